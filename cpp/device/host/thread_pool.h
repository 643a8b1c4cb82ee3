// Single-program threads: run() enters the pool once per forward pass and every thread walks all steps,
// meeting at barriers, because waking threads for each of ~200 steps would cost more than the steps of a
// decode.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace castiron::host {

class ThreadPool {
public:
    // `threads` includes the thread that calls run(). With a CPU for each, waiting threads spin before they
    // sleep. Nobody is pinned: on a shared machine a pinned thread waits for its CPU while another is idle.
    ThreadPool(int threads, int cpus);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    [[nodiscard]] int size() const { return threads_; }

    // Calls body(part) on every thread, part in [0, size()), and returns when all have returned. body must
    // not throw. Not reentrant.
    void run(const std::function<void(int)>& body);

    // Inside a body: returns once every thread of the pool has arrived.
    void barrier();

private:
    void work(int part);
    // Waits until word != seen: spins for a while (a step follows within microseconds), then sleeps.
    void await_change(const std::atomic<uint32_t>& word, uint32_t seen) const;

    int threads_;
    int spins_;
    std::vector<std::thread> workers_;
    const std::function<void(int)>* body_ = nullptr;
    alignas(64) std::atomic<uint32_t> epoch_{0};
    std::atomic<bool> stop_{false};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> generation_{0};
};

}  // namespace castiron::host
