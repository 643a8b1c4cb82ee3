// The steps that a stream works on, in order.
#pragma once

#include <array>
#include <cstddef>

#include "device/cuda/counts.h"
#include "device/cuda/handles.h"

namespace castiron::cuda {

// Steps that may be under way at a time. Each has a slot of its own for what the host writes and reads.
inline constexpr size_t kStepSlots = 2;

struct StepUnderWay {
    size_t slot = 0;
    Counts counts;
    int bucket = 0;  // sequences of the graph; 0: none
};

// A step that is alone on the stream is waited for with the stream. Only where another comes behind it an
// event marks its end.
class StepQueue {
public:
    StepQueue() = default;
    // slots: 1 to kStepSlots.
    StepQueue(const Driver& driver, size_t slots);

    [[nodiscard]] size_t slots() const { return slots_; }
    // The slot for a step that is about to be enqueued: not that of the step before, which may still be using
    // its own. Throws std::logic_error when all are taken.
    [[nodiscard]] size_t take_slot(const Driver& driver, StreamHandle stream);
    // The step was enqueued.
    void push(const Counts& counts, int bucket);
    // Waits for the first of the steps. Throws what check() does, saying which step; none is left then.
    [[nodiscard]] StepUnderWay pop(const Driver& driver, StreamHandle stream);
    // Waits until the stream is idle and forgets its steps.
    void drop(const Driver& driver, StreamHandle stream);

private:
    std::array<Event, kStepSlots> done_;  // by slot
    std::array<StepUnderWay, kStepSlots> steps_;
    size_t slots_ = 0;
    size_t first_ = 0;  // in steps_, a ring
    size_t count_ = 0;
    size_t slot_ = 0;
};

}  // namespace castiron::cuda
