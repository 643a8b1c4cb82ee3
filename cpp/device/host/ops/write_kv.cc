#include <algorithm>
#include <optional>

#include "device/host/kv_cache.h"
#include "device/host/ops/ops.h"
#include "device/host/ops/rope_table.h"

namespace castiron::host {
namespace {

// write_kv stores k and v; rope_write_kv rotates q and k on the way.
class WriteKv final : public Op {
public:
    explicit WriteKv(StepChecker& step) : kernels_(step.kernels()) {
        const bool rope = step.step().kernel == "rope_write_kv";
        const auto& layers = step.program().kv_layers;
        if (layers.empty()) step.fail("the program has no KV layers");
        layer_ = static_cast<size_t>(step.integer("layer", 0, static_cast<int64_t>(layers.size()) - 1));
        const KvLayer& shape = layers[layer_];
        kv_heads_ = step.integer("kv_heads", shape.kv_heads, shape.kv_heads);
        head_dim_ = step.integer("head_dim", shape.head_dim, shape.head_dim);
        v_head_dim_ = step.integer("v_head_dim", shape.v_head_dim, shape.v_head_dim);
        if (rope) {
            q_heads_ = step.integer("q_heads", 1, 65536);
            step.expect(4, 2, 1);
            q_ = step.input(0);
            positions_ = step.input(3);
            q_out_ = step.output(0);
            step.check(q_, DType::kF32, {Dim{Dim::kTokens}, Dim{q_heads_ * head_dim_}}, true);
            step.check(positions_, DType::kI32, {Dim{Dim::kTokens}});
            step.check(q_out_, DType::kF32, q_.shape);
            table_.emplace(step, head_dim_);
        } else {
            step.expect(2, 0, 0);
        }
        k_ = step.input(rope ? 1 : 0);
        v_ = step.input(rope ? 2 : 1);
        step.check(k_, DType::kF32, {Dim{Dim::kTokens}, Dim{kv_heads_ * head_dim_}}, true);
        step.check(v_, DType::kF32, {Dim{Dim::kTokens}, Dim{kv_heads_ * v_head_dim_}}, true);
        step.finish(rope ? std::vector<StepChecker::InPlace>{{0, 0}} : std::vector<StepChecker::InPlace>{});
    }

    [[nodiscard]] size_t scratch_floats() const override {
        return table_ ? table_->scratch_floats() + static_cast<size_t>(kv_heads_ * head_dim_) : 0;
    }

    void run(const StepContext& context, const Lane& lane, int) const override {
        const auto [begin, end] = lane.share(context.tokens);
        for (const SequenceSlice& sequence : context.batch->sequences) {
            const int64_t first = std::max<int64_t>(begin, sequence.first_row);
            const int64_t last = std::min<int64_t>(end, int64_t{sequence.first_row} + sequence.num_rows);
            for (int64_t t = first; t < last; ++t) {
                write_token(context, lane, t, sequence, sequence.start_position + t - sequence.first_row);
            }
        }
    }

private:
    void write_token(const StepContext& context, const Lane& lane, int64_t t, const SequenceSlice& sequence,
                     int64_t position) const {
        const float* k = context.f32(k_) + t * k_.row_stride;
        const float* v = context.f32(v_) + t * v_.row_stride;
        if (table_) {
            const int64_t rotation = context.i32(positions_)[t];
            float* rotated = lane.scratch + table_->scratch_floats();
            table_->rotate(context, kernels_, q_heads_, rotation, context.f32(q_) + t * q_.row_stride,
                           context.f32(q_out_) + t * q_heads_ * head_dim_, lane.scratch);
            table_->rotate(context, kernels_, kv_heads_, rotation, k, rotated, lane.scratch);
            k = rotated;
        }
        // Where a token lies is the sequence's business, not that of the (program-writable) positions value.
        const int32_t block = context.kv->table(layer_, sequence)[position / kBlockTokens];
        context.kv->write(layer_, block, static_cast<int>(position % kBlockTokens), k, v);
    }

    const KernelTable& kernels_;
    size_t layer_ = 0;
    int64_t q_heads_ = 0, kv_heads_ = 0, head_dim_ = 0, v_head_dim_ = 0;
    std::optional<RopeTable> table_;
    Operand q_, k_, v_, positions_, q_out_;
};

}  // namespace

std::unique_ptr<Op> make_write_kv(StepChecker& step) {
    return std::make_unique<WriteKv>(step);
}

}  // namespace castiron::host
