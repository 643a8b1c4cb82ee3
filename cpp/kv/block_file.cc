#include "kv/block_file.h"

#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <system_error>

namespace castiron {
namespace {

std::string reason(int error) {
    return std::generic_category().message(error);
}

// Without a name where the file system can do that, else with one that is taken away at once.
int open_unnamed(const std::string& folder) {
    const int file = open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (file >= 0 || (errno != EOPNOTSUPP && errno != EISDIR)) return file;
    std::string name = folder + "/castiron-kv-XXXXXX";
    const int named = mkostemp(name.data(), O_CLOEXEC);  // of mode 0600
    if (named >= 0) unlink(name.c_str());
    return named;
}

// An error number, or 0. Asks first: where a file system cannot reserve, the library does it by writing.
int reserve(int file, uint64_t bytes) {
    struct statvfs disk{};
    if (fstatvfs(file, &disk) != 0) return errno;
    if (bytes / disk.f_frsize >= disk.f_bavail) return ENOSPC;
    return posix_fallocate(file, 0, static_cast<off_t>(bytes));
}

// Calls some(at), which moves bytes from there on and says how many, until all are moved.
template <typename F>
void move_all(uint64_t bytes, const std::string& doing, F some) {
    for (uint64_t at = 0; at < bytes;) {
        const ssize_t count = some(at);
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) throw std::runtime_error(doing + " the KV cache's disk tier: " + reason(errno));
        at += static_cast<uint64_t>(count);
    }
}

}  // namespace

BlockFile::BlockFile(const std::string& folder, int slots, uint64_t block_bytes)
    : file_(open_unnamed(folder)), slots_(slots), block_bytes_(block_bytes) {
    if (file_ < 0) {
        throw std::invalid_argument("kv_cache_disk_folder is \"" + folder +
                                    "\", and no file can be made there: " + reason(errno));
    }
    const uint64_t bytes = block_bytes * static_cast<uint64_t>(slots);
    const int error = reserve(file_, bytes);
    if (error == 0) return;
    close(file_);
    throw std::invalid_argument("kv_cache_disk_tier: \"" + folder + "\" has no room for " +
                                std::to_string(bytes >> 20) + " MiB: " + reason(error));
}

BlockFile::~BlockFile() {
    close(file_);
}

void BlockFile::write(int32_t slot, const std::byte* from) const {
    move_all(block_bytes_, "writing to",
             [&](uint64_t at) { return pwrite(file_, from + at, block_bytes_ - at, offset(slot, at)); });
}

void BlockFile::read(int32_t slot, std::byte* to) const {
    move_all(block_bytes_, "reading from",
             [&](uint64_t at) { return pread(file_, to + at, block_bytes_ - at, offset(slot, at)); });
}

int64_t BlockFile::offset(int32_t slot, uint64_t at) const {
    return static_cast<int64_t>(static_cast<uint64_t>(slot) * block_bytes_ + at);
}

}  // namespace castiron
