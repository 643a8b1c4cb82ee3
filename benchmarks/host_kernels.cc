// What the host device's kernels reach, beside what this machine can do, measured in the same run:
//
//   host_kernels [threads] [isa]
//
// Roofs: bytes/s of summing 512 MiB in 2 MiB pages, and fused multiply-adds/s in registers, best of several
// runs. Kernels: one program step each, timed through Device::forward, best of several runs.
#include <immintrin.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "device/device.h"
#include "device/host/cpu.h"
#include "device/host/memory.h"
#include "device/host/thread_pool.h"

namespace {

using namespace castiron;
using Clock = std::chrono::steady_clock;

template <typename F>
double best_seconds(double budget, F f) {
    f();
    double best = 1e9, spent = 0;
    for (int i = 0; i < 200 && (spent < budget || i < 5); ++i) {
        const auto start = Clock::now();
        f();
        const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
        best = std::min(best, seconds);
        spent += seconds;
    }
    return best;
}

// Sums p[0..n), n a multiple of 64. Plain variables: an array of vectors would live on the stack.
__attribute__((target("avx2"))) float sum_lines(const float* p, size_t n) {
    __m256 a = _mm256_setzero_ps(), b = a, c = a, d = a, e = a, f = a, g = a, h = a;
    for (const float* const end = p + n; p != end; p += 64) {
        _mm_prefetch(reinterpret_cast<const char*>(p + 512), _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(p + 528), _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(p + 544), _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(p + 560), _MM_HINT_T0);
        a = _mm256_add_ps(a, _mm256_load_ps(p));
        b = _mm256_add_ps(b, _mm256_load_ps(p + 8));
        c = _mm256_add_ps(c, _mm256_load_ps(p + 16));
        d = _mm256_add_ps(d, _mm256_load_ps(p + 24));
        e = _mm256_add_ps(e, _mm256_load_ps(p + 32));
        f = _mm256_add_ps(f, _mm256_load_ps(p + 40));
        g = _mm256_add_ps(g, _mm256_load_ps(p + 48));
        h = _mm256_add_ps(h, _mm256_load_ps(p + 56));
    }
    a = _mm256_add_ps(_mm256_add_ps(_mm256_add_ps(a, b), _mm256_add_ps(c, d)),
                      _mm256_add_ps(_mm256_add_ps(e, f), _mm256_add_ps(g, h)));
    return _mm256_cvtss_f32(a);
}

// n rounds of ten independent fused multiply-adds, more than latency times throughput asks for.
__attribute__((target("avx2,fma"))) float spin_fma(long n) {
    const __m256 x = _mm256_set1_ps(0.999f), y = _mm256_set1_ps(0.001f);
    __m256 a = y, b = y, c = y, d = y, e = y, f = y, g = y, h = y, i = y, j = y;
    for (; n > 0; --n) {
        __asm__ volatile(
            "vfmadd213ps %11, %10, %0\n\tvfmadd213ps %11, %10, %1\n\tvfmadd213ps %11, %10, %2\n\t"
            "vfmadd213ps %11, %10, %3\n\tvfmadd213ps %11, %10, %4\n\tvfmadd213ps %11, %10, %5\n\t"
            "vfmadd213ps %11, %10, %6\n\tvfmadd213ps %11, %10, %7\n\tvfmadd213ps %11, %10, %8\n\t"
            "vfmadd213ps %11, %10, %9"
            : "+x"(a), "+x"(b), "+x"(c), "+x"(d), "+x"(e), "+x"(f), "+x"(g), "+x"(h), "+x"(i), "+x"(j)
            : "x"(x), "x"(y));
    }
    a = _mm256_add_ps(
        _mm256_add_ps(_mm256_add_ps(a, b), _mm256_add_ps(c, d)),
        _mm256_add_ps(_mm256_add_ps(_mm256_add_ps(e, f), _mm256_add_ps(g, h)), _mm256_add_ps(i, j)));
    return _mm256_cvtss_f32(a);
}

// One step per program: x = embedding, y = kernel(x).
struct Bench {
    std::shared_ptr<Program> program = std::make_shared<Program>();
    std::vector<std::byte> table, weights;
    std::unique_ptr<Device> device;

    int value(const char* name, DType dtype, std::vector<Dim> shape) {
        Value v;
        v.name = name;
        v.dtype = dtype;
        v.shape = std::move(shape);
        v.offset = program->arena_bytes;
        uint64_t bytes = 4;
        for (const Dim d : v.shape) bytes *= static_cast<uint64_t>(d.bind(program->limits.max_num_tokens, 1));
        program->arena_bytes += (bytes + 63) / 64 * 64;
        program->values.push_back(v);
        return static_cast<int>(program->values.size()) - 1;
    }
    int weight(DType dtype, Layout layout, std::vector<int64_t> shape, std::vector<std::byte>& data,
               size_t bytes) {
        data.assign(bytes, std::byte{0});
        // Small numbers of both kinds of sign; bf16 pairs and floats alike.
        for (size_t i = 0; i + 4 <= bytes; i += 4) {
            const uint32_t bits = i / 4 % 2 == 0 ? 0x3c003c00u : 0xbc10bc10u;
            std::memcpy(data.data() + i, &bits, 4);
        }
        Weight w;
        w.name = "w" + std::to_string(program->weights.size());
        w.dtype = dtype;
        w.layout = layout;
        w.shape = std::move(shape);
        w.data = data.data();
        w.bytes = bytes;
        program->weights.push_back(w);
        return static_cast<int>(program->weights.size()) - 1;
    }

    Bench(int rows, int64_t k, int64_t n, bool gated, bool bf16, int repeat, const HostOptions& options) {
        program->limits = {64, rows, 1, 8192};
        program->vocab_size = 16;
        const Dim tokens{Dim::kTokens};
        const int ids = value("token_ids", DType::kI32, {tokens});
        const int x = value("x", DType::kF32, {tokens, Dim{k}}),
                  y = value("y", DType::kF32, {tokens, Dim{gated ? n / 2 : n}});
        value("logits", DType::kF32, {Dim{Dim::kRows}, Dim{16}});
        const int embedding =
            weight(DType::kF32, Layout::kPlain, {16, k}, table, static_cast<size_t>(16 * k * 4));
        program->steps.push_back({"embedding", {ids}, {embedding}, {x}, {}});
        const auto blocks = (n + 15) / 16;
        const size_t bytes = static_cast<size_t>(blocks * (k + 1) / 2 * 2 * 16) * (bf16 ? 2 : 4);
        for (int i = 0; i < repeat; ++i) {  // several matrices, as many bytes as exceed the caches
            const int w = weight(bf16 ? DType::kBF16 : DType::kF32,
                                 bf16 ? Layout::kPanel16x2 : Layout::kPanel16, {n, k}, weights, bytes);
            Step step{gated ? "gated_linear" : "linear", {x}, {w}, {y}, {}};
            if (gated) step.attrs["activation"] = std::string("silu");
            program->steps.push_back(step);
        }
        device = make_host_device(program, options);
    }

    double seconds(int rows, double budget) {
        const std::vector<int32_t> ids(static_cast<size_t>(rows), 3), positions(static_cast<size_t>(rows), 0);
        const std::vector<SequenceSlice> slices = {{0, rows, 0, {}}};
        return best_seconds(budget, [&] { (void)device->forward({ids, positions, {}, slices}); });
    }
};

}  // namespace

int main(int argc, char** argv) {
    HostOptions options;
    options.num_threads = argc > 1 ? std::atoi(argv[1]) : 0;
    options.isa = argc > 2 ? argv[2] : "";
    const int cpus = host::usable_cpus();
    const int threads = options.num_threads > 0 ? options.num_threads : cpus;
    host::ThreadPool pool(threads, cpus);

    const size_t floats = size_t{128} << 20;
    host::HugeBuffer memory(floats * 4, true);
    auto* data = reinterpret_cast<float*>(memory.data());
    const size_t share = floats / static_cast<size_t>(threads) / 64 * 64;
    pool.run([&](int part) { std::fill_n(data + share * static_cast<size_t>(part), share, 1.0f); });
    std::vector<float> sink(static_cast<size_t>(threads) * 64);
    const auto read_all = [&] {
        pool.run([&](int part) {
            sink[static_cast<size_t>(part) * 64] = sum_lines(data + share * static_cast<size_t>(part), share);
        });
    };
    const auto spin_all = [&] {
        pool.run([&](int part) { sink[static_cast<size_t>(part) * 64] = spin_fma(2000000); });
    };
    double bandwidth = double(share) * threads * 4 / best_seconds(1.0, read_all);
    double peak = 2e6 * 10 * 16 * threads / best_seconds(0.5, spin_all);
    std::printf("threads %d, isa %s\n", threads,
                std::string(host::isa_name(host::choose_isa(options.isa))).c_str());
    std::printf("roofs: read %.1f GB/s, fp32 FMA (AVX2) %.1f GFLOP/s\n", bandwidth / 1e9, peak / 1e9);

    std::printf("\ndecode, one row, weights streamed once\n");
    for (const bool bf16 : {true, false}) {
        struct Shape {
            int64_t k, n;
            bool gated;
        };
        for (const Shape s : {Shape{576, 49152, false},
                              {576, 960, false},
                              {576, 3072, true},
                              {1536, 576, false},
                              {4096, 4096, false}}) {
            const double bytes_each = double(s.k) * double(s.n) * (bf16 ? 2 : 4);
            const int repeat = std::max(1, static_cast<int>(270e6 / bytes_each));
            Bench bench(1, s.k, s.n, s.gated, bf16, repeat, options);
            bandwidth = double(share) * threads * 4 / best_seconds(0.3, read_all);
            const double rate = bytes_each * repeat / bench.seconds(1, 1.0);
            std::printf("  %s K %5ld N %5ld%s  x%-4d %6.1f GB/s  %5.1f%% of read (%.1f)\n",
                        bf16 ? "bf16" : "fp32", s.k, s.n, s.gated ? " gated" : "      ", repeat, rate / 1e9,
                        100 * rate / bandwidth, bandwidth / 1e9);
        }
    }
    std::printf("\nmatrix products\n");
    for (const bool bf16 : {true, false}) {
        struct Shape {
            int rows;
            int64_t k, n;
            bool gated;
        };
        for (const Shape s : {Shape{512, 576, 960, false},
                              {512, 576, 576, false},
                              {512, 576, 3072, true},
                              {512, 1536, 576, false},
                              {512, 4096, 4096, false},
                              {2, 576, 3072, true},
                              {4, 576, 3072, true},
                              {6, 576, 3072, true},
                              {8, 576, 960, false},
                              {8, 576, 3072, true},
                              {8, 1536, 576, false},
                              {8, 576, 49152, false},
                              {16, 576, 3072, true},
                              {32, 576, 960, false},
                              {32, 576, 3072, true},
                              {32, 1536, 576, false},
                              {32, 576, 49152, false}}) {
            const double flops = 2.0 * s.rows * double(s.k) * double(s.n);
            const int repeat =
                std::max(1, static_cast<int>(std::min(2e9 / flops, 270e6 / (double(s.k) * double(s.n) * 2))));
            Bench bench(s.rows, s.k, s.n, s.gated, bf16, repeat, options);
            peak = 2e6 * 10 * 16 * threads / best_seconds(0.1, spin_all);
            const double rate = flops * repeat / bench.seconds(s.rows, 0.6);
            std::printf("  %s M %3d K %5ld N %5ld%s  %6.1f GFLOP/s  %5.1f%% of fp32 (%.0f)\n",
                        bf16 ? "bf16" : "fp32", s.rows, s.k, s.n, s.gated ? " gated" : "      ", rate / 1e9,
                        100 * rate / peak, peak / 1e9);
        }
    }
    return sink[0] == 12345.0f;
}
