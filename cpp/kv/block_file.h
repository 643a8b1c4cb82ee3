// Blocks in a file that nobody else can open and that is gone with the process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace castiron {

class BlockFile {
public:
    // Room for `slots` blocks of block_bytes on the disk of `folder`, all of it taken here. Throws
    // std::invalid_argument that says what the system says.
    BlockFile(const std::string& folder, int slots, uint64_t block_bytes);
    BlockFile(const BlockFile&) = delete;
    BlockFile& operator=(const BlockFile&) = delete;
    ~BlockFile();

    [[nodiscard]] int slots() const { return slots_; }
    // Throw std::runtime_error.
    void write(int32_t slot, const std::byte* from) const;
    void read(int32_t slot, std::byte* to) const;

private:
    [[nodiscard]] int64_t offset(int32_t slot, uint64_t at) const;

    int file_ = -1;
    int slots_;
    uint64_t block_bytes_;
};

}  // namespace castiron
