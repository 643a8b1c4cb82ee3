#include <cctype>
#include <cstdlib>
#include <cstring>
#include <map>

#include "image.h"

namespace vcuda {
namespace {

// The first driver that reads a PTX ISA version ("PTX ISA release history" of the PTX documentation).
int driver_for_isa(int isa) {
    static const std::map<int, int> kDrivers = {
        {70, 11000}, {71, 11010}, {72, 11020}, {73, 11030}, {74, 11040}, {75, 11050},
        {76, 11060}, {77, 11070}, {78, 11080}, {80, 12000}, {81, 12010}, {82, 12020},
        {83, 12030}, {84, 12040}, {85, 12050}, {86, 12070}, {87, 12080}, {88, 12090},
        {90, 13000}, {91, 13010}, {92, 13020}, {93, 13030}, {94, 13040},
    };
    auto found = kDrivers.lower_bound(isa);
    return found == kDrivers.end() ? 99000 : found->second;
}

uint32_t type_bytes(const std::string& type) {
    return type.size() < 2 ? 0 : static_cast<uint32_t>(std::atoi(type.c_str() + 2)) / 8;
}

std::string word_after(const char* text, const char* key) {
    const char* at = std::strstr(text, key);
    if (at == nullptr) return {};
    at += std::strlen(key);
    while (std::isspace(static_cast<unsigned char>(*at))) ++at;
    const char* end = at;
    while (*end != 0 &&
           (std::isalnum(static_cast<unsigned char>(*end)) || *end == '_' || *end == '.' || *end == '$'))
        ++end;
    return {at, end};
}

// ".param .u64 .ptr .global .align 1 name" or ".param .align 8 .b8 name[24]"
void read_param(const std::string& text, KernelInfo& kernel) {
    uint32_t size = 0;
    uint32_t alignment = 0;
    for (size_t at = text.find('.'); at != std::string::npos; at = text.find('.', at + 1)) {
        const std::string word = word_after(text.c_str() + at, "");
        if (word == ".align") alignment = static_cast<uint32_t>(std::atoi(text.c_str() + at + 6));
        if (word.size() >= 3 && word.size() <= 4 && std::strchr("usfb", word[1]) != nullptr &&
            std::isdigit(static_cast<unsigned char>(word[2])))
            size = type_bytes(word);
    }
    if (size == 0) return;
    const size_t bracket = text.find('[');
    uint32_t unit = size;
    if (bracket != std::string::npos) {
        size *= static_cast<uint32_t>(std::atoi(text.c_str() + bracket + 1));
        unit = alignment == 0 ? unit : alignment;
    }
    const uint32_t offset = (kernel.param_bytes + unit - 1) / unit * unit;
    kernel.param_offsets.push_back(offset);
    kernel.param_sizes.push_back(size);
    kernel.param_bytes = offset + size;
}

void read_entry(const char* at, KernelInfo& kernel) {
    kernel.name = word_after(at, ".entry");
    const char* open = std::strchr(at, '(');
    const char* body = std::strchr(at, '{');
    if (open != nullptr && (body == nullptr || open < body)) {
        const char* close = std::strchr(open, ')');
        std::string params(open + 1, close == nullptr ? open + 1 : close);
        for (size_t begin = 0; begin < params.size();) {
            size_t end = params.find(',', begin);
            if (end == std::string::npos) end = params.size();
            read_param(params.substr(begin, end - begin), kernel);
            begin = end + 1;
        }
        at = close;
    }
    if (at == nullptr || body == nullptr) return;
    const std::string directives(at, body);
    for (const char* key : {".reqntid", ".maxntid"}) {
        const char* found = std::strstr(directives.c_str(), key);
        if (found == nullptr) continue;
        uint32_t block[3] = {1, 1, 1};
        std::sscanf(found + 8, " %u , %u , %u", &block[0], &block[1], &block[2]);
        kernel.max_threads = block[0] * block[1] * block[2];
        if (key[1] == 'r') std::memcpy(kernel.required_block, block, sizeof block);
    }
}

}  // namespace

CUresult parse_ptx(const char* text, Image& image, std::string& why) {
    image.ptx = true;
    image.hash = hash_bytes(reinterpret_cast<const uint8_t*>(text), std::strlen(text));
    const std::string version = word_after(text, ".version");
    const std::string target = word_after(text, ".target");
    int major = 0;
    int minor = 0;
    if (std::sscanf(version.c_str(), "%d.%d", &major, &minor) != 2 || target.rfind("sm_", 0) != 0) {
        why = "PTX without .version and .target";
        return CUDA_ERROR_INVALID_PTX;
    }
    image.driver_needed = driver_for_isa(10 * major + minor);
    image.compute_capability = std::atoi(target.c_str() + 3);
    image.exact = std::isalpha(static_cast<unsigned char>(target.back())) != 0;
    for (const char* at = std::strstr(text, ".entry"); at != nullptr; at = std::strstr(at + 6, ".entry")) {
        KernelInfo kernel;
        read_entry(at, kernel);
        image.kernels.push_back(std::move(kernel));
    }
    if (image.kernels.empty()) {
        why = "PTX without an .entry";
        return CUDA_ERROR_INVALID_PTX;
    }
    return CUDA_SUCCESS;
}

}  // namespace vcuda
