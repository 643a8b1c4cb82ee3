#include "image.h"

#include <elf.h>

#include <algorithm>
#include <cstring>

namespace vcuda {
namespace {

constexpr uint16_t kMachineCuda = 190;
// A block's first KiB of shared memory belongs to the driver from sm_80 on; cubins of ABI 8 count it in.
constexpr uint32_t kReservedShared = 1024;

// Attributes of .nv.info sections, as cuobjdump -elf names them.
enum : uint8_t {
    kParamCbank = 0x0a,
    kReqntid = 0x10,
    kMaxThreads = 0x05,
    kKparamInfo = 0x17,
    kCbankParamSize = 0x19,
    kRegcount = 0x2f,
};

template <class T>
T read(const uint8_t* at) {
    T value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

// Calls visit(attribute, payload, size) for each entry. Format 4 carries a payload, the others a number.
template <class Visit>
void each_attribute(const uint8_t* data, size_t size, Visit visit) {
    for (size_t at = 0; at + 4 <= size;) {
        const uint8_t format = data[at];
        const uint8_t attribute = data[at + 1];
        const auto value = read<uint16_t>(data + at + 2);
        const size_t payload = format == 4 ? value : 0;
        if (at + 4 + payload > size) return;
        visit(attribute, format == 4 ? data + at + 4 : data + at + 2, format == 4 ? payload : size_t{2});
        at += 4 + payload;
    }
}

struct Param {
    uint16_t ordinal;
    uint16_t offset;
    uint32_t size;
};

void read_kernel_info(const uint8_t* data, size_t size, KernelInfo& kernel) {
    std::vector<Param> params;
    each_attribute(data, size, [&](uint8_t attribute, const uint8_t* payload, size_t bytes) {
        if (attribute == kKparamInfo && bytes >= 12) {
            params.push_back({read<uint16_t>(payload + 4), read<uint16_t>(payload + 6),
                              read<uint32_t>(payload + 8) >> 18});
        } else if (attribute == kCbankParamSize) {
            kernel.param_bytes = read<uint16_t>(payload);
        } else if (attribute == kReqntid && bytes >= 12) {
            std::memcpy(kernel.required_block, payload, 12);
        } else if (attribute == kMaxThreads && bytes >= 12) {
            kernel.max_threads =
                read<uint32_t>(payload) * read<uint32_t>(payload + 4) * read<uint32_t>(payload + 8);
        }
    });
    std::sort(params.begin(), params.end(),
              [](const Param& a, const Param& b) { return a.ordinal < b.ordinal; });
    for (const Param& param : params) {
        kernel.param_offsets.push_back(param.offset);
        kernel.param_sizes.push_back(param.size);
    }
}

}  // namespace

uint64_t hash_bytes(const uint8_t* data, size_t size) {
    uint64_t hash = 0xcbf29ce484222325ull;
    for (size_t i = 0; i < size; ++i) hash = (hash ^ data[i]) * 0x100000001b3ull;
    return hash;
}

CUresult parse_cubin(const uint8_t* data, Image& image, std::string& why) {
    const auto header = read<Elf64_Ehdr>(data);
    if (header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_machine != kMachineCuda) {
        why = "an ELF file that is not a 64-bit cubin";
        return CUDA_ERROR_INVALID_IMAGE;
    }
    // Where the architecture stands depends on the ABI version: bits 0-7 up to 7, bits 8-15 from 8 on.
    const int abi = header.e_ident[EI_ABIVERSION];
    image.compute_capability =
        static_cast<int>(abi >= 8 ? header.e_flags >> 8 & 0xff : header.e_flags & 0xff);
    image.exact = abi < 8 && (header.e_flags & 0x800) != 0;
    // ABI 8 came with the 13.x compilers; a cubin of one CUDA major loads on every driver of that major.
    image.driver_needed = abi >= 8 ? 13000 : 12000;

    size_t end = header.e_shoff + size_t{header.e_shnum} * header.e_shentsize;
    end = std::max<size_t>(end, header.e_phoff + size_t{header.e_phnum} * header.e_phentsize);
    std::vector<Elf64_Shdr> sections;
    for (int i = 0; i < header.e_shnum; ++i) {
        sections.push_back(read<Elf64_Shdr>(data + header.e_shoff + size_t(i) * header.e_shentsize));
        if (sections.back().sh_type != SHT_NOBITS)
            end = std::max<size_t>(end, sections.back().sh_offset + sections.back().sh_size);
    }
    image.hash = hash_bytes(data, end);

    const char* names = reinterpret_cast<const char*>(data + sections.at(header.e_shstrndx).sh_offset);
    auto named = [&](const std::string& name) -> const Elf64_Shdr* {
        for (const auto& section : sections)
            if (name == names + section.sh_name) return &section;
        return nullptr;
    };
    const Elf64_Shdr* symbols = named(".symtab");
    const Elf64_Shdr* strings = named(".strtab");
    const Elf64_Shdr* compat = named(".nv.compat");
    if (compat != nullptr) {
        each_attribute(data + compat->sh_offset, compat->sh_size,
                       [&](uint8_t attribute, const uint8_t* payload, size_t) {
                           if (attribute == 9) image.exact = payload[0] == 1;
                       });
    }
    for (const auto& section : sections) {
        const std::string name = names + section.sh_name;
        if (name.rfind(".nv.info.", 0) != 0) continue;
        KernelInfo kernel;
        kernel.name = name.substr(9);
        read_kernel_info(data + section.sh_offset, section.sh_size, kernel);
        if (const Elf64_Shdr* shared = named(".nv.shared." + kernel.name)) {
            kernel.static_shared = static_cast<uint32_t>(shared->sh_size);
            if (abi >= 8 && named(".nv.shared.reserved.0") != nullptr &&
                kernel.static_shared >= kReservedShared)
                kernel.static_shared -= kReservedShared;
        }
        const Elf64_Shdr* info = named(".nv.info");
        if (info != nullptr && symbols != nullptr && strings != nullptr) {
            each_attribute(data + info->sh_offset, info->sh_size,
                           [&](uint8_t attribute, const uint8_t* payload, size_t n) {
                               if (attribute != kRegcount || n < 8) return;
                               const auto index = read<uint32_t>(payload);
                               const auto symbol =
                                   read<Elf64_Sym>(data + symbols->sh_offset + index * sizeof(Elf64_Sym));
                               const char* owner =
                                   reinterpret_cast<const char*>(data + strings->sh_offset) + symbol.st_name;
                               if (kernel.name == owner) kernel.registers = read<uint32_t>(payload + 4);
                           });
        }
        image.kernels.push_back(std::move(kernel));
    }
    return CUDA_SUCCESS;
}

CUresult parse_image(const void* data, Image& image, std::string& why) {
    if (data == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const auto* bytes = static_cast<const uint8_t*>(data);
    if (std::memcmp(bytes, ELFMAG, SELFMAG) == 0) return parse_cubin(bytes, image, why);
    const char* text = static_cast<const char*>(data);
    if (std::strstr(text, ".version") != nullptr && std::strstr(text, ".target") != nullptr)
        return parse_ptx(text, image, why);
    why = "neither a cubin nor PTX";
    return CUDA_ERROR_INVALID_IMAGE;
}

}  // namespace vcuda
