// The products of integers for avx2 with VNNI; everything else is that of avx2. Compiled with its own -m
// flags (CMakeLists.txt), in a namespace of its own.
#include <immintrin.h>

#include <type_traits>

#include "device/host/kernels/table.h"

namespace castiron::host::avxvnni {

// Each builds on those before it.
// clang-format off
#include "device/host/simd/avx2.h"
#include "device/host/simd/dot_avx2.h"
#include "device/host/kernels/unrolled.inl"
#include "device/host/kernels/codes.inl"
#include "device/host/kernels/integer_product.inl"
// clang-format on

IntegerKernels integer_kernels() {
    return {.set_sums = set_sums, .product = integer_product};
}

}  // namespace castiron::host::avxvnni
