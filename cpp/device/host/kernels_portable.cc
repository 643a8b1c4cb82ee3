// The kernels for portable. Compiled with its own -m flags (CMakeLists.txt): everything here, and everything
// it includes, lives in this namespace, so that no function built for it can be linked into the rest.
#include <immintrin.h>
#include <math.h>

#include <type_traits>

#include "device/host/kernels/table.h"

#define CASTIRON_TILE_ROWS 12
// An oracle need not be fast, and its unrolled tiles would be 2 MB of code and most of a minute of compiling.
#define CASTIRON_KEEP_LOOPS

namespace castiron::host::portable {

// The vector types, then what is built on them.
// clang-format off
#include "device/host/simd/portable.h"
#include "device/host/simd/dot_portable.h"
#include "device/host/kernels/kernels.inl"
// clang-format on

}  // namespace castiron::host::portable
