// Bytes of numbers of each type, and of weights in each layout (engines/program.py).
#pragma once

#include <cstdint>

#include "program/program.h"

namespace castiron {

// Of an activation or of the cache; a weight's code of four bits counts as a byte.
[[nodiscard]] constexpr uint64_t item_bytes(DType dtype) {
    switch (dtype) {
        case DType::kF32:
        case DType::kI32:
            return 4;
        case DType::kBF16:
        case DType::kF16:
            return 2;
        case DType::kI8:
        case DType::kU8:
        case DType::kF8E4M3:
        case DType::kI4:
        case DType::kF4E2M1:
            return 1;
    }
    return 1;
}

// Bytes of a weight in its layout, before padding to 64. Layouts but the plain one hold matrices.
[[nodiscard]] inline uint64_t stored_bytes(const Weight& weight) {
    const auto up = [](int64_t size, int64_t unit) {
        return static_cast<uint64_t>((size + unit - 1) / unit);
    };
    const uint64_t item = item_bytes(weight.dtype);
    if (weight.layout == Layout::kPlain) {
        uint64_t bytes = item;
        for (const int64_t size : weight.shape) bytes *= static_cast<uint64_t>(size);
        return bytes;
    }
    const int64_t rows = weight.shape[0], inputs = weight.shape[1];
    const uint64_t panels = up(rows, 16);
    switch (weight.layout) {
        case Layout::kWords:
            return static_cast<uint64_t>(rows) *
                   (weight.dtype == DType::kI4 ? up(inputs, 32) * 16 : up(inputs, 16) * 8);
        case Layout::kPanel16x2:
            return panels * up(inputs, 2) * 32 * item;
        case Layout::kPanel16x4:
            return panels * up(inputs, 4) * 64;
        case Layout::kPanel16x4n:
            return panels * up(inputs, 4) * 32;
        default:
            return panels * static_cast<uint64_t>(inputs) * 16 * item;
    }
}

}  // namespace castiron
