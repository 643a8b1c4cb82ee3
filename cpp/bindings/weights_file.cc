#include "bindings/weights_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "bindings/python_value.h"
#include "program/sizes.h"

namespace castiron::bindings {

WeightsFile::WeightsFile(std::string path) : path_(std::move(path)) {
    const auto fail = [this](const char* what) {
        throw std::invalid_argument("cannot " + std::string(what) + " the weights file " + path_ + ": " +
                                    std::strerror(errno));
    };
    const int file = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) fail("open");
    struct stat status{};
    if (::fstat(file, &status) != 0 || !S_ISREG(status.st_mode)) {
        if (errno == 0) errno = EINVAL;
        ::close(file);
        fail("use");
    }
    bytes_ = static_cast<size_t>(status.st_size);
    void* mapped = bytes_ > 0 ? ::mmap(nullptr, bytes_, PROT_READ, MAP_PRIVATE, file, 0) : nullptr;
    ::close(file);
    if (mapped == MAP_FAILED) fail("map");
    data_ = static_cast<const std::byte*>(mapped);
    if (data_ != nullptr) ::madvise(mapped, bytes_, MADV_WILLNEED);
}

WeightsFile::~WeightsFile() {
    if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), bytes_);
}

void WeightsFile::attach(Program& program, nb::handle tensors) const {
    const nb::dict table = as_dict(tensors, "tensors");
    for (Weight& weight : program.weights) {
        const std::string path = "tensors[\"" + weight.name + "\"]";
        const nb::str key(weight.name.c_str(), weight.name.size());
        if (!table.contains(key)) throw std::invalid_argument(path + " is missing; the program needs it");
        const nb::object entry = as_sequence(table[key], path);
        if (nb::len(entry) != 2) bad_value(path, entry, "(offset, bytes)");
        const auto file_bytes = static_cast<int64_t>(bytes_);
        const int64_t offset = as_integer(entry[0], path + "[0]", 0, file_bytes);
        const int64_t bytes = as_integer(entry[1], path + "[1]", 0, file_bytes - offset);
        // Entries are padded to a multiple of 64 bytes in the file.
        const size_t needed = castiron::stored_bytes(weight);
        if (static_cast<size_t>(bytes) < needed || static_cast<size_t>(bytes) > (needed + 63) / 64 * 64) {
            throw std::invalid_argument(path + " has " + std::to_string(bytes) +
                                        " bytes; its shape and layout need " + std::to_string(needed));
        }
        if (offset % 4 != 0) bad_value(path + "[0]", entry[0], "a multiple of 4");
        weight.data = data_ + offset;
        weight.bytes = needed;
    }
}

}  // namespace castiron::bindings
