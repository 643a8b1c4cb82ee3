// Products of bf16 for avx512 with instructions for them; everything else is that of avx512 with VNNI.
// Compiled with its own -m flags (CMakeLists.txt), in a namespace of its own.
#include <immintrin.h>

#include <type_traits>

#include "device/host/kernels/table.h"

namespace castiron::host::avx512bf16 {

// Each builds on those before it.
// clang-format off
#include "device/host/simd/avx512.h"
#include "device/host/kernels/unrolled.inl"
#include "device/host/kernels/math.inl"
#include "device/host/kernels/codes.inl"
#include "device/host/kernels/linear_product.inl"
#include "device/host/kernels/linear_output.inl"
#include "device/host/kernels/bf16_rows.inl"
#include "device/host/kernels/bf16_dots.inl"
#include "device/host/kernels/attention_cache.inl"
#include "device/host/kernels/attention_products.inl"
#include "device/host/kernels/attention.inl"
#include "device/host/kernels/attention_bf16.inl"
#include "device/host/kernels/attention_dots.inl"
// clang-format on

Bf16Kernels bf16_kernels() {
    return {.round_row = round_bf16_row, .product = bf16_product, .output = linear_output<Bf16Rows>};
}

AttentionKernels bf16_attention() {
    return attention_kernels<DotProducts>;
}

}  // namespace castiron::host::avx512bf16
