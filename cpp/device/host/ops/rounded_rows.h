// Rows of activations as a product takes them, written before it: into memory that all threads share, in a
// phase of its own, or, of few rows, by every thread for itself, which costs less than meeting.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "device/host/op.h"

namespace castiron::host {

class RoundedRows {
public:
    RoundedRows() = default;
    // Of row_bytes each, a multiple of 64; max_rows: at the program's limits.
    RoundedRows(int64_t row_bytes, int64_t max_rows) : row_bytes_(row_bytes), max_rows_(max_rows) {}

    [[nodiscard]] int64_t row_bytes() const { return row_bytes_; }
    [[nodiscard]] size_t scratch_floats() const { return row_floats() * kOwnRows; }
    [[nodiscard]] size_t workspace_floats() const {
        return max_rows_ > kOwnRows ? row_floats() * static_cast<size_t>(max_rows_) : 0;
    }
    [[nodiscard]] static int phases(int64_t rows) { return rows > kOwnRows ? 2 : 1; }

    // So many rows every thread writes for itself.
    static constexpr int64_t kOwnRows = 8;

    // Calls write(row, to) for what this thread has to write in this phase; shared: workspace_floats() of all
    // threads, own: scratch_floats() of this one. The first row, or null where the product has to wait for
    // the next phase.
    template <typename F>
    [[nodiscard]] const std::byte* take(float* shared, const Lane& lane, int64_t rows, int phase, float* own,
                                        F write) const {
        const bool alone = rows <= kOwnRows;
        auto* at = reinterpret_cast<std::byte*>(alone ? own : shared);
        if (alone || phase == 0) {
            const auto [begin, end] = alone ? std::pair{int64_t{0}, rows} : lane.share(rows);
            for (int64_t row = begin; row < end; ++row) write(row, at + row * row_bytes_);
        }
        return alone || phase == 1 ? at : nullptr;
    }

private:
    [[nodiscard]] size_t row_floats() const { return static_cast<size_t>(row_bytes_) / sizeof(float); }

    int64_t row_bytes_ = 0, max_rows_ = 0;
};

}  // namespace castiron::host
