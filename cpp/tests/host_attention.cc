#include <algorithm>

#include "host_support.h"
#include "small_floats.h"

namespace castiron::test {
namespace {

struct Setup {
    int q_heads = 4, kv_heads = 2, head_dim = 16, v_head_dim = 16;
    int64_t window = 0, chunk = 0;
    double softcap = 0;
    DType cache = DType::kF32;
    bool sinks = false, slopes = false;
};

// One attention layer over `tokens` prepared queries, keys and values.
struct Layer {
    Layer(const Setup& setup, int tokens, uint32_t seed) : s(setup), random(seed), graph(tokens, 8192) {
        const auto n = static_cast<size_t>(tokens);
        const auto width = [](int heads, int dim) { return static_cast<size_t>(heads * dim); };
        q = random.floats(n * width(s.q_heads, s.head_dim));
        k = random.floats(n * width(s.kv_heads, s.head_dim));
        v = random.floats(n * width(s.kv_heads, s.v_head_dim));
        sinks = random.floats(static_cast<size_t>(s.q_heads));
        for (int h = 0; h < s.q_heads; ++h) slopes.push_back(std::exp2(-float(h + 1)));
        graph.program().kv_layers = {{s.kv_heads, s.head_dim, s.v_head_dim, s.cache, k_scales(), v_scales()}};
        const int64_t kv_heads = s.kv_heads, head_dim = s.head_dim, v_head_dim = s.v_head_dim,
                      q_heads = s.q_heads, layer = 0;
        const int qv = graph.input(q, q_heads * head_dim), kv = graph.input(k, kv_heads * head_dim);
        const int vv = graph.input(v, kv_heads * v_head_dim),
                  out = graph.value({kT, Dim{q_heads * v_head_dim}});
        graph.step(
            "write_kv", {kv, vv}, {}, {},
            {{"layer", layer}, {"kv_heads", kv_heads}, {"head_dim", head_dim}, {"v_head_dim", v_head_dim}});
        std::vector<int> weights;
        if (s.sinks) weights.push_back(graph.plain(sinks, {q_heads}));
        if (s.slopes) weights.push_back(graph.plain(slopes, {q_heads}));
        graph.step("paged_attention", {qv}, weights, {out},
                   {{"layer", layer},
                    {"q_heads", q_heads},
                    {"kv_heads", kv_heads},
                    {"head_dim", head_dim},
                    {"v_head_dim", v_head_dim},
                    {"scale", scale()},
                    {"window", s.window},
                    {"chunk", s.chunk},
                    {"softcap", s.softcap},
                    {"has_sinks", s.sinks},
                    {"has_slopes", s.slopes}});
        graph.output(out);
    }

    [[nodiscard]] double scale() const { return 1 / std::sqrt(double(s.head_dim)); }
    // Caches of one byte: a scale for each head, of which the largest numbers pass the range.
    [[nodiscard]] Floats scales(float first) const {
        Floats all;
        const bool scaled = s.cache == DType::kI8 || s.cache == DType::kF8E4M3;
        const float range = s.cache == DType::kI8 ? 127.0f : 448.0f;
        for (int h = 0; scaled && h < s.kv_heads; ++h)
            all.push_back(first * static_cast<float>(h + 1) / range);
        return all;
    }
    [[nodiscard]] Floats k_scales() const { return scales(2.5f); }
    [[nodiscard]] Floats v_scales() const { return scales(1.7f); }
    // What is left of a number of a KV head in the cache.
    [[nodiscard]] double stored(float x, const Floats& all, int head) const {
        if (s.cache == DType::kBF16) return double{round_bf16(x)};
        if (all.empty()) return double{x};
        const float scale = all[static_cast<size_t>(head)];
        const double ratio = double{x / scale};
        return double{scale} * (s.cache == DType::kI8 ? std::clamp(std::nearbyint(ratio), -127.0, 127.0)
                                                      : to_e4m3(std::clamp(ratio, -448.0, 448.0)));
    }

    // All numbers of x [tokens, kv_heads * dim] as the cache has them.
    [[nodiscard]] std::vector<double> cached(const Floats& x, int dim, const Floats& all) const {
        std::vector<double> out;
        for (size_t i = 0; i < x.size(); ++i) {
            const auto head = i / static_cast<size_t>(dim) % static_cast<size_t>(s.kv_heads);
            out.push_back(stored(x[i], all, static_cast<int>(head)));
        }
        return out;
    }

    // Whether queries and weights are rounded to bf16.
    [[nodiscard]] bool rounds(const std::string& isa) const {
        return multiplies_bf16(isa) && s.cache != DType::kF32 && s.head_dim % 32 == 0 &&
               s.v_head_dim % 16 == 0;
    }
    // Error of outputs from weights of eight bits and values below 2.5.
    [[nodiscard]] double tolerance(const std::string& isa) const { return rounds(isa) ? 5e-3 : 2e-5; }

    // Attention of queries [begin, begin + count) at positions 0.. of one sequence that starts at row
    // `begin`.
    [[nodiscard]] std::vector<double> expected(int begin, int count, const std::string& isa) const {
        std::vector<double> out;
        const auto queried = [&](size_t i) { return double{rounds(isa) ? round_bf16(q[i]) : q[i]}; };
        const std::vector<double> keys_in_cache = cached(k, s.head_dim, k_scales()),
                                  values_in_cache = cached(v, s.v_head_dim, v_scales());
        for (int i = 0; i < count; ++i) {
            for (int h = 0; h < s.q_heads; ++h) {
                const int kv_head = h / (s.q_heads / s.kv_heads);
                std::vector<double> scores;
                std::vector<int> keys;
                for (int j = 0; j <= i; ++j) {
                    if (s.window > 0 && i - j >= s.window) continue;
                    if (s.chunk > 0 && i / s.chunk != j / s.chunk) continue;
                    double dot = 0;
                    for (int d = 0; d < s.head_dim; ++d) {
                        dot += queried(static_cast<size_t>(((begin + i) * s.q_heads + h) * s.head_dim + d)) *
                               keys_in_cache[static_cast<size_t>(
                                   ((begin + j) * s.kv_heads + kv_head) * s.head_dim + d)];
                    }
                    dot *= scale();
                    if (s.softcap > 0) dot = s.softcap * std::tanh(dot / s.softcap);
                    if (s.slopes) dot += double{slopes[static_cast<size_t>(h)]} * (j - i);
                    scores.push_back(dot);
                    keys.push_back(j);
                }
                double top = *std::max_element(scores.begin(), scores.end());
                if (s.sinks) top = std::max(top, double{sinks[static_cast<size_t>(h)]});
                double total = s.sinks ? std::exp(double{sinks[static_cast<size_t>(h)]} - top) : 0;
                for (double& x : scores) total += x = std::exp(x - top);
                for (int d = 0; d < s.v_head_dim; ++d) {
                    double sum = 0;
                    for (size_t j = 0; j < keys.size(); ++j) {
                        sum +=
                            scores[j] * values_in_cache[static_cast<size_t>(
                                            ((begin + keys[j]) * s.kv_heads + kv_head) * s.v_head_dim + d)];
                    }
                    out.push_back(sum / total);
                }
            }
        }
        return out;
    }

    Setup s;
    Random random;
    Graph graph;
    Floats q, k, v, sinks, slopes;
};

// Blocks in an order that is not that of the positions.
std::vector<int32_t> table(int first, int count) {
    std::vector<int32_t> blocks;
    for (int i = 0; i < count; ++i) blocks.push_back(first + count - 1 - i);
    return blocks;
}

const std::vector<Setup>& setups() {
    static const std::vector<Setup> all = {
        {},
        {.q_heads = 9, .kv_heads = 3, .head_dim = 64, .v_head_dim = 64, .cache = DType::kBF16},
        {.q_heads = 2, .kv_heads = 2, .head_dim = 5, .v_head_dim = 7},
        {.q_heads = 4, .kv_heads = 1, .head_dim = 24, .v_head_dim = 40, .cache = DType::kBF16},
        {.window = 37},
        {.q_heads = 2, .kv_heads = 1, .window = 300, .cache = DType::kBF16},
        {.chunk = 50},
        {.softcap = 2.0},
        {.q_heads = 9, .kv_heads = 3, .head_dim = 64, .v_head_dim = 64, .cache = DType::kI8},
        {.q_heads = 4, .kv_heads = 2, .head_dim = 20, .v_head_dim = 12, .cache = DType::kF8E4M3},
        {.q_heads = 4, .kv_heads = 2, .head_dim = 32, .v_head_dim = 64, .cache = DType::kF8E4M3},
        {.q_heads = 6, .kv_heads = 2, .window = 37, .softcap = 3.0, .cache = DType::kI8, .sinks = true},
        {.sinks = true},
        {.window = 3, .cache = DType::kBF16, .sinks = true},
        {.q_heads = 8, .kv_heads = 8, .slopes = true},
        {.q_heads = 60, .kv_heads = 1, .head_dim = 8, .v_head_dim = 8},
        {.q_heads = 2, .kv_heads = 1, .head_dim = 5, .v_head_dim = 7, .window = 37, .cache = DType::kBF16},
        {.q_heads = 2, .kv_heads = 2, .head_dim = 32, .v_head_dim = 48, .window = 37, .cache = DType::kBF16},
        {.q_heads = 2,
         .kv_heads = 1,
         .head_dim = 96,
         .v_head_dim = 16,
         .softcap = 2.0,
         .cache = DType::kBF16},
        {.q_heads = 2,
         .kv_heads = 1,
         .head_dim = 128,
         .v_head_dim = 32,
         .chunk = 50,
         .cache = DType::kBF16,
         .sinks = true,
         .slopes = true},
    };
    return all;
}

TEST_CASE("paged attention equals a double-precision softmax for every variant") {
    uint32_t seed = 1;
    for (const Setup& setup : setups()) {
        for (const int length : {1, 33, 290}) {
            for (const std::string& isa : isas()) {
                if (isa == "portable" && length > 40) continue;  // software fma: minutes
                CAPTURE(isa);
                CAPTURE(length);
                CAPTURE(seed);
                Layer layer(setup, length, seed++);
                const auto device = layer.graph.device(isa, 2, 16);
                const Floats out = forward(*device, {Run{0, 0, length, table(3, 12)}});
                check_close(out, layer.expected(0, length, isa), layer.tolerance(isa), 1e-5);
            }
        }
    }
}

TEST_CASE("whole prefill, chunks, decode steps and any company give the same bits") {
    uint32_t seed = 50;
    for (const Setup& setup : setups()) {
        CAPTURE(seed);
        constexpr int kLength = 600;
        Layer layer(setup, kLength + 40, seed++);
        const size_t width = static_cast<size_t>(setup.q_heads * setup.v_head_dim);
        const auto rows = [&](const Floats& from, int begin, int count) {
            const auto b = from.begin() + static_cast<std::ptrdiff_t>(static_cast<size_t>(begin) * width);
            return Floats(b, b + static_cast<std::ptrdiff_t>(static_cast<size_t>(count) * width));
        };
        const auto one = layer.graph.device(main_isa(), 1, 64), two = layer.graph.device(main_isa(), 2, 64);
        const Floats whole = forward(*one, {Run{0, 0, kLength, table(0, 20)}});
        CHECK(same_bits(whole, forward(*two, {Run{0, 0, kLength, table(0, 20)}})));

        // Chunks of odd sizes, with other sequences before and after.
        int at = 0;
        for (const int count : {1, 31, 32, 100, 3, 300, 2}) {
            const Floats mixed =
                forward(*two, {Run{kLength, 0, 7, table(40, 2)}, Run{at, at, count, table(20, 20)},
                               Run{kLength + 7, 0, 9, table(42, 2)}});
            CHECK(same_bits(rows(mixed, 7, count), rows(whole, at, count)));
            at += count;
        }
        // Decode alone splits the segments over threads; with one thread it does not.
        for (; at < 480; ++at) {
            CHECK(same_bits(forward(*two, {Run{at, at, 1, table(20, 20)}}), rows(whole, at, 1)));
        }
        const Floats again = forward(*one, {Run{at, at, 1, table(0, 20)}});
        CHECK(same_bits(again, rows(whole, at, 1)));
        CHECK(same_bits(forward(*two, {Run{at, at, 120, table(20, 20)}}), rows(whole, at, 120)));
    }
}

TEST_CASE("stale contents of a block, not-a-number included, never reach another sequence") {
    for (const Setup& setup : {Setup{}, Setup{.head_dim = 32, .v_head_dim = 32, .cache = DType::kBF16},
                               Setup{.head_dim = 32, .v_head_dim = 32, .cache = DType::kF8E4M3},
                               Setup{.head_dim = 24, .v_head_dim = 7, .cache = DType::kBF16}}) {
        for (const int length : {39, 40}) {
            CAPTURE(setup.head_dim);
            CAPTURE(length);
            Layer clean(setup, 100, 3), dirty(setup, 100, 3);
            const auto device = clean.graph.device(main_isa(), 2, 8);
            const Floats expected = forward(*device, {Run{0, 0, length, table(0, 2)}});
            for (size_t i = 0; i < 3; ++i) {  // the three embedded inputs: make tokens 40.. not-a-number
                Weight& w = dirty.graph.program().weights[i];
                auto* data = reinterpret_cast<float*>(const_cast<std::byte*>(w.data));
                const size_t columns = w.bytes / 4 / 100;
                for (size_t j = 40 * columns; j < w.bytes / 4; ++j) data[j] = NAN;
            }
            const auto dirty_device = dirty.graph.device(main_isa(), 2, 8);
            (void)forward(*dirty_device, {Run{40, 0, 60, table(0, 2)}});
            CHECK(same_bits(forward(*dirty_device, {Run{0, 0, length, table(0, 2)}}), expected));
        }
    }
}

TEST_CASE("scales that do not fit a cache are refused") {
    const auto refusal = [](DType cache, Floats scales) -> std::string {
        Layer layer({.cache = cache}, 4, 1);
        layer.graph.program().kv_layers[0].k_scale = std::move(scales);
        try {
            (void)layer.graph.device();
        } catch (const std::invalid_argument& error) {
            return error.what();
        }
        return "accepted";
    };
    CHECK(refusal(DType::kI8, {}) == "accepted");
    for (const auto& [cache, scales] : {std::pair{DType::kI8, Floats{1.0f}},
                                        {DType::kI8, Floats{1.0f, 0.0f}},
                                        {DType::kF8E4M3, Floats{1.0f, INFINITY}},
                                        {DType::kBF16, Floats{1.0f, 1.0f}}}) {
        const std::string found = refusal(cache, scales);
        CHECK_MESSAGE(found.find("one positive number for each KV head") != std::string::npos, found);
    }
}

TEST_CASE("rope_write_kv rotates queries and keys and stores both, as rope and write_kv do") {
    for (const bool interleaved : {false, true}) {
        for (const bool concat : {false, true}) {
            constexpr int kTokens = 50, kHeads = 4, kKv = 2, kDim = 20, kRotary = 12;
            Random random(9);
            const Floats qkv = random.floats(kTokens * (kHeads + 2 * kKv) * kDim);
            const Floats cos = random.floats(kTokens * kRotary / 2),
                         sin = random.floats(kTokens * kRotary / 2);
            const auto build = [&](bool fused) {
                auto g = std::make_unique<Graph>(kTokens);
                g->program().kv_layers = {{kKv, kDim, kDim, DType::kF32}};
                const int x = g->input(qkv, (kHeads + 2 * kKv) * kDim);
                const int q = g->view(x, 0, kHeads * kDim), k = g->view(x, kHeads * kDim, kKv * kDim);
                const int v = g->view(x, (kHeads + kKv) * kDim, kKv * kDim);
                const std::vector<int> tables = {g->plain(cos, {kTokens, kRotary / 2}),
                                                 g->plain(sin, {kTokens, kRotary / 2})};
                const int turned = g->value({kT, Dim{kHeads * kDim}}),
                          out = g->value({kT, Dim{kHeads * kDim}});
                Attrs rope = {{"head_dim", int64_t{kDim}},
                              {"rotary_dim", int64_t{kRotary}},
                              {"interleaved", interleaved},
                              {"concat_halves", concat}};
                Attrs kv = {{"layer", int64_t{0}},
                            {"kv_heads", int64_t{kKv}},
                            {"head_dim", int64_t{kDim}},
                            {"v_head_dim", int64_t{kDim}}};
                if (fused) {
                    Attrs both = rope;
                    both.insert(kv.begin(), kv.end());
                    both["q_heads"] = int64_t{kHeads};
                    g->step("rope_write_kv", {q, k, v, g->positions}, tables, {turned}, both);
                } else {
                    const int turned_k = g->value({kT, Dim{kKv * kDim}});
                    rope["heads"] = int64_t{kHeads};
                    g->step("rope", {q, g->positions}, tables, {turned}, rope);
                    rope["heads"] = int64_t{kKv};
                    g->step("rope", {k, g->positions}, tables, {turned_k}, rope);
                    g->step("write_kv", {turned_k, v}, {}, {}, kv);
                }
                Attrs attention = kv;
                attention["q_heads"] = int64_t{kHeads};
                attention["scale"] = 0.2;
                g->step("paged_attention", {turned}, {}, {out}, attention);
                g->output(out);
                return g;
            };
            const auto fused = build(true), apart = build(false);
            CHECK(same_bits(forward(*fused->device(main_isa(), 2, 2), {Run{0, 0, kTokens, table(0, 2)}}),
                            forward(*apart->device(main_isa(), 2, 2), {Run{0, 0, kTokens, table(0, 2)}})));
        }
    }
}

TEST_CASE("a copied KV block serves like the original") {
    Layer layer({.cache = DType::kBF16}, 80, 21);
    const auto device = layer.graph.device(main_isa(), 2, 8);
    const Floats whole = forward(*device, {Run{0, 0, 80, {0, 1, 2}}});
    device->copy_kv_block(KvGroup::kAll, 0, 5);
    device->copy_kv_block(KvGroup::kAll, 1, 6);
    const Floats tail = forward(*device, {Run{64, 64, 16, {5, 6, 7}}});
    CHECK(same_bits(tail, Floats(whole.end() - 16 * 64, whole.end())));
    CHECK_THROWS_AS(device->copy_kv_block(KvGroup::kAll, 0, 8), std::invalid_argument);
}

}  // namespace
}  // namespace castiron::test
