#include "device/host/kernels/table.h"

namespace castiron::host {

const KernelTable& kernels_for(Isa isa) {
    switch (isa) {
        case Isa::kAvx512:
            return avx512::kernel_table();
        case Isa::kAvx2:
            return avx2::kernel_table();
        case Isa::kPortable:
            break;
    }
    return portable::kernel_table();
}

}  // namespace castiron::host
