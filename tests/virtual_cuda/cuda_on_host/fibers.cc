// Runs a grid of a kernel that was compiled with cuda_on_host.h.
#include "cuda_on_host.h"

#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

namespace cuda_on_host {

uint3 thread_index, block_index;
dim3 block_size, grid_size;
unsigned lane, warp;
alignas(128) std::byte shared[256 << 10];

namespace {

constexpr size_t kStackBytes = 128 << 10;

struct Fiber {
    ucontext_t context;
    std::byte* stack = nullptr;
    uint3 index{};
    unsigned lane = 0, warp = 0;
    enum class State { kReady, kAtBlock, kAtLanes, kDone } state = State::kReady;
    unsigned mask = 0;
    uint64_t slot = 0;
};

std::vector<Fiber> g_fibers;
Fiber* g_current = nullptr;
ucontext_t g_scheduler;
void (*g_call)(const void* const*) = nullptr;  // unpacks the arguments and calls the kernel
const void* const* g_params = nullptr;
sigjmp_buf g_escape;
const void* g_fault_address = nullptr;

void body() {
    g_call(g_params);
    g_current->state = Fiber::State::kDone;
    swapcontext(&g_current->context, &g_scheduler);
}

void yield(Fiber::State state) {
    g_current->state = state;
    swapcontext(&g_current->context, &g_scheduler);
}

void on_segv(int, siginfo_t* info, void*) {
    g_fault_address = info->si_addr;
    siglongjmp(g_escape, 1);
}

void resume(Fiber& fiber) {
    g_current = &fiber;
    thread_index = fiber.index;
    lane = fiber.lane;
    warp = fiber.warp;
    swapcontext(&g_scheduler, &fiber.context);
}

// Whether all lanes of the waiting fiber's mask that live wait with the same mask.
bool lanes_met(const Fiber& fiber) {
    const size_t first = fiber.warp * 32;
    for (size_t i = first; i < std::min(first + 32, g_fibers.size()); ++i) {
        const Fiber& other = g_fibers[i];
        if ((fiber.mask >> other.lane & 1) == 0 || other.state == Fiber::State::kDone) continue;
        if (other.state != Fiber::State::kAtLanes || other.mask != fiber.mask) return false;
    }
    return true;
}

// Wakes those whose wait is over; false if nobody could be woken.
bool release() {
    bool woken = false;
    for (Fiber& fiber : g_fibers) {
        if (fiber.state != Fiber::State::kAtLanes || !lanes_met(fiber)) continue;
        const unsigned mask = fiber.mask;
        const size_t first = fiber.warp * 32;
        for (size_t i = first; i < std::min(first + 32, g_fibers.size()); ++i)
            if (g_fibers[i].state == Fiber::State::kAtLanes && g_fibers[i].mask == mask)
                g_fibers[i].state = Fiber::State::kReady;
        woken = true;
    }
    if (woken) return true;
    for (const Fiber& fiber : g_fibers)
        if (fiber.state != Fiber::State::kDone && fiber.state != Fiber::State::kAtBlock) return false;
    for (Fiber& fiber : g_fibers)
        if (fiber.state == Fiber::State::kAtBlock) fiber.state = Fiber::State::kReady;
    return true;
}

bool run_block() {
    std::memset(shared, 0xFF, sizeof shared);  // shared memory holds anything at first: NaN
    for (Fiber& fiber : g_fibers) {
        if (fiber.stack == nullptr) {
            void* stack =
                mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (stack == MAP_FAILED) std::abort();
            fiber.stack = static_cast<std::byte*>(stack);
        }
        fiber.state = Fiber::State::kReady;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack;
        fiber.context.uc_stack.ss_size = kStackBytes;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, body, 0);
    }
    while (true) {
        bool living = false;
        for (Fiber& fiber : g_fibers) {
            if (fiber.state == Fiber::State::kReady) resume(fiber);
            living = living || fiber.state != Fiber::State::kDone;
        }
        if (!living) return true;
        bool ready = false;
        for (const Fiber& fiber : g_fibers) ready = ready || fiber.state == Fiber::State::kReady;
        if (!ready && !release()) return false;
    }
}

}  // namespace

void wait_for_block() {
    yield(Fiber::State::kAtBlock);
}

void wait_for_lanes(unsigned mask) {
    g_current->mask = mask;
    yield(Fiber::State::kAtLanes);
}

uint64_t& slot(unsigned of_lane) {
    return g_fibers[warp * 32 + of_lane].slot;
}

bool alive(unsigned of_lane) {
    const size_t at = warp * 32 + of_lane;
    return at < g_fibers.size() && g_fibers[at].state != Fiber::State::kDone;
}

}  // namespace cuda_on_host

// Runs the grid. 0: done; 1: a thread touched memory that is not mapped, its address and place are in `where`
// (address, block x y z, thread x y z); 2: threads wait for others that never come.
extern "C" __attribute__((visibility("default"))) int cuda_on_host_run(void (*call)(const void* const*),
                                                                       const void* const* params,
                                                                       const uint32_t grid[3],
                                                                       const uint32_t block[3],
                                                                       uint64_t where[7]) {
    using namespace cuda_on_host;
    g_call = call;
    g_params = params;
    grid_size = {grid[0], grid[1], grid[2]};
    block_size = {block[0], block[1], block[2]};
    const size_t threads = size_t{block[0]} * block[1] * block[2];
    for (size_t i = threads; i < g_fibers.size(); ++i) munmap(g_fibers[i].stack, kStackBytes);
    g_fibers.resize(threads);
    for (unsigned i = 0; i < threads; ++i) {
        g_fibers[i].index = {i % block[0], i / block[0] % block[1], i / block[0] / block[1]};
        g_fibers[i].lane = i % 32;
        g_fibers[i].warp = i / 32;
    }
    struct sigaction action = {}, before = {};
    action.sa_sigaction = on_segv;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGSEGV, &action, &before);
    volatile int outcome = 0;
    if (sigsetjmp(g_escape, 1) == 0) {
        for (unsigned z = grid[2]; z-- > 0 && outcome == 0;)
            for (unsigned y = grid[1]; y-- > 0 && outcome == 0;)
                for (unsigned x = grid[0]; x-- > 0 && outcome == 0;) {
                    block_index = {x, y, z};
                    if (!run_block()) outcome = 2;
                }
    } else {
        outcome = 1;
    }
    sigaction(SIGSEGV, &before, nullptr);
    const uint64_t place[7] = {reinterpret_cast<uint64_t>(g_fault_address),
                               block_index.x,
                               block_index.y,
                               block_index.z,
                               thread_index.x,
                               thread_index.y,
                               thread_index.z};
    std::copy(place, place + 7, where);
    return outcome;
}
