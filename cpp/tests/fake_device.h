// A device whose logits are a hash of the tokens that it finds in its KV cache through the block tables: a
// wrong block, position or row shows as another token.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <limits>
#include <list>
#include <numeric>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "device/device.h"

namespace castiron::testing {

// The logits that follow a history, in [-4, 4).
inline void hashed_logits(std::span<const int32_t> history, std::span<float> logits) {
    uint64_t hash = 0xCBF29CE484222325U;
    for (const int32_t token : history) {
        hash = (hash ^ static_cast<uint64_t>(token + 1)) * 0x100000001B3U;
        hash ^= hash >> 29;
    }
    for (size_t i = 0; i < logits.size(); ++i) {
        uint64_t x = hash + (i + 1) * 0x9E3779B97F4A7C15U;
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
        x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
        x ^= x >> 31;
        logits[i] = static_cast<float>(static_cast<double>(x >> 40) * 0x1.0p-24 * 8.0 - 4.0);
    }
}

// The token that device.h and docs/batching.md define for a row, by full sorts in double.
inline SampledRows::Row choose_token(std::span<const float> logits, const RowSampling& sampling,
                                     std::span<const LogitEdit> edits, int row) {
    std::vector<double> x(logits.begin(), logits.end());
    for (const double logit : x) {
        if (std::isnan(logit)) return {-1, 1};
    }
    for (const LogitEdit& edit : edits) {
        if (edit.row != row) continue;
        double& logit = x[static_cast<size_t>(edit.token)];
        if (edit.count < 0) {
            logit = -std::numeric_limits<double>::infinity();
            continue;
        }
        const auto repetition = static_cast<double>(sampling.repetition);
        logit = logit > 0 ? logit / repetition : logit * repetition;
        if (edit.count > 0)
            logit -=
                static_cast<double>(sampling.frequency) * edit.count + static_cast<double>(sampling.presence);
    }
    std::vector<int32_t> order(x.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
        return x[static_cast<size_t>(a)] > x[static_cast<size_t>(b)];
    });
    if (sampling.temperature == 0) return {order[0], 0};
    const double most = x[static_cast<size_t>(order[0])];
    const auto weight = [&](int32_t id) {
        return std::exp((x[static_cast<size_t>(id)] - most) / static_cast<double>(sampling.temperature));
    };
    if (sampling.top_k > 0) order.resize(std::min(order.size(), static_cast<size_t>(sampling.top_k)));
    double mass = 0;
    for (const int32_t id : order) mass += weight(id);
    double kept = 0;
    size_t count = 0;
    while (count < order.size() &&
           (count == 0 || sampling.top_p >= 1 || kept < static_cast<double>(sampling.top_p) * mass)) {
        if (weight(order[count]) < static_cast<double>(sampling.min_p) || weight(order[count]) == 0) break;
        kept += weight(order[count++]);
    }
    order.resize(count);
    if (sampling.top_k == 0) std::sort(order.begin(), order.end());  // the walk is by id
    double passed = 0;
    for (const int32_t id : order) {
        passed += weight(id);
        if (passed > static_cast<double>(sampling.uniform) * kept) return {id, 0};
    }
    return {order.back(), 0};
}

// What it adds to every token: nobody says under one adapter what he says under another.
struct FakeAdapter final : Adapter {
    explicit FakeAdapter(int number) : shift(number * 1000) {}
    uint64_t bytes() const override { return 1; }
    int32_t shift;
};

inline int32_t shift_of(const Adapter* adapter) {
    return adapter == nullptr ? 0 : dynamic_cast<const FakeAdapter&>(*adapter).shift;
}

inline std::vector<int32_t> shifted(std::span<const int32_t> tokens, int32_t shift) {
    std::vector<int32_t> result(tokens.begin(), tokens.end());
    for (int32_t& token : result) token += shift;
    return result;
}

// What the last of the tokens sees of them.
inline std::span<const int32_t> in_window(std::span<const int32_t> tokens, int window) {
    if (window == 0 || tokens.size() <= static_cast<size_t>(window)) return tokens;
    return tokens.last(static_cast<size_t>(window));
}

class FakeDevice : public Device {
public:
    // on_device: it chooses tokens itself. queues: steps can be started, and run when somebody waits for
    // them, as late as a device may.
    FakeDevice(const Limits& limits, int vocab_size, bool on_device = false, bool queues = false)
        : limits_(limits), vocab_size_(vocab_size), on_device_(on_device || queues), queues_(queues) {
        logits_.reserve(static_cast<size_t>(limits.max_logit_rows) * static_cast<size_t>(vocab_size));
    }

    static constexpr uint64_t kBlockBytes = kBlockTokens * sizeof(int32_t);

    uint64_t kv_block_bytes() const override { return kBlockBytes; }
    int kv_window() const override { return window_of_some ? 0 : window; }
    KvWindowGroup kv_window_group() const override {
        return window_of_some ? KvWindowGroup{window, kBlockBytes} : KvWindowGroup{};
    }
    void reserve_kv(int num_blocks, int window_blocks) override {
        cache_.assign(static_cast<size_t>(num_blocks) * kBlockTokens, kNothing);
        window_cache_.assign(static_cast<size_t>(window_blocks) * kBlockTokens, kNothing);
    }
    void copy_kv_block(KvGroup group, int from, int to) override {
        copies_.push_back({group, from, to, nullptr, nullptr});
    }
    std::byte* reserve_host_blocks(uint64_t bytes) override {
        host_blocks_.resize(bytes);
        return host_blocks_.data();
    }
    void save_kv_block(KvGroup group, int block, std::byte* to) override {
        copies_.push_back({group, block, 0, nullptr, to});
    }
    void load_kv_block(KvGroup group, const std::byte* from, int block) override {
        copies_.push_back({group, 0, block, from, nullptr});
    }
    std::shared_ptr<const Adapter> make_adapter(const LoraModules&) const override {
        return std::make_shared<FakeAdapter>(++adapters_made_);
    }

    std::span<const float> forward(const Batch& batch) override {
        const int step = steps++;
        copy_blocks(copies_);
        copies_.clear();
        if (delay.count() > 0) std::this_thread::sleep_for(delay);
        hold(step);
        if (lost) throw DeviceLostError("the fake device was told to vanish");
        if (failures > 0) {
            --failures;
            throw std::runtime_error("the fake device was told to fail");
        }
        require(!batch.token_ids.empty(), "an empty step");
        require(batch.token_ids.size() <= static_cast<size_t>(limits_.max_num_tokens), "too many tokens");
        require(batch.logit_rows.size() <= static_cast<size_t>(limits_.max_logit_rows),
                "too many logit rows");
        require(batch.positions.size() == batch.token_ids.size(), "positions");
        write(batch);
        logits_.assign(batch.logit_rows.size() * static_cast<size_t>(vocab_size_), 0.0F);
        for (size_t i = 0; i < batch.logit_rows.size(); ++i) {
            const int row = batch.logit_rows[i];
            require(i == 0 || row > batch.logit_rows[i - 1], "logit rows are not ascending");
            answer(batch, row,
                   std::span(logits_).subspan(i * static_cast<size_t>(vocab_size_),
                                              static_cast<size_t>(vocab_size_)));
        }
        return logits_;
    }

    bool samples() const override { return on_device_; }
    SampledRows forward_and_sample(const Batch& batch, const SamplingBatch& sampling) override {
        const auto vocab = static_cast<size_t>(vocab_size_);
        const auto logits = forward(batch);
        require(sampling.rows.size() == batch.logit_rows.size(), "one entry of sampling for each row");
        sampled_.clear();
        top_ids_.assign(sampling.rows.size() * kMaxDeviceLogprobs, -1);
        top_logprobs_.assign(sampling.rows.size() * (1 + kMaxDeviceLogprobs), 0.0F);
        for (size_t row = 0; row < sampling.rows.size(); ++row) {
            const auto x = logits.subspan(row * vocab, vocab);
            sampled_.push_back(choose_token(x, sampling.rows[row], sampling.edits, static_cast<int>(row)));
            if (sampling.rows[row].num_logprobs < 0) continue;
            double sum = 0;
            for (const float logit : x) sum += std::exp(static_cast<double>(logit));
            const auto logprob = [&](int32_t id) {
                return static_cast<float>(static_cast<double>(x[static_cast<size_t>(id)]) - std::log(sum));
            };
            std::vector<int32_t> order(vocab);
            std::iota(order.begin(), order.end(), 0);
            std::stable_sort(order.begin(), order.end(),
                             [&](int32_t a, int32_t b) { return logprob(a) > logprob(b); });
            float* to = &top_logprobs_[row * (1 + kMaxDeviceLogprobs)];
            to[0] = sampled_.back().token >= 0 ? logprob(sampled_.back().token) : 0.0F;
            for (int i = 0; i < sampling.rows[row].num_logprobs; ++i) {
                top_ids_[row * kMaxDeviceLogprobs + static_cast<size_t>(i)] = order[static_cast<size_t>(i)];
                to[1 + i] = logprob(order[static_cast<size_t>(i)]);
            }
        }
        return {sampled_, top_ids_, top_logprobs_};
    }

    bool queues() const override { return queues_; }
    void start(const Batch& batch, const SamplingBatch& sampling) override {
        require(under_way_.size() < 2, "a third step is started");
        if (fails_at_start) throw_failure();
        under_way_.push_back({batch, sampling, std::exchange(copies_, {}), poisoned_history});
        require(!batch.token_sources.empty() || under_way_.size() == 1, "no token sources");
        for (const int32_t source : batch.token_sources) {
            const auto rows = under_way_.front().logit_rows.size();
            require(source < 0 || (under_way_.size() == 2 && static_cast<size_t>(source) < rows),
                    "a token comes from a row that no step under way has");
        }
    }
    SampledRows finish() override {
        require(!under_way_.empty(), "no step is under way");
        Queued step = std::move(under_way_.front());
        under_way_.pop_front();
        copy_blocks(step.copies);
        for (size_t row = 0; row < step.token_sources.size(); ++row) {
            const int32_t source = step.token_sources[row];
            // The request of a row without a token has ended.
            if (source >= 0) step.token_ids[row] = std::max(last_[static_cast<size_t>(source)].token, 0);
        }
        SampledRows sampled;
        const auto later = std::exchange(copies_, {});
        std::swap(poisoned_history, step.poisoned_history);
        try {
            sampled = forward_and_sample(step.batch(), {step.rows, step.edits});
        } catch (...) {
            under_way_.clear();
            throw;
        }
        std::swap(poisoned_history, step.poisoned_history);
        copies_ = later;
        last_.assign(sampled.rows.begin(), sampled.rows.end());
        return sampled;
    }

    // Nobody knows what the cache holds any more.
    void scramble() {
        for (auto* cache : {&cache_, &window_cache_}) {
            for (size_t i = 0; i < cache->size(); ++i)
                (*cache)[i] = static_cast<int32_t>(i % 7) - kFirstGarbage;
        }
    }

    std::atomic<bool> lost{false};            // every step throws that the device is lost
    std::atomic<int> failures{0};             // so many of the next steps throw
    std::atomic<bool> fails_at_start{false};  // the next step that is started throws
    std::atomic<int> steps{0};
    // The step of this number, from 0, and those behind it stay on the device until somebody says otherwise:
    // what a test does meanwhile meets them there, however slow or fast the machine is.
    std::atomic<int> held_from{kNever};
    static constexpr int kNever = std::numeric_limits<int>::max();
    std::chrono::microseconds delay{0};
    int window = 0;  // tokens that a token sees, itself among them; 0: all
    // Only some layers have it: a token is seen through the others for good, and checked in these.
    bool window_of_some = false;
    std::vector<int32_t> poisoned_history;  // logits after this history, as the cache has it, are NaN

private:
    static constexpr int32_t kNothing = -1;
    static constexpr int32_t kFirstGarbage = 100;

    // From a block, or from outside, to a block, or to outside; as late as a device may.
    struct Move {
        KvGroup group;
        int from, to;
        const std::byte* outside_from;
        std::byte* outside_to;
    };

    // A step that was started, with all that it needs: what was passed may change.
    struct Queued {
        Queued(const Batch& batch, const SamplingBatch& sampling, std::vector<Move> to_copy,
               std::vector<int32_t> poison)
            : token_ids(batch.token_ids.begin(), batch.token_ids.end()),
              positions(batch.positions.begin(), batch.positions.end()),
              logit_rows(batch.logit_rows.begin(), batch.logit_rows.end()),
              token_sources(batch.token_sources.begin(), batch.token_sources.end()),
              sequences(batch.sequences.begin(), batch.sequences.end()),
              rows(sampling.rows.begin(), sampling.rows.end()),
              edits(sampling.edits.begin(), sampling.edits.end()),
              copies(std::move(to_copy)),
              poisoned_history(std::move(poison)) {
            for (SequenceSlice& sequence : sequences) {
                for (auto* table : {&sequence.block_table, &sequence.window_table}) {
                    tables.emplace_back(table->begin(), table->end());
                    *table = tables.back();
                }
            }
        }
        Batch batch() const { return {token_ids, positions, logit_rows, sequences, {}}; }

        std::vector<int32_t> token_ids, positions, logit_rows, token_sources;
        std::list<std::vector<int32_t>> tables;
        std::vector<SequenceSlice> sequences;
        std::vector<RowSampling> rows;
        std::vector<LogitEdit> edits;
        std::vector<Move> copies;
        std::vector<int32_t> poisoned_history;
    };

    [[noreturn]] void throw_failure() {
        fails_at_start = false;
        under_way_.clear();
        copies_.clear();
        throw std::runtime_error("the fake device was told to fail");
    }

    // A minute at most, so that a test that fails meanwhile does not hang.
    void hold(int step) const {
        const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
        while (step >= held_from && std::chrono::steady_clock::now() < deadline) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
    }

    static void require(bool holds, const char* what) {
        if (!holds) throw std::logic_error(std::string("the fake device refuses the step: ") + what);
    }
    int32_t& slot(KvGroup group, int block, int offset) {
        std::vector<int32_t>& cache = group == KvGroup::kAll ? cache_ : window_cache_;
        require(block >= 0 && static_cast<size_t>(block) * kBlockTokens < cache.size(),
                "block outside the pool");
        return cache[static_cast<size_t>(block) * kBlockTokens + static_cast<size_t>(offset)];
    }
    int32_t& slot_at(KvGroup group, const SequenceSlice& sequence, int position) {
        const auto index = static_cast<size_t>(position / kBlockTokens);
        const auto table = group == KvGroup::kAll ? sequence.block_table : sequence.window_table;
        require(index < table.size(), "block table too short");
        return slot(group, table[index], position % kBlockTokens);
    }
    // What the layers with a window hold of a token: nobody else's token, and none of another position.
    static int32_t stamp(int32_t token, int position) { return token * 1009 + position; }
    bool keeps_apart() const { return !window_cache_.empty(); }

    void copy_blocks(std::span<const Move> copies) {
        for (const Move& move : copies) {
            const void* from = move.outside_from != nullptr
                                   ? move.outside_from
                                   : static_cast<const void*>(&slot(move.group, move.from, 0));
            void* to = move.outside_to != nullptr ? move.outside_to
                                                  : static_cast<void*>(&slot(move.group, move.to, 0));
            std::memcpy(to, from, kBlockBytes);
        }
    }

    void write(const Batch& batch) {
        int row = 0;
        std::set<int32_t> written, windows_written;
        for (const SequenceSlice& sequence : batch.sequences) {
            require(sequence.first_row == row && sequence.num_rows > 0, "rows of the sequences have gaps");
            for (int i = 0; i < sequence.num_rows; ++i, ++row) {
                const int position = sequence.start_position + i;
                require(position < limits_.max_seq_len, "position past max_seq_len");
                require(batch.positions[static_cast<size_t>(row)] == position, "positions");
                const int32_t token = batch.token_ids[static_cast<size_t>(row)] + shift_of(sequence.adapter);
                slot_at(KvGroup::kAll, sequence, position) = token;
                if (keeps_apart()) slot_at(KvGroup::kWindow, sequence, position) = stamp(token, position);
            }
            for (int p = sequence.start_position / kBlockTokens;
                 p <= (sequence.start_position + sequence.num_rows - 1) / kBlockTokens; ++p) {
                require(written.insert(sequence.block_table[static_cast<size_t>(p)]).second,
                        "two sequences write to one block");
                if (!keeps_apart()) continue;
                require(windows_written.insert(sequence.window_table[static_cast<size_t>(p)]).second,
                        "two blocks of a step have one window block");
            }
        }
        require(static_cast<size_t>(row) == batch.token_ids.size(), "rows without a sequence");
    }

    void answer(const Batch& batch, int row, std::span<float> logits) {
        for (const SequenceSlice& sequence : batch.sequences) {
            if (row >= sequence.first_row + sequence.num_rows) continue;
            const int last = sequence.start_position + row - sequence.first_row;
            history_.clear();
            const int seen = window > 0 ? std::max(last - window + 1, 0) : 0;
            for (int p = window_of_some ? 0 : seen; p <= last; ++p) {
                history_.push_back(slot_at(KvGroup::kAll, sequence, p));
                if (!keeps_apart() || p < seen) continue;
                // What the other layers do not hold is another token's: the row says something else then.
                const int32_t here = slot_at(KvGroup::kWindow, sequence, p);
                if (here != stamp(history_.back(), p)) history_.push_back(here);
            }
            hashed_logits(history_, logits);
            if (!poisoned_history.empty() && history_ == poisoned_history) {
                logits[logits.size() / 2] = std::numeric_limits<float>::quiet_NaN();
            }
            return;
        }
    }

    Limits limits_;
    int vocab_size_;
    std::vector<int32_t> cache_;
    std::vector<int32_t> window_cache_;
    std::vector<std::byte> host_blocks_;
    std::vector<int32_t> history_;
    std::vector<float> logits_;
    bool on_device_;
    bool queues_;
    mutable std::atomic<int> adapters_made_{0};
    std::deque<Queued> under_way_;
    std::vector<Move> copies_;            // of the step that is started next
    std::vector<SampledRows::Row> last_;  // of the step done last
    std::vector<SampledRows::Row> sampled_;
    std::vector<int32_t> top_ids_;
    std::vector<float> top_logprobs_;
};

}  // namespace castiron::testing
