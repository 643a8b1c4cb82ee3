// Loops: those whose trip counts and indices are constants, and the one over vectors.

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

// Calls f(Int<R>{}) with R = rows, 1 to kMost.
template <int kMost, typename F>
CASTIRON_INLINE void with_rows(int64_t rows, F f) {
    switch (rows) {
#define CASTIRON_ROWS(R)                              \
    case R:                                           \
        if constexpr (R <= kMost) return f(Int<R>{}); \
        break;
        CASTIRON_ROWS(1)
        CASTIRON_ROWS(2)
        CASTIRON_ROWS(3)
        CASTIRON_ROWS(4)
        CASTIRON_ROWS(5)
        CASTIRON_ROWS(6)
        CASTIRON_ROWS(7)
        CASTIRON_ROWS(8)
        CASTIRON_ROWS(9)
        CASTIRON_ROWS(10)
        CASTIRON_ROWS(11)
        CASTIRON_ROWS(12)
#undef CASTIRON_ROWS
        default:
            break;
    }
    __builtin_unreachable();
}

// f(vector at i, lanes) over n elements.
template <typename F>
CASTIRON_INLINE void for_each_vec(int64_t n, F f) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) f(i, 16);
    if (i < n) f(i, static_cast<int>(n - i));
}
