#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "device/batch_check.h"
#include "device/device.h"
#include "device/host/cpu.h"
#include "device/host/kv_cache.h"
#include "device/host/lora.h"
#include "device/host/memory.h"
#include "device/host/op.h"
#include "device/host/ops/ops.h"
#include "device/host/rounded_values.h"
#include "device/host/step_checker.h"
#include "device/host/thread_pool.h"
#include "program/sliding_window.h"

namespace castiron {
namespace host {
namespace {

int thread_count(const HostOptions& options, int cpus) {
    if (options.num_threads < 0 || options.num_threads > 1024)
        throw std::invalid_argument("num_threads is " + std::to_string(options.num_threads) +
                                    "; expected at most 1024, or 0 for all CPUs");
    return options.num_threads > 0 ? options.num_threads : cpus;
}

int lora_rank(const HostOptions& options) {
    constexpr int kLargest = 512;
    if (options.max_lora_rank < 0 || options.max_lora_rank > kLargest)
        throw std::invalid_argument("max_lora_rank must be 0 (no adapters) to " + std::to_string(kLargest));
    return options.max_lora_rank;
}

const Operand* find(const std::vector<Operand>& values, const char* name) {
    const auto it =
        std::find_if(values.begin(), values.end(), [&](const Operand& o) { return o.name == name; });
    return it == values.end() ? nullptr : &*it;
}

class HostDevice final : public Device {
public:
    HostDevice(std::shared_ptr<const Program> program, const HostOptions& options)
        : program_(std::move(program)),
          huge_pages_(options.huge_pages),
          max_lora_rank_(lora_rank(options)),
          kernels_(kernels_for(choose_isa(options.isa))),
          cpus_(usable_cpus()),
          values_(resolve_values(*program_)),
          window_(layer_window(*program_)),
          kv_(program_->kv_layers),
          pool_(thread_count(options, cpus_), cpus_) {
        bind_io();
        std::vector<ResolvedWeight> weights = resolve_weights(*program_);
        const uint64_t weight_bytes = weights.empty() ? 0 : weights.back().offset + weights.back().bytes;
        weights_ = HugeBuffer(weight_bytes + kPadding, huge_pages_);
        for (ResolvedWeight& w : weights) w.data = weights_.data() + w.offset;
        // Adapters read what products read, as float32.
        if (kernels_.bf16.product != nullptr && max_lora_rank_ == 0) find_rounded_values(*program_, values_);
        for (size_t i = 0; i < program_->steps.size(); ++i) {
            StepChecker step(*program_, i, values_, weights, kernels_);
            ops_.push_back(make_op(step));
        }
        reserve_memory();
        copy_weights(weights);
    }

    [[nodiscard]] uint64_t kv_block_bytes() const override { return kv_.block_bytes(KvGroup::kAll); }
    [[nodiscard]] KvWindowGroup kv_window_group() const override {
        return {window_, kv_.block_bytes(KvGroup::kWindow)};
    }
    void reserve_kv(int num_blocks, int window_blocks) override {
        kv_.reserve(num_blocks, window_blocks, huge_pages_);
    }
    void copy_kv_block(KvGroup group, int from, int to) override { kv_.copy_block(group, from, to); }
    [[nodiscard]] std::byte* reserve_host_blocks(uint64_t bytes) override {
        host_blocks_ = HugeBuffer(bytes, huge_pages_);
        return host_blocks_.data();
    }
    void save_kv_block(KvGroup group, int block, std::byte* to) override { kv_.save_block(group, block, to); }
    void load_kv_block(KvGroup group, const std::byte* from, int block) override {
        kv_.load_block(group, from, block);
    }
    [[nodiscard]] int kv_window() const override { return sliding_window(*program_); }

    [[nodiscard]] std::shared_ptr<const Adapter> make_adapter(const LoraModules& modules) const override {
        if (max_lora_rank_ == 0) return Device::make_adapter(modules);
        return std::make_shared<HostAdapter>(*program_, modules, max_lora_rank_, huge_pages_);
    }

    [[nodiscard]] std::span<const float> forward(const Batch& batch) override {
        check_batch(batch, program_->limits, kv_.num_layers() > 0,
                    {kv_.num_blocks(KvGroup::kAll), kv_.num_blocks(KvGroup::kWindow)});
        const size_t tokens = batch.token_ids.size(), rows = batch.logit_rows.size();
        if (tokens == 0) return {};
        fill(token_ids_, batch.token_ids);
        fill(positions_, batch.positions);
        fill(logit_rows_, batch.logit_rows);
        for (Counter& counter : counters_) counter.value.store(0, std::memory_order_relaxed);
        fault_.store(nullptr, std::memory_order_relaxed);
        StepContext context;
        context.tokens = static_cast<int64_t>(tokens);
        context.rows = static_cast<int64_t>(rows);
        context.arena = arena_.data();
        context.batch = &batch;
        context.kv = &kv_;
        context.fault = &fault_;
        context.workspace = reinterpret_cast<float*>(workspace_.data());
        place_adapters(batch, context);
        pool_.run([this, context](int part) { walk(context, part); });
        if (const char* fault = fault_.load(std::memory_order_relaxed)) throw std::out_of_range(fault);
        return {reinterpret_cast<const float*>(arena_.data() + logits_->offset),
                rows * static_cast<size_t>(program_->vocab_size)};
    }

private:
    static constexpr size_t kPadding = 2048;  // kernels may read two tiles of AMX past the end
    static constexpr int kMaxPhases = 3;
    struct alignas(64) Counter {
        std::atomic<int64_t> value{0};
    };

    void bind_io() {
        const std::vector<Dim> per_token{Dim{Dim::kTokens}}, per_row{Dim{Dim::kRows}};
        const std::vector<Dim> logits{Dim{Dim::kRows}, Dim{program_->vocab_size}};
        const auto bind = [&](const char* name, DType dtype, const std::vector<Dim>& shape,
                              bool required) -> const Operand* {
            const Operand* o = find(values_, name);
            if (o == nullptr && required)
                throw std::invalid_argument(std::string("the program has no value '") + name + "'");
            if (o != nullptr && (o->dtype != dtype || o->shape != shape || o->view)) {
                throw std::invalid_argument(std::string("value '") + name + "' has shape " +
                                            shape_text(o->shape) +
                                            " or a dtype other than expected: " + shape_text(shape));
            }
            return o;
        };
        token_ids_ = bind("token_ids", DType::kI32, per_token, true);
        positions_ = bind("positions", DType::kI32, per_token, false);
        logit_rows_ = bind("logit_rows", DType::kI32, per_row, false);
        logits_ = bind("logits", DType::kF32, logits, true);
    }

    void reserve_memory() {
        arena_ = HugeBuffer(program_->arena_bytes + kPadding, huge_pages_);
        size_t workspace = 0;
        for (const auto& op : ops_) {
            scratch_floats_ = std::max(scratch_floats_, op->scratch_floats());
            workspace = std::max(workspace, op->workspace_floats(pool_.size()));
        }
        // Whole pages for each thread: their scratch never shares a cache line.
        scratch_floats_ = (scratch_floats_ + 1023) / 1024 * 1024;
        scratch_ =
            HugeBuffer(scratch_floats_ * sizeof(float) * static_cast<size_t>(pool_.size()), huge_pages_);
        workspace_ = HugeBuffer(workspace * sizeof(float), huge_pages_);
        counters_ = std::vector<Counter>(ops_.size() * kMaxPhases);
        if (max_lora_rank_ > 0) reserve_for_adapters();
    }

    void reserve_for_adapters() {
        for (const Step& step : program_->steps)
            lora_stride_ = std::max(lora_stride_, lora_columns(step, max_lora_rank_));
        const auto tokens = static_cast<size_t>(program_->limits.max_num_tokens);
        const auto rows = static_cast<size_t>(program_->limits.max_logit_rows);
        token_adapters_.reserve(tokens);
        row_adapters_.reserve(rows);
        lora_sums_ = HugeBuffer(std::max(tokens, rows) * static_cast<size_t>(lora_stride_) * sizeof(float),
                                huge_pages_);
    }

    // The adapter of each row, where any has one.
    void place_adapters(const Batch& batch, StepContext& context) {
        if (std::all_of(batch.sequences.begin(), batch.sequences.end(),
                        [](const SequenceSlice& s) { return s.adapter == nullptr; })) {
            return;
        }
        token_adapters_.clear();
        row_adapters_.clear();
        for (const SequenceSlice& s : batch.sequences) {
            const auto* adapter = dynamic_cast<const HostAdapter*>(s.adapter);
            if (s.adapter != nullptr && (adapter == nullptr || adapter->program() != program_.get()))
                throw std::invalid_argument("batch: a sequence has an adapter of another device");
            token_adapters_.insert(token_adapters_.end(), static_cast<size_t>(s.num_rows),
                                   adapter == nullptr ? nullptr : adapter->steps());
        }
        for (const int32_t row : batch.logit_rows)
            row_adapters_.push_back(token_adapters_[static_cast<size_t>(row)]);
        context.token_adapters = token_adapters_.data();
        context.row_adapters = row_adapters_.data();
        context.lora_sums = reinterpret_cast<float*>(lora_sums_.data());
        context.lora_stride = lora_stride_;
    }

    // All threads copy: it is page faults and zeroing that take the time.
    void copy_weights(const std::vector<ResolvedWeight>& weights) {
        constexpr size_t kPiece = size_t{8} << 20;
        std::vector<std::pair<const ResolvedWeight*, size_t>> pieces;
        for (const ResolvedWeight& w : weights) {
            for (size_t at = 0; at < w.bytes; at += kPiece) pieces.emplace_back(&w, at);
        }
        std::atomic<size_t> next{0};
        pool_.run([&](int) {
            for (size_t i = next.fetch_add(1); i < pieces.size(); i = next.fetch_add(1)) {
                const auto [w, at] = pieces[i];
                std::memcpy(weights_.data() + w->offset + at, w->weight->data + at,
                            std::min(kPiece, w->bytes - at));
            }
        });
    }

    void walk(StepContext context, int part) {
        Lane lane{part, pool_.size(),
                  reinterpret_cast<float*>(scratch_.data()) + scratch_floats_ * static_cast<size_t>(part)};
        for (size_t i = 0; i < ops_.size(); ++i) {
            const int phases = ops_[i]->phases(context, lane.parts);
            for (int phase = 0; phase < phases; ++phase) {
                context.counter = &counters_[i * kMaxPhases + static_cast<size_t>(phase)].value;
                ops_[i]->run(context, lane, phase);
                pool_.barrier();
            }
        }
    }

    void fill(const Operand* to, std::span<const int32_t> from) {
        if (to != nullptr && !from.empty())
            std::memcpy(arena_.data() + to->offset, from.data(), from.size_bytes());
    }

    std::shared_ptr<const Program> program_;
    bool huge_pages_;
    int max_lora_rank_;
    const KernelTable& kernels_;
    int cpus_;
    std::vector<Operand> values_;
    int window_;  // of layers that can be kept apart; 0: there are none
    KvCache kv_;
    HugeBuffer weights_, arena_, scratch_, workspace_, lora_sums_, host_blocks_;
    size_t scratch_floats_ = 0;
    std::vector<std::unique_ptr<Op>> ops_;
    std::vector<Counter> counters_;
    int64_t lora_stride_ = 0;
    std::vector<const LoraStep*> token_adapters_, row_adapters_;
    std::atomic<const char*> fault_{nullptr};
    const Operand* token_ids_ = nullptr;
    const Operand* positions_ = nullptr;
    const Operand* logit_rows_ = nullptr;
    const Operand* logits_ = nullptr;
    ThreadPool pool_;
};

}  // namespace
}  // namespace host

std::unique_ptr<Device> make_host_device(std::shared_ptr<const Program> program, const HostOptions& options) {
    if (program == nullptr) throw std::invalid_argument("no program");
    return std::make_unique<host::HostDevice>(std::move(program), options);
}

}  // namespace castiron
