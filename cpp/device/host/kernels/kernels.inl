// All kernels of one instruction set and their table. Included once by each kernels_<isa>.cc, inside the
// ISA's namespace and behind its vector type: no guard, no system headers.

static_assert(kTileRows == CASTIRON_TILE_ROWS);

// Each builds on those before it.
// clang-format off
#include "device/host/kernels/unrolled.inl"
#include "device/host/kernels/math.inl"
#include "device/host/kernels/codes.inl"
#include "device/host/kernels/linear_product.inl"
#include "device/host/kernels/linear_output.inl"
#include "device/host/kernels/linear.inl"
#include "device/host/kernels/rows.inl"
#include "device/host/kernels/rounding.inl"
#include "device/host/kernels/dequantized_product.inl"
#include "device/host/kernels/integer_product.inl"
#include "device/host/kernels/attention_cache.inl"
#include "device/host/kernels/attention_products.inl"
#include "device/host/kernels/attention.inl"
#include "device/host/kernels/attention_float.inl"
// clang-format on

const KernelTable& kernel_table() {
    static constexpr KernelTable table = {
        .integers = {.set_sums = set_sums, .product = integer_product},
        .bf16 = {},
        .attention = attention_kernels<FloatProducts>,
        .bf16_attention = {},
        .dequantized_product = dequantized_product,
        .linear_output = linear_output<FloatRows>,
        .round_row = round_row,
        .linear = linear,
        .rms_norm = rms_norm,
        .layer_norm = layer_norm,
        .rope = rope,
        .unary = unary,
        .binary = binary,
        .clip = clip,
        .softmax = softmax,
        .reduce = reduce,
        .matmul = matmul,
        .scale_bf16 = scale_bf16,
    };
    return table;
}
