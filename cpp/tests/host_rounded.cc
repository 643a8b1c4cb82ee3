// Values that only products of bf16 read are left as rows of bf16.
#include "device/host/rounded_values.h"
#include "host_support.h"

namespace castiron::test {
namespace {

constexpr int64_t kHidden = 64, kHeads = 2, kHeadDim = 32, kInner = 72;  // 72: rows that end in padding

// A layer of a decoder whose weights are bf16. read_twice: another step reads what the products read, so that
// all of it stays float32.
struct DecoderLayer {
    explicit DecoderLayer(int rows, bool read_twice) : g(rows), twice(read_twice) {
        Random random(7);
        const auto matrix = [&](int64_t n, int64_t k) {
            return g.panels(random.floats(static_cast<size_t>(n * k), 0.2f), n, k, true);
        };
        const int ones = g.plain(Floats(kHidden, 1.5f), {kHidden});
        const auto values = [&](int64_t columns) { return g.value({kT, Dim{columns}}); };
        const int x = g.input(random.floats(static_cast<size_t>(rows * kHidden)), kHidden);
        const int kv = g.input(random.floats(static_cast<size_t>(rows * kHidden)), kHidden);
        g.program().kv_layers = {{kHeads, kHeadDim, kHeadDim, DType::kBF16, {}, {}}};
        const Attrs heads = {
            {"layer", int64_t{0}}, {"kv_heads", kHeads}, {"head_dim", kHeadDim}, {"v_head_dim", kHeadDim}};
        g.step("write_kv", {kv, kv}, {}, {}, heads);

        const int normed = made(values(kHidden)), q = values(kHidden), attended = made(values(kHidden));
        g.step("rms_norm", {x}, {ones}, {normed}, {{"eps", 1e-5}, {"has_weight", true}});
        g.step("linear", {normed}, {matrix(kHidden, kHidden)}, {q});
        Attrs attention = heads;
        attention["q_heads"] = kHeads;
        attention["scale"] = 0.2;
        g.step("paged_attention", {q}, {}, {attended}, attention);
        const int projected = values(kHidden);
        g.step("linear", {attended}, {matrix(kHidden, kHidden)}, {projected});

        // Written over what it reads, as lowering places it: stays float32.
        const int sum = values(kHidden), second = in_place = values(kHidden);
        g.program().values[static_cast<size_t>(second)].offset =
            g.program().values[static_cast<size_t>(projected)].offset;
        g.step("add_layer_norm", {projected, x}, {}, {second, sum}, {{"eps", 1e-5}});
        const int gated = made(values(kInner)), inner = made(values(kInner));
        g.step("gated_linear", {second}, {matrix(2 * 80, kHidden)}, {gated}, {{"activation", "silu"}});
        g.step("linear", {gated}, {matrix(kInner, kInner)}, {inner},
               {{"activation", "gelu_tanh"}, {"alpha", 0.5}});
        const int out = values(kHidden);
        g.step("linear", {inner, sum}, {matrix(kHidden, kInner)}, {out}, {{"has_residual", true}});
        if (twice) {
            for (const int v : made_for_products) {
                const Dim columns = g.program().values[static_cast<size_t>(v)].shape[1];
                g.step("gather_rows", {v, g.logit_rows}, {}, {g.value({kN, columns})});
            }
        }
        g.output(out);
    }

    int made(int value) {
        made_for_products.push_back(value);
        return value;
    }

    Graph g;
    bool twice;
    int in_place = 0;
    std::vector<int> made_for_products;
};

std::vector<int> rounded(DecoderLayer& layer) {
    std::vector<host::Operand> values = host::resolve_values(layer.g.program());
    host::find_rounded_values(layer.g.program(), values);
    std::vector<int> found;
    for (size_t i = 0; i < values.size(); ++i) {
        if (values[i].may_round) found.push_back(static_cast<int>(i));
    }
    return found;
}

TEST_CASE("what only products of bf16 read may be rounded by who makes it") {
    DecoderLayer once(4, false), twice(4, true);
    std::vector<int> expected = once.made_for_products;
    expected.push_back(once.in_place);  // its maker sees that it writes over its input
    std::sort(expected.begin(), expected.end());
    CHECK(rounded(once) == expected);
    CHECK(rounded(twice) == std::vector{twice.in_place});
}

TEST_CASE("values rounded where they are made give the same bits") {
    for (const std::string& isa : isas()) {
        for (const int rows : {1, 5, 9, 40, 150}) {
            CAPTURE(isa);
            CAPTURE(rows);
            std::vector<int32_t> blocks((static_cast<size_t>(rows) + 31) / 32);
            std::iota(blocks.begin(), blocks.end(), 0);
            const auto run = [&](bool read_twice, int threads) {
                DecoderLayer layer(rows, read_twice);
                return forward(*layer.g.device(isa, threads, 8), {Run{0, 0, rows, blocks}});
            };
            const Floats expected = run(true, 2);
            CHECK(same_bits(run(false, 1), expected));
            CHECK(same_bits(run(false, 3), expected));
        }
    }
}

}  // namespace
}  // namespace castiron::test
