// CUDA C++ as plain C++: included before a kernel's source, so that g++ compiles it for this machine.
//
// Threads of a block are fibers on one thread. A fiber runs until it waits (__syncthreads, warp operations)
// or ends, so every data race that is not a missing barrier stays hidden, and a missing barrier shows:
// threads run one after the other, not side by side. Blocks run one by one, the last first.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __shared__ static
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __grid_constant__

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) int2 {
    int x, y;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) {
    return {x, y};
}
inline float4 make_float4(float x, float y, float z, float w) {
    return {x, y, z, w};
}
inline int2 make_int2(int x, int y) {
    return {x, y};
}
inline int4 make_int4(int x, int y, int z, int w) {
    return {x, y, z, w};
}

namespace cuda_on_host {

// Of the fiber that runs now.
extern uint3 thread_index, block_index;
extern dim3 block_size, grid_size;
extern unsigned lane, warp;

// Dynamic shared memory of the block.
extern std::byte shared[];

// Waits until every living thread of the block is here.
void wait_for_block();
// Waits until every living lane of the mask is here, with the same mask.
void wait_for_lanes(unsigned mask);
// 8 bytes that each lane of the warp shows to the others between two waits.
uint64_t& slot(unsigned of_lane);
bool alive(unsigned of_lane);

template <class T>
T exchange(unsigned mask, T value, unsigned from) {
    static_assert(sizeof(T) <= 8);
    std::memcpy(&slot(lane), &value, sizeof value);
    wait_for_lanes(mask);
    T result = value;
    if (from < 32 && (mask >> from & 1) != 0 && alive(from)) std::memcpy(&result, &slot(from), sizeof result);
    wait_for_lanes(mask);
    return result;
}

inline unsigned vote(unsigned mask, bool value) {
    slot(lane) = value;
    wait_for_lanes(mask);
    unsigned votes = 0;
    for (unsigned i = 0; i < 32; ++i)
        if ((mask >> i & 1) != 0 && alive(i) && slot(i) != 0) votes |= 1u << i;
    wait_for_lanes(mask);
    return votes;
}

}  // namespace cuda_on_host

#define threadIdx (cuda_on_host::thread_index)
#define blockIdx (cuda_on_host::block_index)
#define blockDim (cuda_on_host::block_size)
#define gridDim (cuda_on_host::grid_size)
#define warpSize 32

inline void __syncthreads() {
    cuda_on_host::wait_for_block();
}
inline void __syncwarp(unsigned mask = ~0u) {
    cuda_on_host::wait_for_lanes(mask);
}
inline void __threadfence() {}
inline void __threadfence_block() {}

template <class T>
T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
    const unsigned base = cuda_on_host::lane / unsigned(width) * unsigned(width);
    return cuda_on_host::exchange(mask, value, base + unsigned(from) % unsigned(width));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int flip, int width = 32) {
    const unsigned from = cuda_on_host::lane ^ unsigned(flip);
    const bool inside = from / unsigned(width) <= cuda_on_host::lane / unsigned(width);
    return cuda_on_host::exchange(mask, value, inside ? from : cuda_on_host::lane);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32) {
    const unsigned from = cuda_on_host::lane + by;
    const bool inside = from / unsigned(width) == cuda_on_host::lane / unsigned(width);
    return cuda_on_host::exchange(mask, value, inside ? from : cuda_on_host::lane);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32) {
    const bool inside = cuda_on_host::lane % unsigned(width) >= by;
    return cuda_on_host::exchange(mask, value, inside ? cuda_on_host::lane - by : cuda_on_host::lane);
}
inline unsigned __ballot_sync(unsigned mask, bool value) {
    return cuda_on_host::vote(mask, value);
}
inline bool __any_sync(unsigned mask, bool value) {
    return cuda_on_host::vote(mask, value) != 0;
}
inline bool __all_sync(unsigned mask, bool value) {
    return cuda_on_host::vote(mask, !value) == 0;
}
inline int __popc(unsigned value) {
    return __builtin_popcount(value);
}
inline int __clz(int value) {
    return value == 0 ? 32 : __builtin_clz(unsigned(value));
}
inline int __ffs(int value) {
    return __builtin_ffs(value);
}

template <class T>
T __ldg(const T* from) {
    return *from;
}

// Fibers do not preempt each other, so plain code is atomic.
template <class T, class U>
T atomicAdd(T* at, U value) {
    const T old = *at;
    *at = old + T(value);
    return old;
}
template <class T, class U>
T atomicMax(T* at, U value) {
    const T old = *at;
    *at = std::max(old, T(value));
    return old;
}
template <class T, class U>
T atomicMin(T* at, U value) {
    const T old = *at;
    *at = std::min(old, T(value));
    return old;
}
template <class T, class U>
T atomicExch(T* at, U value) {
    const T old = *at;
    *at = T(value);
    return old;
}
template <class T>
T atomicCAS(T* at, T compare, T value) {
    const T old = *at;
    if (old == compare) *at = value;
    return old;
}

inline float rsqrtf(float x) {
    return 1.0f / std::sqrt(x);
}
inline float __expf(float x) {
    return std::exp(x);
}
inline float __logf(float x) {
    return std::log(x);
}
inline float __fdividef(float x, float y) {
    return x / y;
}
inline float __frcp_rn(float x) {
    return 1.0f / x;
}
inline float __fmaf_rn(float x, float y, float z) {
    return std::fma(x, y, z);
}
inline float __int_as_float(int x) {
    float result;
    std::memcpy(&result, &x, sizeof result);
    return result;
}
inline int __float_as_int(float x) {
    int result;
    std::memcpy(&result, &x, sizeof result);
    return result;
}
inline float __uint_as_float(unsigned x) {
    return __int_as_float(int(x));
}
inline unsigned __float_as_uint(float x) {
    return unsigned(__float_as_int(x));
}
using std::max;
using std::min;
