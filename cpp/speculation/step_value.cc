#include "speculation/step_value.h"

#include <algorithm>

namespace castiron {

void StepCost::observe(int rows, double seconds) {
    constexpr double kKept = 0.98;  // of the weight of what was seen before, at each step
    constexpr double kLongest = 3;  // a step that took longer than so many times the expected was disturbed
    constexpr double kDoubt = 4;    // weight of the first guess, in steps one row away from the mean
    constexpr double kCheapest = 0.01;  // a row, in steps of the mean size
    if (rows < 1 || !(seconds > 0)) return;
    if (weight_ > 1) seconds = std::min(seconds, kLongest * this->seconds(rows));
    weight_ = weight_ * kKept + 1;
    rows_ = rows_ * kKept + rows;
    seconds_ = seconds_ * kKept + seconds;
    rows_squared_ = rows_squared_ * kKept + static_cast<double>(rows) * rows;
    rows_seconds_ = rows_seconds_ * kKept + rows * seconds;
    const double mean_rows = rows_ / weight_;
    const double mean_seconds = seconds_ / weight_;
    const double variance = std::max(0.0, rows_squared_ / weight_ - mean_rows * mean_rows);
    const double covariance = rows_seconds_ / weight_ - mean_rows * mean_seconds;
    const double guess = kFirstGuess * mean_seconds / (1 + kFirstGuess * (mean_rows - 1));
    const double doubt = kDoubt / weight_;
    const double slope = (covariance + doubt * guess) / (variance + doubt);
    per_row_ = std::clamp(slope, kCheapest * mean_seconds / mean_rows, mean_seconds / mean_rows);
    base_ = mean_seconds - per_row_ * mean_rows;
}

}  // namespace castiron
