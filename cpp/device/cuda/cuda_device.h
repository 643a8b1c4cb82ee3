// A CUDA program on one NVIDIA GPU (docs/cuda-device.md).
#pragma once

#include <memory>
#include <string>

#include "device/device.h"

namespace castiron::cuda {
struct Driver;
}

namespace castiron {

struct CudaOptions {
    int device_index = 0;
    bool graphs = true;              // replay CUDA graphs for decode steps
    int max_batch_size = 0;          // sequences of the largest graph; 0: the program's limit
    int vocab_limit = 0;             // token ids from it on are never drawn; 0: vocab_size
    double kv_cache_fraction = 0.9;  // of the memory that is free after all else is reserved
    double max_capture_seconds = 30;
    int max_loras = 0;      // slots for LoRA adapters; 0: takes none
    int max_lora_rank = 0;  // of adapters; 0: the program's
};

// What stats() says about a CUDA device.
struct CudaFacts {
    std::string name;
    int compute_capability = 0;
    uint64_t weights_bytes = 0;
    uint64_t input_bytes = 0;   // of the largest step, on the device and again pinned on the host
    uint64_t result_bytes = 0;  // pinned on the host
    int graphs = 0;
    int largest_graph = 0;  // sequences
    uint64_t graph_bytes = 0;
    double graph_seconds = 0;
    uint64_t lora_bytes = 0;  // of the slots for adapters
};

class CudaDevice : public Device {
public:
    [[nodiscard]] virtual CudaFacts facts() const = 0;
};

// Checks the program, loads its kernels and weights, and reserves all memory but the KV pool. Throws
// std::invalid_argument for a program that cannot run here, std::runtime_error where there is no driver or
// device, or too little memory. Weights are copied: Weight::data need not outlive this call.
[[nodiscard]] std::unique_ptr<CudaDevice> make_cuda_device(std::shared_ptr<const Program> program,
                                                           const CudaOptions& options);
// The same on a driver that is given; it must outlive the device.
[[nodiscard]] std::unique_ptr<CudaDevice> make_cuda_device(std::shared_ptr<const Program> program,
                                                           const CudaOptions& options,
                                                           const cuda::Driver& driver);

}  // namespace castiron
