// Builds small programs for the host device in tests. Activations enter through an embedding whose token ids
// are row numbers, and leave through gather_rows into the logits: only the public interface is used.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "device/device.h"
#include "device/host/cpu.h"

namespace castiron::test {

using Floats = std::vector<float>;
using Attrs = std::map<std::string, Attr>;

inline constexpr Dim kT{Dim::kTokens};
inline constexpr Dim kN{Dim::kRows};

// The instruction set of tests that need only one: CASTIRON_TEST_ISA, which restricts all of them, or AVX2.
inline std::string main_isa() {
    const char* forced = std::getenv("CASTIRON_TEST_ISA");
    return forced != nullptr ? forced : "avx2";
}

// The instruction sets this machine can run; portable stands for AVX-512 with VNNI, whose blocking it shares.
// A forced one that the CPU lacks makes the device throw: nothing is skipped.
inline std::vector<std::string> isas() {
    if (std::getenv("CASTIRON_TEST_ISA") != nullptr) return {main_isa()};
    std::vector<std::string> names;
    for (const host::Isa isa : host::kAllIsas) {
        if (host::cpu_supports(isa)) names.emplace_back(host::isa_name(isa));
    }
    return names;
}

// Whether it rounds activations to bf16 where weights are bf16.
inline bool multiplies_bf16(const std::string& isa) {
    return isa == "avx512bf16" || isa == "amx";
}

inline float round_bf16(float x) {
    auto bits = std::bit_cast<uint32_t>(x);
    bits = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
    return std::bit_cast<float>(bits);
}

class Random {
public:
    explicit Random(uint32_t seed) : engine_(seed) { INFO("seed ", seed); }
    float normal(float scale = 1) { return scale * normal_(engine_); }
    int integer(int low, int high) { return std::uniform_int_distribution<int>(low, high)(engine_); }
    Floats floats(size_t n, float scale = 1) {
        Floats v(n);
        for (float& x : v) x = normal(scale);
        return v;
    }

private:
    std::mt19937 engine_;
    std::normal_distribution<float> normal_;
};

class Graph {
public:
    explicit Graph(int max_tokens, int max_seq_len = 4096) {
        program_->target = "host";
        program_->limits = {64, max_tokens, max_tokens, std::max(max_seq_len, max_tokens)};
        token_ids = value("token_ids", DType::kI32, {kT});
        positions = value("positions", DType::kI32, {kT});
        logit_rows = value("logit_rows", DType::kI32, {kN});
    }

    int token_ids, positions, logit_rows;

    [[nodiscard]] Program& program() { return *program_; }
    [[nodiscard]] std::shared_ptr<const Program> shared() const { return program_; }

    int value(const std::string& name, DType dtype, std::vector<Dim> shape) {
        Value v;
        v.name = name;
        v.dtype = dtype;
        v.shape = std::move(shape);
        v.offset = program_->arena_bytes;
        uint64_t bytes = 4;
        for (const Dim d : v.shape)
            bytes *= static_cast<uint64_t>(
                d.bind(program_->limits.max_num_tokens, program_->limits.max_logit_rows));
        program_->arena_bytes += (bytes + 63) / 64 * 64;
        program_->values.push_back(v);
        return static_cast<int>(program_->values.size()) - 1;
    }
    int value(std::vector<Dim> shape) {
        return value("v" + std::to_string(program_->values.size()), DType::kF32, std::move(shape));
    }
    int value_i32(std::vector<Dim> shape) {
        return value("i" + std::to_string(program_->values.size()), DType::kI32, std::move(shape));
    }
    int view(int base, uint64_t column, int64_t width) {
        Value v;
        v.name = "view" + std::to_string(program_->values.size());
        v.shape = {program_->values[static_cast<size_t>(base)].shape[0], Dim{width}};
        v.base = base;
        v.column = column;
        program_->values.push_back(v);
        return static_cast<int>(program_->values.size()) - 1;
    }

    int weight_bytes(DType dtype, Layout layout, std::vector<int64_t> shape, std::vector<std::byte> data) {
        data_.push_back(std::move(data));
        Weight w;
        w.name = "w" + std::to_string(program_->weights.size());
        w.dtype = dtype;
        w.layout = layout;
        w.shape = std::move(shape);
        w.data = data_.back().data();
        w.bytes = data_.back().size();
        program_->weights.push_back(w);
        return static_cast<int>(program_->weights.size()) - 1;
    }

    int plain(const Floats& x, std::vector<int64_t> shape, bool bf16 = false) {
        std::vector<std::byte> data(x.size() * (bf16 ? 2 : 4));
        for (size_t i = 0; i < x.size(); ++i) put(data, i, x[i], bf16);
        return weight_bytes(bf16 ? DType::kBF16 : DType::kF32, Layout::kPlain, std::move(shape),
                            std::move(data));
    }

    // w [n, k] into panels of 16 outputs.
    int panels(const Floats& w, int64_t n, int64_t k, bool bf16) {
        const int64_t blocks = (n + 15) / 16, depth = bf16 ? (k + 1) / 2 * 2 : k;
        std::vector<std::byte> data(static_cast<size_t>(blocks * depth * 16) * (bf16 ? 2 : 4));
        for (int64_t o = 0; o < n; ++o) {
            for (int64_t i = 0; i < k; ++i) {
                const int64_t at = bf16 ? ((o / 16 * (depth / 2) + i / 2) * 16 + o % 16) * 2 + i % 2
                                        : (o / 16 * depth + i) * 16 + o % 16;
                put(data, static_cast<size_t>(at), w[static_cast<size_t>(o * k + i)], bf16);
            }
        }
        return weight_bytes(bf16 ? DType::kBF16 : DType::kF32, bf16 ? Layout::kPanel16x2 : Layout::kPanel16,
                            {n, k}, std::move(data));
    }

    // Codes [n, k], one a byte (int4: -8 to 7; fp4: 0 to 15), as panel16x4 or panel16x4n. Padding is code
    // zero.
    int codes(const std::vector<int>& values, int64_t n, int64_t k, DType dtype) {
        const bool nibbles = dtype == DType::kI4 || dtype == DType::kF4E2M1;
        const int64_t blocks = (n + 15) / 16, quads = (k + 3) / 4;
        std::vector<std::byte> data(static_cast<size_t>(blocks * quads * (nibbles ? 32 : 64)),
                                    dtype == DType::kI4 ? std::byte{0x88} : std::byte{0});
        for (int64_t o = 0; o < n; ++o) {
            for (int64_t i = 0; i < k; ++i) {
                const int code = values[static_cast<size_t>(o * k + i)] + (dtype == DType::kI4 ? 8 : 0);
                const int64_t quad = o / 16 * quads + i / 4;
                if (!nibbles) {
                    data[static_cast<size_t>(quad * 64 + o % 16 * 4 + i % 4)] = static_cast<std::byte>(code);
                    continue;
                }
                std::byte& at = data[static_cast<size_t>(quad * 32 + o % 8 * 4 + i % 4)];
                const bool high = o % 16 >= 8;
                at = (at & static_cast<std::byte>(high ? 0x0f : 0xf0)) |
                     static_cast<std::byte>(high ? code << 4 : code);
            }
        }
        return weight_bytes(dtype, nibbles ? Layout::kPanel16x4n : Layout::kPanel16x4, {n, k},
                            std::move(data));
    }

    // Scales or offsets [n, groups] as panel16.
    int scale_panels(const Floats& values, int64_t n, int64_t groups, bool half) {
        const size_t item = half ? 2 : 4;
        std::vector<std::byte> data(static_cast<size_t>((n + 15) / 16 * groups * 16) * item);
        for (int64_t o = 0; o < n; ++o) {
            for (int64_t g = 0; g < groups; ++g) {
                const float value = values[static_cast<size_t>(o * groups + g)];
                const auto at = static_cast<size_t>((o / 16 * groups + g) * 16 + o % 16) * item;
                const auto as_half = static_cast<_Float16>(value);
                std::memcpy(data.data() + at, half ? static_cast<const void*>(&as_half) : &value, item);
            }
        }
        return weight_bytes(half ? DType::kF16 : DType::kF32, Layout::kPanel16, {n, groups}, std::move(data));
    }

    int indices(const std::vector<int32_t>& values) {
        std::vector<std::byte> data(values.size() * 4);
        std::memcpy(data.data(), values.data(), data.size());
        return weight_bytes(DType::kI32, Layout::kPlain, {static_cast<int64_t>(values.size())},
                            std::move(data));
    }

    void step(const std::string& kernel, std::vector<int> inputs, std::vector<int> weights,
              std::vector<int> outputs, Attrs attrs = {}) {
        program_->steps.push_back(
            {kernel, std::move(inputs), std::move(weights), std::move(outputs), std::move(attrs)});
    }

    // rows [rows, columns] as a value [T, columns]: token id i selects row i.
    int input(const Floats& rows, int64_t columns) {
        const int v = value({kT, Dim{columns}});
        const auto height = static_cast<int64_t>(rows.size()) / columns;
        step("embedding", {token_ids}, {plain(rows, {height, columns})}, {v});
        return v;
    }

    // Makes `v` [T, C] the logits.
    void output(int v) {
        const Dim columns = program_->values[static_cast<size_t>(v)].shape[1];
        program_->vocab_size = static_cast<int>(columns.value);
        const int logits = value("logits", DType::kF32, {kN, columns});
        step("gather_rows", {v, logit_rows}, {}, {logits});
    }

    [[nodiscard]] std::unique_ptr<Device> device(const std::string& isa = main_isa(), int threads = 2,
                                                 int kv_blocks = 0) {
        HostOptions options;
        options.num_threads = threads;
        options.isa = isa;
        auto device = make_host_device(program_, options);
        if (kv_blocks > 0) device->reserve_kv(kv_blocks, 0);
        return device;
    }

private:
    static void put(std::vector<std::byte>& data, size_t i, float x, bool bf16) {
        if (bf16) {
            const auto half = static_cast<uint16_t>(std::bit_cast<uint32_t>(round_bf16(x)) >> 16);
            std::memcpy(data.data() + i * 2, &half, 2);
        } else {
            std::memcpy(data.data() + i * 4, &x, 4);
        }
    }

    std::shared_ptr<Program> program_ = std::make_shared<Program>();
    std::deque<std::vector<std::byte>> data_;
};

// A run of tokens of one sequence: row numbers first_id.., at positions start...
struct Run {
    int first_id = 0;
    int start = 0;
    int count = 0;
    std::vector<int32_t> blocks;
};

// One forward pass; logits of every row.
inline Floats forward(Device& device, const std::vector<Run>& runs) {
    std::vector<int32_t> ids, positions, rows;
    std::vector<SequenceSlice> slices;
    for (const Run& run : runs) {
        slices.push_back({static_cast<int>(ids.size()), run.count, run.start, run.blocks});
        for (int i = 0; i < run.count; ++i) {
            ids.push_back(run.first_id + i);
            positions.push_back(run.start + i);
            rows.push_back(static_cast<int32_t>(rows.size()));
        }
    }
    const std::span<const float> logits = device.forward({ids, positions, rows, slices});
    return {logits.begin(), logits.end()};
}

inline Floats forward(Device& device, int tokens) {
    return forward(device, {Run{0, 0, tokens, {}}});
}

inline bool same_bits(const Floats& a, const Floats& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Largest |a - b| / (absolute + relative * |b|) must stay below one.
inline void check_close(const Floats& a, const std::vector<double>& b, double absolute, double relative) {
    REQUIRE(a.size() == b.size());
    double worst = 0;
    size_t at = 0;
    for (size_t i = 0; i < a.size(); ++i) {
        double error = std::abs(double{a[i]} - b[i]) / (absolute + relative * std::abs(b[i]));
        if (std::isnan(a[i]) != std::isnan(b[i])) error = INFINITY;
        if (error > worst) {
            worst = error;
            at = i;
        }
    }
    if (!a.empty()) {
        INFO("element ", at, ": ", a[at], " instead of ", b[at]);
        CHECK(worst <= 1);
    }
}

}  // namespace castiron::test
