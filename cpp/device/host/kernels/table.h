// The inner loops of the host device as one table of functions per instruction set. The ops (ops/*.cc) check,
// shape and split the work; what a function here gets is valid and in range.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/host/cpu.h"

namespace castiron::host {

enum class Activation : uint8_t {
    kNone,
    kSilu,
    kGeluTanh,
    kGeluErf,
    kGeluQuick,
    kRelu,
    kRelu2,
    kTanh,
    kSigmoid
};

enum class UnaryFn : uint8_t {
    kSilu,
    kGeluTanh,
    kGeluErf,
    kGeluQuick,
    kRelu,
    kRelu2,
    kTanh,
    kSigmoid,
    kExp,
    kLog,
    kSqrt,
    kRsqrt,
    kNeg,
    kAbs,
    kReciprocal,
    kSoftplus,
    kSin,
    kCos,
    kErf,
    kSquare,
};

enum class BinaryFn : uint8_t { kAdd, kSub, kMul, kDiv, kMin, kMax, kPow };

enum class ReduceFn : uint8_t { kSum, kMean, kMax };

// What one adapter adds to the sums of one panel of a product: those of ranks [first, first + count).
struct LoraPanel {
    const float* b = nullptr;  // [count][16]
    int32_t first = 0;
    int32_t count = 0;
};

// An adapter's part of one product: x · aᵀ, then each panel's b. No panels: the adapter leaves it alone.
struct LoraStep {
    const float* a = nullptr;  // panel16 [a_panels][k][16]: a rank is a column of it
    int64_t a_panels = 0;
    const LoraPanel* panels = nullptr;
};

// The adapters of a product's rows.
struct LoraRows {
    const LoraStep* const* adapters =
        nullptr;  // [rows]: the row's adapter, as its parts of all steps; or null
    size_t step = 0;
    const float* shrunk = nullptr;  // [rows, stride]: x · aᵀ
    int64_t stride = 0;
};

// What becomes of the sums of a product: y = alpha * act(x · wᵀ + bias) + residual, or act(gate) * up where
// panels alternate gate and up. The unit of work is a block: 16 output columns (one panel, or a pair of
// panels when gated).
struct LinearOutput {
    const float* bias = nullptr;      // [n], or [2 * 16 * blocks] when gated; or null
    const float* residual = nullptr;  // [rows, n] contiguous, may be y; or null
    float* y = nullptr;               // [rows, n] contiguous
    std::byte* rounded = nullptr;     // or rows of bf16, bf16_row_bytes(n) apart (Bf16Kernels::output)
    int64_t n = 0;
    Activation activation = Activation::kNone;
    float alpha = 1.0f;
    bool gated = false;
    const LoraRows* lora = nullptr;   // added to the sums first; or null
    const int32_t* places = nullptr;  // [rows]: which row of y a row becomes; null: its own
};

struct LinearArgs : LinearOutput {
    const float* x = nullptr;
    int64_t x_stride = 0;  // elements between rows
    const std::byte* weight = nullptr;
    bool bf16 = false;  // panel16x2, else panel16 of float32
    int64_t k = 0;
};

// One call covers at most these many rows and blocks; they bound its scratch.
inline constexpr int64_t kMaxLinearRows = 96;
inline constexpr int64_t kMaxLinearBlocks = 8;
// Inputs in one chain of multiply-adds, and whose weights (16 outputs, as float32) stay in the first-level
// cache. Even, so that no bf16 pair is cut. Part of the arithmetic (docs/program.md): engines' results change
// with it.
inline constexpr int64_t kLinearDepth = 192;
// Weights of a block of k as float32, for as many panels as a tile takes at once.
inline constexpr int64_t kLinearWideFloats = kLinearDepth * 16 * 2;
inline constexpr size_t kLinearScratchFloats =
    static_cast<size_t>(kLinearWideFloats + kMaxLinearRows * kMaxLinearBlocks * 2 * 16);

// Rows of bf16 and a weight in panel16x2.
struct Bf16Args {
    const std::byte* x = nullptr;
    int64_t x_stride = 0;  // bytes
    const std::byte* weight = nullptr;
    int64_t k = 0;
    bool gated = false;
};

// Weights as codes: w[n, k] = value(code[n, k]) * scale[n, k / group] + offset[n, k / group].
enum class Codes : uint8_t { kInt8, kInt4, kFp8, kFp4 };

struct QuantizedWeight {
    Codes format = Codes::kInt8;
    const std::byte* codes = nullptr;    // panel16x4, or panel16x4n
    const std::byte* scales = nullptr;   // panel16 [blocks][groups][16]
    const std::byte* offsets = nullptr;  // the same, or null
    bool half_scales = false;            // float16, else float32; offsets as well
    int64_t k = 0;
    int64_t group = 0;  // inputs that share a scale; k when all do

    [[nodiscard]] int64_t quads() const { return (k + 3) / 4; }
    [[nodiscard]] int64_t groups() const { return (k + group - 1) / group; }
    [[nodiscard]] int64_t panel_bytes() const {
        return quads() * (format == Codes::kInt4 || format == Codes::kFp4 ? 32 : 64);
    }
    [[nodiscard]] int64_t scale_panel_bytes() const { return groups() * (half_scales ? 32 : 64); }
};

// How activations are rounded before a product.
// kInt8: codes for the integer product; the others leave floats.
enum class XFormat : uint8_t { kFloat, kInt8, kInt8Floats, kFp8, kNvfp4, kMxfp4, kMxfp8 };

struct Rounding {
    XFormat format = XFormat::kFloat;
    int64_t k = 0;
    int64_t group = 0;  // inputs that share a scale; k when the row does
    float scale = 0;    // static, or 0: from the largest magnitude
    // Of kInt8: inputs in one integer sum, which divides the groups of activations and of weights (but for
    // what is left at the end). The product takes the codes of a weight plus `zero`, and so its sums over a
    // chunk start from -zero * (sum of x's codes): one int32 for each chunk, or, where sums are of int16, two
    // of them for the first and the last two inputs of each four.
    int64_t step = 0;
    int64_t chunk = 0;
    int32_t zero = 0;
    bool paired = false;
    float unit = 1;  // what one of the product's integers stands for, besides the scales

    // A row as kInt8 leaves it: codes, padded with zeros; for each step scale * unit and scale * (sum of
    // codes); for each chunk its start. The others leave k floats.
    [[nodiscard]] int64_t steps() const { return (k + step - 1) / step; }
    [[nodiscard]] int64_t chunks_per_step() const { return (step + chunk - 1) / chunk; }
    [[nodiscard]] int64_t scales_at() const { return (k + 63) / 64 * 64; }
    [[nodiscard]] int64_t sums_at() const { return scales_at() + steps() * 4; }
    [[nodiscard]] int64_t starts_at() const { return scales_at() + steps() * 8; }
    [[nodiscard]] int64_t row_bytes() const {
        if (format != XFormat::kInt8) return (k * 4 + 63) / 64 * 64;
        return (starts_at() + steps() * chunks_per_step() * 4 + 63) / 64 * 64;
    }
};

struct QuantizedArgs {
    QuantizedWeight weight;
    Rounding rounding;
    const std::byte* x = nullptr;  // rows of Rounding, or of floats
    int64_t x_stride = 0;          // bytes
    bool gated = false;
};

// One call of an integer product covers all inputs of a panel: its codes as bytes, where many rows use them.
[[nodiscard]] constexpr size_t unpacked_floats(int64_t k) {
    return static_cast<size_t>((k + 3) / 4 * 16);
}

struct NormArgs {
    const float* x = nullptr;
    const float* residual = nullptr;  // or null
    const float* weight = nullptr;    // [group] or null
    const float* bias = nullptr;      // [group] or null; layer norm only
    float* sum = nullptr;             // x + residual, where there is a residual
    float* y = nullptr;
    int64_t columns = 0;
    int64_t group = 0;
    float eps = 0;
};

struct RopeArgs {
    int heads = 0;
    int head_dim = 0;
    int rotary_dim = 0;
    bool interleaved = false;
    bool concat_halves = false;
};

// What the KV cache stores.
enum class CacheType : uint8_t { kF32, kBF16, kI8, kF8E4M3 };

inline constexpr int kSegmentKeys = 256;
inline constexpr int kMaxAttentionRows = 48;
// Floats between the scores of two rows: not a power of two, so that they do not meet in one set of the
// cache.
inline constexpr int64_t kScoreStride = kSegmentKeys + 16;

// One layer's attention over one sequence and one KV head. Packed row r is query token r / group and query
// head kv_head * group + r % group.
struct AttentionArgs {
    const float* q = nullptr;  // the sequence's first row
    int64_t q_stride = 0;
    float* out = nullptr;  // the sequence's first row; [T, q_heads * v_head_dim]
    int64_t out_stride = 0;
    // Instead of out, where attention rounds to bf16: rows of bf16, bf16_row_bytes apart.
    std::byte* rounded_out = nullptr;
    int64_t rounded_stride = 0;
    const std::byte* cache = nullptr;  // the layer's first block
    size_t block_bytes = 0;            // between blocks of the layer
    size_t v_offset = 0;               // values behind a block's keys
    CacheType cache_type = CacheType::kF32;
    const int32_t* block_table = nullptr;
    int start_position = 0;  // of query token 0
    int group = 0;
    int kv_head = 0;
    int head_dim = 0;
    int v_head_dim = 0;
    float scale = 1;    // of scores, that of the stored keys included
    float v_scale = 1;  // of the stored values
    float softcap = 0;
    int64_t window = 0;
    int64_t chunk = 0;
    const float* sinks = nullptr;   // [q_heads] or null
    const float* slopes = nullptr;  // [q_heads] or null
};

// A partial result of one row over one segment: maximum, sum, then the weighted values padded to 16.
[[nodiscard]] constexpr int64_t padded16(int64_t n) {
    return (n + 15) / 16 * 16;
}
[[nodiscard]] constexpr int64_t attention_partial_floats(int64_t v_head_dim) {
    return 16 + padded16(v_head_dim);
}
// Of a segment of a cache of bytes: a block's keys and all values as floats.
[[nodiscard]] constexpr int64_t attention_wide_floats(int64_t head_dim, int64_t v_head_dim, CacheType type) {
    const bool bytes = type == CacheType::kI8 || type == CacheType::kF8E4M3;
    return bytes ? 32 * head_dim + kSegmentKeys * v_head_dim : 0;
}
// Queries, scores, a running result and a partial one of each row; what is widened; values of one block.
[[nodiscard]] constexpr size_t attention_scratch_floats(int64_t head_dim, int64_t v_head_dim,
                                                        CacheType type) {
    const int64_t row = padded16(head_dim) + kScoreStride + 2 * attention_partial_floats(v_head_dim);
    return static_cast<size_t>(kMaxAttentionRows * row + attention_wide_floats(head_dim, v_head_dim, type) +
                               16 * v_head_dim + 16);
}

// What a call of a product may know of the weights around its own.
struct WeightsAhead {
    int64_t next_block = -1;  // that this thread will probably want next, or -1
    bool cold = true;         // nothing asked for this call's weights before
};

// Products of integers, apart from the rest: processors with instructions for them (VNNI) have the float
// kernels of those without.
struct IntegerKernels {
    int64_t height = 1;  // rows at once, where cuts should lie between them
    // How the product takes codes of a format.
    void (*set_sums)(Codes, Rounding&);
    // Sums of rows [row_begin, row_end) of codes times blocks [block_begin, block_end), at most
    // kMaxLinearRows and kMaxLinearBlocks: acc [panels][rows][16]. unpacked: unpacked_floats of scratch for
    // each of two panels.
    void (*product)(const QuantizedArgs&, int64_t row_begin, int64_t row_end, int64_t block_begin,
                    int64_t block_end, float* acc, std::byte* unpacked, const WeightsAhead&);
};

// Products where the processor multiplies bf16: activations are rounded to it as well.
struct Bf16Kernels {
    int64_t height = 1;  // as that of IntegerKernels
    // One row x [k] as the product takes it, bf16_row_bytes(k).
    void (*round_row)(const float* x, int64_t k, std::byte* row) = nullptr;
    // Sums as those of IntegerKernels::product.
    void (*product)(const Bf16Args&, int64_t row_begin, int64_t row_end, int64_t block_begin,
                    int64_t block_end, float* acc, const WeightsAhead&) = nullptr;
    // KernelTable::linear_output, into LinearOutput::rounded.
    void (*output)(const LinearOutput&, int64_t row_begin, int64_t row_end, int64_t block_begin,
                   int64_t block_end, float* acc) = nullptr;
};

// An odd number of cache lines: a tile's rows, that far apart, never meet in one set.
[[nodiscard]] constexpr int64_t bf16_row_bytes(int64_t k) {
    return ((k + 31) / 32 | 1) * 64;
}

// Paged attention; scratch of attention_scratch_floats.
struct AttentionKernels {
    int max_rows = 0;  // of a call, at most kMaxAttentionRows
    // Packed rows [row_begin, row_end) over all keys; writes the output.
    void (*attention)(const AttentionArgs&, int64_t row_begin, int64_t row_end, float* scratch);
    // The same rows over one segment; row r's partial goes to partials + (r - row_begin) * row_stride.
    void (*segment)(const AttentionArgs&, int64_t row_begin, int64_t row_end, int64_t segment,
                    float* partials, int64_t row_stride, float* scratch);
    // Merge a row's partials (segments in order, attention_partial_floats apart) and write its output.
    void (*merge)(const AttentionArgs&, int64_t row, const float* partials, int64_t count, float* scratch);
};

// What attention that rounds queries and weights to bf16 takes.
[[nodiscard]] constexpr bool bf16_attention_takes(const AttentionArgs& a) {
    return a.cache_type != CacheType::kF32 && a.head_dim % 32 == 0 && a.v_head_dim % 16 == 0;
}

struct KernelTable {
    IntegerKernels integers;
    Bf16Kernels bf16;  // null: bf16 weights are products of float32 (linear)
    AttentionKernels attention;
    AttentionKernels bf16_attention;  // null: none
    // Sums of a product with rows of floats, likewise; wide: kLinearWideFloats of scratch.
    void (*dequantized_product)(const QuantizedArgs&, int64_t row_begin, int64_t row_end, int64_t block_begin,
                                int64_t block_end, float* acc, float* wide);
    // The sums of such a call become outputs; acc is used up.
    void (*linear_output)(const LinearOutput&, int64_t row_begin, int64_t row_end, int64_t block_begin,
                          int64_t block_end, float* acc);
    // One row x [k] as the product takes it.
    void (*round_row)(const Rounding&, const float* x, std::byte* row);
    // Rows [row_begin, row_end) and blocks [block_begin, block_end); scratch of kLinearScratchFloats.
    void (*linear)(const LinearArgs&, int64_t row_begin, int64_t row_end, int64_t block_begin,
                   int64_t block_end, float* scratch, const WeightsAhead&);
    void (*rms_norm)(const NormArgs&);  // one row
    void (*layer_norm)(const NormArgs&);
    // One row of heads; cos and sin are the position's. x may be y. scratch: rotary_dim floats.
    void (*rope)(const RopeArgs&, const float* x, float* y, const float* cos, const float* sin,
                 float* scratch);
    void (*unary)(UnaryFn, const float* x, float* y, int64_t n);
    // Operands advance by their step, 0 or 1, per element.
    void (*binary)(BinaryFn, const float* a, int64_t a_step, const float* b, int64_t b_step, float* y,
                   int64_t n);
    void (*clip)(const float* x, float* y, int64_t n, float low, float high);
    void (*softmax)(const float* x, float* y, int64_t n);
    float (*reduce)(ReduceFn, const float* x, int64_t n);
    // One row: y[n] = a[k] · b[k, n].
    void (*matmul)(const float* a, const float* b, float* y, int64_t k, int64_t n);
    // y = x * scale over bf16 weights.
    void (*scale_bf16)(const uint16_t* x, float* y, int64_t n, float scale);
};

[[nodiscard]] const KernelTable& kernels_for(Isa isa);

namespace portable {
const KernelTable& kernel_table();
}
namespace avxvnni {
IntegerKernels integer_kernels();
}
namespace avx512vnni {
IntegerKernels integer_kernels();
}
namespace avx512bf16 {
Bf16Kernels bf16_kernels();
AttentionKernels bf16_attention();
}  // namespace avx512bf16
namespace amx {
IntegerKernels integer_kernels();
Bf16Kernels bf16_kernels();
AttentionKernels bf16_attention();
}  // namespace amx
namespace avx2 {
const KernelTable& kernel_table();
}
namespace avx512 {
const KernelTable& kernel_table();
}

}  // namespace castiron::host
