// Whole steps of a decoder with SmolLM2-135M's shapes on the host device, without Python and batching around
// them: what the device leaves to the rest.
//
//   host_model [threads] [rounds] [weights] [case ...]     case: decode8 = a decode step of 8 requests,
//   prefill512
//
// weights: bf16; int8 (a scale a row), int4 (groups of 32), both with activations in int8 by groups of 32;
// w8a8 (int8, a scale a row and a token). The quantized ones have an int8 cache when their name ends in
// "+kv". Prints the best and the median time of a step; decodes stand at position 192.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "device/device.h"

namespace {

using namespace castiron;

constexpr int64_t kHidden = 576, kInner = 1536, kQkv = 960, kVocab = 49152, kMaxSeq = 4096;
constexpr int kLayers = 30, kPosition = 192;

// Weights of all matrices lie in one buffer of small numbers: the device copies each to a place of its own.
class ModelBuilder {
public:
    explicit ModelBuilder(const std::string& weights) : weights_(weights.substr(0, weights.find('+'))) {
        cache_ = weights.ends_with("+kv") ? DType::kI8 : DType::kBF16;
        program->limits = {64, 1024, 64, static_cast<int>(kMaxSeq)};
        program->vocab_size = static_cast<int>(kVocab);
        matrix_.resize(static_cast<size_t>(kVocab * kHidden));
        uint32_t state = 1;
        for (uint16_t& w : matrix_) {  // +-2^-6 to 2^-4 as bf16
            state = state * 1664525u + 1013904223u;
            w = static_cast<uint16_t>(((state >> 31) << 15) | (0x3c80u + (state >> 20 & 0xffu)));
        }
        scales_.assign(static_cast<size_t>(kVocab * kHidden / 32), 0x0c00);  // 2^-12 as f16
        ones_.assign(kInner, 1.0f);
        for (int64_t position = 0; position < kMaxSeq; ++position) {
            for (int i = 0; i < 32; ++i) {
                const float angle = static_cast<float>(position) * std::pow(10000.0f, -float(i) / 32);
                cos_.push_back(std::cos(angle));
                sin_.push_back(std::sin(angle));
            }
        }
    }

    std::shared_ptr<Program> program = std::make_shared<Program>();

    void build() {
        const Dim t{Dim::kTokens}, n{Dim::kRows};
        const int ids = value("token_ids", DType::kI32, {t});
        const int positions = value("positions", DType::kI32, {t});
        const int rows = value("logit_rows", DType::kI32, {n});
        const int cos = plain(cos_, {kMaxSeq, 32}), sin = plain(sin_, {kMaxSeq, 32});
        const int norm = plain(ones_, {kHidden});
        const int table =
            weight(DType::kBF16, Layout::kPanel16x2, {kVocab, kHidden}, matrix_.data(), matrix_.size() * 2);
        const int x = f32("x", t, kHidden), y = f32("y", t, kHidden), z = f32("z", t, kHidden);
        const int qkv = f32("qkv", t, kQkv);
        const int q = view(qkv, 0, 576), k = view(qkv, 576, 192), v = view(qkv, 768, 192);
        const int inner = f32("inner", t, kInner), last = f32("last", n, kHidden);
        const int last_normed = f32("last_normed", n, kHidden);
        const int logits = f32("logits", n, kVocab);
        step("embedding", {ids}, {table}, {x}, {});
        for (int layer = 0; layer < kLayers; ++layer) {
            program->kv_layers.push_back({3, 64, 64, cache_});
            const std::map<std::string, Attr> heads = {{"layer", int64_t{layer}},
                                                       {"q_heads", int64_t{9}},
                                                       {"kv_heads", int64_t{3}},
                                                       {"head_dim", int64_t{64}},
                                                       {"v_head_dim", int64_t{64}}};
            auto rope = heads, attention = heads;
            rope["rotary_dim"] = int64_t{64};
            attention["scale"] = 0.125;
            const int normed = like(y), rotated = like(y), attended = like(z), second = like(y);
            const int gated = like(inner);
            rms_norm(x, norm, normed);
            linear("linear", {normed}, kQkv, kHidden, qkv, {});
            step("rope_write_kv", {q, k, v, positions}, {cos, sin}, {rotated}, rope);
            step("paged_attention", {rotated}, {}, {attended}, attention);
            linear("linear", {attended, x}, kHidden, kHidden, x, {{"has_residual", true}});
            rms_norm(x, norm, second);
            linear("gated_linear", {second}, 2 * kInner, kHidden, gated,
                   {{"activation", std::string("silu")}});
            linear("linear", {gated, x}, kHidden, kInner, x, {{"has_residual", true}});
        }
        step("gather_rows", {x, rows}, {}, {last}, {});
        rms_norm(last, norm, last_normed);
        linear("linear", {last_normed}, kVocab, kHidden, logits, {});
    }

private:
    void rms_norm(int x, int weight, int y) {
        step("rms_norm", {x}, {weight}, {y}, {{"eps", 1e-5}, {"has_weight", true}});
    }
    void step(const char* kernel, std::vector<int> in, std::vector<int> weights, std::vector<int> out,
              std::map<std::string, Attr> attrs) {
        program->steps.push_back(
            {kernel, std::move(in), std::move(weights), std::move(out), std::move(attrs), {}});
    }
    int value(std::string name, DType dtype, std::vector<Dim> shape) {
        Value v;
        v.name = std::move(name);
        v.dtype = dtype;
        v.shape = std::move(shape);
        v.offset = program->arena_bytes;
        uint64_t bytes = 4;
        for (const Dim d : v.shape) bytes *= static_cast<uint64_t>(d.bind(1024, 64));
        program->arena_bytes += (bytes + 63) / 64 * 64;
        program->values.push_back(v);
        return static_cast<int>(program->values.size()) - 1;
    }
    int f32(std::string name, Dim rows, int64_t columns) {
        return value(std::move(name), DType::kF32, {rows, Dim{columns}});
    }
    // A value of its own in the memory of another, whose time is over: as lowering places them.
    int like(int other) {
        Value v = program->values[static_cast<size_t>(other)];
        v.name += std::to_string(program->values.size());
        program->values.push_back(v);
        return static_cast<int>(program->values.size()) - 1;
    }
    int view(int base, uint64_t column, int64_t columns) {
        Value v;
        v.name = "view" + std::to_string(column);
        v.shape = {Dim{Dim::kTokens}, Dim{columns}};
        v.base = base;
        v.column = column;
        program->values.push_back(v);
        return static_cast<int>(program->values.size()) - 1;
    }
    int weight(DType dtype, Layout layout, std::vector<int64_t> shape, const void* data, size_t bytes) {
        Weight w;
        w.name = "w" + std::to_string(program->weights.size());
        w.dtype = dtype;
        w.layout = layout;
        w.shape = std::move(shape);
        w.data = static_cast<const std::byte*>(data);
        w.bytes = bytes;
        program->weights.push_back(w);
        return static_cast<int>(program->weights.size()) - 1;
    }
    void linear(const std::string& kernel, std::vector<int> in, int64_t n, int64_t k, int out,
                std::map<std::string, Attr> attrs) {
        const auto product = static_cast<size_t>(n * k);
        if (weights_ == "bf16") {
            const int w = weight(DType::kBF16, Layout::kPanel16x2, {n, k}, matrix_.data(), product * 2);
            return step(kernel.c_str(), std::move(in), {w}, {out}, std::move(attrs));
        }
        const bool int4 = weights_ == "int4";
        const int64_t group = int4 ? 32 : 0, groups = int4 ? k / 32 : 1;
        const int codes = int4 ? weight(DType::kI4, Layout::kPanel16x4n, {n, k}, matrix_.data(), product / 2)
                               : weight(DType::kI8, Layout::kPanel16x4, {n, k}, matrix_.data(), product);
        const int scales = weight(DType::kF16, Layout::kPanel16, {n, groups}, scales_.data(),
                                  static_cast<size_t>(n * groups * 2));
        attrs.insert({{"group", group},
                      {"x_format", std::string("int8")},
                      {"x_group", int64_t{weights_ == "w8a8" ? 0 : 32}}});
        step(("quantized_" + kernel).c_str(), std::move(in), {codes, scales}, {out}, std::move(attrs));
    }
    int plain(const std::vector<float>& data, std::vector<int64_t> shape) {
        size_t bytes = 4;
        for (const int64_t d : shape) bytes *= static_cast<size_t>(d);
        return weight(DType::kF32, Layout::kPlain, std::move(shape), data.data(), bytes);
    }

    std::string weights_;
    DType cache_ = DType::kBF16;
    std::vector<uint16_t> matrix_, scales_;
    std::vector<float> ones_, cos_, sin_;
};

// `requests` sequences of `rows` rows each, from `start` on.
void time_steps(Device& device, const char* name, int requests, int rows, int start, int rounds) {
    std::vector<int32_t> ids, positions, logit_rows;
    std::vector<std::vector<int32_t>> tables(static_cast<size_t>(requests));
    std::vector<SequenceSlice> slices;
    int32_t block = 0;
    for (int r = 0; r < requests; ++r) {
        auto& table = tables[static_cast<size_t>(r)];
        for (int p = 0; p < start + rows; p += kBlockTokens) table.push_back(block++);
        for (int i = 0; i < rows; ++i) {
            ids.push_back(r * 97 + i * 31 % 40000);
            positions.push_back(start + i);
        }
        logit_rows.push_back((r + 1) * rows - 1);
        slices.push_back({r * rows, rows, start, table});
    }
    const Batch batch{ids, positions, logit_rows, slices};
    std::vector<double> times;
    for (int i = 0; i < rounds + 2; ++i) {
        const auto begin = std::chrono::steady_clock::now();
        const auto logits = device.forward(batch);
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
        if (i >= 2) times.push_back(took.count());
        if (!std::isfinite(logits[0])) std::printf("not finite\n");
    }
    std::sort(times.begin(), times.end());
    const double median = times[times.size() / 2];
    std::printf("%-12s best %8.3f ms  median %8.3f ms  %8.1f tokens/s\n", name, times[0] * 1e3, median * 1e3,
                requests * rows / median);
}

}  // namespace

int main(int argc, char** argv) {
    HostOptions options;
    options.num_threads = argc > 1 ? std::atoi(argv[1]) : 0;
    const int rounds = argc > 2 ? std::atoi(argv[2]) : 20;
    const std::string weights = argc > 3 ? argv[3] : "bf16";
    std::vector<std::string> cases(argv + std::min(argc, 4), argv + argc);
    if (cases.empty()) cases = {"decode1", "decode8", "decode32", "prefill512"};
    std::unique_ptr<Device> device;
    {
        ModelBuilder model(weights);
        model.build();
        device = make_host_device(model.program, options);
    }
    device->reserve_kv(512, 0);
    for (const std::string& name : cases) {
        if (name.starts_with("decode")) {
            time_steps(*device, name.c_str(), std::atoi(name.c_str() + 6), 1, kPosition, rounds);
        } else if (name.starts_with("chunks")) {  // chunksN: N requests' first 128 tokens
            time_steps(*device, name.c_str(), std::atoi(name.c_str() + 6), 128, 0, std::max(3, rounds / 5));
        } else {
            time_steps(*device, name.c_str(), 1, std::atoi(name.c_str() + 7), 0, std::max(3, rounds / 5));
        }
    }
}
