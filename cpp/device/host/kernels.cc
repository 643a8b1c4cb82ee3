#include "device/host/kernels/table.h"

namespace castiron::host {
namespace {

KernelTable with(KernelTable table, IntegerKernels integers) {
    table.integers = integers;
    return table;
}

KernelTable with(KernelTable table, Bf16Kernels bf16, AttentionKernels attention) {
    table.bf16 = bf16;
    table.bf16_attention = attention;
    return table;
}

}  // namespace

const KernelTable& kernels_for(Isa isa) {
    static const KernelTable avx2_vnni = with(avx2::kernel_table(), avxvnni::integer_kernels());
    static const KernelTable avx512_vnni = with(avx512::kernel_table(), avx512vnni::integer_kernels());
    static const KernelTable avx512_bf16 =
        with(avx512_vnni, avx512bf16::bf16_kernels(), avx512bf16::bf16_attention());
    static const KernelTable amx_units = with(with(avx512::kernel_table(), amx::integer_kernels()),
                                              amx::bf16_kernels(), amx::bf16_attention());
    switch (isa) {
        case Isa::kAmx:
            return amx_units;
        case Isa::kAvx512Bf16:
            return avx512_bf16;
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
