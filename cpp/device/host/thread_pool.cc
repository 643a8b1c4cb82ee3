#include "device/host/thread_pool.h"

#include <immintrin.h>

namespace castiron::host {
namespace {

// About a millisecond: longer than any gap inside a decode, so that threads do not sleep between steps.
// Sleeping earlier was worse wherever something else wants the CPU: it then runs for a whole time slice.
constexpr int kSpins = 50000;

}  // namespace

ThreadPool::ThreadPool(int threads, int cpus)
    : threads_(threads < 1 ? 1 : threads), spins_(threads_ <= cpus ? kSpins : 0) {
    workers_.reserve(static_cast<size_t>(threads_ - 1));
    for (int part = 1; part < threads_; ++part) {
        workers_.emplace_back([this, part] { work(part); });
    }
}

ThreadPool::~ThreadPool() {
    stop_.store(true, std::memory_order_relaxed);
    epoch_.fetch_add(1, std::memory_order_release);
    epoch_.notify_all();
    for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::await_change(const std::atomic<uint32_t>& word, uint32_t seen) const {
    for (int spin = 0; spin < spins_; ++spin) {
        if (word.load(std::memory_order_acquire) != seen) return;
        _mm_pause();
    }
    while (word.load(std::memory_order_acquire) == seen) word.wait(seen, std::memory_order_acquire);
}

void ThreadPool::barrier() {
    if (threads_ == 1) return;
    const uint32_t seen = generation_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
        arrived_.store(0, std::memory_order_relaxed);
        generation_.store(seen + 1, std::memory_order_release);
        generation_.notify_all();
    } else {
        await_change(generation_, seen);
    }
}

void ThreadPool::run(const std::function<void(int)>& body) {
    body_ = &body;
    epoch_.fetch_add(1, std::memory_order_release);
    epoch_.notify_all();
    body(0);
    barrier();
}

void ThreadPool::work(int part) {
    uint32_t seen = 0;
    while (true) {
        await_change(epoch_, seen);
        ++seen;
        if (stop_.load(std::memory_order_relaxed)) return;
        (*body_)(part);
        barrier();
    }
}

}  // namespace castiron::host
