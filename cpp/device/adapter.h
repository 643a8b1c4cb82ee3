// A LoRA adapter, as it comes to a device and as a device holds it.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>

namespace castiron {

// What an adapter adds to the output of one module: y += scale * (x · aᵀ) · bᵀ.
struct LoraPair {
    std::span<const float> a;  // [rank, inputs]
    std::span<const float> b;  // [outputs, rank]
    int64_t rank = 0;
    int64_t inputs = 0;
    int64_t outputs = 0;
    float scale = 1;
};

// By the module's path in the source model.
using LoraModules = std::map<std::string, LoraPair, std::less<>>;

// An adapter ready to run on the device that made it. It never changes, so requests share it.
class Adapter {
public:
    virtual ~Adapter() = default;
    [[nodiscard]] virtual uint64_t bytes() const = 0;
};

}  // namespace castiron
