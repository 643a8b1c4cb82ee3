#include "bindings/python_value.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace castiron::bindings {
namespace {

// A short rendering for messages. A value whose repr fails is named by its type.
std::string shown(nb::handle value) {
    constexpr size_t kLongest = 80;
    std::string text;
    try {
        text = nb::repr(value).c_str();
    } catch (nb::python_error&) {
        text = nb::type_name(value.type()).c_str();
    }
    if (text.size() > kLongest) text = text.substr(0, kLongest) + "...";
    return text;
}

}  // namespace

void bad_value(const std::string& path, nb::handle found, std::string_view expected) {
    throw std::invalid_argument(path + " is " + shown(found) + "; expected " + std::string(expected));
}

bool is_integer(nb::handle value) {
    return PyLong_Check(value.ptr()) && !PyBool_Check(value.ptr());
}

int64_t as_integer(nb::handle value, const std::string& path, int64_t min, int64_t max) {
    int overflow = 0;
    const int64_t number = is_integer(value) ? PyLong_AsLongLongAndOverflow(value.ptr(), &overflow) : 0;
    if (!is_integer(value) || overflow != 0 || number < min || number > max) {
        bad_value(path, value, "an integer from " + std::to_string(min) + " to " + std::to_string(max));
    }
    return number;
}

bool as_bool(nb::handle value, const std::string& path) {
    if (!PyBool_Check(value.ptr())) bad_value(path, value, "True or False");
    return value.ptr() == Py_True;
}

std::string as_string(nb::handle value, const std::string& path) {
    Py_ssize_t length = 0;
    const char* text = PyUnicode_Check(value.ptr()) ? PyUnicode_AsUTF8AndSize(value.ptr(), &length) : nullptr;
    if (text == nullptr) {
        PyErr_Clear();  // lone surrogates
        bad_value(path, value, "a string");
    }
    return {text, static_cast<size_t>(length)};
}

nb::object as_sequence(nb::handle value, const std::string& path) {
    if (!PyList_Check(value.ptr()) && !PyTuple_Check(value.ptr())) bad_value(path, value, "a list");
    return nb::borrow(value);
}

nb::dict as_dict(nb::handle value, const std::string& path) {
    if (!PyDict_Check(value.ptr())) bad_value(path, value, "a dict");
    return nb::borrow<nb::dict>(value);
}

Fields::Fields(nb::handle value, std::string path) : fields_(as_dict(value, path)), path_(std::move(path)) {}

nb::object Fields::optional(const char* key) {
    PyObject* found = PyDict_GetItemString(fields_.ptr(), key);
    return found == nullptr ? nb::object() : nb::borrow(found);
}

nb::object Fields::required(const char* key) {
    nb::object found = optional(key);
    if (!found.is_valid()) throw std::invalid_argument(path(key) + " is missing");
    return found;
}

void Fields::finish(std::initializer_list<std::string_view> known) const {
    for (const auto [key, value] : fields_) {
        const std::string name = as_string(key, path_ + ": a key");
        if (std::find(known.begin(), known.end(), name) != known.end()) continue;
        std::string names;
        for (const std::string_view one : known) names += (names.empty() ? "" : ", ") + std::string(one);
        throw std::invalid_argument(path_ + " has an unknown field \"" + name.substr(0, 80) +
                                    "\"; known: " + names);
    }
}

}  // namespace castiron::bindings
