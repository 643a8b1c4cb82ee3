// What a module image says about its kernels: a cubin (ELF) or PTX text.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace vcuda {

struct KernelInfo {
    std::string name;
    std::vector<uint32_t> param_offsets;
    std::vector<uint32_t> param_sizes;
    uint32_t param_bytes = 0;
    uint32_t static_shared = 0;  // without what the driver reserves
    uint32_t registers = 0;      // 0: unknown (PTX)
    uint32_t max_threads = 1024;
    uint32_t required_block[3] = {0, 0, 0};  // .reqntid, 0: none
};

struct Image {
    uint64_t hash = 0;  // FNV-1a 64 of its bytes
    bool ptx = false;
    int compute_capability = 0;
    bool exact = false;     // code for this very architecture (the "a" of sm_90a)
    int driver_needed = 0;  // the oldest driver that reads it
    std::vector<KernelInfo> kernels;
};

uint64_t hash_bytes(const uint8_t* data, size_t size);

// CUDA_SUCCESS, or what a driver says to an image that it cannot parse; `why` gets a sentence.
CUresult parse_image(const void* data, Image& image, std::string& why);
CUresult parse_cubin(const uint8_t* data, Image& image, std::string& why);
CUresult parse_ptx(const char* text, Image& image, std::string& why);

}  // namespace vcuda
