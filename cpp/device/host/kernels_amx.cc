// Products by the matrix unit (AMX), those of attention as well; everything else is that of avx512 with VNNI.
// Compiled with its own -m flags (CMakeLists.txt), in a namespace of its own.
#include <immintrin.h>

#include <type_traits>

#include "device/host/kernels/table.h"

namespace castiron::host::amx {

// Each builds on those before it.
// clang-format off
#include "device/host/simd/avx512.h"
#include "device/host/simd/dot_avx512.h"
#include "device/host/kernels/unrolled.inl"
#include "device/host/kernels/math.inl"
#include "device/host/kernels/codes.inl"
#include "device/host/kernels/integer_product.inl"
#include "device/host/kernels/tiles.inl"
#include "device/host/kernels/linear_output.inl"
#include "device/host/kernels/bf16_rows.inl"
#include "device/host/kernels/bf16_tiles.inl"
#include "device/host/kernels/integer_tiles.inl"
#include "device/host/kernels/attention_cache.inl"
#include "device/host/kernels/attention.inl"
#include "device/host/kernels/attention_bf16.inl"
#include "device/host/kernels/attention_tiles.inl"
// clang-format on

IntegerKernels integer_kernels() {
    return {.height = 2 * kTileHeight, .set_sums = set_sums, .product = tiled_integer_product};
}

Bf16Kernels bf16_kernels() {
    return {.height = 2 * kTileHeight,
            .round_row = round_bf16_row,
            .product = bf16_product,
            .output = linear_output<Bf16Rows>};
}

AttentionKernels bf16_attention() {
    return attention_kernels<TileProducts>;
}

}  // namespace castiron::host::amx
