// Masks of consecutive tokens of a request.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace castiron {

// Bit t % 32 of word t / 32 of a row: token t may come. Row i is for the token behind i drafts.
struct MaskRows {
    std::span<const uint32_t> words;
    size_t count = 0;

    [[nodiscard]] std::span<const uint32_t> row(size_t i) const {
        if (count == 0) return {};
        const size_t width = words.size() / count;
        return words.subspan(i * width, width);
    }
};

}  // namespace castiron
