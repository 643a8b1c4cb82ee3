#include "device/cuda/step_graphs.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>

namespace castiron::cuda {
namespace {

GraphExec capture_one(const Driver& driver, StreamHandle stream, const std::function<void()>& enqueue) {
    check(driver, driver.capture_begin(stream, CaptureMode::kThreadLocal), "beginning to capture a graph");
    GraphHandle raw = nullptr;
    try {
        enqueue();
    } catch (...) {
        if (driver.capture_end(stream, &raw) == Result::kSuccess && raw != nullptr) {
            const Graph dropped(driver, raw);
        }
        throw;
    }
    check(driver, driver.capture_end(stream, &raw), "capturing a graph");
    const Graph graph(driver, raw);
    GraphExecHandle exec = nullptr;
    check(driver, driver.graph_instantiate(&exec, graph.get(), 0), "instantiating a graph");
    GraphExec made(driver, exec);
    check(driver, driver.graph_upload(exec, stream), "uploading a graph");
    return made;
}

}  // namespace

std::vector<int> graph_buckets(int most) {
    std::vector<int> buckets;
    for (int size = 1; size < most;) {
        buckets.push_back(size);
        int step = size;  // doubles up to 8
        if (size >= 8) {
            step = 8;
            while (step * 2 <= size / 8) step *= 2;
        }
        size += step;
    }
    if (most >= 1) buckets.push_back(most);
    return buckets;
}

void StepGraphs::capture(const Driver& driver, StreamHandle stream, const std::vector<GraphKind>& kinds,
                         size_t slots, int most, double max_seconds, const Enqueue& enqueue) {
    const auto begin = std::chrono::steady_clock::now();
    const auto passed = [&] {
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    };
    for (const int bucket : graph_buckets(most)) {
        if (passed() > max_seconds) break;
        for (size_t slot = 0; slot < slots; ++slot) {
            for (const GraphKind kind : kinds) {
                graphs_[slot][static_cast<size_t>(kind)].push_back(
                    capture_one(driver, stream, [&] { enqueue(slot, kind, bucket); }));
            }
        }
        buckets_.push_back(bucket);
    }
    check(driver, driver.stream_synchronize(stream), "uploading graphs");
    seconds_ = passed();
}

int StepGraphs::bucket(int sequences) const {
    const auto found = std::lower_bound(buckets_.begin(), buckets_.end(), sequences);
    return found == buckets_.end() ? 0 : *found;
}

GraphExecHandle StepGraphs::get(size_t slot, GraphKind kind, int bucket) const {
    const auto found = std::lower_bound(buckets_.begin(), buckets_.end(), bucket);
    return graphs_[slot][static_cast<size_t>(kind)].at(static_cast<size_t>(found - buckets_.begin())).get();
}

int StepGraphs::count() const {
    size_t count = 0;
    for (const Graphs& of_slot : graphs_) {
        for (const auto& graphs : of_slot) count += graphs.size();
    }
    return static_cast<int>(count);
}

}  // namespace castiron::cuda
