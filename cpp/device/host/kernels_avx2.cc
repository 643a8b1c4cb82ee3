// The kernels for avx2. Compiled with its own -m flags (CMakeLists.txt): everything here, and everything it
// includes, lives in this namespace, so that no function built for it can be linked into the rest.
#include <immintrin.h>
#include <math.h>

#include <type_traits>

#include "device/host/kernels/table.h"

#define CASTIRON_TILE_ROWS 6

namespace castiron::host::avx2 {

// The vector types, then what is built on them.
// clang-format off
#include "device/host/simd/avx2.h"
#include "device/host/simd/dot_avx2.h"
#include "device/host/kernels/kernels.inl"
// clang-format on

}  // namespace castiron::host::avx2
