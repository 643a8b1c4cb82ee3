// Reading plain Python values with full checking: every error is a ValueError that says where and what.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
#include <string_view>

namespace castiron::bindings {

namespace nb = nanobind;

// `path` names the value for the message, e.g. program.steps[3].inputs.
[[noreturn]] void bad_value(const std::string& path, nb::handle found, std::string_view expected);

[[nodiscard]] bool is_integer(nb::handle value);  // an int that is not a bool
[[nodiscard]] int64_t as_integer(nb::handle value, const std::string& path, int64_t min,
                                 int64_t max = std::numeric_limits<int64_t>::max());
[[nodiscard]] bool as_bool(nb::handle value, const std::string& path);
[[nodiscard]] std::string as_string(nb::handle value, const std::string& path);
[[nodiscard]] nb::object as_sequence(nb::handle value, const std::string& path);  // a list or a tuple
[[nodiscard]] nb::dict as_dict(nb::handle value, const std::string& path);

// A dict of which every key is read exactly once: finish() refuses the rest.
class Fields {
public:
    Fields(nb::handle value, std::string path);

    // The value of `key`; refuses a dict that lacks it.
    [[nodiscard]] nb::object required(const char* key);
    // The value of `key`, or a null object where it is absent.
    [[nodiscard]] nb::object optional(const char* key);
    [[nodiscard]] std::string path(const char* key) const { return path_ + "." + key; }
    void finish(std::initializer_list<std::string_view> known) const;

private:
    nb::dict fields_;
    std::string path_;
};

}  // namespace castiron::bindings
