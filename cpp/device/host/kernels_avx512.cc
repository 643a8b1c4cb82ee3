// The kernels for avx512. Compiled with its own -m flags (CMakeLists.txt): everything here, and everything it
// includes, lives in this namespace, so that no function built for it can be linked into the rest.
#include <immintrin.h>
#include <math.h>

#include <type_traits>

#include "device/host/kernels/table.h"

#define CASTIRON_TILE_ROWS 12

namespace castiron::host::avx512 {

// The vector types, then what is built on them.
// clang-format off
#include "device/host/simd/avx512.h"
#include "device/host/simd/dot_avx512.h"
#include "device/host/kernels/kernels.inl"
// clang-format on

}  // namespace castiron::host::avx512
