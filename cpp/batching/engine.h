// In-flight batching: requests come and go while steps run.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "batching/event.h"
#include "batching/logits_exchange.h"
#include "batching/mask_exchange.h"
#include "batching/scheduler.h"
#include "batching/step_runner.h"
#include "batching/trace.h"
#include "device/device.h"
#include "kv/block_pool.h"
#include "kv/pool_size.h"

namespace castiron {

// In which order waiting requests are served.
enum class SchedulingPolicy : uint8_t {
    kFcfs,      // as they came
    kPriority,  // by the request's priority, then as they came
};

struct EngineOptions {
    int kv_cache_blocks = 0;        // 0: enough for the limits, at most what the device gives by default
    uint64_t kv_cache_bytes = 0;    // the same in bytes; one of them is 0
    int max_batch_size = 0;         // 0: the program's; else at most that
    int max_num_tokens = 0;         // 0: the program's; else at most that
    int max_queue_size = 16384;     // requests waiting to run
    int64_t max_queued_tokens = 0;  // tokens of the waiting requests' prompts; 0: no bound
    int vocab_limit = 0;            // token ids from it on are never sampled; 0: vocab_size
    bool prefix_caching = true;     // use the keys and values of a prompt's beginning if they are there
    SchedulingPolicy scheduling = SchedulingPolicy::kFcfs;
    CapacityPolicy capacity = CapacityPolicy::kGuaranteedNoEvict;
    int max_loras = 0;             // different adapters running at a time; 0: the engine takes none
    uint64_t host_tier_bytes = 0;  // for blocks that the pool gives up; 0: they are gone
    uint64_t disk_tier_bytes = 0;  // for those that the host tier gives up
    std::string disk_tier_folder;  // where they lie
    double watchdog_seconds = 0;   // a step that is longer on the device has hung; 0: no such limit
};

using AdapterId = int64_t;  // 0: none

// What a request says besides how its tokens are chosen.
struct RequestOptions {
    int32_t priority = 0;  // smaller numbers first; other than 0 under SchedulingPolicy::kPriority alone
    CacheSalt cache_salt;  // cached prefixes are shared by requests of the same salt and adapter
    AdapterId adapter = 0;
};

// Too many requests or tokens wait already.
struct QueueFullError : std::runtime_error {
    using std::runtime_error::runtime_error;
};
// The engine was shut down, or died of a failure that its message tells.
struct EngineDeadError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct EngineStats {
    int running = 0;
    int waiting = 0;
    int64_t waiting_tokens = 0;           // prompts and outputs of the waiting requests
    Blocked blocked = Blocked::kNothing;  // why the first waiting request does not run yet
    int kv_blocks_total = 0;
    int kv_blocks_used = 0;      // that running requests hold
    int kv_blocks_cached = 0;    // that nobody holds and the prefix cache keeps: can be evicted at any time
    int kv_blocks_free = 0;      // the rest
    int kv_blocks_promised = 0;  // of the cached and free ones
    int64_t kv_blocks_evicted = 0;
    int window_blocks_total = 0;     // where some layers have a window: of these layers
    int window_blocks_used = 0;      // that running requests read
    int window_blocks_cached = 0;    // that nobody reads and the prefix cache keeps
    int window_blocks_free = 0;      // the rest
    int window_blocks_promised = 0;  // what running requests may read, besides what a step feeds
    int64_t window_blocks_evicted = 0;
    int host_blocks_total = 0;         // that the host tier has room for
    int host_blocks = 0;               // that it holds
    int64_t host_blocks_saved = 0;     // copied there
    int64_t host_blocks_loaded = 0;    // copied back
    int host_window_blocks_total = 0;  // the same of window blocks
    int host_window_blocks = 0;
    int64_t host_window_blocks_saved = 0;
    int64_t host_window_blocks_loaded = 0;
    int disk_blocks_total = 0;         // that the disk tier has room for
    int disk_blocks = 0;               // that it holds
    int64_t disk_blocks_spilled = 0;   // written there
    int64_t disk_blocks_fetched = 0;   // read back
    std::string disk_error;            // why it is not used any more
    std::string kv_integrity_error;    // what was wrong when the cache had to be emptied
    int64_t prefix_query_tokens = 0;   // prompt tokens looked for in the prefix cache
    int64_t prefix_cached_tokens = 0;  // of them found there
    int64_t preemptions = 0;
    int64_t recomputed_tokens = 0;  // computed a second time, after a preemption
    int64_t steps = 0;
    int64_t graph_steps = 0;           // of them: a CUDA graph was replayed
    int64_t device_sampled_steps = 0;  //          tokens were chosen on the device
    int64_t ahead_steps = 0;           //          started while the step before was on the device
    int64_t requests_submitted = 0;
    std::array<int64_t, 5> requests_finished{};  // by FinishReason
    int64_t prompt_tokens = 0;                   // computed in prefill, recomputed ones among them
    int64_t generated_tokens = 0;
    int64_t draft_tokens = 0;     // guesses that were checked
    int64_t accepted_tokens = 0;  // of them: right
    int64_t device_failures = 0;
    int adapters = 0;  // that requests may name; bytes: all of their memory
    uint64_t adapter_bytes = 0;
    std::string dead;          // why, if it is
    std::string stall_report;  // what the engine was doing when a step hung
    StepRecord last_step;
    std::vector<StepRecord> recent_steps;
};

// Where blocks go that the pool gives up, those of each group of layers.
struct EngineTiers {
    std::unique_ptr<HostTier> blocks, windows;

    [[nodiscard]] HostTiers all() const { return {blocks.get(), windows.get()}; }
};

// One thread runs the loop: take in submissions and cancels, schedule, run the device, sample, hand over
// events. It sleeps while there is nothing to do. A device that queues steps and chooses tokens gets the next
// step while one is under way, as long as the scheduler can plan it without that one's tokens. All memory is
// reserved before: the engine's own in the constructor, a request's in submit(), on the caller's thread.
// Events are not queued but read off the requests, so that a slow caller costs no memory and gets the news of
// several steps as one event.
//
// Idle for kIdleCheck, it checks the accounting of the KV cache; a cache that fails is emptied, which
// stats() tells.
//
// A device failure ends the running requests with an error, empties the prefix cache, and the loop goes on;
// after kMaxDeviceFailures in a row, when the device is lost, or after any failure of the engine itself, it
// is dead: all requests end with the error and submit() refuses.
//
// A step that stays on the device for watchdog_seconds has hung: a second thread ends all requests with an
// error, writes the engine's state to stderr and to stats(), and the engine is dead. The device may still be
// reading what belongs to those requests, so that memory stays until the engine thread is back.
class Engine {
public:
    static constexpr int kMaxDeviceFailures = 3;
    static constexpr std::chrono::milliseconds kIdleCheck{500};
    // How long a step waits for the mask of a grammar or a logits processor before it ends that request.
    static constexpr std::chrono::seconds kMaskPatience{5};

    // Reserves the device's KV pool and starts the thread. Throws std::invalid_argument on options out of
    // range. drafter: guesses tokens (speculative decoding); none: nobody does.
    Engine(std::unique_ptr<Device> device, const Limits& limits, int vocab_size, const EngineOptions& options,
           std::unique_ptr<Drafter> drafter = nullptr);
    ~Engine();
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    // Thread-safe. Throws std::invalid_argument on a request that cannot be served, QueueFullError,
    // EngineDeadError.
    RequestId submit(std::span<const int32_t> prompt, SamplingParams params,
                     const RequestOptions& options = {});
    // Thread-safe. Makes an adapter ready for requests to name. Its memory is allocated here, on the caller's
    // thread. Throws std::invalid_argument where it does not fit, or where the engine takes no adapters.
    AdapterId add_adapter(const LoraModules& modules);
    // Thread-safe. No request can name it any more; those that did go on, and its memory is freed with the
    // last of them. Unknown ones are ignored.
    void remove_adapter(AdapterId id);
    // Thread-safe. The request ends with kCancelled within a step; unknown and finished ones are ignored.
    void cancel(RequestId id);
    // News of all requests, waiting up to `timeout` for some. One thread at a time; empty at once after
    // shutdown.
    [[nodiscard]] std::vector<Event> poll(std::chrono::duration<double> timeout);
    [[nodiscard]] EngineStats stats(size_t recent_steps) const;
    // Cancels what runs and joins the thread, within a step. Events that are left can still be polled. False
    // when the device has hung and the thread is not back a second later: then destroying the engine would
    // wait for it, maybe for ever.
    bool shutdown();

    // Where the masks of requests with a first_mask are asked for and given.
    [[nodiscard]] MaskExchange& masks() { return masks_; }
    // Where the rows of requests with process_logits are shown and given back.
    [[nodiscard]] LogitsExchange& processors() { return processors_; }
    [[nodiscard]] const SchedulerLimits& limits() const { return limits_; }
    [[nodiscard]] const PoolSize& pool_size() const { return pool_size_; }

private:
    using Clock = std::chrono::steady_clock;

    // What is new about a request: output tokens [from, to) and the flags. poll() takes the whole list away
    // by a swap, so that the engine thread never waits while the caller reads the requests.
    struct News {
        const Request* request;
        int from;
        int to;
        bool context;
        bool finished;
    };

    // A step that was started, and what is known of it.
    struct StartedStep {
        const StepPlan* plan = nullptr;  // none: there is no step
        StepRecord record;
        Clock::time_point started;
        bool queued = false;  // the device is still to be waited for
    };

    [[nodiscard]] int check_request(std::span<const int32_t> prompt, const SamplingParams& params,
                                    const RequestOptions& options) const;
    [[nodiscard]] std::unique_ptr<Request> make_request(RequestId id, std::span<const int32_t> prompt,
                                                        SamplingParams params, int new_tokens,
                                                        const RequestOptions& options) const;
    void check_room(int64_t length) const;
    [[nodiscard]] std::shared_ptr<const Adapter> find_adapter(AdapterId id) const;
    void drop_helpers(RequestId id);

    // engine_loop.cc
    void loop();
    void turn(StepRecord& record);
    [[nodiscard]] bool take_in(StepRecord& record);
    [[nodiscard]] bool take_in_cancels();
    [[nodiscard]] const StepPlan* next_plan();
    [[nodiscard]] bool start(StartedStep& step);
    [[nodiscard]] bool finish(StartedStep& step);
    template <typename Call>
    [[nodiscard]] bool on_device(const StartedStep& step, Call call);
    void fail_running(const std::string& failure, bool lost);
    void enter_device(const StartedStep& step);
    void add_drafts(StartedStep& step);
    void leave_device();
    void watch();
    void give_up(double seconds);
    void check_cache();
    void end_requests(FinishReason reason, const std::string& message);
    void end_all(FinishReason reason, const std::string& message);
    void ask_along_drafts(const StepPlan& plan);
    void take_masks(const StepPlan& plan);
    void ask_for_masks(const StepPlan& plan);
    void hand_over(StepRecord& record);
    void publish(Request& request);
    void update_gauges();

    const PoolSize pool_size_;
    const SchedulerLimits limits_;
    const int vocab_size_;
    const EngineOptions options_;
    const uint64_t entropy_;  // for requests without a seed
    const Clock::time_point born_ = Clock::now();

    // The engine thread's.
    std::unique_ptr<Device> device_;
    BlockPool pool_;
    const EngineTiers tiers_;  // none: blocks that are evicted are gone
    const std::unique_ptr<Drafter> drafter_;
    StepCost step_cost_;
    Scheduler scheduler_;
    StepRunner runner_;
    std::vector<Request*> touched_;     // requests with news in this step
    StartedStep under_way_;             // a step that the device has queued
    bool cancelled_under_way_ = false;  // a request that it may hold was cancelled
    Clock::time_point last_finish_;     // of a step on the device
    int64_t steps_ = 0;
    int64_t checked_steps_ = 0;  // at the last check of the cache
    int failures_in_a_row_ = 0;

    MaskExchange masks_;
    LogitsExchange processors_;

    // Shared, under mutex_.
    mutable std::mutex mutex_;
    std::condition_variable work_;    // for the engine thread
    std::condition_variable events_;  // for poll()
    std::condition_variable ends_;    // for the watchdog and shutdown()
    bool stopping_ = false;
    bool ended_ = false;                   // nothing more happens to any request
    bool thread_ended_ = false;            // the engine thread will not touch anything any more
    bool hung_ = false;                    // the watchdog has ended everything
    const StepPlan* on_device_ = nullptr;  // what the engine thread waits for
    int64_t on_device_step_ = 0;
    Clock::time_point on_device_since_;
    std::vector<std::unique_ptr<Request>> stranded_;  // polled to the end while the device hangs
    RequestId next_id_ = 1;
    AdapterId next_adapter_ = 1;
    std::map<AdapterId, std::shared_ptr<const Adapter>> adapters_;
    std::unordered_map<RequestId, std::unique_ptr<Request>> live_;  // until its last event is polled
    std::vector<Request*> inbox_;
    int64_t inbox_tokens_ = 0;
    std::vector<RequestId> cancels_;
    std::vector<News> outbox_;
    EngineStats stats_;
    StepTrace trace_{1024};

    std::mutex poll_mutex_;
    std::vector<News> polled_;  // under poll_mutex_; swapped with the outbox
    std::mutex join_mutex_;
    std::thread thread_;  // last: they start when all the rest is there
    std::thread watchdog_;
};

}  // namespace castiron
