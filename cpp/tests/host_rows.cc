#include "host_support.h"

namespace castiron::test {
namespace {

std::vector<double> row(const Floats& x, size_t r, size_t n) {
    return {x.begin() + static_cast<std::ptrdiff_t>(r * n),
            x.begin() + static_cast<std::ptrdiff_t>((r + 1) * n)};
}

TEST_CASE("norms equal their formulas, grouped and with residual") {
    uint32_t seed = 1;
    for (const std::string& isa : isas()) {
        for (const bool layer : {false, true}) {
            for (const bool add : {false, true}) {
                for (const auto& [columns, group] :
                     {std::pair{576, 576}, {7, 7}, {100, 25}, {16, 16}, {130, 65}}) {
                    if (add && columns != group) continue;
                    CAPTURE(isa);
                    CAPTURE(columns);
                    constexpr size_t kRows = 5;
                    constexpr double kEps = 1e-5;
                    Random random(seed++);
                    const auto n = static_cast<size_t>(columns), width = static_cast<size_t>(group);
                    const Floats x = random.floats(kRows * n, 3), residual = random.floats(kRows * n),
                                 w = random.floats(width), b = random.floats(width);
                    Graph g(kRows);
                    std::vector<int> inputs = {g.input(x, columns)}, weights = {g.plain(w, {group})};
                    if (add) inputs.push_back(g.input(residual, columns));
                    if (layer) weights.push_back(g.plain(b, {group}));
                    std::vector<int> outputs = {g.value({kT, Dim{columns}})};
                    Attrs attrs = {{"eps", kEps}, {"has_weight", true}};
                    if (layer) attrs["has_bias"] = true;
                    if (add) {
                        outputs.push_back(g.value({kT, Dim{columns}}));
                    } else {
                        attrs["group"] = int64_t{group};
                    }
                    g.step(std::string(add ? "add_" : "") + (layer ? "layer_norm" : "rms_norm"), inputs,
                           weights, outputs, attrs);
                    int out = outputs[0];
                    if (add) {  // both outputs side by side
                        out = g.value({kT, Dim{2 * columns}});
                        g.step("concat", outputs, {}, {out}, {{"axis", int64_t{1}}});
                    }
                    g.output(out);
                    std::vector<double> expected;
                    for (size_t r = 0; r < kRows; ++r) {
                        std::vector<double> v = row(x, r, n);
                        if (add) {
                            for (size_t i = 0; i < n; ++i) v[i] = double{x[r * n + i] + residual[r * n + i]};
                        }
                        for (size_t start = 0; start < n; start += width) {
                            double mean = 0, square = 0;
                            for (size_t i = 0; i < width; ++i) mean += v[start + i] / double(width);
                            if (!layer) mean = 0;
                            for (size_t i = 0; i < width; ++i)
                                square += (v[start + i] - mean) * (v[start + i] - mean) / double(width);
                            for (size_t i = 0; i < width; ++i) {
                                expected.push_back((v[start + i] - mean) / std::sqrt(square + kEps) *
                                                       double{w[i]} +
                                                   (layer ? double{b[i]} : 0));
                            }
                        }
                        if (add) expected.insert(expected.end(), v.begin(), v.end());
                    }
                    check_close(forward(*g.device(isa), kRows), expected, 2e-6, 2e-6);
                }
            }
        }
    }
}

TEST_CASE("rope turns pairs in every layout and passes the other columns through") {
    for (const std::string& isa : isas()) {
        for (const bool interleaved : {false, true}) {
            for (const bool concat : {false, true}) {
                constexpr size_t kRows = 6, kHeads = 3, kDim = 21, kRotary = 14, kHalf = kRotary / 2;
                Random random(5);
                const Floats x = random.floats(kRows * kHeads * kDim), cos = random.floats(kRows * kHalf),
                             sin = random.floats(kRows * kHalf);
                Graph g(kRows);
                const int in = g.input(x, kHeads * kDim), out = g.value({kT, Dim{kHeads * kDim}});
                g.step("rope", {in, g.positions},
                       {g.plain(cos, {kRows, kHalf}), g.plain(sin, {kRows, kHalf})}, {out},
                       {{"heads", int64_t{kHeads}},
                        {"head_dim", int64_t{kDim}},
                        {"rotary_dim", int64_t{kRotary}},
                        {"interleaved", interleaved},
                        {"concat_halves", concat}});
                g.output(out);
                std::vector<double> expected(x.begin(), x.end());
                for (size_t t = 0; t < kRows; ++t) {
                    for (size_t h = 0; h < kHeads; ++h) {
                        const size_t at = (t * kHeads + h) * kDim;
                        for (size_t i = 0; i < kHalf; ++i) {
                            const size_t p = interleaved ? 2 * i : i, q = interleaved ? 2 * i + 1 : i + kHalf;
                            const double a = double{x[at + p]}, b = double{x[at + q]},
                                         c = double{cos[t * kHalf + i]}, s = double{sin[t * kHalf + i]};
                            expected[at + (concat ? i : p)] = a * c - b * s;
                            expected[at + (concat ? i + kHalf : q)] = b * c + a * s;
                        }
                    }
                }
                check_close(forward(*g.device(isa), kRows), expected, 1e-6, 1e-6);
            }
        }
    }
}

// Distance in units in the last place of the float nearest to the true value, plus what rounding near zero
// hides.
void check_ulp(const std::string& fn, double (*truth)(double), const Floats& x, double ulps,
               double absolute = 0) {
    Graph g(static_cast<int>(x.size()));
    const int in = g.input(x, 1), out = g.value({kT, Dim{1}});
    g.step("unary", {in}, {}, {out}, {{"fn", fn}});
    g.output(out);
    const Floats y = forward(*g.device(main_isa(), 1), static_cast<int>(x.size()));
    double worst = 0;
    float at = 0;
    for (size_t i = 0; i < x.size(); ++i) {
        const double expected = truth(double{x[i]});
        const auto nearest = static_cast<float>(expected);
        if (std::isinf(nearest) || std::isnan(nearest)) {
            CHECK_MESSAGE((std::isnan(nearest) ? std::isnan(y[i]) : y[i] == nearest), fn, "(", x[i],
                          ") = ", y[i]);
            continue;
        }
        const double ulp =
            std::max(double{std::nextafter(std::abs(nearest), INFINITY)} - std::abs(double{nearest}), 1e-45);
        const double error = std::max(0.0, std::abs(double{y[i]} - expected) - absolute) / ulp;
        if (error > worst || std::isnan(error)) {
            worst = error;
            at = x[i];
        }
    }
    MESSAGE(fn, ": worst ", worst, " ulp at ", at);
    CHECK_MESSAGE(worst <= ulps, fn, " at ", at);
    // What not-a-number looks like is up to the machine.
    const auto plain_nan = [](Floats v) {
        for (float& f : v) f = std::isnan(f) ? NAN : f;
        return v;
    };
    for (const std::string& isa : isas()) {
        CAPTURE(isa);
        CHECK(same_bits(plain_nan(y), plain_nan(forward(*g.device(isa, 2), static_cast<int>(x.size())))));
    }
}

TEST_CASE("vector functions are accurate over their whole range and the same on every ISA") {
    Floats x = {0,   -0.0f, 1,    -1,     87.3f,    88.72f,    88.8f, 100,    1e10f, -87.3f,
                -88, -103,  -104, -1e10f, INFINITY, -INFINITY, NAN,   1e-30f, 1e-8f, -1e-8f};
    for (int i = -4000; i <= 4000; ++i) x.push_back(static_cast<float>(i) * 0.0251f);
    for (int i = -2000; i <= 2000; ++i) x.push_back(static_cast<float>(i) * 0.00213f);
    const auto sigmoid = [](double v) { return 1 / (1 + std::exp(-v)); };
    check_ulp("exp", [](double v) { return std::exp(v); }, x, 2);
    check_ulp("tanh", [](double v) { return std::tanh(v); }, x, 3);
    check_ulp("erf", [](double v) { return std::erf(v); }, x, 3);
    check_ulp("sigmoid", sigmoid, x, 3, 2e-38);  // what is below the normal floats may become zero
    check_ulp("softplus", [](double v) { return v > 700 ? v : std::log1p(std::exp(v)); }, x, 3);
    check_ulp("square", [](double v) { return v * v; }, x, 1);
    check_ulp("sin", [](double v) { return std::sin(v); }, x, 1);
    check_ulp("abs", [](double v) { return std::abs(v); }, x, 0);
    check_ulp(
        "relu2", [](double v) { return std::isnan(v) ? 0.0 : std::max(v, 0.0) * std::max(v, 0.0); }, x, 1);
    x.resize(10);  // infinities times zero are not worth agreeing on
    for (int i = -4000; i <= 4000; ++i) x.push_back(static_cast<float>(i) * 0.0151f);
    // x · f(x) cancels in the negative tail, in every formula that frameworks use: absolute there.
    check_ulp("silu", [](double v) { return v / (1 + std::exp(-v)); }, x, 3, 1e-40);
    check_ulp(
        "gelu_quick", [](double v) { return v / (1 + std::exp(-1.702 * v)); }, x, 110,
        2e-36);  // rounding 1.702 · x alone moves e^102 by as much
    check_ulp("gelu_erf", [](double v) { return 0.5 * v * (1 + std::erf(v / std::sqrt(2.0))); }, x, 4, 4e-7);
    check_ulp(
        "gelu_tanh",
        [](double v) { return 0.5 * v * (1 + std::tanh(std::sqrt(2 / M_PI) * (v + 0.044715 * v * v * v))); },
        x, 4, 4e-7);
    x.clear();
    for (int i = 1; i < 3000; ++i) x.push_back(static_cast<float>(i) * 0.37f);
    check_ulp("sqrt", [](double v) { return std::sqrt(v); }, x, 0.5);
    check_ulp("rsqrt", [](double v) { return 1 / std::sqrt(v); }, x, 1.5);
    check_ulp("reciprocal", [](double v) { return 1 / v; }, x, 0.5);
    check_ulp("log", [](double v) { return std::log(v); }, x, 1);
    check_ulp("neg", [](double v) { return -v; }, x, 0);
}

TEST_CASE("binary broadcasts like numpy") {
    for (const std::string& isa : isas()) {
        for (const auto& [fn, truth] :
             std::initializer_list<std::pair<const char*, double (*)(double, double)>>{
                 {"add", [](double a, double b) { return a + b; }},
                 {"sub", [](double a, double b) { return a - b; }},
                 {"mul", [](double a, double b) { return a * b; }},
                 {"div", [](double a, double b) { return a / b; }},
                 {"min", [](double a, double b) { return std::min(a, b); }},
                 {"max", [](double a, double b) { return std::max(a, b); }},
                 {"pow", [](double a, double b) { return std::pow(a, b); }}}) {
            for (const bool reverse : {false, true}) {
                CAPTURE(fn);
                constexpr size_t kRows = 5, kA = 3, kB = 7;
                Random random(3);
                Floats x = random.floats(kRows * kA * kB), column = random.floats(kRows * kA),
                       w = random.floats(kB);
                for (Floats* v : {&x, &column, &w}) {
                    for (float& f : *v) f = std::abs(f) + 0.5f;
                }
                // [T, 3, 7] with [T, 3, 1], then with a weight [7], then with a constant [1].
                Graph g(kRows);
                const int x3 = g.value({kT, Dim{kA}, Dim{kB}}), c3 = g.value({kT, Dim{kA}, Dim{1}});
                g.step("copy", {g.input(x, kA * kB)}, {}, {x3});
                g.step("copy", {g.input(column, kA)}, {}, {c3});
                const int first = g.value({kT, Dim{kA}, Dim{kB}}), second = g.value({kT, Dim{kA}, Dim{kB}}),
                          third = g.value({kT, Dim{kA}, Dim{kB}});
                const int out = g.value({kT, Dim{kA * kB}});
                g.step("binary", {x3, c3}, {}, {first}, {{"fn", std::string(fn)}, {"reverse", reverse}});
                g.step("binary", {first}, {g.plain(w, {kB})}, {second},
                       {{"fn", std::string(fn)}, {"reverse", reverse}, {"b_weight", true}});
                g.step("binary", {second}, {g.plain({0.75f}, {1})}, {third},
                       {{"fn", std::string(fn)}, {"b_weight", true}});
                g.step("copy", {third}, {}, {out});
                g.output(out);
                std::vector<double> expected;
                for (size_t i = 0; i < x.size(); ++i) {
                    const double a = double{x[i]}, b = double{column[i / kB]}, c = double{w[i % kB]};
                    const double once = reverse ? truth(b, a) : truth(a, b);
                    const double twice = reverse ? truth(c, double{static_cast<float>(once)})
                                                 : truth(double{static_cast<float>(once)}, c);
                    expected.push_back(truth(twice, 0.75));
                }
                check_close(forward(*g.device(isa), kRows), expected, 1e-6, 4e-6);
            }
        }
    }
}

TEST_CASE("softmax, reduce, clip and matmul equal their formulas") {
    for (const std::string& isa : isas()) {
        for (const size_t n : {size_t{1}, size_t{7}, size_t{16}, size_t{77}, size_t{300}}) {
            CAPTURE(n);
            constexpr size_t kRows = 4;
            Random random(8);
            const Floats x = random.floats(kRows * n, 4), b = random.floats(n * 19);
            const auto columns = static_cast<int64_t>(n);
            Graph g(kRows);
            const int in = g.input(x, columns), soft = g.value({kT, Dim{columns}}),
                      cut = g.value({kT, Dim{columns}});
            const int sum = g.value({kT, Dim{1}}), mean = g.value({kT, Dim{1}}), top = g.value({kT, Dim{1}});
            g.step("softmax", {in}, {}, {soft});
            g.step("clip", {in}, {}, {cut}, {{"min", -1.5}, {"max", int64_t{2}}});
            g.step("reduce", {in}, {}, {sum}, {{"fn", std::string("sum")}});
            g.step("reduce", {in}, {}, {mean}, {{"fn", std::string("mean")}});
            g.step("reduce", {in}, {}, {top}, {{"fn", std::string("max")}});
            const int zero = g.value_i32({Dim{1}}), right = g.value({Dim{1}, Dim{columns * 19}}),
                      right2 = g.value({Dim{columns}, Dim{19}});
            g.step("gather", {zero}, {g.plain(b, {1, columns * 19})}, {right}, {{"x_weight", true}});
            g.step("copy", {right}, {}, {right2});
            const int product = g.value({kT, Dim{19}}), out = g.value({kT, Dim{2 * columns + 3 + 19}});
            g.step("matmul", {in, right2}, {}, {product});
            g.step("concat", {soft, cut, sum, mean, top, product}, {}, {out}, {{"axis", int64_t{-1}}});
            g.output(out);
            std::vector<double> expected;
            for (size_t r = 0; r < kRows; ++r) {
                const std::vector<double> v = row(x, r, n);
                double largest = v[0], total = 0, plain = 0;
                for (const double a : v) largest = std::max(largest, a);
                for (const double a : v) {
                    total += std::exp(a - largest);
                    plain += a;
                }
                for (const double a : v) expected.push_back(std::exp(a - largest) / total);
                for (const double a : v) expected.push_back(std::min(2.0, std::max(-1.5, a)));
                expected.insert(expected.end(), {plain, plain / double(n), largest});
                for (size_t j = 0; j < 19; ++j) {
                    double dot = 0;
                    for (size_t i = 0; i < n; ++i) dot += v[i] * double{b[i * 19 + j]};
                    expected.push_back(dot);
                }
            }
            check_close(forward(*g.device(isa), kRows), expected, 1e-4, 2e-6);
        }
    }
}

TEST_CASE("transpose, slice, gather, views and embeddings of any layout move the right elements") {
    constexpr size_t kRows = 5, kA = 3, kB = 4, kC = 5;
    Random random(8);
    const Floats x = random.floats(kRows * kA * kB * kC);
    Graph g(kRows);
    const int flat = g.input(x, kA * kB * kC), x4 = g.value({kT, Dim{kA}, Dim{kB}, Dim{kC}});
    const int turned = g.value({Dim{kB}, kT, Dim{kC}, Dim{kA}}),
              sliced = g.value({Dim{2}, kT, Dim{kC}, Dim{kA}});
    const int back = g.value({kT, Dim{2}, Dim{kA}, Dim{kC}}), out = g.value({kT, Dim{2 * kA * kC}});
    g.step("copy", {flat}, {}, {x4});
    g.step("transpose", {x4}, {}, {turned}, {{"perm", std::vector<int64_t>{2, 0, 3, 1}}});
    g.step("slice", {turned}, {}, {sliced},
           {{"axis", int64_t{0}}, {"start", int64_t{3}}, {"step", int64_t{-2}}});
    g.step("transpose", {sliced}, {}, {back}, {{"perm", std::vector<int64_t>{1, 0, 3, 2}}});
    g.step("copy", {back}, {}, {out});
    g.output(out);
    std::vector<double> expected;
    for (size_t t = 0; t < kRows; ++t) {
        for (const size_t b : {size_t{3}, size_t{1}}) {
            for (size_t a = 0; a < kA; ++a) {
                for (size_t c = 0; c < kC; ++c)
                    expected.push_back(double{x[((t * kA + a) * kB + b) * kC + c]});
            }
        }
    }
    check_close(forward(*g.device(), kRows), expected, 1e-30, 0);

    for (const int layout : {0, 1, 2, 3}) {
        CAPTURE(layout);
        const Floats table = random.floats(37 * 21);
        Graph e(37);
        const bool bf16 = layout % 2 == 1;
        const int w = layout < 2 ? e.plain(table, {37, 21}, bf16) : e.panels(table, 37, 21, bf16);
        const int y = e.value({kT, Dim{21}});
        e.step("embedding", {e.token_ids}, {w}, {y}, {{"scale", 1.5}, {"index_offset", int64_t{0}}});
        e.output(y);
        std::vector<double> rows;
        for (const float v : table) rows.push_back(1.5 * double{bf16 ? round_bf16(v) : v});
        check_close(forward(*e.device(), 37), rows, 1e-6, 1e-6);
        CHECK_THROWS_AS((void)forward(*e.device(), {Run{30, 0, 8, {}}}), std::out_of_range);
        CHECK_THROWS_AS((void)forward(*e.device(), {Run{-1, 0, 1, {}}}), std::out_of_range);
    }
}

TEST_CASE("gather picks along any axis and counts negative indices from the end") {
    constexpr size_t kRows = 4, kA = 3, kB = 6;
    Random random(2);
    const Floats x = random.floats(kRows * kA * kB);
    Graph g(kRows);
    const int x3 = g.value({kT, Dim{kA}, Dim{kB}}), picked = g.value({kT, kT, Dim{kB}}),
              out = g.value({kT, Dim{kB}});
    g.step("copy", {g.input(x, kA * kB)}, {}, {x3});
    g.step("gather", {x3, g.positions}, {}, {picked}, {{"axis", int64_t{1}}});
    g.step("reduce", {picked}, {}, {g.value({kT, kT})}, {{"fn", std::string("sum")}});
    const int rows = g.value({kT, Dim{kA * kB}});
    g.step("copy", {x3}, {}, {rows});
    g.step("copy", {g.view(rows, 0, kB)}, {}, {out});
    g.output(out);
    const auto device = g.device();
    CHECK(forward(*device, {Run{0, 0, 3, {}}}).size() == 3 * kB);
    CHECK_THROWS_AS((void)forward(*device, 4), std::out_of_range);  // position 3 is past an axis of 3
}

}  // namespace
}  // namespace castiron::test
