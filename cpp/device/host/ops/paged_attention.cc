#include <algorithm>

#include "device/host/kv_cache.h"
#include "device/host/ops/ops.h"

namespace castiron::host {
namespace {

// Work is cut into units of one sequence, one KV head and some dozens of packed rows (query tokens x query
// heads of the KV head). Where that gives too few units for the threads (one request decoding), units are cut
// by segment of keys as well; the partial results are then merged in the same order, so the outcome is the
// same bit for bit.
class PagedAttention final : public Op {
public:
    explicit PagedAttention(StepChecker& step) {
        const auto& layers = step.program().kv_layers;
        if (layers.empty()) step.fail("the program has no KV layers");
        layer_ = static_cast<size_t>(step.integer("layer", 0, static_cast<int64_t>(layers.size()) - 1));
        const KvLayer& shape = layers[layer_];
        kv_heads_ = step.integer("kv_heads", shape.kv_heads, shape.kv_heads);
        const int64_t head_dim = step.integer("head_dim", shape.head_dim, shape.head_dim);
        const int64_t v_head_dim = step.integer("v_head_dim", shape.v_head_dim, shape.v_head_dim);
        q_heads_ = step.integer("q_heads", 1, 65536);
        if (q_heads_ % kv_heads_ != 0) step.fail("q_heads is not a multiple of kv_heads");
        args_.group = static_cast<int>(q_heads_ / kv_heads_);
        args_.head_dim = static_cast<int>(head_dim);
        args_.v_head_dim = static_cast<int>(v_head_dim);
        args_.cache_type = cache_type(shape.dtype);
        const KernelTable& table = step.kernels();
        const bool bf16 = table.bf16_attention.attention != nullptr && bf16_attention_takes(args_);
        kernels_ = bf16 ? table.bf16_attention : table.attention;
        args_.scale = static_cast<float>(step.number("scale"));
        args_.softcap = static_cast<float>(step.number_or("softcap", 0));
        if (args_.softcap < 0) step.fail("softcap is negative");
        args_.window = step.integer_or("window", 0, 0, int64_t{1} << 31);
        args_.chunk = step.integer_or("chunk", 0, 0, int64_t{1} << 31);
        const bool has_sinks = step.flag("has_sinks"), has_slopes = step.flag("has_slopes");
        step.expect(1, size_t{has_sinks} + size_t{has_slopes}, 1);
        if (has_sinks) args_.sinks = step.vector_weight(0, {q_heads_});
        if (has_slopes) args_.slopes = step.vector_weight(has_sinks ? 1 : 0, {q_heads_});
        q_ = step.input(0);
        out_ = step.output(0);
        step.check(q_, DType::kF32, {Dim{Dim::kTokens}, Dim{q_heads_ * head_dim}}, true);
        step.check(out_, DType::kF32, {Dim{Dim::kTokens}, Dim{q_heads_ * v_head_dim}});
        step.finish();
        rounds_ = bf16 && v_head_dim % 32 == 0 && step.round_output(0);
        partial_floats_ = attention_partial_floats(v_head_dim);
        max_segments_ = (step.program().limits.max_seq_len + kSegmentKeys - 1) / kSegmentKeys;
    }

    [[nodiscard]] size_t scratch_floats() const override {
        return attention_scratch_floats(args_.head_dim, args_.v_head_dim, args_.cache_type);
    }

    // Room for the splits of as many decodes as leave threads idle, within 16 MiB.
    [[nodiscard]] size_t workspace_floats(int parts) const override {
        if (parts == 1) return 0;
        const int64_t rows = int64_t{parts} * kUnitsPerThread * args_.group;
        return static_cast<size_t>(std::min(rows * max_segments_ * partial_floats_, kMaxWorkspaceFloats));
    }

    [[nodiscard]] int phases(const StepContext& context, int parts) const override {
        return split(context, parts) ? 2 : 1;
    }

    void run(const StepContext& context, const Lane& lane, int phase) const override {
        if (phase == 1) {
            merge_all(context, lane);
        } else if (split(context, lane.parts)) {
            run_segments(context, lane);
        } else {
            run_units(context, lane);
        }
    }

private:
    static CacheType cache_type(DType dtype) {
        switch (dtype) {
            case DType::kBF16:
                return CacheType::kBF16;
            case DType::kI8:
                return CacheType::kI8;
            case DType::kF8E4M3:
                return CacheType::kF8E4M3;
            default:
                return CacheType::kF32;
        }
    }

    static constexpr int64_t kUnitsPerThread = 4;
    static constexpr int64_t kMaxWorkspaceFloats = int64_t{4} << 20;

    [[nodiscard]] int64_t rows_of(const SequenceSlice& s) const { return int64_t{s.num_rows} * args_.group; }
    [[nodiscard]] int64_t chunks_of(int64_t rows) const {
        return (rows + kernels_.max_rows - 1) / kernels_.max_rows;
    }

    // Segments that a sequence's rows may see: [first, last].
    [[nodiscard]] std::pair<int64_t, int64_t> segments_of(const SequenceSlice& s) const {
        const int64_t position = s.start_position;
        int64_t first = 0;
        if (args_.window > 0) first = std::max(first, position - args_.window + 1);
        if (args_.chunk > 0) first = std::max(first, position / args_.chunk * args_.chunk);
        return {first / kSegmentKeys, (position + s.num_rows - 1) / kSegmentKeys};
    }

    [[nodiscard]] bool split(const StepContext& context, int parts) const {
        if (parts == 1) return false;
        int64_t units = 0, split_units = 0, floats = 0;
        for (const SequenceSlice& s : context.batch->sequences) {
            if (s.num_rows == 0) continue;
            const auto [first, last] = segments_of(s);
            units += chunks_of(rows_of(s)) * kv_heads_;
            if (units >= parts * kUnitsPerThread) return false;
            split_units += chunks_of(rows_of(s)) * kv_heads_ * (last - first + 1);
            floats += rows_of(s) * kv_heads_ * (last - first + 1) * partial_floats_;
        }
        return split_units > units && static_cast<size_t>(floats) <= workspace_floats(parts);
    }

    [[nodiscard]] AttentionArgs bind(const StepContext& context, const SequenceSlice& s,
                                     int64_t kv_head) const {
        AttentionArgs a = args_;
        const KvCache::LayerView& layer = context.kv->layer(layer_);
        a.q = context.f32(q_) + s.first_row * q_.row_stride;
        a.q_stride = q_.row_stride;
        a.out_stride = q_heads_ * a.v_head_dim;
        if (rounds_) {
            a.rounded_stride = bf16_row_bytes(a.out_stride);
            a.rounded_out = context.rounded(out_) + s.first_row * a.rounded_stride;
        } else {
            a.out = context.f32(out_) + s.first_row * a.out_stride;
        }
        a.cache = context.kv->data(layer_);
        a.block_bytes = layer.block_bytes;
        a.v_offset = layer.v_offset;
        a.block_table = context.kv->table(layer_, s);
        a.start_position = s.start_position;
        a.kv_head = static_cast<int>(kv_head);
        a.scale *= layer.k_scale(kv_head);
        a.v_scale = layer.v_scale(kv_head);
        return a;
    }

    void run_units(const StepContext& context, const Lane& lane) const {
        int64_t base = 0, unit = context.next();
        for (const SequenceSlice& s : context.batch->sequences) {
            const int64_t rows = rows_of(s), chunks = chunks_of(rows), units = chunks * kv_heads_;
            for (; unit < base + units; unit = context.next()) {
                // Late rows see the most keys: first, so that the threads finish together.
                const int64_t chunk = chunks - 1 - (unit - base) / kv_heads_,
                              kv_head = (unit - base) % kv_heads_;
                kernels_.attention(bind(context, s, kv_head), rows * chunk / chunks,
                                   rows * (chunk + 1) / chunks, lane.scratch);
            }
            base += units;
        }
    }

    // Partials lie by sequence, KV head, row, segment.
    void run_segments(const StepContext& context, const Lane& lane) const {
        int64_t base = 0, unit = context.next();
        float* partials = context.workspace;
        for (const SequenceSlice& s : context.batch->sequences) {
            if (s.num_rows == 0) continue;
            const auto [first, last] = segments_of(s);
            const int64_t rows = rows_of(s), chunks = chunks_of(rows), segments = last - first + 1;
            const int64_t row_stride = segments * partial_floats_, units = kv_heads_ * chunks * segments;
            for (; unit < base + units; unit = context.next()) {
                const int64_t segment = (unit - base) % segments, chunk = (unit - base) / segments % chunks;
                const int64_t kv_head = (unit - base) / segments / chunks;
                const int64_t begin = rows * chunk / chunks, end = rows * (chunk + 1) / chunks;
                float* to = partials + (kv_head * rows + begin) * row_stride + segment * partial_floats_;
                kernels_.segment(bind(context, s, kv_head), begin, end, first + segment, to, row_stride,
                                 lane.scratch);
            }
            base += units;
            partials += kv_heads_ * rows * row_stride;
        }
    }

    void merge_all(const StepContext& context, const Lane& lane) const {
        int64_t base = 0, unit = context.next();
        const float* partials = context.workspace;
        for (const SequenceSlice& s : context.batch->sequences) {
            if (s.num_rows == 0) continue;
            const auto [first, last] = segments_of(s);
            const int64_t rows = rows_of(s), segments = last - first + 1, units = kv_heads_ * rows;
            for (; unit < base + units; unit = context.next()) {
                const int64_t kv_head = (unit - base) / rows, row = (unit - base) % rows;
                kernels_.merge(bind(context, s, kv_head), row,
                               partials + (unit - base) * segments * partial_floats_, segments, lane.scratch);
            }
            base += units;
            partials += units * segments * partial_floats_;
        }
    }

    AttentionKernels kernels_;
    size_t layer_ = 0;
    int64_t q_heads_ = 0, kv_heads_ = 0, partial_floats_ = 0, max_segments_ = 0;
    AttentionArgs args_;
    bool rounds_ = false;  // whether the output is rows of bf16
    Operand q_, out_;
};

}  // namespace

std::unique_ptr<Op> make_paged_attention(StepChecker& step) {
    return std::make_unique<PagedAttention>(step);
}

}  // namespace castiron::host
