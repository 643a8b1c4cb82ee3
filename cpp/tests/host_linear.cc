#include "host_support.h"

#include <limits>

namespace castiron::test {
namespace {

double act(const std::string& name, double x) {
    const auto sigmoid = [](double v) { return 1 / (1 + std::exp(-v)); };
    if (name == "silu") return x * sigmoid(x);
    if (name == "gelu_tanh")
        return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    if (name == "gelu_erf") return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0)));
    if (name == "gelu_quick") return x * sigmoid(1.702 * x);
    if (name == "relu") return std::max(x, 0.0);
    if (name == "relu2") return std::max(x, 0.0) * std::max(x, 0.0);
    if (name == "tanh") return std::tanh(x);
    if (name == "sigmoid") return sigmoid(x);
    return x;
}

struct Case {
    int rows, k, n;
    bool bf16, bias, residual;
    std::string activation = "none";
    double alpha = 1;
};

// What a product takes for x.
Floats seen_by_product(Floats x, bool bf16, const std::string& isa) {
    if (bf16 && multiplies_bf16(isa)) {
        for (float& v : x) v = round_bf16(v);
    }
    return x;
}

void check_linear(const Case& c, const std::string& isa, uint32_t seed) {
    CAPTURE(c.rows);
    CAPTURE(c.k);
    CAPTURE(c.n);
    CAPTURE(c.bf16);
    CAPTURE(isa);
    CAPTURE(seed);
    Random random(seed);
    const auto m = static_cast<size_t>(c.rows), k = static_cast<size_t>(c.k), n = static_cast<size_t>(c.n);
    const Floats x = random.floats(m * k), bias = random.floats(n), residual = random.floats(m * n);
    Floats w = random.floats(n * k, 0.1f);
    if (c.bf16) {
        for (float& v : w) v = round_bf16(v);
    }
    Graph g(c.rows);
    std::vector<int> inputs = {g.input(x, c.k)}, weights = {g.panels(w, c.n, c.k, c.bf16)};
    if (c.residual) inputs.push_back(g.input(residual, c.n));
    if (c.bias) weights.push_back(g.plain(bias, {c.n}));
    const int y = g.value({kT, Dim{c.n}});
    g.step("linear", inputs, weights, {y},
           {{"has_bias", c.bias},
            {"has_residual", c.residual},
            {"activation", c.activation},
            {"alpha", c.alpha}});
    g.output(y);

    const Floats seen = seen_by_product(x, c.bf16, isa);
    std::vector<double> expected(m * n);
    double scale = 0;
    for (size_t r = 0; r < m; ++r) {
        for (size_t o = 0; o < n; ++o) {
            double sum = 0;
            for (size_t i = 0; i < k; ++i) sum += double{seen[r * k + i]} * double{w[o * k + i]};
            if (c.bias) sum += double{bias[o]};
            scale = std::max(scale, std::abs(sum));
            expected[r * n + o] =
                c.alpha * act(c.activation, sum) + (c.residual ? double{residual[r * n + o]} : 0.0);
        }
    }
    // A float32 chain of k products of size 0.1 errs by about sqrt(k) units in the last place of its largest
    // sum.
    const double tolerance = 4e-7 * std::sqrt(double(c.k)) * (1 + scale) * (1 + std::abs(c.alpha));
    check_close(forward(*g.device(isa), c.rows), expected, tolerance, 1e-5);
}

TEST_CASE("linear equals a double-precision product for any shape, dtype and epilogue") {
    uint32_t seed = 1;
    for (const std::string& isa : isas()) {
        for (const bool bf16 : {false, true}) {
            for (const auto& [rows, k, n] : {std::tuple{1, 64, 80},
                                             {1, 33, 16},
                                             {2, 7, 5},
                                             {3, 48, 50},
                                             {4, 64, 130},
                                             {5, 31, 17},
                                             {6, 40, 33},
                                             {7, 64, 48},
                                             {11, 65, 19},
                                             {13, 300, 35},
                                             {25, 577, 40},
                                             {50, 601, 21},
                                             {200, 40, 70}}) {
                check_linear({rows, k, n, bf16, false, false}, isa, seed++);
                check_linear({rows, k, n, bf16, true, true, "silu", 0.5}, isa, seed++);
            }
        }
    }
}

TEST_CASE("linear applies every activation") {
    uint32_t seed = 100;
    for (const char* name :
         {"none", "silu", "gelu_tanh", "gelu_erf", "gelu_quick", "relu", "relu2", "tanh", "sigmoid"}) {
        for (const int rows : {1, 9})
            check_linear({rows, 96, 40, true, true, false, name}, main_isa(), seed++);
    }
}

TEST_CASE("linear may write over its residual and read a view") {
    Random random(7);
    const Floats wide = random.floats(9 * 100), residual = random.floats(9 * 24), w = random.floats(24 * 40);
    Graph g(9);
    const int x = g.view(g.input(wide, 100), 37, 40), in_place = g.input(residual, 24);
    Value y = g.program().values[static_cast<size_t>(in_place)];
    y.name = "y";
    g.program().values.push_back(y);
    const int out = static_cast<int>(g.program().values.size()) - 1;
    g.step("linear", {x, in_place}, {g.panels(w, 24, 40, false)}, {out}, {{"has_residual", true}});
    g.output(out);
    std::vector<double> expected;
    for (size_t r = 0; r < 9; ++r) {
        for (size_t o = 0; o < 24; ++o) {
            double sum = double{residual[r * 24 + o]};
            for (size_t i = 0; i < 40; ++i) sum += double{wide[r * 100 + 37 + i]} * double{w[o * 40 + i]};
            expected.push_back(sum);
        }
    }
    check_close(forward(*g.device(), 9), expected, 1e-5, 1e-5);
}

TEST_CASE("gated_linear multiplies the activated gate by up") {
    uint32_t seed = 200;
    for (const std::string& isa : isas()) {
        for (const bool bf16 : {false, true}) {
            for (const auto& [rows, k, f] :
                 {std::tuple{1, 64, 32}, {2, 33, 21}, {5, 50, 16}, {8, 64, 40}, {30, 310, 50}}) {
                CAPTURE(isa);
                CAPTURE(rows);
                CAPTURE(f);
                const bool bias = seed % 2 == 0;
                Random random(seed++);
                const auto m = static_cast<size_t>(rows), depth = static_cast<size_t>(k),
                           width = static_cast<size_t>(f);
                const size_t padded = (width + 15) / 16 * 16;
                const Floats x = random.floats(m * depth), seen = seen_by_product(x, bf16, isa);
                Floats gate = random.floats(width * depth, 0.2f), up = random.floats(width * depth, 0.2f);
                const Floats gate_bias = random.floats(width), up_bias = random.floats(width);
                Floats packed(2 * padded * depth), packed_bias(2 * padded);
                for (size_t o = 0; o < width; ++o) {
                    const size_t at = o / 16 * 32 + o % 16;
                    for (size_t i = 0; i < depth; ++i) {
                        float& a = gate[o * depth + i];
                        float& b = up[o * depth + i];
                        if (bf16) {
                            a = round_bf16(a);
                            b = round_bf16(b);
                        }
                        packed[at * depth + i] = a;
                        packed[(at + 16) * depth + i] = b;
                    }
                    packed_bias[at] = gate_bias[o];
                    packed_bias[at + 16] = up_bias[o];
                }
                Graph g(rows);
                const auto n = static_cast<int64_t>(2 * padded);
                std::vector<int> weights = {g.panels(packed, n, k, bf16)};
                if (bias) weights.push_back(g.plain(packed_bias, {n}));
                const int y = g.value({kT, Dim{f}});
                g.step("gated_linear", {g.input(x, k)}, weights, {y},
                       {{"activation", "gelu_tanh"}, {"has_bias", bias}});
                g.output(y);
                std::vector<double> expected;
                for (size_t r = 0; r < m; ++r) {
                    for (size_t o = 0; o < width; ++o) {
                        double a = bias ? double{gate_bias[o]} : 0, b = bias ? double{up_bias[o]} : 0;
                        for (size_t i = 0; i < depth; ++i) {
                            a += double{seen[r * depth + i]} * double{gate[o * depth + i]};
                            b += double{seen[r * depth + i]} * double{up[o * depth + i]};
                        }
                        expected.push_back(act("gelu_tanh", a) * b);
                    }
                }
                check_close(forward(*g.device(isa), rows), expected, 1e-4, 1e-5);
            }
        }
    }
}

TEST_CASE("a row of linear is the same bit for bit alone, among 37 and among 300, on any threads and ISA") {
    for (const bool bf16 : {false, true}) {
        constexpr int kRows = 300, kDepth = 601, kOut = 83;
        Random random(11);
        const Floats x = random.floats(size_t{kRows} * kDepth),
                     w = random.floats(size_t{kOut} * kDepth, 0.05f);
        Graph g(kRows);
        const int y = g.value({kT, Dim{kOut}});
        g.step("linear", {g.input(x, kDepth)}, {g.panels(w, kOut, kDepth, bf16)}, {y},
               {{"activation", "silu"}});
        g.output(y);
        const Floats float32 = forward(*g.device(main_isa(), 1), kRows);
        for (const std::string& isa : isas()) {
            CAPTURE(isa);
            // Those that multiply bf16 have an arithmetic of their own.
            const Floats all = bf16 && multiplies_bf16(isa) ? forward(*g.device(isa, 1), kRows) : float32;
            CHECK(same_bits(all, forward(*g.device(isa, 5), kRows)));
            const auto device = g.device(isa, 2);
            CHECK(same_bits(all, forward(*device, kRows)));
            for (const auto& [first, count] :
                 {std::pair{0, 1}, {17, 1}, {5, 2}, {9, 3}, {100, 5}, {1, 7}, {60, 8}, {3, 37}, {250, 50}}) {
                CAPTURE(count);
                const Floats part = forward(*device, {Run{first, 0, count, {}}});
                CHECK(same_bits(part,
                                Floats(all.begin() + first * kOut, all.begin() + (first + count) * kOut)));
            }
        }
    }
}

// Products of bf16 in the order that docs/program.md gives, with the smallest numbers for zero: `add` takes
// `block` inputs into two chains that begin at zero; their sum joins that of the blocks before.
template <typename Add>
void check_bf16_order(const std::string& isa, int depth, size_t block, Add add) {
    constexpr int kRows = 21, kOut = 35;
    const auto k = static_cast<size_t>(depth);
    Random random(12);
    Floats x = random.floats(kRows * k), w = random.floats(kOut * k);
    for (size_t i = 0; i < x.size(); i += 7) x[i] *= 1e-38f;
    for (size_t i = 0; i < w.size(); i += 5) w[i] *= 1e-38f;
    for (float& v : w) v = round_bf16(v);
    Graph g(kRows);
    const int y = g.value({kT, Dim{kOut}});
    g.step("linear", {g.input(x, depth)}, {g.panels(w, kOut, depth, true)}, {y}, {{"activation", "none"}});
    g.output(y);
    const auto normal = [](float v) { return std::abs(v) < std::numeric_limits<float>::min() ? 0 * v : v; };
    const auto fma = [&](float a, float b, float c) { return normal(std::fma(normal(a), normal(b), c)); };
    Floats expected;
    for (size_t r = 0; r < kRows; ++r) {
        for (size_t o = 0; o < kOut; ++o) {
            float sum = 0;
            for (size_t begin = 0; begin < k; begin += block) {
                float chains[2] = {0, 0};
                add(begin, std::min(begin + block, k), [&](size_t i, int chain) {
                    const float rounded = round_bf16(normal(x[r * k + i]));
                    chains[chain] = fma(rounded, w[o * k + i], chains[chain]);
                });
                sum = normal(sum + normal(chains[0] + chains[1]));
            }
            expected.push_back(sum);
        }
    }
    const auto device = g.device(isa, 2);
    CHECK(same_bits(forward(*device, kRows), expected));
    CHECK(same_bits(forward(*device, {Run{20, 0, 1, {}}}), Floats(expected.end() - kOut, expected.end())));
}

TEST_CASE("AMX adds the products of bf16 in the documented order") {
    if (!host::cpu_supports(host::Isa::kAmx)) return;
    check_bf16_order("amx", 83, 32, [](size_t begin, size_t end, const auto& take) {
        for (size_t i = begin; i < end; ++i) take(i, static_cast<int>(i % 2));
    });
}

TEST_CASE("AVX-512 adds the products of bf16 in the documented order") {
    if (!host::cpu_supports(host::Isa::kAvx512Bf16)) return;
    for (const int depth : {83, 801}) {
        check_bf16_order("avx512bf16", depth, 384, [](size_t begin, size_t end, const auto& take) {
            for (size_t i = begin; i < end; i += 2) {
                if (i + 1 < end) take(i + 1, 0);
                take(i, 0);
            }
        });
    }
}

}  // namespace
}  // namespace castiron::test
