// Vector functions. Polynomials are minimax fits of our own (weighted least squares, mpmath references);
// errors are bounded in cpp/tests/host_math_test against double precision.

// e^x for any x; relative error under 2 ulp.
CASTIRON_INLINE Vec exp(Vec x) {
    x = min(set1(89.0f), max(set1(-104.0f), x));  // not-a-number passes through: second operands
    const Vec n = round(mul(x, set1(1.44269504f)));
    Vec r =
        fnma(n, set1(0.693359375f), x);  // ln 2 in two parts: the first has few bits, so the product is exact
    r = fnma(n, set1(-2.12194440e-4f), r);
    Vec p = set1(1.991849550e-04f);
    p = fma(p, r, set1(1.394617746e-03f));
    p = fma(p, r, set1(8.333264161e-03f));
    p = fma(p, r, set1(4.166626849e-02f));
    p = fma(p, r, set1(1.666666686e-01f));
    p = fma(p, r, set1(5.000000078e-01f));
    p = fma(mul(r, r), p, r);
    p = add(p, set1(1.0f));
    return scale_by_pow2(p, n);
}

// e^x for x <= 0, zero below -87: the weights of a softmax.
CASTIRON_INLINE Vec exp_negative(Vec x) {
    const Mask tiny = less(x, set1(-87.0f));
    const Vec c = max(set1(-87.0f), x);
    const Vec n = round(mul(c, set1(1.44269504f)));
    Vec r = fnma(n, set1(0.693359375f), c);
    r = fnma(n, set1(-2.12194440e-4f), r);
    Vec p = set1(1.991849550e-04f);
    p = fma(p, r, set1(1.394617746e-03f));
    p = fma(p, r, set1(8.333264161e-03f));
    p = fma(p, r, set1(4.166626849e-02f));
    p = fma(p, r, set1(1.666666686e-01f));
    p = fma(p, r, set1(5.000000078e-01f));
    p = fma(mul(r, r), p, r);
    p = add(p, set1(1.0f));
    return select(tiny, zero(), scale_to_normal(p, n));
}

CASTIRON_INLINE Vec tanh(Vec x) {
    const Vec a = abs(x);
    const Vec z = mul(x, x);
    Vec p = set1(-5.528630625e-03f);
    p = fma(p, z, set1(2.048331290e-02f));
    p = fma(p, z, set1(-5.369296687e-02f));
    p = fma(p, z, set1(1.333089974e-01f));
    p = fma(p, z, set1(-3.333326288e-01f));
    const Vec small = fma(mul(p, z), a, a);
    const Vec e = exp(add(a, a));
    const Vec large = sub(set1(1.0f), div(set1(2.0f), add(e, set1(1.0f))));
    return copysign(select(less(a, set1(0.625f)), small, large), x);
}

// Below one an odd polynomial, above it 1 - e^-g(x) with g = -log(erfc).
CASTIRON_INLINE Vec erf(Vec x) {
    const Vec a = abs(x);
    const Vec z = mul(x, x);
    Vec p = set1(7.889121848e-05f);
    p = fma(p, z, set1(-8.020841973e-04f));
    p = fma(p, z, set1(5.189535417e-03f));
    p = fma(p, z, set1(-2.685444463e-02f));
    p = fma(p, z, set1(1.128360018e-01f));
    p = fma(p, z, set1(-3.761262714e-01f));
    p = fma(p, z, set1(1.128379166e+00f));
    const Vec small = mul(a, p);
    const Vec c = min(set1(4.0f), a);
    Vec g = set1(-2.513018814e-07f);
    g = fma(g, c, set1(2.531446104e-05f));
    g = fma(g, c, set1(-4.637859299e-04f));
    g = fma(g, c, set1(4.282375594e-03f));
    g = fma(g, c, set1(-2.537354126e-02f));
    g = fma(g, c, set1(1.086389790e-01f));
    g = fma(g, c, set1(6.330396275e-01f));
    g = fma(g, c, set1(1.129661150e+00f));
    g = fma(g, c, set1(-2.043586213e-04f));
    const Vec large = sub(set1(1.0f), exp(neg(g)));
    return copysign(select(less(a, set1(1.0f)), small, large), x);
}

CASTIRON_INLINE Vec sigmoid(Vec x) {
    return div(set1(1.0f), add(set1(1.0f), exp(neg(x))));
}
CASTIRON_INLINE Vec silu(Vec x) {
    return div(x, add(set1(1.0f), exp(neg(x))));
}
CASTIRON_INLINE Vec relu(Vec x) {
    return max(x, zero());
}
CASTIRON_INLINE Vec gelu_quick(Vec x) {
    return mul(x, sigmoid(mul(set1(1.702f), x)));
}
CASTIRON_INLINE Vec gelu_tanh(Vec x) {
    const Vec inner = mul(set1(0.797884561f), fma(mul(mul(x, x), x), set1(0.044715f), x));
    return mul(mul(set1(0.5f), x), add(set1(1.0f), tanh(inner)));
}
CASTIRON_INLINE Vec gelu_erf(Vec x) {
    return mul(mul(set1(0.5f), x), add(set1(1.0f), erf(mul(x, set1(0.707106781f)))));
}
CASTIRON_INLINE Vec relu2(Vec x) {
    const Vec r = relu(x);
    return mul(r, r);
}

template <typename F>
CASTIRON_INLINE void map_rows(float* x, int64_t rows, F f) {
    for (int64_t r = 0; r < rows; ++r) store(x + r * 16, f(load(x + r * 16)));
}

// In place over rows of 16. One function, so that the epilogues of all kernels share the code, and a loop
// behind the choice, so that the latency of one row hides behind the next.
static void activate(Activation activation, float* x, int64_t rows) {
    switch (activation) {
        case Activation::kNone:
            return;
        case Activation::kSilu:
            return map_rows(x, rows, [](Vec v) { return silu(v); });
        case Activation::kGeluTanh:
            return map_rows(x, rows, [](Vec v) { return gelu_tanh(v); });
        case Activation::kGeluErf:
            return map_rows(x, rows, [](Vec v) { return gelu_erf(v); });
        case Activation::kGeluQuick:
            return map_rows(x, rows, [](Vec v) { return gelu_quick(v); });
        case Activation::kRelu:
            return map_rows(x, rows, [](Vec v) { return relu(v); });
        case Activation::kRelu2:
            return map_rows(x, rows, [](Vec v) { return relu2(v); });
        case Activation::kTanh:
            return map_rows(x, rows, [](Vec v) { return tanh(v); });
        case Activation::kSigmoid:
            return map_rows(x, rows, [](Vec v) { return sigmoid(v); });
    }
}
