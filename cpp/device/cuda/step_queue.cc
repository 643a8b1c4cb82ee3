#include "device/cuda/step_queue.h"

#include <stdexcept>
#include <string>

namespace castiron::cuda {

StepQueue::StepQueue(const Driver& driver, size_t slots) : slots_(slots) {
    for (size_t slot = 0; slot < slots; ++slot) done_[slot] = make_event(driver);
}

size_t StepQueue::take_slot(const Driver& driver, StreamHandle stream) {
    if (count_ == slots_) throw std::logic_error("too many steps are under way");
    if (count_ > 0) check(driver, driver.event_record(done_[slot_].get(), stream), "marking a step's end");
    slot_ = (slot_ + 1) % slots_;
    return slot_;
}

void StepQueue::push(const Counts& counts, int bucket) {
    steps_[(first_ + count_++) % kStepSlots] = {slot_, counts, bucket};
}

StepUnderWay StepQueue::pop(const Driver& driver, StreamHandle stream) {
    if (count_ == 0) throw std::logic_error("no step is under way");
    const StepUnderWay step = steps_[first_];
    const Result result =
        count_ == 1 ? driver.stream_synchronize(stream) : driver.event_synchronize(done_[step.slot].get());
    if (result != Result::kSuccess) {
        drop(driver, stream);
        const std::string how =
            step.bucket > 0 ? "graph of " + std::to_string(step.bucket) : "without a graph";
        const std::string doing = "running a step of " + std::to_string(step.counts[Dim::kTokens]) +
                                  " tokens of " + std::to_string(step.counts[Dim::kSequences]) +
                                  " sequences, " + how;
        check(driver, result, doing.c_str());
    }
    first_ = (first_ + 1) % kStepSlots;
    --count_;
    return step;
}

void StepQueue::drop(const Driver& driver, StreamHandle stream) {
    count_ = 0;
    if (stream != nullptr) static_cast<void>(driver.stream_synchronize(stream));
}

}  // namespace castiron::cuda
