#include "device/cuda/cuda_device.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <string>
#include <thread>
#include <utility>

#include "device/batch_check.h"
#include "device/cuda/adapter.h"
#include "device/cuda/driver.h"
#include "device/cuda/handles.h"
#include "device/cuda/input_block.h"
#include "device/cuda/kernel_set.h"
#include "device/cuda/kv_pools.h"
#include "device/cuda/launch_list.h"
#include "device/cuda/layout.h"
#include "device/cuda/lora_rows.h"
#include "device/cuda/memory_plan.h"
#include "device/cuda/probe.h"
#include "device/cuda/step_graphs.h"
#include "device/cuda/step_queue.h"
#include "device/cuda/step_results.h"
#include "device/cuda/weight_upload.h"
#include "program/sliding_window.h"

namespace castiron {
namespace cuda {
namespace {

int vocab_limit(const Program& program, const CudaOptions& options) {
    if (options.vocab_limit < 0 || options.vocab_limit > program.vocab_size) {
        throw std::invalid_argument("vocab_limit is " + std::to_string(options.vocab_limit) +
                                    "; the vocabulary has " + std::to_string(program.vocab_size) + " ids");
    }
    return options.vocab_limit > 0 ? options.vocab_limit : program.vocab_size;
}

// Slots for adapters.
int lora_slots(const Program& program, const CudaOptions& options) {
    if (options.max_loras <= 0) return 0;
    const int built = program.adapters.rank;
    if (built == 0) {
        throw std::invalid_argument(
            "the engine was built without LoRA adapters for GPUs; build it with --max-lora-rank, or start it "
            "without --enable-lora");
    }
    if (options.max_lora_rank > built) {
        throw std::invalid_argument("max_lora_rank is " + std::to_string(options.max_lora_rank) +
                                    ", and the engine was built for ranks up to " + std::to_string(built) +
                                    "; choose less, or build it with --max-lora-rank " +
                                    std::to_string(options.max_lora_rank));
    }
    return options.max_loras;
}

void check_options(const CudaOptions& options) {
    if (!(options.kv_cache_fraction > 0 && options.kv_cache_fraction <= 1)) {
        throw std::invalid_argument("kv_cache_fraction is " + std::to_string(options.kv_cache_fraction) +
                                    "; expected more than 0 and at most 1");
    }
}

// A program's steps in one form, launched or replayed.
struct StepForm {
    std::unique_ptr<LaunchList> launches;
    StepGraphs graphs;
};

class CudaDeviceImpl final : public CudaDevice {
public:
    CudaDeviceImpl(std::shared_ptr<const Program> program, const CudaOptions& options, const Driver& driver)
        : program_(std::move(program)),
          options_(options),
          driver_(driver),
          gpu_(describe(driver, options.device_index)),
          max_loras_(lora_slots(*program_, options)),
          packer_(*program_, vocab_limit(*program_, options), max_loras_),
          window_(layer_window(*program_)),
          context_(driver, options.device_index),
          thread_(std::this_thread::get_id()),
          kv_(program_->kv_layers) {
        check_options(options);
        const std::vector<uint64_t> values = value_offsets(*program_);
        const WeightPlaces weights = weight_places(*program_);
        plan_ = {weights.bytes,
                 program_->arena_bytes,
                 scratch_bytes(*program_, gpu_),
                 packer_.max_bytes(),
                 kv_.block_bytes(),
                 program_->adapters.slot_bytes * static_cast<uint64_t>(max_loras_)};
        check_fits(plan_, gpu_, free_memory(driver_));
        try {
            stream_ = make_stream(driver_);
            kernels_ = KernelSet(driver_, gpu_, *program_);
            reserve();
            prepare_launches(values, weights);
            upload_weights(driver_, *program_, weights, weights_.get(), stream_.get());
        } catch (const CudaError& error) {
            if (error.result() != Result::kOutOfMemory) throw;
            refuse_memory(plan_, gpu_, free_memory(driver_), "the engine");
        }
    }

    ~CudaDeviceImpl() override {
        // What follows is freed in the context of this thread, after the last step.
        static_cast<void>(driver_.context_set_current(context_.get()));
        queue_.drop(driver_, stream_.get());
    }

    [[nodiscard]] uint64_t kv_block_bytes() const override { return kv_.stride(KvGroup::kAll); }
    [[nodiscard]] int kv_window() const override { return sliding_window(*program_); }
    [[nodiscard]] KvWindowGroup kv_window_group() const override {
        return {window_, kv_.stride(KvGroup::kWindow)};
    }

    [[nodiscard]] KvBudget kv_budget() const override {
        context_.make_current();
        const uint64_t free = free_memory(driver_);
        return {free, static_cast<uint64_t>(static_cast<double>(free) * options_.kv_cache_fraction)};
    }

    void reserve_kv(int num_blocks, int window_blocks) override {
        if (num_blocks < 1) throw std::invalid_argument("a KV pool needs at least one block");
        enter();
        kv_.reserve(driver_, {num_blocks, window_blocks}, plan_, gpu_);
        for (size_t i = 0; i < program_->kv_layers.size(); ++i) {
            arguments_.k_cache[i] = kv_.k_cache(i);
            arguments_.v_cache[i] = kv_.v_cache(i);
        }
        if (options_.graphs) capture();
    }

    void copy_kv_block(KvGroup group, int from, int to) override {
        or_none_under_way([&] {
            if (from == to) return;
            enter();
            kv_.copy(driver_, group, from, to, stream_.get());
        });
    }

    [[nodiscard]] std::byte* reserve_host_blocks(uint64_t bytes) override {
        enter();
        host_blocks_ = make_pinned_buffer(driver_, bytes);
        return static_cast<std::byte*>(host_blocks_.get());
    }

    void save_kv_block(KvGroup group, int block, std::byte* to) override {
        or_none_under_way([&] {
            enter();
            kv_.save(driver_, group, block, to, stream_.get());
        });
    }

    void load_kv_block(KvGroup group, const std::byte* from, int block) override {
        or_none_under_way([&] {
            enter();
            kv_.load(driver_, group, from, block, stream_.get());
        });
    }

    [[nodiscard]] std::span<const float> forward(const Batch& batch) override {
        begin(batch, nullptr);
        static_cast<void>(end());
        return results_.logits(batch.logit_rows.size());
    }

    [[nodiscard]] bool samples() const override { return !program_->sampling.empty(); }

    [[nodiscard]] SampledRows forward_and_sample(const Batch& batch, const SamplingBatch& sampling) override {
        start(batch, sampling);
        return finish();
    }

    [[nodiscard]] bool queues() const override { return !program_->feeding.empty(); }

    void start(const Batch& batch, const SamplingBatch& sampling) override {
        if (!samples()) return Device::start(batch, sampling);
        begin(batch, &sampling);
    }

    [[nodiscard]] SampledRows finish() override {
        const StepUnderWay step = end();
        const auto rows = static_cast<size_t>(step.counts[Dim::kRows]);
        return results_.sampled(rows, step.counts[Dim::kLogprobs] > 0, step.slot);
    }

    [[nodiscard]] int graph_bucket() const override { return bucket_; }

    [[nodiscard]] std::shared_ptr<const Adapter> make_adapter(const LoraModules& modules) const override {
        if (max_loras_ == 0) return Device::make_adapter(modules);
        const int most = options_.max_lora_rank > 0 ? options_.max_lora_rank : program_->adapters.rank;
        return std::make_shared<CudaAdapter>(*program_, modules, most, ++adapters_made_);
    }

    [[nodiscard]] CudaFacts facts() const override {
        CudaFacts facts;
        facts.name = gpu_.name;
        facts.compute_capability = gpu_.compute_capability;
        facts.weights_bytes = plan_.weights;
        facts.input_bytes = plan_.inputs;
        facts.result_bytes = results_.bytes();
        facts.largest_graph = in_form(Form::kPlain).graphs.largest();
        facts.graph_bytes = graph_bytes_;
        for (const StepForm& form : forms_) {
            facts.graphs += form.graphs.count();
            facts.graph_seconds += form.graphs.seconds();
        }
        facts.lora_bytes = plan_.adapters;
        return facts;
    }

private:
    // The engine's thread is not the one that made the device.
    void enter() {
        if (thread_ == std::this_thread::get_id()) return;
        context_.make_current();
        thread_ = std::this_thread::get_id();
    }

    void reserve() {
        weights_ = make_device_buffer(driver_, plan_.weights);
        arena_ = make_device_buffer(driver_, plan_.arena);
        scratch_ = make_device_buffer(driver_, plan_.scratch);
        inputs_ = make_device_buffer(driver_, plan_.inputs);
        if (max_loras_ > 0) {
            adapters_ = AdapterMemory(driver_, *program_, max_loras_);
            lora_ = LoraRows(program_->limits);
        }
        queue_ = StepQueue(driver_, queues() ? kStepSlots : 1);
        for (size_t slot = 0; slot < queue_.slots(); ++slot) {
            host_inputs_[slot] = make_pinned_buffer(driver_, plan_.inputs);
        }
    }

    void prepare_launches(const std::vector<uint64_t>& values, const WeightPlaces& weights) {
        FixedAddresses fixed;
        for (const uint64_t offset : values) fixed.values.push_back(arena_.get() + offset);
        for (const uint64_t offset : weights.offsets) fixed.weights.push_back(weights_.get() + offset);
        fixed.scratch = scratch_.get();
        fixed.adapters = adapters_.address();
        results_ = StepResults(driver_, *program_, fixed.values, queue_.slots());
        // Launches find these by name in the input block.
        const Dim tokens{Dim::kTokens};
        static_cast<void>(find_value(*program_, "token_ids", DType::kI32, {tokens}, false));
        static_cast<void>(find_value(*program_, "positions", DType::kI32, {tokens}, false));
        static_cast<void>(find_value(*program_, "logit_rows", DType::kI32, {Dim{Dim::kRows}}, false));
        arguments_.k_cache.resize(program_->kv_layers.size());
        arguments_.v_cache.resize(program_->kv_layers.size());
        for (const Form form : forms()) {
            in_form(form).launches = std::make_unique<LaunchList>(*program_, program_->steps, "steps", fixed,
                                                                  arguments_, kernels_, gpu_, form);
        }
        sampling_ = std::make_unique<LaunchList>(*program_, program_->sampling, "sampling", fixed, arguments_,
                                                 kernels_, gpu_);
        feeding_ = std::make_unique<LaunchList>(*program_, program_->feeding, "feeding", fixed, arguments_,
                                                kernels_, gpu_);
    }

    void capture() {
        const uint64_t before = free_memory(driver_);
        const Limits& limits = program_->limits;
        const int chosen = options_.max_batch_size > 0 ? options_.max_batch_size : limits.max_batch_size;
        const int most =
            std::min({chosen, limits.max_batch_size, limits.max_num_tokens, limits.max_logit_rows});
        std::vector<GraphKind> kinds{GraphKind::kLogits};
        if (samples()) kinds = {GraphKind::kModel, GraphKind::kGreedy, GraphKind::kRandom};
        double left = options_.max_capture_seconds;
        try {
            for (const Form form : forms()) {
                StepGraphs& graphs = in_form(form).graphs;
                graphs.capture(driver_, stream_.get(), kinds, queue_.slots(), most, left,
                               [this, form](size_t slot, GraphKind kind, int bucket) {
                                   slot_ = slot;
                                   enqueue_decode(kind, bucket, form);
                               });
                left -= graphs.seconds();
            }
        } catch (const CudaError& error) {
            if (error.result() != Result::kOutOfMemory) throw;
            throw std::runtime_error("CUDA graphs do not fit beside the KV pool: " + bytes_text(before) +
                                     " were free on " + gpu_.name +
                                     "; choose fewer kv_cache_blocks or switch CUDA graphs off");
        }
        const uint64_t after = free_memory(driver_);
        graph_bytes_ = before > after ? before - after : 0;
    }

    // What a graph holds.
    void enqueue_decode(GraphKind kind, int bucket, Form form) {
        const Counts counts =
            packer_.decode_counts(bucket, kind == GraphKind::kRandom, form == Form::kAdapted);
        const InputLayout layout = set_arguments(counts);
        upload(0, layout.bytes);
        feeding_->enqueue(driver_, stream_.get());
        in_form(form).launches->enqueue(driver_, stream_.get());
        if (kind == GraphKind::kModel) return;
        conclude(counts[Dim::kRows], kind != GraphKind::kLogits);
    }

    InputLayout set_arguments(const Counts& counts) {
        const InputLayout layout = packer_.layout(counts);
        arguments_.counts = counts;
        for (size_t i = 0; i < kNumInputs; ++i) arguments_.inputs[i] = inputs_.get() + layout.offsets[i];
        return layout;
    }

    [[nodiscard]] std::byte* host_block() const { return static_cast<std::byte*>(host_inputs_[slot_].get()); }

    void upload(uint64_t begin, uint64_t end) {
        check(driver_,
              driver_.copy_to_device(inputs_.get() + begin, host_block() + begin, end - begin, stream_.get()),
              "copying a step's inputs to the device");
    }

    // What comes behind the steps: tokens are chosen and fetched, or else the logits are fetched.
    void conclude(int64_t rows, bool sample) {
        if (!sample) {
            results_.fetch_logits(driver_, rows, stream_.get());
            return;
        }
        sampling_->enqueue(driver_, stream_.get());
        results_.fetch_sampled(driver_, rows, arguments_.counts[Dim::kLogprobs] > 0, slot_, stream_.get());
    }

    // What Device promises of its calls: after an exception no step is under way.
    template <typename Call>
    void or_none_under_way(Call call) {
        try {
            call();
        } catch (...) {
            queue_.drop(driver_, stream_.get());
            throw;
        }
    }

    // Enqueues a step.
    void begin(const Batch& batch, const SamplingBatch* sampling) {
        or_none_under_way([&] {
            check_batch(batch, program_->limits, !program_->kv_layers.empty(), kv_.blocks());
            check_token_sources(batch, queues() ? sampled_rows_ : 0);
            if (sampling != nullptr) check_sampling(batch, *sampling, program_->vocab_size);
            enter();
            slot_ = queue_.take_slot(driver_, stream_.get());
            bucket_ = 0;
            place_adapters(batch);
            const Counts counts = packer_.count(batch, sampling, lora_);
            if (!batch.token_ids.empty()) enqueue(batch, sampling, counts);
            queue_.push(counts, bucket_);
            sampled_rows_ = sampling != nullptr ? batch.logit_rows.size() : 0;
        });
    }

    // Steps in which no row has an adapter are those of an engine without.
    void place_adapters(const Batch& batch) {
        if (max_loras_ > 0) {
            lora_.set(batch, adapters_.place(driver_, batch, stream_.get()));
        } else if (std::any_of(batch.sequences.begin(), batch.sequences.end(),
                               [](const SequenceSlice& s) { return s.adapter != nullptr; })) {
            throw std::invalid_argument("batch: a sequence has an adapter of another device");
        }
    }

    // Waits for the first of the steps under way.
    StepUnderWay end() {
        enter();
        return queue_.pop(driver_, stream_.get());
    }

    void enqueue(const Batch& batch, const SamplingBatch* sampling, const Counts& counts) {
        const bool decode_only = counts[Dim::kTokens] == counts[Dim::kDecodes];
        if (decode_only) bucket_ = form_of_step().graphs.bucket(counts[Dim::kTokens]);
        if (bucket_ > 0) {
            replay(batch, sampling, counts);
        } else {
            run(batch, sampling, counts);
        }
    }

    // The forms that steps can have.
    [[nodiscard]] std::vector<Form> forms() const {
        if (max_loras_ == 0) return {Form::kPlain};
        return {Form::kPlain, Form::kAdapted};
    }
    [[nodiscard]] StepForm& in_form(Form form) { return forms_[static_cast<size_t>(form)]; }
    [[nodiscard]] const StepForm& in_form(Form form) const { return forms_[static_cast<size_t>(form)]; }
    [[nodiscard]] const StepForm& form_of_step() const {
        return in_form(lora_.empty() ? Form::kPlain : Form::kAdapted);
    }

    void run(const Batch& batch, const SamplingBatch* sampling, const Counts& counts) {
        packer_.pack(batch, sampling, lora_, counts, host_block());
        const InputLayout layout = set_arguments(counts);
        upload(0, layout.bytes);
        if (takes_tokens(batch)) feeding_->enqueue(driver_, stream_.get());
        form_of_step().launches->enqueue(driver_, stream_.get());
        conclude(counts[Dim::kRows], sampling != nullptr);
    }

    static bool takes_tokens(const Batch& batch) {
        return std::any_of(batch.token_sources.begin(), batch.token_sources.end(),
                           [](int32_t source) { return source >= 0; });
    }

    void replay(const Batch& batch, const SamplingBatch* sampling, const Counts& counts) {
        const bool plain = counts[Dim::kEdits] == 0 && counts[Dim::kLogprobs] == 0;
        const bool random = counts[Dim::kRandom] > 0;
        GraphKind kind = samples() ? GraphKind::kModel : GraphKind::kLogits;
        if (sampling != nullptr && plain) kind = random ? GraphKind::kRandom : GraphKind::kGreedy;
        Counts padded = packer_.decode_counts(bucket_, kind == GraphKind::kRandom, !lora_.empty());
        if (kind == GraphKind::kModel) {
            for (const int64_t symbol : {Dim::kRandom, Dim::kEdits, Dim::kLogprobs}) {
                padded[symbol] = counts[symbol];
            }
        }
        packer_.pack(batch, sampling, lora_, padded, host_block());
        arguments_.counts = padded;
        check(driver_, driver_.graph_launch(form_of_step().graphs.get(slot_, kind, bucket_), stream_.get()),
              "replaying a graph");
        if (kind != GraphKind::kModel) return;
        const InputLayout layout = set_arguments(padded);
        const uint64_t edits = layout.offsets[static_cast<size_t>(StepInput::kEditRow)];
        if (padded[Dim::kEdits] > 0) upload(edits, layout.bytes);
        conclude(counts[Dim::kRows], sampling != nullptr);
    }

    std::shared_ptr<const Program> program_;
    CudaOptions options_;
    const Driver& driver_;
    Gpu gpu_;
    int max_loras_;
    InputPacker packer_;
    int window_;  // of layers that can be kept apart; 0: there are none
    MemoryPlan plan_;
    PrimaryContext context_;  // before all that lives in it
    std::thread::id thread_;  // the one that the context is current on
    Stream stream_;
    KernelSet kernels_;
    DeviceBuffer weights_;
    DeviceBuffer arena_;
    DeviceBuffer scratch_;
    DeviceBuffer inputs_;
    AdapterMemory adapters_;
    LoraRows lora_;  // of the step begun last
    mutable std::atomic<uint64_t> adapters_made_ = 0;
    KvPools kv_;
    PinnedBuffer host_blocks_;
    std::array<PinnedBuffer, kStepSlots> host_inputs_;
    StepQueue queue_;
    StepResults results_;
    StepArguments arguments_;
    std::array<StepForm, 2> forms_;  // by Form
    std::unique_ptr<LaunchList> sampling_;
    std::unique_ptr<LaunchList> feeding_;
    uint64_t graph_bytes_ = 0;
    size_t sampled_rows_ = 0;  // rows of logits of the step begun last, if tokens are chosen
    size_t slot_ = 0;          // of the step begun last
    int bucket_ = 0;
};

}  // namespace
}  // namespace cuda

std::unique_ptr<CudaDevice> make_cuda_device(std::shared_ptr<const Program> program,
                                             const CudaOptions& options) {
    return make_cuda_device(std::move(program), options, cuda::load_driver());
}

std::unique_ptr<CudaDevice> make_cuda_device(std::shared_ptr<const Program> program,
                                             const CudaOptions& options, const cuda::Driver& driver) {
    if (program == nullptr) throw std::invalid_argument("no program");
    return std::make_unique<cuda::CudaDeviceImpl>(std::move(program), options, driver);
}

}  // namespace castiron
