#include "kv/block_pool.h"

#include <stdexcept>
#include <string>

namespace castiron {

BlockPool::BlockPool(int num_blocks) {
    if (num_blocks < 1) {
        throw std::invalid_argument("the KV cache has " + std::to_string(num_blocks) +
                                    " blocks; at least 1 is needed");
    }
    references_.resize(static_cast<size_t>(num_blocks), 0);
    free_.reserve(references_.size());
    for (int32_t block = num_blocks - 1; block >= 0; --block) free_.push_back(block);
}

size_t BlockPool::checked(int32_t block) const {
    if (block < 0 || block >= total()) {
        throw std::logic_error("KV block " + std::to_string(block) + " is outside the pool of " +
                               std::to_string(total()));
    }
    return static_cast<size_t>(block);
}

bool BlockPool::promise(int blocks) {
    if (blocks < 0 || blocks > free() - promised_) return false;
    promised_ += blocks;
    return true;
}

void BlockPool::withdraw(int blocks) {
    if (blocks < 0 || blocks > promised_) {
        throw std::logic_error("withdrawing " + std::to_string(blocks) + " KV blocks of " +
                               std::to_string(promised_) + " promised");
    }
    promised_ -= blocks;
}

int32_t BlockPool::take_promised() {
    if (promised_ < 1 || free_.empty()) {
        throw std::logic_error("a KV block was taken that had not been promised");
    }
    --promised_;
    const int32_t block = free_.back();
    free_.pop_back();
    references_[checked(block)] = 1;
    return block;
}

void BlockPool::retain(int32_t block) {
    int32_t& references = references_[checked(block)];
    if (references < 1) throw std::logic_error("free KV block " + std::to_string(block) + " was retained");
    ++references;
}

void BlockPool::release(int32_t block) {
    int32_t& references = references_[checked(block)];
    if (references < 1) throw std::logic_error("free KV block " + std::to_string(block) + " was released");
    if (--references == 0) free_.push_back(block);
}

void BlockPool::check_integrity() const {
    std::vector<bool> is_free(references_.size(), false);
    for (const int32_t block : free_) {
        if (is_free[checked(block)]) {
            throw std::logic_error("KV block " + std::to_string(block) + " is in the free list twice");
        }
        if (references_[checked(block)] != 0) {
            throw std::logic_error("KV block " + std::to_string(block) + " is free and has " +
                                   std::to_string(references_[checked(block)]) + " references");
        }
        is_free[checked(block)] = true;
    }
    for (size_t block = 0; block < references_.size(); ++block) {
        if (references_[block] == 0 && !is_free[block]) {
            throw std::logic_error("KV block " + std::to_string(block) + " is lost: not free, no references");
        }
    }
    if (promised_ < 0 || promised_ > free()) {
        throw std::logic_error(std::to_string(promised_) + " KV blocks are promised, " +
                               std::to_string(free()) + " are free");
    }
}

}  // namespace castiron
