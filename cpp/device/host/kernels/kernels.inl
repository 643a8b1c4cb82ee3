// All kernels of one instruction set and their table. Included once by each kernels_<isa>.cc, inside the
// ISA's namespace and behind its vector type: no guard, no system headers.

static_assert(kTileRows == CASTIRON_TILE_ROWS);

// A loop body as a lambda over constants: where the indices into an array of vectors are constants, gcc keeps
// the array in registers. Left to unroll loops itself it does so only sometimes, and a tile then runs at half
// its speed.
#define CASTIRON_UNROLLED __attribute__((always_inline))
// A function of its own, so that its code does not depend on who calls it.
#define CASTIRON_KERNEL __attribute__((noipa)) static

template <int kValue>
struct Int {
    static constexpr int value = kValue;
};

template <int N, typename F>
CASTIRON_INLINE void unrolled(F f) {
#ifdef CASTIRON_KEEP_LOOPS
    struct Index {
        int value;
    };
    for (int i = 0; i < N; ++i) f(Index{i});
#else
    if constexpr (N > 0) {
        unrolled<N - 1>(f);
        f(Int<N - 1>{});
    }
#endif
}

template <int N, int M, typename F>
CASTIRON_INLINE void unrolled(F f) {
    unrolled<N>([&](auto n) CASTIRON_UNROLLED { unrolled<M>([&](auto m) CASTIRON_UNROLLED { f(n, m); }); });
}

// Each builds on those before it.
// clang-format off
#include "device/host/kernels/math.inl"
#include "device/host/kernels/linear.inl"
#include "device/host/kernels/rows.inl"
#include "device/host/kernels/attention.inl"
// clang-format on

const KernelTable& kernel_table() {
    static constexpr KernelTable table = {
        .linear = linear,
        .attention = attention,
        .attention_segment = attention_segment,
        .attention_merge = attention_merge,
        .rms_norm = rms_norm,
        .layer_norm = layer_norm,
        .rope = rope,
        .unary = unary,
        .binary = binary,
        .clip = clip,
        .softmax = softmax,
        .reduce = reduce,
        .matmul = matmul,
        .scale_bf16 = scale_bf16,
    };
    return table;
}
