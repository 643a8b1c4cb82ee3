// What an engine was doing when a step did not come back.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "batching/scheduler.h"
#include "batching/trace.h"
#include "kv/block_pool.h"

namespace castiron {

// Lines of text: the step that hangs, the running requests, the queue, the KV cache, and the steps before.
// To be called while the engine thread waits for the device.
[[nodiscard]] std::string describe_stall(int64_t step, double seconds, const StepPlan& plan,
                                         const Scheduler& scheduler, const BlockPool& pool,
                                         std::span<const StepRecord> before);

}  // namespace castiron
