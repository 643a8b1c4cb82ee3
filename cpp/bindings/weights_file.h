// The engine's weights file, mapped read-only while a device copies from it.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <string>

#include "program/program.h"

namespace castiron::bindings {

class WeightsFile {
public:
    // Throws std::invalid_argument when the file cannot be opened or mapped.
    explicit WeightsFile(std::string path);
    ~WeightsFile();
    WeightsFile(const WeightsFile&) = delete;
    WeightsFile& operator=(const WeightsFile&) = delete;

    // Points the program's weights into the mapping. `tensors` is a dict {name: (offset in the file, bytes)}.
    // Throws std::invalid_argument when a weight is missing, has the wrong size for its shape and layout, is
    // misaligned, or does not lie inside the file.
    void attach(Program& program, nanobind::handle tensors) const;

private:
    std::string path_;
    const std::byte* data_ = nullptr;
    size_t bytes_ = 0;
};

}  // namespace castiron::bindings
