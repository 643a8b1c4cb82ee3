// LoRA adapters of a CUDA program: packed for a slot of device memory, and the slots.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "device/adapter.h"
#include "device/cuda/handles.h"
#include "device/device.h"
#include "program/program.h"

namespace castiron::cuda {

// What is copied into a slot, as docs/cuda-program.md says ("Adapters"); in ordinary host memory.
class CudaAdapter final : public Adapter {
public:
    // id: another one for each adapter of the program, not 0. Throws std::invalid_argument where the adapter
    // does not fit the program, or where a number of it is too large for half precision.
    CudaAdapter(const Program& program, const LoraModules& modules, int max_rank, uint64_t id);

    [[nodiscard]] uint64_t bytes() const override { return image_.size() * sizeof(uint16_t); }
    [[nodiscard]] const Program* program() const { return program_; }
    [[nodiscard]] uint64_t id() const { return id_; }
    [[nodiscard]] std::span<const std::byte> image() const { return std::as_bytes(std::span(image_)); }

private:
    const Program* program_;
    uint64_t id_;
    std::vector<uint16_t> image_;
};

// The device's memory for adapters. An adapter stays in its slot until another one needs the place.
class AdapterMemory {
public:
    AdapterMemory() = default;
    AdapterMemory(const Driver& driver, const Program& program, int count);

    [[nodiscard]] Address address() const { return memory_.get(); }
    // The slot of each sequence's adapter, -1 where it has none; empty where no sequence has one. What is not
    // there yet is copied in the order of the stream: steps that were enqueued before still find what they
    // use. Valid until the next call. Throws std::invalid_argument for adapters of another device, and for
    // more than there are slots.
    [[nodiscard]] std::span<const int32_t> place(const Driver& driver, const Batch& batch,
                                                 StreamHandle stream);

private:
    struct Slot {
        uint64_t adapter = 0;  // its id; 0: none
        uint64_t last_use = 0;
    };

    [[nodiscard]] int32_t slot_of(const Driver& driver, const CudaAdapter& adapter, StreamHandle stream);

    const Program* program_ = nullptr;
    DeviceBuffer memory_;
    std::vector<Slot> slots_;
    std::vector<int32_t> of_sequence_;
    uint64_t step_ = 0;
};

}  // namespace castiron::cuda
