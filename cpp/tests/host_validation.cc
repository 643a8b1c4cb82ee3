// Programs that must be refused, each with a message that names the reason; and batches that must be.
#include <functional>

#include "device/host/thread_pool.h"
#include "host_support.h"

namespace castiron::test {
namespace {

// A small valid program: linear, rope_write_kv, attention, norm.
struct Model {
    Model() : g(8, 64) {
        Random random(1);
        g.program().kv_layers = {{2, 8, 8, DType::kF32}};
        x = g.input(random.floats(8 * 32), 32);
        qkv = g.value({kT, Dim{64}});
        g.step("linear", {x}, {g.panels(random.floats(64 * 32), 64, 32, true)}, {qkv},
               {{"activation", std::string("none")}});
        const int q = g.view(qkv, 0, 32), k = g.view(qkv, 32, 16), v = g.view(qkv, 48, 16);
        const int turned = g.value({kT, Dim{32}}), attended = g.value({kT, Dim{32}}),
                  normed = g.value({kT, Dim{32}});
        g.step("rope_write_kv", {q, k, v, g.positions},
               {g.plain(random.floats(64 * 4), {64, 4}), g.plain(random.floats(64 * 4), {64, 4})}, {turned},
               {{"q_heads", int64_t{4}},
                {"kv_heads", int64_t{2}},
                {"head_dim", int64_t{8}},
                {"v_head_dim", int64_t{8}},
                {"layer", int64_t{0}},
                {"rotary_dim", int64_t{8}}});
        g.step("paged_attention", {turned}, {}, {attended},
               {{"q_heads", int64_t{4}},
                {"kv_heads", int64_t{2}},
                {"head_dim", int64_t{8}},
                {"v_head_dim", int64_t{8}},
                {"layer", int64_t{0}},
                {"scale", 0.35}});
        g.step("rms_norm", {attended}, {g.plain(random.floats(32), {32})}, {normed},
               {{"eps", 1e-5}, {"has_weight", true}});
        g.output(normed);
    }
    Step& step(size_t i) { return g.program().steps[i]; }
    Graph g;
    int x = 0, qkv = 0;
};

std::string refusal(const std::function<void(Model&)>& damage) {
    Model m;
    damage(m);
    try {
        (void)m.g.device();
    } catch (const std::invalid_argument& error) {
        return error.what();
    }
    return "accepted";
}

bool contains(const std::string& text, const std::string& part) {
    INFO(text);
    const bool found = text.find(part) != std::string::npos;
    CHECK_MESSAGE(found, text);
    return found;
}

TEST_CASE("the undamaged program runs") {
    Model m;
    const auto device = m.g.device(main_isa(), 2, 4);
    CHECK(forward(*device, {Run{0, 0, 8, {2}}}).size() == 8 * 32);
}

TEST_CASE("damaged programs are refused with the reason") {
    using M = Model&;
    contains(refusal([](M m) { m.step(1).kernel = "lineal"; }), "no kernel of this name");
    contains(refusal([](M m) { m.step(1).inputs = {999}; }), "does not exist");
    contains(refusal([](M m) { m.step(1).inputs = {-1}; }), "does not exist");
    contains(refusal([](M m) { m.step(1).weights = {77}; }), "does not exist");
    contains(refusal([](M m) { m.step(1).inputs = {}; }), "inputs");
    contains(refusal([](M m) { m.step(1).attrs["beta"] = 1.0; }), "unknown attribute 'beta'");
    contains(refusal([](M m) { m.step(1).attrs["activation"] = std::string("swish"); }),
             "unknown activation");
    contains(refusal([](M m) { m.step(1).attrs["activation"] = 3.0; }), "must be a string");
    contains(refusal([](M m) { m.step(1).attrs["has_bias"] = true; }), "weights");
    contains(refusal([](M m) { m.step(1).outputs = {m.x}; }), "shape");
    contains(refusal([](M m) { m.step(2).attrs["layer"] = int64_t{1}; }), "layer");
    contains(refusal([](M m) { m.step(2).attrs["layer"] = int64_t{-1}; }), "layer");
    contains(refusal([](M m) { m.step(2).attrs["kv_heads"] = int64_t{4}; }), "kv_heads");
    contains(refusal([](M m) { m.step(2).attrs["rotary_dim"] = int64_t{10}; }), "rotary_dim");
    contains(refusal([](M m) { m.step(2).attrs["rotary_dim"] = int64_t{6}; }), "cos table");
    contains(refusal([](M m) { m.step(3).attrs["q_heads"] = int64_t{5}; }), "multiple");
    contains(refusal([](M m) { m.step(3).attrs.erase("scale"); }), "scale is missing");
    contains(refusal([](M m) { m.step(3).attrs["scale"] = double{NAN}; }), "finite");
    contains(refusal([](M m) { m.step(3).outputs = m.step(3).inputs; }), "shares memory");
    contains(refusal([](M m) { m.step(4).attrs["group"] = int64_t{5}; }), "divide");
    contains(refusal([](M m) { m.step(4).attrs["group"] = int64_t{-8}; }), "group");
    contains(refusal([](M m) { m.step(4).attrs["eps"] = std::string("x"); }), "eps");
    contains(refusal([](M m) { m.g.program().values[static_cast<size_t>(m.qkv)].offset += 1u << 20; }),
             "arena");
    contains(
        refusal([](M m) { m.g.program().values[static_cast<size_t>(m.qkv)].offset = ~uint64_t{0} - 63; }),
        "arena");
    contains(refusal([](M m) { m.g.program().values[static_cast<size_t>(m.qkv)].offset += 4; }), "aligned");
    contains(refusal([](M m) {
                 m.g.program().values[static_cast<size_t>(m.qkv)].shape = {kT, Dim{int64_t{1} << 40},
                                                                           Dim{int64_t{1} << 40}};
             }),
             "elements");
    contains(refusal([](M m) { m.g.program().values[static_cast<size_t>(m.qkv)].shape = {kT, Dim{0}}; }),
             "sizes");
    contains(refusal([](M m) { m.g.program().values[static_cast<size_t>(m.qkv)].shape = {kT, Dim{-7}}; }),
             "sizes");
    contains(refusal([](M m) { m.g.program().values[static_cast<size_t>(m.qkv)].shape = {}; }), "axes");
    contains(refusal([](M m) { m.g.program().values[static_cast<size_t>(m.qkv) + 1].column = 40; }),
             "reach past");
    contains(refusal([](M m) { m.g.program().values[static_cast<size_t>(m.qkv) + 1].column = ~uint64_t{0}; }),
             "reach past");
    contains(refusal([](M m) { m.g.program().values[static_cast<size_t>(m.qkv) + 1].base = m.qkv + 1; }),
             "view on itself");
    contains(refusal([](M m) { m.g.program().values[static_cast<size_t>(m.qkv) + 1].base = 5000; }),
             "base does not exist");
    contains(refusal([](M m) { m.g.program().weights[1].bytes -= 1; }), "bytes");
    contains(refusal([](M m) { m.g.program().weights[1].data = nullptr; }), "bytes");
    contains(refusal([](M m) { m.g.program().weights[1].layout = Layout::kPanel16; }), "panel16");
    contains(refusal([](M m) { m.g.program().weights[1].shape = {64, 48}; }), "bytes");
    contains(refusal([](M m) { m.g.program().weights[1].shape = {int64_t{1} << 40, int64_t{1} << 40}; }),
             "elements");
    contains(refusal([](M m) { m.g.program().weights[1].shape = {32, 32}; }), "shape");
    contains(refusal([](M m) { m.g.program().limits.max_num_tokens = 0; }), "limits");
    contains(refusal([](M m) { m.g.program().limits.max_num_tokens = 1 << 20; }), "arena");
    contains(refusal([](M m) { m.g.program().kv_layers[0].head_dim = 0; }), "KV layer");
    contains(refusal([](M m) { m.g.program().vocab_size = 31; }), "logits");
    contains(refusal([](M m) { m.g.program().values[0].name = "tokens"; }), "token_ids");
}

TEST_CASE("unusable options are refused") {
    Model m;
    CHECK_THROWS_AS((void)m.g.device("sse9"), std::invalid_argument);
    CHECK_THROWS_AS((void)m.g.device(main_isa(), -1), std::invalid_argument);
    CHECK_THROWS_AS((void)make_host_device(nullptr, {}), std::invalid_argument);
}

TEST_CASE("a batch that would leave its bounds is refused, and the device still works") {
    Model m;
    const auto device = m.g.device(main_isa(), 2, 4);
    const auto refused = [&](const std::vector<Run>& runs) {
        CHECK_THROWS_AS((void)forward(*device, runs), std::invalid_argument);
    };
    refused({Run{0, 0, 9, {0}}});  // max_num_tokens
    refused({Run{0, 0, 8, {4}}});  // block outside the pool
    refused({Run{0, 0, 8, {-1}}});
    refused({Run{0, 32, 8, {0}}});        // table too short
    refused({Run{0, 60, 8, {0, 1, 2}}});  // max_seq_len
    refused({Run{0, -1, 8, {0}}});
    const std::vector<int32_t> ids = {0, 1}, positions = {0, 1}, rows = {0}, bad_rows = {2}, blocks = {0},
                               far = {0, 64}, one = {0};
    const std::vector<SequenceSlice> slices = {{0, 2, 0, blocks}}, part = {{0, 1, 0, blocks}};
    CHECK_THROWS_AS((void)device->forward({ids, positions, bad_rows, slices}), std::invalid_argument);
    CHECK_THROWS_AS((void)device->forward({ids, positions, rows, part}), std::invalid_argument);
    CHECK_THROWS_AS((void)device->forward({ids, one, rows, slices}), std::invalid_argument);
    CHECK_THROWS_AS((void)device->forward({ids, far, rows, slices}),
                    std::out_of_range);  // past the rope table
    CHECK(device->forward({ids, positions, rows, slices}).size() == 32);
    CHECK(device->forward({ids, positions, {}, slices}).empty());
    CHECK(device->forward({}).empty());
}

TEST_CASE("threads of a pool meet at every barrier") {
    for (const int threads : {1, 2, 3, 7}) {
        host::ThreadPool pool(threads, host::usable_cpus());
        std::vector<int> seen(static_cast<size_t>(threads) * 64, 0);
        std::atomic<int> bad{0};
        for (int round = 0; round < 20; ++round) {
            pool.run([&](int part) {
                for (int step = 1; step <= 30; ++step) {
                    seen[static_cast<size_t>(part) * 64] = round * 100 + step;
                    pool.barrier();
                    for (int other = 0; other < threads; ++other) {
                        if (seen[static_cast<size_t>(other) * 64] != round * 100 + step) ++bad;
                    }
                    pool.barrier();
                }
            });
        }
        CHECK(bad == 0);
    }
}

}  // namespace
}  // namespace castiron::test
