#include "device/host/kernels/table.h"

namespace castiron::host {
namespace {

KernelTable with(KernelTable table, IntegerKernels integers) {
    table.integers = integers;
    return table;
}

KernelTable with_tiles(KernelTable table) {
    table.integers = amx::integer_kernels();
    table.bf16 = amx::bf16_kernels();
    table.attention = amx::tiled_attention();
    return table;
}

}  // namespace

const KernelTable& kernels_for(Isa isa) {
    static const KernelTable avx2_vnni = with(avx2::kernel_table(), avxvnni::integer_kernels());
    static const KernelTable avx512_vnni = with(avx512::kernel_table(), avx512vnni::integer_kernels());
    static const KernelTable amx_units = with_tiles(avx512::kernel_table());
    switch (isa) {
        case Isa::kAmx:
            return amx_units;
        case Isa::kAvx512Vnni:
            return avx512_vnni;
        case Isa::kAvx512:
            return avx512::kernel_table();
        case Isa::kAvxVnni:
            return avx2_vnni;
        case Isa::kAvx2:
            return avx2::kernel_table();
        case Isa::kPortable:
            break;
    }
    return portable::kernel_table();
}

}  // namespace castiron::host
