// Machine code of a plugin for the CPU, loaded from the engine's bytes.
#pragma once

#include <memory>
#include <string>

#include "castiron_plugin.h"

namespace castiron::host {

// An open shared library; closed with its last user.
class NativeLibrary {
public:
    // Loads the ELF image from memory, so that no file can be exchanged between its check and its use.
    // Throws std::invalid_argument with the loader's reason.
    NativeLibrary(const std::string& name, const std::string& image);
    ~NativeLibrary();
    NativeLibrary(const NativeLibrary&) = delete;
    NativeLibrary& operator=(const NativeLibrary&) = delete;

    // Throws std::invalid_argument when the library has no such function.
    [[nodiscard]] castiron_kernel function(const std::string& name) const;

private:
    [[nodiscard]] void* symbol(const std::string& name) const;

    std::string name_;
    void* handle_ = nullptr;
};

}  // namespace castiron::host
