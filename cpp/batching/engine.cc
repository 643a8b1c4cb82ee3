#include "batching/engine.h"

#include <algorithm>
#include <random>
#include <utility>

#include "sampling/philox.h"

namespace castiron {
namespace {

int within(const char* name, int chosen, int planned) {
    if (chosen < 0 || chosen > planned) {
        throw std::invalid_argument(std::string(name) + " is " + std::to_string(chosen) +
                                    "; the engine was built for at most " + std::to_string(planned) +
                                    ": choose less, or build it with a larger limit");
    }
    return chosen == 0 ? planned : chosen;
}

Limits choose_limits(const Limits& built, const EngineOptions& options) {
    return {within("max_batch_size", options.max_batch_size, built.max_batch_size),
            within("max_num_tokens", options.max_num_tokens, built.max_num_tokens), built.max_logit_rows,
            built.max_seq_len};
}

SchedulerLimits scheduler_limits(const Device& device, const Limits& limits, const PoolSize& size,
                                 const EngineOptions& options) {
    const bool apart = size.window_blocks > 0;
    return {limits.max_batch_size,
            limits.max_num_tokens,
            limits.max_logit_rows,
            limits.max_seq_len,
            options.max_loras,
            apart ? device.kv_window_group().tokens : device.kv_window(),
            apart};
}

KvShape shape_of(const Device& device) {
    const KvWindowGroup group = device.kv_window_group();
    return {device.kv_block_bytes(), group.block_bytes, {group.tokens, 0, group.tokens > 0}};
}

EngineOptions checked(const EngineOptions& options) {
    if (options.max_queue_size < 1) {
        throw std::invalid_argument("max_queue_size is " + std::to_string(options.max_queue_size) +
                                    "; expected 1 or more");
    }
    if (options.max_queued_tokens < 0) {
        throw std::invalid_argument("max_queued_tokens is " + std::to_string(options.max_queued_tokens) +
                                    "; expected 1 or more, or 0 for no bound");
    }
    if (options.max_loras < 0) {
        throw std::invalid_argument("max_loras is " + std::to_string(options.max_loras) +
                                    "; expected 1 or more, or 0 for no adapters");
    }
    if (options.host_tier_bytes > 0 && !options.prefix_caching) {
        throw std::invalid_argument(
            "kv_cache_host_tier keeps what the prefix cache gives up, and prefix caching is off; leave out "
            "one");
    }
    if (options.disk_tier_bytes > 0 && options.host_tier_bytes == 0) {
        throw std::invalid_argument(
            "kv_cache_disk_tier keeps what kv_cache_host_tier gives up; give that as well");
    }
    if (!(options.watchdog_seconds >= 0 && options.watchdog_seconds <= 1e6)) {
        throw std::invalid_argument("watchdog_timeout is " + std::to_string(options.watchdog_seconds) +
                                    "; expected 0 (off) to 1000000 seconds");
    }
    return options;
}

PoolSize choose_pool(const Device& device, const Limits& limits, const EngineOptions& options) {
    const int blocks = options.kv_cache_blocks;
    if (blocks < 0) {
        throw std::invalid_argument("kv_cache_blocks is " + std::to_string(blocks) +
                                    "; expected 1 or more, or 0 to have it chosen");
    }
    if (blocks > 0 && options.kv_cache_bytes > 0) {
        throw std::invalid_argument("kv_cache_blocks and kv_cache_bytes both set the size of the KV cache");
    }
    const KvBudget budget = device.kv_budget();
    return choose_pool_size({blocks, options.kv_cache_bytes}, limits, shape_of(device), budget.available,
                            budget.by_default);
}

// Blocks of each group, in the proportion that the pools have, that fit into so many bytes.
PoolSize tier_size(const char* option, uint64_t bytes, const PoolSize& pool, const KvShape& shape) {
    const uint64_t one = shape.block_bytes + shape.window_block_bytes;
    if (bytes < one) {
        throw std::invalid_argument(std::string(option) + " is " + std::to_string(bytes) +
                                    " bytes; one block takes " + std::to_string(one));
    }
    PoolSize size;
    if (pool.window_blocks == 0) {
        size.blocks = static_cast<int>(std::min<uint64_t>(bytes / one, uint64_t{1} << 30));
        return size;
    }
    const double share = static_cast<double>(bytes - one) / static_cast<double>(bytes_of(pool, shape));
    size.blocks = 1 + static_cast<int>(share * pool.blocks);
    size.window_blocks = 1 + static_cast<int>(share * pool.window_blocks);
    return size;
}

// Room for whole blocks in host_tier_bytes of this machine's memory, and in disk_tier_bytes of its disk; none
// for 0.
EngineTiers make_tiers(Device& device, BlockPool& pool, const PoolSize& pool_size,
                       const EngineOptions& options) {
    const uint64_t bytes = options.host_tier_bytes;
    if (bytes == 0) return {};
    const KvShape shape = shape_of(device);
    const uint64_t available = available_memory();
    const PoolSize slots = tier_size("kv_cache_host_tier", bytes, pool_size, shape);
    if (bytes > available) {
        throw std::invalid_argument("kv_cache_host_tier is " + std::to_string(bytes >> 20) + " MiB; " +
                                    std::to_string(available >> 20) + " MiB are available");
    }
    PoolSize on_disk;
    if (options.disk_tier_bytes > 0)
        on_disk = tier_size("kv_cache_disk_tier", options.disk_tier_bytes, pool_size, shape);
    std::byte* memory = device.reserve_host_blocks(bytes_of(slots, shape));
    const auto make = [&](KvGroup group, uint64_t block, int in_memory, int in_file) {
        std::unique_ptr<BlockFile> disk;
        if (in_file > 0) disk = std::make_unique<BlockFile>(options.disk_tier_folder, in_file, block);
        auto tier = std::make_unique<HostTier>(memory, in_memory, block, std::move(disk), group);
        memory += block * static_cast<uint64_t>(in_memory);
        return tier;
    };
    const bool apart = slots.window_blocks > 0;
    EngineTiers tiers;
    tiers.blocks = make(KvGroup::kAll, shape.block_bytes + (apart ? 0 : shape.window_block_bytes),
                        slots.blocks, on_disk.blocks);
    if (apart) {
        tiers.windows =
            make(KvGroup::kWindow, shape.window_block_bytes, slots.window_blocks, on_disk.window_blocks);
    }
    pool.use_tiers(tiers.all());
    return tiers;
}

uint64_t draw_entropy() {
    std::random_device source;
    return (uint64_t{source()} << 32) | source();
}

}  // namespace

Engine::Engine(std::unique_ptr<Device> device, const Limits& limits, int vocab_size,
               const EngineOptions& options, std::unique_ptr<Drafter> drafter)
    : pool_size_(choose_pool(*device, choose_limits(limits, options), options)),
      limits_(scheduler_limits(*device, choose_limits(limits, options), pool_size_, options)),
      vocab_size_(vocab_size),
      options_(checked(options)),
      entropy_(draw_entropy()),
      device_(std::move(device)),
      pool_(pool_size_.blocks, pool_size_.window_blocks, pool_size_.set_aside),
      tiers_(make_tiers(*device_, pool_, pool_size_, options_)),
      drafter_(std::move(drafter)),
      scheduler_(limits_, pool_, options_.capacity, static_cast<size_t>(options_.max_queue_size)),
      runner_(*device_, limits_, vocab_size, within("vocab_limit", options.vocab_limit, vocab_size),
              tiers_.all()) {
    device_->reserve_kv(pool_size_.blocks, pool_size_.window_blocks);
    touched_.reserve(static_cast<size_t>(limits_.max_batch_size));
    inbox_.reserve(static_cast<size_t>(options_.max_queue_size));
    update_gauges();
    thread_ = std::thread([this] { loop(); });
    if (options_.watchdog_seconds > 0) watchdog_ = std::thread([this] { watch(); });
}

Engine::~Engine() {
    if (!shutdown()) thread_.join();
}

// How many tokens the request may generate. Throws std::invalid_argument where it could never be served.
int Engine::check_request(std::span<const int32_t> prompt, const SamplingParams& params,
                          const RequestOptions& options) const {
    params.validate(vocab_size_);
    if (options.priority != 0 && options_.scheduling != SchedulingPolicy::kPriority) {
        throw std::invalid_argument("priority is " + std::to_string(options.priority) +
                                    ", and this engine serves requests as they come; leave it out, or start "
                                    "the engine with the scheduling policy \"priority\"");
    }
    if (prompt.empty()) throw std::invalid_argument("the prompt is empty; at least one token is needed");
    const auto length = static_cast<int64_t>(prompt.size());
    const int64_t room = limits_.max_seq_len - length;
    if (room < (params.max_tokens > 0 ? 1 : 0)) {
        throw std::invalid_argument("maximum context length is " + std::to_string(limits_.max_seq_len) +
                                    " tokens; the prompt has " + std::to_string(length) + " and " +
                                    std::to_string(params.max_tokens) + " are to be generated");
    }
    for (const int32_t token : prompt) {
        if (token < 0 || token >= vocab_size_) {
            throw std::invalid_argument("token id " + std::to_string(token) +
                                        " is in the prompt; the vocabulary has " +
                                        std::to_string(vocab_size_) + " ids, from 0");
        }
    }
    const int new_tokens = static_cast<int>(std::min<int64_t>(params.max_tokens, room));
    scheduler_.check_can_ever_run(static_cast<int>(length), new_tokens, params.beam_width);
    return new_tokens;
}

// Without the lock: what a request needs, context logits for one, can be large.
std::unique_ptr<Request> Engine::make_request(RequestId id, std::span<const int32_t> prompt,
                                              SamplingParams params, int new_tokens,
                                              const RequestOptions& options) const {
    const auto bits = philox4x32({static_cast<uint32_t>(id), static_cast<uint32_t>(id >> 32), 0, 0},
                                 {static_cast<uint32_t>(entropy_), static_cast<uint32_t>(entropy_ >> 32)});
    const uint64_t seed = params.seed.value_or((uint64_t{bits[0]} << 32) | bits[1]);
    CacheUse cache{options_.prefix_caching, options.priority, options.cache_salt};
    cache.salt.adapter = options.adapter;
    auto request = std::make_unique<Request>(id, prompt, std::move(params), seed, new_tokens, vocab_size_,
                                             cache, limits_.window());
    if (drafter_ != nullptr && request->params.num_speculative_tokens != 0 && new_tokens > 1 &&
        request->beams == nullptr) {
        request->drafts.reserve(static_cast<size_t>(drafter_->max_tokens()));
        request->draft_with(drafter_->begin(*request));
    }
    return request;
}

// Under mutex_.
void Engine::check_room(int64_t length) const {
    if (!stats_.dead.empty()) throw EngineDeadError("the engine is dead: " + stats_.dead);
    if (stopping_) throw EngineDeadError("the engine was shut down");
    const auto waiting = static_cast<int64_t>(inbox_.size()) + stats_.waiting;
    if (waiting >= options_.max_queue_size) {
        throw QueueFullError(std::to_string(waiting) + " requests are waiting already (max_queue_size)");
    }
    const int64_t tokens = inbox_tokens_ + stats_.waiting_tokens;
    if (options_.max_queued_tokens > 0 && waiting > 0 && tokens + length > options_.max_queued_tokens) {
        throw QueueFullError(std::to_string(tokens) +
                             " tokens are waiting already, and max_queued_tokens is " +
                             std::to_string(options_.max_queued_tokens));
    }
}

RequestId Engine::submit(std::span<const int32_t> prompt, SamplingParams params,
                         const RequestOptions& options) {
    const int new_tokens = check_request(prompt, params, options);
    std::unique_lock lock(mutex_);
    std::shared_ptr<const Adapter> adapter = options.adapter == 0 ? nullptr : find_adapter(options.adapter);
    const RequestId id = next_id_++;
    lock.unlock();
    std::unique_ptr<Request> request = make_request(id, prompt, std::move(params), new_tokens, options);
    request->adapter = std::move(adapter);

    // Of a request that is refused below, too: it is dropped then.
    struct Helped {
        Engine& engine;
        RequestId id;
        bool kept = false;
        ~Helped() {
            if (!kept) engine.drop_helpers(id);
        }
    } helped{*this, id};
    if (request->constrained()) masks_.add(id, request->params.first_mask, new_tokens);
    if (request->params.process_logits) processors_.add(id, vocab_size_, new_tokens);

    const auto length = static_cast<int64_t>(prompt.size());
    lock.lock();
    check_room(length);
    inbox_tokens_ += length;
    if (outbox_.capacity() <= live_.size()) outbox_.reserve(2 * live_.size() + 64);
    inbox_.push_back(request.get());
    live_.emplace(id, std::move(request));
    ++stats_.requests_submitted;
    helped.kept = true;
    lock.unlock();
    work_.notify_one();
    return id;
}

// A request ends: nobody waits any more for its masks and its logits.
void Engine::drop_helpers(RequestId id) {
    masks_.drop(id);
    processors_.drop(id);
}

AdapterId Engine::add_adapter(const LoraModules& modules) {
    if (options_.max_loras == 0)
        throw std::invalid_argument("this engine takes no adapters; start it with max_loras of 1 or more");
    std::shared_ptr<const Adapter> made = device_->make_adapter(modules);  // takes a while: without the lock
    const std::lock_guard lock(mutex_);
    const AdapterId id = next_adapter_++;
    adapters_.emplace(id, std::move(made));
    return id;
}

// Under mutex_.
std::shared_ptr<const Adapter> Engine::find_adapter(AdapterId id) const {
    const auto found = adapters_.find(id);
    if (found == adapters_.end()) {
        throw std::invalid_argument("adapter " + std::to_string(id) + " is unknown, or was removed");
    }
    return found->second;
}

void Engine::remove_adapter(AdapterId id) {
    std::shared_ptr<const Adapter> last;  // freed without the lock
    const std::lock_guard lock(mutex_);
    const auto found = adapters_.find(id);
    if (found == adapters_.end()) return;
    last = std::move(found->second);
    adapters_.erase(found);
}

void Engine::cancel(RequestId id) {
    {
        const std::lock_guard lock(mutex_);
        const auto found = live_.find(id);
        if (found == live_.end() || found->second->cancel_requested) return;
        found->second->cancel_requested = true;
        cancels_.push_back(id);
    }
    work_.notify_one();
}

std::vector<Event> Engine::poll(std::chrono::duration<double> timeout) {
    const std::lock_guard polling(poll_mutex_);
    polled_.clear();
    {
        std::unique_lock lock(mutex_);
        events_.wait_for(lock, timeout, [this] { return !outbox_.empty() || ended_; });
        // The engine thread gets polled_ to write to, so it must hold as much.
        if (polled_.capacity() < outbox_.capacity()) polled_.reserve(outbox_.capacity());
        polled_.swap(outbox_);
    }
    // Without the lock, on this thread's time: what was published does not change any more.
    std::vector<Event> events;
    events.reserve(polled_.size());
    std::vector<std::unique_ptr<Request>> finished;
    for (const News& news : polled_) {
        events.push_back(make_event(*news.request, news.from, news.to, news.context, news.finished));
        events.back().vocab_size = vocab_size_;
    }
    const std::lock_guard lock(mutex_);
    for (const Event& event : events) {
        if (!event.finished) continue;
        const auto owner = live_.find(event.request_id);
        (hung_ && !thread_ended_ ? stranded_ : finished).push_back(std::move(owner->second));
        live_.erase(owner);
    }
    return events;
}

EngineStats Engine::stats(size_t recent_steps) const {
    const std::lock_guard lock(mutex_);
    EngineStats stats = stats_;
    stats.waiting += static_cast<int>(inbox_.size());
    stats.waiting_tokens += inbox_tokens_;
    stats.recent_steps = trace_.last(recent_steps);
    stats.adapters = static_cast<int>(adapters_.size());
    for (const auto& [id, adapter] : adapters_) stats.adapter_bytes += adapter->bytes();
    return stats;
}

bool Engine::shutdown() {
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    masks_.close();  // or a step could wait for one
    processors_.close();
    work_.notify_one();
    const std::lock_guard joining(join_mutex_);
    {
        std::unique_lock lock(mutex_);
        ends_.wait(lock, [this] { return thread_ended_ || hung_; });
        if (!ends_.wait_for(lock, std::chrono::seconds(1), [this] { return thread_ended_; })) return false;
    }
    if (thread_.joinable()) thread_.join();
    if (watchdog_.joinable()) watchdog_.join();
    return true;
}

}  // namespace castiron
