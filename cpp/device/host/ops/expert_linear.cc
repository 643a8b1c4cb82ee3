// expert_linear, expert_gated_linear and their quantized forms: products whose weight each row picks.
#include <algorithm>
#include <cstring>
#include <optional>

#include "device/host/ops/ops.h"
#include "device/host/ops/products.h"

namespace castiron::host {
namespace {

// Pairs of a token and one of its experts in the order of experts: the rows of expert e are the pairs
// order[starts[e]] to order[starts[e + 1]].
struct ExpertOrder {
    int32_t* starts = nullptr;  // [experts + 1]
    int32_t* order = nullptr;   // [pairs]

    // Stable, so that results do not depend on it. False, and no rows, where an id names no expert.
    [[nodiscard]] bool sort(const int32_t* ids, int64_t pairs, int64_t experts) const {
        std::fill_n(starts, experts + 1, 0);
        for (int64_t pair = 0; pair < pairs; ++pair) {
            if (ids[pair] < 0 || ids[pair] >= experts) {
                std::fill_n(starts, experts + 1, 0);
                std::fill_n(order, pairs, 0);
                return false;
            }
            ++starts[ids[pair] + 1];
        }
        for (int64_t e = 0; e < experts; ++e) starts[e + 1] += starts[e];
        for (int64_t pair = 0; pair < pairs; ++pair) order[starts[ids[pair]]++] = static_cast<int32_t>(pair);
        // Every start has become the next one.
        for (int64_t e = experts; e > 0; --e) starts[e] = starts[e - 1];
        starts[0] = 0;
        return true;
    }
};

// y[t, j] = x[t, j] · w[ids[t, j]]ᵀ. Pairs are sorted by expert, their rows prepared side by side, and each
// expert's rows multiply as those of a linear op; outputs go to the places of their pairs. Of many pairs the
// first two are phases that serve all threads, of few every thread does them for itself.
template <typename Product>
class ExpertLinear final : public Op {
public:
    ExpertLinear(StepChecker& step, bool gated) {
        const bool has_bias = step.flag("has_bias");
        const size_t weights = Product::weight_count(step);
        step.expect(2, weights + size_t{has_bias}, 1);
        x_ = step.input(0);
        ids_ = step.input(1);
        y_ = step.output(0);
        step.check(ids_, DType::kI32, ids_.shape);
        if (ids_.shape.size() != 2 || ids_.shape[1].value < 1) step.fail("expert ids must be [T, k]");
        picks_ = ids_.shape[1].value;
        const size_t rank = x_.shape.size();
        if (rank != 2 && rank != 3) step.fail("input must be [T, K] or [T, k, K]");
        sizes_.k = x_.shape.back().value;
        sizes_.n = y_.shape.back().value;
        if (sizes_.k < 1 || sizes_.n < 1) step.fail("inputs and outputs must be of fixed sizes");
        const Dim tokens = ids_.shape[0], picks = ids_.shape[1];
        step.check(x_, DType::kF32,
                   rank == 2 ? std::vector<Dim>{tokens, Dim{sizes_.k}}
                             : std::vector<Dim>{tokens, picks, Dim{sizes_.k}});
        step.check(y_, DType::kF32, {tokens, picks, Dim{sizes_.n}});
        shared_rows_ = rank == 2;
        sizes_.gated = gated;
        sizes_.experts = step.integer("experts", 1, int64_t{1} << 20);
        product_.emplace(step, sizes_);
        output_.n = sizes_.n;
        output_.gated = gated;
        if (has_bias) output_.bias = step.vector_weight(weights, {sizes_.bias_size()});
        output_.activation = read_activation(step);
        step.finish();
        const Limits& limits = step.program().limits;
        max_pairs_ = tokens.bind(limits.max_num_tokens, limits.max_logit_rows) * picks_;
        rows_ = RoundedRows(product_->row_bytes(), max_pairs_);
    }

    [[nodiscard]] size_t scratch_floats() const override {
        return product_->scratch_floats() + rows_.scratch_floats() + order_floats(RoundedRows::kOwnRows) +
               product_->prepare_floats();
    }
    [[nodiscard]] size_t workspace_floats(int) const override {
        return order_floats(max_pairs_) + rows_.workspace_floats();
    }
    [[nodiscard]] int phases(const StepContext& context, int) const override { return few(context) ? 1 : 3; }

    void run(const StepContext& context, const Lane& lane, int phase) const override {
        const int64_t pairs = context.elements(ids_);
        if (pairs == 0) return;
        float* own_rows = lane.scratch + product_->scratch_floats();
        float* own_order = own_rows + rows_.scratch_floats();
        float* gathered = own_order + order_floats(RoundedRows::kOwnRows);
        const bool alone = few(context);
        const ExpertOrder sorted = order_at(alone ? own_order : context.workspace);
        if (alone || (phase == 0 && lane.part == 0)) {
            if (!sorted.sort(context.i32(ids_), pairs, sizes_.experts)) {
                context.report("expert_linear: an expert's index is out of range");
            }
        }
        if (!alone && phase == 0) return;
        const float* x = context.f32(x_);
        const std::byte* rows = rows_.take(
            alone ? nullptr : context.workspace + order_floats(max_pairs_), lane, pairs,
            alone ? 0 : phase - 1, own_rows, [&](int64_t row, std::byte* to) {
                const int64_t pair = sorted.order[row];
                product_->prepare_row(x + (shared_rows_ ? pair / picks_ : pair) * sizes_.k, to, gathered);
            });
        if (rows != nullptr) multiply(context, lane, sorted, rows);
    }

private:
    // Tiles of all experts are numbered through, and handed out as threads come.
    void multiply(const StepContext& context, const Lane& lane, const ExpertOrder& sorted,
                  const std::byte* rows) const {
        LinearOutput output = output_;
        output.y = context.f32(y_);
        const int64_t bias_stride = sizes_.bias_size() / sizes_.experts;
        ProductTile tile;
        tile.x_stride = product_->row_bytes();
        int64_t mine = context.next(), first = 0;
        for (int64_t e = 0; e < sizes_.experts; ++e) {
            const int64_t start = sorted.starts[e], count = sorted.starts[e + 1] - start;
            if (count == 0) continue;
            const LinearShape shape{.rows = count,
                                    .blocks = sizes_.blocks(),
                                    .panels_per_block = sizes_.panels_per_block(),
                                    .height = product_->height(),
                                    .row_bytes = tile.x_stride};
            const LinearTiles tiles = linear_tiles(shape, lane.parts);
            tile.x = rows + start * tile.x_stride;
            tile.expert = e;
            tile.ahead = {};
            output.places = sorted.order + start;
            if (output_.bias != nullptr) output.bias = output_.bias + e * bias_stride;
            for (; mine < first + tiles.count(shape); mine = context.next()) {
                tile.part = tiles.at(shape, mine - first);
                if (tile.part.row_begin < tile.part.row_end) product_->run(output, tile, lane.scratch);
            }
            first += tiles.count(shape);
        }
    }

    [[nodiscard]] bool few(const StepContext& context) const {
        return context.elements(ids_) <= RoundedRows::kOwnRows;
    }
    [[nodiscard]] size_t order_floats(int64_t pairs) const {
        return static_cast<size_t>((sizes_.experts + 1 + pairs + 15) / 16 * 16);
    }
    [[nodiscard]] ExpertOrder order_at(float* memory) const {
        auto* starts = reinterpret_cast<int32_t*>(memory);
        return {starts, starts + sizes_.experts + 1};
    }

    Operand x_, ids_, y_;
    ProductSizes sizes_;
    std::optional<Product> product_;
    LinearOutput output_;
    RoundedRows rows_;
    int64_t picks_ = 0, max_pairs_ = 0;
    bool shared_rows_ = false;  // x has one row for all experts of a token
};

}  // namespace

std::unique_ptr<Op> make_expert_linear(StepChecker& step) {
    return std::make_unique<ExpertLinear<FloatProduct>>(step, step.step().kernel == "expert_gated_linear");
}

std::unique_ptr<Op> make_quantized_expert_linear(StepChecker& step) {
    return std::make_unique<ExpertLinear<QuantizedProduct>>(
        step, step.step().kernel == "quantized_expert_gated_linear");
}

}  // namespace castiron::host
