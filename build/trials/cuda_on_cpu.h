// CUDA C++ on the CPU, for plugin kernels on machines without a GPU: castiron plugin test, and engines on the
// virtual CUDA device of the tests.
//
// A kernel's source is compiled behind this header as ordinary C++. Blocks run one after the other; the
// threads of a block are fibers that change places at __syncthreads and at warp intrinsics, so that a block
// has the order that its barriers ask for. What is here is what kernels of that size use; the compiler names
// anything else.
#pragma once

#include <signal.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __constant__ static
#define __shared__ static
#define __restrict__ __restrict
#define __launch_bounds__(...)

struct uint3 {
    unsigned x = 0, y = 0, z = 0;
};
struct dim3 : uint3 {};
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace castiron_trial {

constexpr size_t kStackBytes = 64 << 10;
constexpr unsigned kWarp = 32;

struct Fiber {
    ucontext_t context{};
    std::vector<char> stack;
    uint3 index;
    bool done = false;
    uint64_t exchange = 0;  // what this lane offers to a warp intrinsic
};

// Where a launch broke off: a thread touched memory that is forbidden to it.
struct Fault {
    uint64_t address;
    uint3 block, thread;
};

// The block that runs, and its threads.
struct Block {
    std::vector<Fiber> fibers;
    size_t current = 0;
    ucontext_t scheduler{};
    std::vector<char> dynamic_shared;
    void (*body)(void*) = nullptr;
    void* argument = nullptr;
    ucontext_t end{};  // of the launch: where a fault goes on
    bool broken = false;
    Fault fault{};
};
inline Block block;
// Whether this thread of the process runs a launch: faults of others are not ours.
inline thread_local bool running = false;
inline struct sigaction previous_action;

inline Fiber& self() { return block.fibers[block.current]; }
// Lets every other thread of the block reach its next barrier.
inline void meet() {
    Fiber& fiber = self();
    swapcontext(&fiber.context, &block.scheduler);
}

template <class T>
T trade(T value, unsigned lane) {
    static_assert(sizeof(T) <= sizeof(uint64_t));
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    self().exchange = bits;
    const size_t first = block.current / kWarp * kWarp;
    meet();
    const size_t from = std::min(first + lane % kWarp, block.fibers.size() - 1);
    bits = block.fibers[from].exchange;
    meet();
    T result;
    std::memcpy(&result, &bits, sizeof(T));
    return result;
}

}  // namespace castiron_trial

inline uint3 blockIdx;
inline dim3 blockDim, gridDim;
#define threadIdx (castiron_trial::self().index)
#define warpSize 32

inline void __syncthreads() { castiron_trial::meet(); }
inline void __syncwarp(unsigned = ~0u) { castiron_trial::meet(); }
inline void __threadfence() {}

inline unsigned castiron_lane() { return static_cast<unsigned>(castiron_trial::block.current) % 32; }
template <class T> T __shfl_sync(unsigned, T v, int lane, int = 32) { return castiron_trial::trade(v, static_cast<unsigned>(lane)); }
template <class T> T __shfl_xor_sync(unsigned, T v, int mask, int = 32) {
    return castiron_trial::trade(v, castiron_lane() ^ static_cast<unsigned>(mask));
}
template <class T> T __shfl_down_sync(unsigned, T v, unsigned delta, int = 32) {
    const unsigned lane = castiron_lane();
    return castiron_trial::trade(v, lane + delta < 32 ? lane + delta : lane);
}
template <class T> T __shfl_up_sync(unsigned, T v, unsigned delta, int = 32) {
    const unsigned lane = castiron_lane();
    return castiron_trial::trade(v, lane >= delta ? lane - delta : lane);
}

template <class T> T __ldg(const T* p) { return *p; }
template <class T> T atomicAdd(T* p, T v) { return std::exchange(*p, *p + v); }
template <class T> T atomicMax(T* p, T v) { return std::exchange(*p, std::max(*p, v)); }
template <class T> T atomicMin(T* p, T v) { return std::exchange(*p, std::min(*p, v)); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline unsigned __float_as_uint(float x) { unsigned u; std::memcpy(&u, &x, 4); return u; }
inline float __uint_as_float(unsigned u) { float x; std::memcpy(&x, &u, 4); return x; }
inline int __float_as_int(float x) { return static_cast<int>(__float_as_uint(x)); }
inline float __int_as_float(int i) { return __uint_as_float(static_cast<unsigned>(i)); }
using std::max;
using std::min;

namespace castiron_trial {

inline void enter() {
    block.body(block.argument);
    self().done = true;
    swapcontext(&self().context, &block.scheduler);
}

// Runs every thread of one block to its end, in rounds from barrier to barrier.
inline void run_block() {
    size_t alive = block.fibers.size();
    for (Fiber& fiber : block.fibers) {
        fiber.done = false;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, enter, 0);
    }
    while (alive > 0) {
        for (block.current = 0; block.current < block.fibers.size(); ++block.current) {
            Fiber& fiber = self();
            if (fiber.done) continue;
            swapcontext(&block.scheduler, &fiber.context);
            if (fiber.done) --alive;
        }
    }
}

inline void on_fault(int, siginfo_t* info, void*) {
    if (!running) {  // returning repeats the fault, now for whoever was there before
        sigaction(SIGSEGV, &previous_action, nullptr);
        return;
    }
    block.fault = {reinterpret_cast<uint64_t>(info->si_addr), blockIdx, self().index};
    block.broken = true;
    setcontext(&block.end);
}

// Runs `blocks` to its end, or to the first fault: then true, and `fault` says which.
template <class Blocks>
bool breaks(Blocks blocks, Fault* fault) {
    struct sigaction action {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, &previous_action);
    block.broken = false;
    running = true;
    getcontext(&block.end);
    if (!block.broken) blocks();
    running = false;
    sigaction(SIGSEGV, &previous_action, nullptr);
    *fault = block.fault;
    return block.broken;
}

template <class... Args, size_t... I>
void call(void (*kernel)(Args...), void** params, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_reference_t<Args>*>(params[I])...);
}

template <class... Args>
bool launch(void (*kernel)(Args...), const unsigned* grid, const unsigned* threads, unsigned shared, void** params,
            Fault* fault) {
    auto body = [&] { call(kernel, params, std::index_sequence_for<Args...>{}); };
    using Body = decltype(body);
    block.body = [](void* argument) { (*static_cast<Body*>(argument))(); };
    block.argument = &body;
    block.dynamic_shared.assign(shared + 16, '\xff');
    block.fibers.resize(size_t{threads[0]} * threads[1] * threads[2]);
    for (size_t i = 0; i < block.fibers.size(); ++i) {
        Fiber& fiber = block.fibers[i];
        fiber.stack.resize(kStackBytes);
        const auto n = static_cast<unsigned>(i);
        fiber.index = {n % threads[0], n / threads[0] % threads[1], n / (threads[0] * threads[1])};
    }
    gridDim.x = grid[0], gridDim.y = grid[1], gridDim.z = grid[2];
    blockDim.x = threads[0], blockDim.y = threads[1], blockDim.z = threads[2];
    // The last block first: a kernel that relies on the order of blocks shows it.
    const auto blocks = [&] {
        for (unsigned left = grid[0] * grid[1] * grid[2]; left-- > 0;) {
            blockIdx = {left % grid[0], left / grid[0] % grid[1], left / (grid[0] * grid[1])};
            run_block();
        }
    };
    return breaks(blocks, fault);
}

inline void* dynamic_shared() {
    const auto at = reinterpret_cast<uintptr_t>(block.dynamic_shared.data());
    return reinterpret_cast<void*>((at + 15) / 16 * 16);
}

}  // namespace castiron_trial
