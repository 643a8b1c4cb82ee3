// The engine's statistics for Python.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <string>

#include "batching/engine.h"
#include "device/cuda/cuda_device.h"

namespace castiron::bindings {

// What does not change while an engine lives.
struct StaticStats {
    std::string target;
    std::string isa;      // on the host
    int num_threads = 0;  // on the host
    std::optional<CudaFacts> cuda;
    uint64_t arena_bytes = 0;
    uint64_t weights_bytes = 0;
    uint64_t kv_bytes = 0;
    KvShape kv_shape;
};

[[nodiscard]] nanobind::dict stats_to_dict(const EngineStats& stats, const SchedulerLimits& limits,
                                           const PoolSize& pool, const StaticStats& fixed);

}  // namespace castiron::bindings
