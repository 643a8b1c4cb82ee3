#include "device/device.h"

#include "kv/pool_size.h"

namespace castiron {

KvBudget Device::kv_budget() const {
    const uint64_t available = available_memory();
    return {available, available / 4};
}

SampledRows Device::forward_and_sample(const Batch&, const SamplingBatch&) {
    throw std::logic_error("this device does not sample");
}

void Device::start(const Batch&, const SamplingBatch&) {
    throw std::logic_error("this device runs a step to its end");
}

SampledRows Device::finish() {
    throw std::logic_error("no step is under way");
}

std::byte* Device::reserve_host_blocks(uint64_t) {
    throw std::invalid_argument("this device keeps no KV blocks outside of its pool");
}

void Device::save_kv_block(KvGroup, int, std::byte*) {
    throw std::logic_error("this device keeps no KV blocks outside of its pool");
}

void Device::load_kv_block(KvGroup, const std::byte*, int) {
    throw std::logic_error("this device keeps no KV blocks outside of its pool");
}

std::shared_ptr<const Adapter> Device::make_adapter(const LoraModules&) const {
    throw std::invalid_argument("this device takes no LoRA adapters");
}

}  // namespace castiron
