#include "device/host/native_library.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>

namespace castiron::host {
namespace {

// A file without a name, for the time that the loader needs it.
class MemoryFile {
public:
    explicit MemoryFile(const std::string& content) : fd_(memfd_create("castiron-plugin", MFD_CLOEXEC)) {
        size_t done = 0;
        while (fd_ >= 0 && done < content.size()) {
            const ssize_t count = write(fd_, content.data() + done, content.size() - done);
            if (count < 0 && errno == EINTR) continue;
            if (count <= 0) break;
            done += static_cast<size_t>(count);
        }
        whole_ = fd_ >= 0 && done == content.size();
    }
    ~MemoryFile() {
        if (fd_ >= 0) close(fd_);
    }
    MemoryFile(const MemoryFile&) = delete;
    MemoryFile& operator=(const MemoryFile&) = delete;

    [[nodiscard]] bool whole() const { return whole_; }
    [[nodiscard]] std::string path() const { return "/proc/self/fd/" + std::to_string(fd_); }

private:
    int fd_;
    bool whole_ = false;
};

}  // namespace

NativeLibrary::NativeLibrary(const std::string& name, const std::string& image) : name_(name) {
    const MemoryFile file(image);
    if (!file.whole()) {
        throw std::invalid_argument("plugin library '" + name +
                                    "' cannot be put into memory: " + std::strerror(errno));
    }
    handle_ = dlopen(file.path().c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle_ == nullptr) {
        throw std::invalid_argument("plugin library '" + name + "' cannot be loaded: " + dlerror());
    }
    const void* abi = dlsym(handle_, "castiron_plugin_abi");
    const int found = abi == nullptr ? 0 : *static_cast<const int*>(abi);
    if (found != CASTIRON_PLUGIN_ABI) {
        dlclose(handle_);
        throw std::invalid_argument("plugin library '" + name + "' has plugin ABI " + std::to_string(found) +
                                    "; this castiron has " + std::to_string(CASTIRON_PLUGIN_ABI) +
                                    ". Rebuild the engine");
    }
}

NativeLibrary::~NativeLibrary() {
    dlclose(handle_);
}

castiron_kernel NativeLibrary::function(const std::string& name) const {
    void* found = symbol(name);
    castiron_kernel kernel = nullptr;
    std::memcpy(&kernel, &found, sizeof kernel);  // POSIX allows it, ISO C++ has no cast for it
    return kernel;
}

void* NativeLibrary::symbol(const std::string& name) const {
    void* found = dlsym(handle_, name.c_str());
    if (found == nullptr) {
        throw std::invalid_argument("plugin library '" + name_ + "' has no function '" + name +
                                    "'; its kernel needs C linkage (extern \"C\")");
    }
    return found;
}

}  // namespace castiron::host
