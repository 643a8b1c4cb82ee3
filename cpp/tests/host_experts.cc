// Mixtures of experts: what routers pick, and products whose weight each row picks. A row must have the bits
// that a linear op gives it with its expert's weight alone.
#include <algorithm>
#include <numeric>

#include "host_support.h"

namespace castiron::test {
namespace {

struct Case {
    int tokens, experts, picks, k, n;
    std::string format;  // of weights: f32, bf16, i8, i4, fp4
    bool gated = false, bias = false;
    bool own_rows = false;  // x has a row for each pick
};

std::string text(const Case& c) {
    return c.format + " tokens " + std::to_string(c.tokens) + " experts " + std::to_string(c.experts) +
           " picks " + std::to_string(c.picks) + " k " + std::to_string(c.k) + " n " + std::to_string(c.n) +
           (c.gated ? " gated" : "") + (c.bias ? " bias" : "") + (c.own_rows ? " own rows" : "");
}

// One layer of experts over random numbers; every expert's matrix stands alone as well.
struct Layer {
    explicit Layer(const Case& given) : c(given), random(11), padded((c.n + 15) / 16 * 16) {
        const auto t = static_cast<size_t>(c.tokens), e = static_cast<size_t>(c.experts);
        x = random.floats(t * inputs());
        scores = random.floats(t * e);
        const size_t rows = e * weight_rows(), k = static_cast<size_t>(c.k);
        if (quantized()) {
            codes.resize(rows * k);
            for (int& code : codes)
                code = c.format == "i8" ? random.integer(-127, 127) : random.integer(0, 7);
            scales = random.floats(rows * groups(), 0.02f);
        } else {
            w = random.floats(rows * k, 0.1f);
        }
        biases = random.floats(e * bias_rows());
    }

    [[nodiscard]] bool quantized() const { return c.format == "i8" || c.format == "i4" || c.format == "fp4"; }
    [[nodiscard]] size_t inputs() const { return static_cast<size_t>(c.own_rows ? c.picks * c.k : c.k); }
    // Of one expert: whole panels, of gate and up in turn.
    [[nodiscard]] size_t weight_rows() const { return static_cast<size_t>(c.gated ? 2 * padded : padded); }
    [[nodiscard]] size_t bias_rows() const { return static_cast<size_t>(c.gated ? 2 * padded : c.n); }
    [[nodiscard]] size_t groups() const {
        return static_cast<size_t>(c.format == "i8" ? 1 : (c.k + 31) / 32);
    }

    // Experts [first, first + count): `rows` of each.
    std::vector<int> weights(Graph& g, size_t first, size_t count, size_t rows) const {
        const auto out = static_cast<int64_t>(count * rows);
        const auto part = [&](const auto& all, size_t columns) {
            auto result = all;
            result.clear();
            for (size_t e = first; e < first + count; ++e) {
                const auto begin = all.begin() + static_cast<std::ptrdiff_t>(e * weight_rows() * columns);
                result.insert(result.end(), begin, begin + static_cast<std::ptrdiff_t>(rows * columns));
            }
            return result;
        };
        const auto k = static_cast<size_t>(c.k);
        if (!quantized()) return {g.panels(part(w, k), out, c.k, c.format == "bf16")};
        const DType dtype = c.format == "i8" ? DType::kI8 : c.format == "i4" ? DType::kI4 : DType::kF4E2M1;
        const auto g_count = static_cast<int64_t>(groups());
        return {g.codes(part(codes, k), out, c.k, dtype),
                g.scale_panels(part(scales, groups()), out, g_count, false)};
    }
    [[nodiscard]] Attrs attrs() const {
        Attrs a = {{"has_bias", c.bias}, {"activation", std::string(c.gated ? "silu" : "none")}};
        if (quantized()) {
            a["group"] = c.format == "i8" ? 0 : 32;
            a["x_format"] = std::string("int8");
            a["x_group"] = 32;
        }
        return a;
    }
    [[nodiscard]] std::string kernel(const std::string& kind) const {
        return std::string(quantized() ? "quantized_" : "") + kind + (c.gated ? "gated_linear" : "linear");
    }

    // [tokens, picks * n], and the experts of each token.
    Floats run(const std::string& isa, int threads) const {
        Graph g(c.tokens);
        const int rows = g.input(x, static_cast<int64_t>(inputs()));
        const int scored = g.input(scores, c.experts);
        const Dim picks{c.picks};
        const int top = g.value({kT, picks}), ids = g.value_i32({kT, picks});
        g.step("top_k", {scored}, {}, {top, ids});
        int own = rows;
        if (c.own_rows) {
            own = g.value({kT, picks, Dim{c.k}});
            g.step("copy", {rows}, {}, {own});
        }
        std::vector<int> given = weights(g, 0, static_cast<size_t>(c.experts), weight_rows());
        if (c.bias) given.push_back(g.plain(biases, {static_cast<int64_t>(biases.size())}));
        const int y = g.value({kT, picks, Dim{c.n}}), flat = g.value({kT, Dim{int64_t{c.picks} * c.n}});
        Attrs a = attrs();
        a["experts"] = c.experts;
        g.step(kernel("expert_"), {own, ids}, given, {y}, a);
        g.step("copy", {y}, {}, {flat});
        g.output(flat);
        return forward(*g.device(isa, threads), c.tokens);
    }

    // The same rows through one expert's matrix: [tokens * (own_rows ? picks : 1), n].
    Floats alone(size_t expert, const std::string& isa) const {
        const int rows = c.own_rows ? c.tokens * c.picks : c.tokens;
        Graph g(rows);
        const int in = g.input(x, c.k);
        const size_t used = c.gated ? weight_rows() : static_cast<size_t>(c.n);
        std::vector<int> given = weights(g, expert, 1, used);
        if (c.bias) {
            const auto begin = biases.begin() + static_cast<std::ptrdiff_t>(expert * bias_rows());
            given.push_back(g.plain(Floats(begin, begin + static_cast<std::ptrdiff_t>(bias_rows())),
                                    {static_cast<int64_t>(bias_rows())}));
        }
        const int y = g.value({kT, Dim{c.n}});
        g.step(kernel(""), {in}, given, {y}, attrs());
        g.output(y);
        return forward(*g.device(isa), rows);
    }

    // Experts by falling score, of equal ones the first.
    [[nodiscard]] std::vector<size_t> picked(size_t token) const {
        std::vector<size_t> order(static_cast<size_t>(c.experts));
        std::iota(order.begin(), order.end(), size_t{0});
        const float* s = scores.data() + token * order.size();
        std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return s[a] > s[b]; });
        order.resize(static_cast<size_t>(c.picks));
        return order;
    }

    Case c;
    Random random;
    int padded;
    Floats x, scores, w, scales, biases;
    std::vector<int> codes;
};

void check(const Case& c, const std::string& isa) {
    CAPTURE(text(c));
    CAPTURE(isa);
    const Layer layer(c);
    const Floats found = layer.run(isa, 2);
    CHECK(same_bits(found, layer.run(isa, 3)));
    const auto n = static_cast<size_t>(c.n), picks = static_cast<size_t>(c.picks);
    Floats expected(found.size());
    for (size_t e = 0; e < static_cast<size_t>(c.experts); ++e) {
        const Floats rows = layer.alone(e, isa);
        for (size_t t = 0; t < static_cast<size_t>(c.tokens); ++t) {
            const std::vector<size_t> experts = layer.picked(t);
            for (size_t j = 0; j < picks; ++j) {
                if (experts[j] != e) continue;
                const auto row =
                    rows.begin() + static_cast<std::ptrdiff_t>((c.own_rows ? t * picks + j : t) * n);
                std::copy_n(row, n, expected.begin() + static_cast<std::ptrdiff_t>((t * picks + j) * n));
            }
        }
    }
    CHECK(same_bits(found, expected));
}

}  // namespace

TEST_CASE("an expert's rows have the bits of a product with its matrix alone") {
    for (const std::string& isa : isas()) {
        for (const int tokens : {1, 2, 5, 40, 150}) {
            check({tokens, 5, 2, 70, 48, "f32"}, isa);
            check({tokens, 5, 2, 96, 33, "bf16", false, true}, isa);
            check({tokens, 4, 3, 64, 40, "bf16", true, true, true}, isa);
            check({tokens, 4, 2, 96, 32, "i8", true}, isa);
            check({tokens, 6, 2, 64, 80, "fp4", false, true, true}, isa);
        }
        check({3, 1, 1, 32, 16, "f32"}, isa);
        check({200, 64, 4, 64, 48, "i4", true, true}, isa);
        check({300, 2, 1, 640, 208, "bf16"}, isa);
    }
}

TEST_CASE("top_k is stable, and numbers that are none come last") {
    const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
    const Floats scores = {1, 3, 3, 2, nan, 5, nan, -inf, nan, nan, nan, nan, -inf, -inf, nan, 4};
    Graph g(4);
    const int in = g.input(scores, 4), top = g.value({kT, Dim{3}}), ids = g.value_i32({kT, Dim{3}});
    g.step("top_k", {in}, {}, {top, ids});
    // The places of a second list of numbers show what was picked.
    const int other = g.input({0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23, 30, 31, 32, 33}, 4);
    const int y = g.value({kT, Dim{3}});
    g.step("gather_elements", {other, ids}, {}, {y});
    g.output(y);
    CHECK(forward(*g.device(), 4) == Floats{1, 2, 3, 11, 13, 10, 20, 21, 22, 33, 30, 31});
}

TEST_CASE("marks stand at the places that were picked") {
    Graph g(3);
    const int in = g.input({1, 9, 5, 7, 4, 3, 2, 1, 0, 1, 0, 2}, 4), top = g.value({kT, Dim{2}});
    const int ids = g.value_i32({kT, Dim{2}}), y = g.value({kT, Dim{4}});
    g.step("top_k", {in}, {}, {top, ids});
    g.step("mark_places", {ids}, {}, {y});
    g.output(y);
    CHECK(forward(*g.device(), 3) == Floats{0, 1, 0, 1, 1, 1, 0, 0, 0, 1, 0, 1});
}

TEST_CASE("indices out of range are told, and the device goes on") {
    Graph g(4);
    const int in = g.input(Floats(4 * 16, 1.0f), 16);
    const int ids = g.value_i32({kT, Dim{1}}), y = g.value({kT, Dim{1}, Dim{16}}),
              flat = g.value({kT, Dim{16}});
    g.step("copy", {g.token_ids}, {}, {ids});
    g.step("expert_linear", {in, ids}, {g.panels(Floats(2 * 16 * 16, 1.0f), 32, 16, false)}, {y},
           {{"experts", 2}});
    g.step("copy", {y}, {}, {flat});
    g.output(flat);
    const auto device = g.device();
    CHECK_THROWS_AS((void)forward(*device, 4), std::out_of_range);  // tokens 2 and 3 name no expert
    CHECK(forward(*device, 2) == Floats(2 * 16, 16.0f));

    Graph picks(4);
    const int x = picks.input(Floats(4 * 3, 1.0f), 3), places = picks.value_i32({kT, Dim{1}});
    const int out = picks.value({kT, Dim{1}});
    picks.step("copy", {picks.token_ids}, {}, {places});
    picks.step("gather_elements", {x, places}, {}, {out});
    picks.output(out);
    const int marks = picks.value({kT, Dim{3}});
    picks.step("mark_places", {places}, {}, {marks});
    CHECK_THROWS_AS((void)forward(*picks.device(), 4), std::out_of_range);
    CHECK(forward(*picks.device(), 3) == Floats(3, 1.0f));
}

TEST_CASE("steps of experts that cannot be are refused") {
    const auto refused = [](int64_t experts, int64_t weight_rows, int64_t picks, int64_t outputs) {
        Graph g(4);
        const int in = g.input(Floats(4 * 16, 1.0f), 16), ids = g.value_i32({kT, Dim{1}});
        const int y = g.value({kT, Dim{picks}, Dim{outputs}}), flat = g.value({kT, Dim{picks * outputs}});
        g.step("copy", {g.token_ids}, {}, {ids});
        const auto size = static_cast<size_t>(weight_rows * 16);
        g.step("expert_linear", {in, ids}, {g.panels(Floats(size, 1.0f), weight_rows, 16, false)}, {y},
               {{"experts", experts}});
        g.step("copy", {y}, {}, {flat});
        g.output(flat);
        CHECK_THROWS_AS((void)g.device(), std::invalid_argument);
    };
    refused(0, 32, 1, 16);
    refused(3, 32, 1, 16);
    refused(2, 32, 2, 16);
    refused(2, 32, 1, 17);
    Graph g(4);
    const int in = g.input(Floats(4 * 2, 1.0f), 2), top = g.value({kT, Dim{3}}),
              ids = g.value_i32({kT, Dim{3}});
    g.step("top_k", {in}, {}, {top, ids});
    g.output(top);
    CHECK_THROWS_AS((void)g.device(), std::invalid_argument);
}

}  // namespace castiron::test
