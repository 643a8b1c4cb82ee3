// The kernels for portable. Compiled with its own -m flags (CMakeLists.txt): everything here, and everything
// it includes, lives in this namespace, so that no function built for it can be linked into the rest.
#include <immintrin.h>
#include <math.h>

#include "device/host/kernels/table.h"

#define CASTIRON_TILE_ROWS 12

namespace castiron::host::portable {

#include "device/host/simd/portable.h"

static_assert(kTileRows == CASTIRON_TILE_ROWS);

// Each builds on those before it.
// clang-format off
#include "device/host/kernels/math.inl"
#include "device/host/kernels/linear.inl"
#include "device/host/kernels/rows.inl"
#include "device/host/kernels/attention.inl"
// clang-format on

const KernelTable& kernel_table() {
    static constexpr KernelTable table = {
        .linear = linear,
        .attention = attention,
        .attention_segment = attention_segment,
        .attention_merge = attention_merge,
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

}  // namespace castiron::host::portable
