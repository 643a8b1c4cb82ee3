// top_k, gather_elements and mark_places: what routers of mixtures pick.
#include <algorithm>
#include <string>

#include "device/host/ops/ops.h"

namespace castiron::host {
namespace {

// The sizes in front of the last axis.
std::vector<Dim> outer(const Operand& o) {
    return {o.shape.begin(), o.shape.end() - 1};
}

// Checks that places lie along the last axis of rows.
void check_places(StepChecker& step, const Operand& places, const Operand& rows) {
    step.check(places, DType::kI32, places.shape);
    step.check(rows, DType::kF32, rows.shape);
    if (outer(rows) != outer(places)) step.fail("values and places have different rows");
    if (places.shape.back().value < 1 || rows.shape.back().value < 1) {
        step.fail("rows must be of fixed sizes");
    }
}

// The k largest of each row and their places, in descending order; of equal ones the first. NaN is below all.
class TopK final : public Op {
public:
    explicit TopK(StepChecker& step) {
        step.expect(1, 0, 2);
        x_ = step.input(0);
        values_ = step.output(0);
        places_ = step.output(1);
        step.check(x_, DType::kF32, x_.shape);
        std::vector<Dim> picked = outer(x_);
        picked.push_back(values_.shape.back());
        step.check(values_, DType::kF32, picked);
        step.check(places_, DType::kI32, picked);
        width_ = x_.shape.back().value;
        count_ = picked.back().value;
        if (count_ < 1 || count_ > width_) {
            step.fail("picks " + std::to_string(count_) + " of " + std::to_string(width_));
        }
        step.finish();
    }

    void run(const StepContext& context, const Lane& lane, int) const override {
        const auto [begin, end] = lane.share(context.elements(values_) / count_);
        for (int64_t row = begin; row < end; ++row) {
            pick(context.f32(x_) + row * width_, context.f32(values_) + row * count_,
                 context.i32(places_) + row * count_);
        }
    }

private:
    void pick(const float* x, float* values, int32_t* places) const {
        int64_t held = 0;
        for (int64_t i = 0; i < width_; ++i) {
            int64_t at = std::min(held, count_ - 1);
            if (held == count_ && !above(x[i], values[at])) continue;
            for (; at > 0 && above(x[i], values[at - 1]); --at) {
                values[at] = values[at - 1];
                places[at] = places[at - 1];
            }
            values[at] = x[i];
            places[at] = static_cast<int32_t>(i);
            held = std::min(held + 1, count_);
        }
    }
    [[nodiscard]] static bool above(float a, float b) { return a > b || (b != b && a == a); }

    Operand x_, values_, places_;
    int64_t width_ = 0, count_ = 0;
};

// y[.., j] = x[.., places[.., j]].
class GatherElements final : public Op {
public:
    explicit GatherElements(StepChecker& step) {
        step.expect(2, 0, 1);
        x_ = step.input(0);
        places_ = step.input(1);
        y_ = step.output(0);
        check_places(step, places_, x_);
        step.check(y_, DType::kF32, places_.shape);
        width_ = x_.shape.back().value;
        count_ = places_.shape.back().value;
        step.finish();
    }

    void run(const StepContext& context, const Lane& lane, int) const override {
        const auto [begin, end] = lane.share(context.elements(places_), 16);
        for (int64_t i = begin; i < end; ++i) {
            const int64_t place = context.i32(places_)[i];
            const bool valid = place >= 0 && place < width_;
            if (!valid) context.report("gather_elements: an index is out of range");
            context.f32(y_)[i] = valid ? context.f32(x_)[i / count_ * width_ + place] : 0.0f;
        }
    }

private:
    Operand x_, places_, y_;
    int64_t width_ = 0, count_ = 0;
};

// y[.., places[.., j]] = 1, elsewhere 0.
class MarkPlaces final : public Op {
public:
    explicit MarkPlaces(StepChecker& step) {
        step.expect(1, 0, 1);
        places_ = step.input(0);
        y_ = step.output(0);
        check_places(step, places_, y_);
        width_ = y_.shape.back().value;
        count_ = places_.shape.back().value;
        step.finish();
    }

    void run(const StepContext& context, const Lane& lane, int) const override {
        const auto [begin, end] = lane.share(context.elements(y_) / width_);
        for (int64_t row = begin; row < end; ++row) {
            float* marks = context.f32(y_) + row * width_;
            std::fill_n(marks, width_, 0.0f);
            for (int64_t i = 0; i < count_; ++i) {
                const int64_t place = context.i32(places_)[row * count_ + i];
                if (place < 0 || place >= width_) {
                    context.report("mark_places: an index is out of range");
                } else {
                    marks[place] = 1;
                }
            }
        }
    }

private:
    Operand places_, y_;
    int64_t width_ = 0, count_ = 0;
};

}  // namespace

std::unique_ptr<Op> make_top_k(StepChecker& step) {
    return std::make_unique<TopK>(step);
}
std::unique_ptr<Op> make_gather_elements(StepChecker& step) {
    return std::make_unique<GatherElements>(step);
}
std::unique_ptr<Op> make_mark_places(StepChecker& step) {
    return std::make_unique<MarkPlaces>(step);
}

}  // namespace castiron::host
