// CUDA graphs of decode steps, captured once: a step of such a size is replayed by one driver call.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <vector>

#include "device/cuda/handles.h"
#include "device/cuda/step_queue.h"

namespace castiron::cuda {

// What a captured step does behind the upload of its inputs.
enum class GraphKind : uint8_t {
    kLogits,  // the steps, and the logits to the host: programs without sampling
    kModel,   // the steps alone; what follows is launched apart
    kGreedy,  // the steps, sampling of rows that are all greedy, and the tokens to the host
    kRandom,  // the same with rows drawn at random
};
inline constexpr size_t kNumGraphKinds = 4;

// Sequences that graphs are captured for: 1, 2, 4, 8 and on in steps of at most an eighth, ending at `most`.
[[nodiscard]] std::vector<int> graph_buckets(int most);

class StepGraphs {
public:
    // Enqueues a step of `kind` for `bucket` sequences in a slot on the stream that is captured.
    using Enqueue = std::function<void(size_t slot, GraphKind kind, int bucket)>;

    // Captures every bucket in each of the kinds for each of the slots, smallest first, until `max_seconds`
    // have passed; what is larger then runs without a graph.
    void capture(const Driver& driver, StreamHandle stream, const std::vector<GraphKind>& kinds, size_t slots,
                 int most, double max_seconds, const Enqueue& enqueue);

    // The smallest bucket that holds `sequences`; 0 where there is none.
    [[nodiscard]] int bucket(int sequences) const;
    [[nodiscard]] GraphExecHandle get(size_t slot, GraphKind kind, int bucket) const;

    [[nodiscard]] int count() const;
    // Sequences of the largest bucket; 0 without graphs.
    [[nodiscard]] int largest() const { return buckets_.empty() ? 0 : buckets_.back(); }
    [[nodiscard]] double seconds() const { return seconds_; }

private:
    std::vector<int> buckets_;
    using Graphs = std::array<std::vector<GraphExec>, kNumGraphKinds>;  // each by bucket
    std::array<Graphs, kStepSlots> graphs_;
    double seconds_ = 0;
};

}  // namespace castiron::cuda
