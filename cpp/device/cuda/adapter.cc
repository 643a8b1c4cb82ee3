#include "device/cuda/adapter.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "device/adapter_check.h"
#include "device/half.h"

namespace castiron::cuda {
namespace {

constexpr float kMostF16 = 65504;

// Writes the matrices of one program's adapters into an image of a slot.
class Packer {
public:
    Packer(const AdapterSlots& slots, std::vector<uint16_t>& image)
        : rank_(slots.rank), to_bf16_(slots.dtype == DType::kBF16), image_(image) {}

    void pack(const Step& step, const LoraModules& modules) {
        std::vector<const std::string*> seen;
        for (const ModuleColumns& columns : step.modules) {
            const auto same = [&](const std::string* name) { return *name == columns.module; };
            const auto known = std::find_if(seen.begin(), seen.end(), same);
            const int64_t number = known - seen.begin();
            if (known == seen.end()) seen.push_back(&columns.module);
            const auto found = modules.find(columns.module);
            if (found == modules.end()) continue;
            module_ = &columns.module;
            if (number + 1 == static_cast<int64_t>(seen.size())) pack_a(*step.adapter, found->second, number);
            pack_b(*step.adapter, columns, found->second);
        }
    }

private:
    // a [modules · rank, inputs]
    void pack_a(const AdapterPlace& place, const LoraPair& pair, int64_t number) {
        uint16_t* to = image_.data() + place.a / sizeof(uint16_t) + number * rank_ * place.inputs;
        for (const float value : pair.a) *to++ = half(value);
    }

    // b [columns, rank]
    void pack_b(const AdapterPlace& place, const ModuleColumns& columns, const LoraPair& pair) {
        uint16_t* to = image_.data() + place.b / sizeof(uint16_t) + columns.column * rank_;
        const float* from = pair.b.data() + columns.row * pair.rank;
        for (int64_t i = 0; i < columns.count; ++i, to += rank_, from += pair.rank) {
            for (int64_t r = 0; r < pair.rank; ++r) to[r] = half(from[r] * pair.scale);
        }
    }

    [[nodiscard]] uint16_t half(float value) const {
        if (to_bf16_) return to_bf16(value);
        if (std::abs(value) > kMostF16) {
            throw std::invalid_argument("module \"" + *module_ + "\": the adapter has the number " +
                                        std::to_string(value) +
                                        ", and the engine computes in float16, which ends at 65504; build it "
                                        "with --dtype bfloat16");
        }
        return to_f16(value);
    }

    int64_t rank_;
    bool to_bf16_;
    std::vector<uint16_t>& image_;
    const std::string* module_ = nullptr;
};

}  // namespace

CudaAdapter::CudaAdapter(const Program& program, const LoraModules& modules, int max_rank, uint64_t id)
    : program_(&program), id_(id) {
    check_adapter(program, modules, max_rank);
    image_.resize(program.adapters.slot_bytes / sizeof(uint16_t));
    Packer packer(program.adapters, image_);
    for (const Step& step : program.steps) {
        if (step.adapter.has_value()) packer.pack(step, modules);
    }
}

AdapterMemory::AdapterMemory(const Driver& driver, const Program& program, int count)
    : program_(&program),
      memory_(make_device_buffer(driver, program.adapters.slot_bytes * static_cast<uint64_t>(count))),
      slots_(static_cast<size_t>(count)) {
    of_sequence_.reserve(static_cast<size_t>(program.limits.max_batch_size));
}

std::span<const int32_t> AdapterMemory::place(const Driver& driver, const Batch& batch, StreamHandle stream) {
    of_sequence_.clear();
    if (std::all_of(batch.sequences.begin(), batch.sequences.end(),
                    [](const SequenceSlice& s) { return s.adapter == nullptr; })) {
        return {};
    }
    ++step_;
    // Those that are there first, so that none of them has to make room.
    for (const SequenceSlice& s : batch.sequences) {
        const auto* adapter = dynamic_cast<const CudaAdapter*>(s.adapter);
        if (s.adapter != nullptr && (adapter == nullptr || adapter->program() != program_))
            throw std::invalid_argument("batch: a sequence has an adapter of another device");
        if (adapter == nullptr) continue;
        for (Slot& slot : slots_) {
            if (slot.adapter == adapter->id()) slot.last_use = step_;
        }
    }
    for (const SequenceSlice& s : batch.sequences) {
        const auto* adapter = static_cast<const CudaAdapter*>(s.adapter);
        of_sequence_.push_back(adapter == nullptr ? -1 : slot_of(driver, *adapter, stream));
    }
    return of_sequence_;
}

int32_t AdapterMemory::slot_of(const Driver& driver, const CudaAdapter& adapter, StreamHandle stream) {
    const auto mine = std::find_if(slots_.begin(), slots_.end(),
                                   [&](const Slot& slot) { return slot.adapter == adapter.id(); });
    if (mine != slots_.end()) return static_cast<int32_t>(mine - slots_.begin());
    const auto oldest = std::min_element(
        slots_.begin(), slots_.end(), [](const Slot& a, const Slot& b) { return a.last_use < b.last_use; });
    if (oldest == slots_.end() || oldest->last_use == step_) {
        throw std::invalid_argument("batch: more different adapters than the " +
                                    std::to_string(slots_.size()) + " of max_loras");
    }
    const auto number = static_cast<uint64_t>(oldest - slots_.begin());
    *oldest = {};  // a copy that fails leaves nothing
    check(driver,
          driver.copy_to_device(memory_.get() + number * program_->adapters.slot_bytes,
                                adapter.image().data(), adapter.image().size(), stream),
          "copying an adapter to the device");
    *oldest = {adapter.id(), step_};
    return static_cast<int32_t>(number);
}

}  // namespace castiron::cuda
