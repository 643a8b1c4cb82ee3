// Kernels over one row or one run of elements: norms, rotary embedding, elementwise functions, softmax.

// Sum over i of f(i, lanes), where lanes past n give zero. Four partial sums; the order depends on n alone.
template <typename F>
CASTIRON_INLINE float sum_over(int64_t n, F f) {
    Vec s0 = zero(), s1 = zero(), s2 = zero(), s3 = zero();
    int64_t i = 0;
    for (; i + 64 <= n; i += 64) {
        s0 = add(s0, f(i, 16));
        s1 = add(s1, f(i + 16, 16));
        s2 = add(s2, f(i + 32, 16));
        s3 = add(s3, f(i + 48, 16));
    }
    for (; i < n; i += 16) s0 = add(s0, f(i, n - i < 16 ? static_cast<int>(n - i) : 16));
    return sum(add(add(s0, s1), add(s2, s3)));
}

CASTIRON_INLINE const float* add_residual(const NormArgs& a) {
    if (a.residual == nullptr) return a.x;
    for_each_vec(a.columns, [&](int64_t i, int n) {
        store_n(a.sum + i, add(load_n(a.x + i, n), load_n(a.residual + i, n)), n);
    });
    return a.sum;
}

static void rms_norm(const NormArgs& a) {
    const float* x = add_residual(a);
    for (int64_t g = 0; g < a.columns; g += a.group) {
        const float* in = x + g;
        float* out = a.y + g;
        const float squares = sum_over(a.group, [&](int64_t i, int n) {
            const Vec v = load_n(in + i, n);
            return mul(v, v);
        });
        const float mean = squares / static_cast<float>(a.group);
        const Vec inverse = set1(1.0f / __builtin_sqrtf(mean + a.eps));
        for_each_vec(a.group, [&](int64_t i, int n) {
            Vec v = mul(load_n(in + i, n), inverse);
            if (a.weight != nullptr) v = mul(v, load_n(a.weight + i, n));
            store_n(out + i, v, n);
        });
    }
}

static void layer_norm(const NormArgs& a) {
    const float* x = add_residual(a);
    for (int64_t g = 0; g < a.columns; g += a.group) {
        const float* in = x + g;
        float* out = a.y + g;
        const float count = static_cast<float>(a.group);
        const float mean = sum_over(a.group, [&](int64_t i, int n) { return load_n(in + i, n); }) / count;
        const Vec center = set1(mean);
        // Two passes: the variance of large values with a small spread survives float32.
        const float squares = sum_over(a.group, [&](int64_t i, int n) {
            const Vec d = sub(load_n(in + i, n), center);
            const Vec kept = n == 16 ? d : select(less(lane_index(), set1(static_cast<float>(n))), d, zero());
            return mul(kept, kept);
        });
        const Vec inverse = set1(1.0f / __builtin_sqrtf(squares / count + a.eps));
        for_each_vec(a.group, [&](int64_t i, int n) {
            Vec v = mul(sub(load_n(in + i, n), center), inverse);
            if (a.weight != nullptr) v = mul(v, load_n(a.weight + i, n));
            if (a.bias != nullptr) v = add(v, load_n(a.bias + i, n));
            store_n(out + i, v, n);
        });
    }
}

static void rope_head(const RopeArgs& a, const float* x, float* y, const float* cos, const float* sin,
                      float* scratch) {
    const int half = a.rotary_dim / 2;
    if (!a.interleaved) {
        // Pairs are (i, i + half) on both sides, so concat_halves changes nothing; x may be y.
        for_each_vec(half, [&](int64_t i, int n) {
            const Vec c = load_n(cos + i, n), s = load_n(sin + i, n);
            const Vec first = load_n(x + i, n), second = load_n(x + half + i, n);
            store_n(y + i, sub(mul(first, c), mul(second, s)), n);
            store_n(y + half + i, add(mul(second, c), mul(first, s)), n);
        });
    } else {
        for (int i = 0; i < half; ++i) {
            const float first = x[2 * i], second = x[2 * i + 1];
            const float turned = first * cos[i] - second * sin[i];
            const float other = second * cos[i] + first * sin[i];
            if (a.concat_halves) {
                scratch[i] = turned;
                scratch[half + i] = other;
            } else {
                y[2 * i] = turned;
                y[2 * i + 1] = other;
            }
        }
        if (a.concat_halves) {
            for (int i = 0; i < a.rotary_dim; ++i) y[i] = scratch[i];
        }
    }
    if (x != y) {
        const int rotary = a.rotary_dim;
        for_each_vec(a.head_dim - rotary,
                     [&](int64_t i, int n) { store_n(y + rotary + i, load_n(x + rotary + i, n), n); });
    }
}

static void rope(const RopeArgs& a, const float* x, float* y, const float* cos, const float* sin,
                 float* scratch) {
    for (int h = 0; h < a.heads; ++h) {
        rope_head(a, x + static_cast<int64_t>(h) * a.head_dim, y + static_cast<int64_t>(h) * a.head_dim, cos,
                  sin, scratch);
    }
}

template <typename F>
CASTIRON_INLINE void map_unary(const float* x, float* y, int64_t n, F f) {
    for_each_vec(n, [&](int64_t i, int lanes) { store_n(y + i, f(load_n(x + i, lanes)), lanes); });
}

// Functions that no model needs in its inner loops go element by element through the C library.
template <typename F>
CASTIRON_INLINE void map_scalar(const float* x, float* y, int64_t n, F f) {
    for (int64_t i = 0; i < n; ++i) y[i] = f(x[i]);
}

static void unary(UnaryFn fn, const float* x, float* y, int64_t n) {
    switch (fn) {
        case UnaryFn::kSilu:
            return map_unary(x, y, n, [](Vec v) { return silu(v); });
        case UnaryFn::kGeluTanh:
            return map_unary(x, y, n, [](Vec v) { return gelu_tanh(v); });
        case UnaryFn::kGeluErf:
            return map_unary(x, y, n, [](Vec v) { return gelu_erf(v); });
        case UnaryFn::kGeluQuick:
            return map_unary(x, y, n, [](Vec v) { return gelu_quick(v); });
        case UnaryFn::kRelu:
            return map_unary(x, y, n, [](Vec v) { return relu(v); });
        case UnaryFn::kRelu2:
            return map_unary(x, y, n, [](Vec v) { return relu2(v); });
        case UnaryFn::kTanh:
            return map_unary(x, y, n, [](Vec v) { return tanh(v); });
        case UnaryFn::kSigmoid:
            return map_unary(x, y, n, [](Vec v) { return sigmoid(v); });
        case UnaryFn::kExp:
            return map_unary(x, y, n, [](Vec v) { return exp(v); });
        case UnaryFn::kLog:
            return map_scalar(x, y, n, [](float v) { return ::logf(v); });
        case UnaryFn::kSqrt:
            return map_unary(x, y, n, [](Vec v) { return sqrt(v); });
        case UnaryFn::kRsqrt:
            return map_unary(x, y, n, [](Vec v) { return div(set1(1.0f), sqrt(v)); });
        case UnaryFn::kNeg:
            return map_unary(x, y, n, [](Vec v) { return neg(v); });
        case UnaryFn::kAbs:
            return map_unary(x, y, n, [](Vec v) { return abs(v); });
        case UnaryFn::kReciprocal:
            return map_unary(x, y, n, [](Vec v) { return div(set1(1.0f), v); });
        case UnaryFn::kSoftplus:
            return map_scalar(x, y, n, [](float v) { return v > 20.0f ? v : ::log1pf(::expf(v)); });
        case UnaryFn::kSin:
            return map_scalar(x, y, n, [](float v) { return ::sinf(v); });
        case UnaryFn::kCos:
            return map_scalar(x, y, n, [](float v) { return ::cosf(v); });
        case UnaryFn::kErf:
            return map_unary(x, y, n, [](Vec v) { return erf(v); });
        case UnaryFn::kSquare:
            return map_unary(x, y, n, [](Vec v) { return mul(v, v); });
    }
}

template <typename F>
CASTIRON_INLINE void map_binary(const float* a, int64_t a_step, const float* b, int64_t b_step, float* y,
                                int64_t n, F f) {
    const Vec a0 = set1(*a), b0 = set1(*b);
    for_each_vec(n, [&](int64_t i, int lanes) {
        const Vec va = a_step != 0 ? load_n(a + i, lanes) : a0;
        const Vec vb = b_step != 0 ? load_n(b + i, lanes) : b0;
        store_n(y + i, f(va, vb), lanes);
    });
}

static void binary(BinaryFn fn, const float* a, int64_t a_step, const float* b, int64_t b_step, float* y,
                   int64_t n) {
    if (n == 0) return;
    switch (fn) {
        case BinaryFn::kAdd:
            return map_binary(a, a_step, b, b_step, y, n, [](Vec p, Vec q) { return add(p, q); });
        case BinaryFn::kSub:
            return map_binary(a, a_step, b, b_step, y, n, [](Vec p, Vec q) { return sub(p, q); });
        case BinaryFn::kMul:
            return map_binary(a, a_step, b, b_step, y, n, [](Vec p, Vec q) { return mul(p, q); });
        case BinaryFn::kDiv:
            return map_binary(a, a_step, b, b_step, y, n, [](Vec p, Vec q) { return div(p, q); });
        case BinaryFn::kMin:
            return map_binary(a, a_step, b, b_step, y, n, [](Vec p, Vec q) { return min(p, q); });
        case BinaryFn::kMax:
            return map_binary(a, a_step, b, b_step, y, n, [](Vec p, Vec q) { return max(p, q); });
        case BinaryFn::kPow:
            for (int64_t i = 0; i < n; ++i) y[i] = ::powf(a[i * a_step], b[i * b_step]);
            return;
    }
}

static void clip(const float* x, float* y, int64_t n, float low, float high) {
    map_unary(x, y, n, [=](Vec v) { return min(set1(high), max(set1(low), v)); });
}

CASTIRON_INLINE float max_over(const float* x, int64_t n) {
    Vec m = set1(-__builtin_inff());
    for_each_vec(n, [&](int64_t i, int lanes) {
        const Vec v = load_n(x + i, lanes);
        m = max(m, lanes == 16 ? v : select(less(lane_index(), set1(static_cast<float>(lanes))), v, m));
    });
    return largest(m);
}

static void softmax(const float* x, float* y, int64_t n) {
    const Vec top = set1(max_over(x, n));
    const float total = sum_over(n, [&](int64_t i, int lanes) {
        Vec e = exp_negative(sub(load_n(x + i, lanes), top));
        if (lanes < 16) e = select(less(lane_index(), set1(static_cast<float>(lanes))), e, zero());
        store_n(y + i, e, lanes);
        return e;
    });
    const Vec scale = set1(total);
    map_unary(y, y, n, [&](Vec v) { return div(v, scale); });
}

static float reduce(ReduceFn fn, const float* x, int64_t n) {
    if (fn == ReduceFn::kMax) return max_over(x, n);
    const float total = sum_over(n, [&](int64_t i, int lanes) { return load_n(x + i, lanes); });
    return fn == ReduceFn::kMean ? total / static_cast<float>(n) : total;
}

static void matmul(const float* a, const float* b, float* y, int64_t k, int64_t n) {
    for_each_vec(n, [&](int64_t j, int lanes) {
        Vec c = zero();
        for (int64_t i = 0; i < k; ++i) c = fma(set1(a[i]), load_n(b + i * n + j, lanes), c);
        store_n(y + j, c, lanes);
    });
}

static void scale_bf16(const uint16_t* x, float* y, int64_t n, float scale) {
    const Vec s = set1(scale);
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) store(y + i, mul(load_bf16(x + i), s));
    for (; i < n; ++i) y[i] = __builtin_bit_cast(float, static_cast<uint32_t>(x[i]) << 16) * scale;
}
