// One step of a program, bound to a device: checked once when the device is made, run many times by all
// threads.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "device/device.h"
#include "device/host/kernels/table.h"
#include "device/host/operand.h"

namespace castiron::host {

class KvCache;

// What a forward pass offers to its steps.
struct StepContext {
    int64_t tokens = 0;
    int64_t rows = 0;  // of which logits are wanted
    std::byte* arena = nullptr;
    const Batch* batch = nullptr;
    const KvCache* kv = nullptr;
    std::atomic<int64_t>* counter = nullptr;    // hands out this phase's work units, from 0
    std::atomic<const char*>* fault = nullptr;  // set by an op that met an index out of range
    float* workspace = nullptr;                 // shared by all threads, Op::workspace_floats of it
    // The adapters of tokens and of rows whose logits are wanted, as LoraRows has them; null: none has one.
    const LoraStep* const* token_adapters = nullptr;
    const LoraStep* const* row_adapters = nullptr;
    float* lora_sums = nullptr;  // shared by all threads, [rows, lora_stride]
    int64_t lora_stride = 0;

    [[nodiscard]] int64_t bind(Dim d) const { return d.bind(tokens, rows); }
    [[nodiscard]] int64_t elements(const Operand& o) const {
        int64_t n = 1;
        for (const Dim d : o.shape) n *= bind(d);
        return n;
    }
    [[nodiscard]] float* f32(const Operand& o) const { return reinterpret_cast<float*>(arena + o.offset); }
    [[nodiscard]] std::byte* rounded(const Operand& o) const { return arena + o.offset; }
    [[nodiscard]] int32_t* i32(const Operand& o) const {
        return reinterpret_cast<int32_t*>(arena + o.offset);
    }
    [[nodiscard]] int64_t next(int64_t count = 1) const {
        return counter->fetch_add(count, std::memory_order_relaxed);
    }
    void report(const char* what) const { fault->store(what, std::memory_order_relaxed); }
};

// Thread `part` of `parts`, with scratch of its own (Op::scratch_floats).
struct Lane {
    int part = 0;
    int parts = 1;
    float* scratch = nullptr;

    // This thread's share of n units, in runs of `align` units.
    [[nodiscard]] std::pair<int64_t, int64_t> share(int64_t n, int64_t align = 1) const {
        const int64_t units = (n + align - 1) / align;
        const int64_t begin = (units * part + parts - 1) / parts * align;
        const int64_t end = (units * (part + 1) + parts - 1) / parts * align;
        return {begin < n ? begin : n, end < n ? end : n};
    }
};

class Op {
public:
    virtual ~Op() = default;
    // All threads meet before each phase. The count depends on the context alone.
    [[nodiscard]] virtual int phases(const StepContext&, int /*parts*/) const { return 1; }
    virtual void run(const StepContext& context, const Lane& lane, int phase) const = 0;
    [[nodiscard]] virtual size_t scratch_floats() const { return 0; }
    [[nodiscard]] virtual size_t workspace_floats(int /*parts*/) const { return 0; }
};

}  // namespace castiron::host
