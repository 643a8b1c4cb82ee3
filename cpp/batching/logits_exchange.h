// Logits that somebody outside the engine changes before a token is chosen from them.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace castiron {

// A request's row of logits, waiting to be changed.
struct LogitsWish {
    int num_output = 0;           // tokens generated so far: the row is for the one after them
    std::vector<int32_t> tokens;  // since the last wish
    std::vector<float> logits;    // [vocab_size]
};

// The engine shows the rows of a step, all at once, and waits for each until its time is over. Every request
// has somebody of its own on the other side, so that one who takes long keeps nobody but itself from its
// turn. Thread-safe; the engine thread allocates nothing here.
class LogitsExchange {
public:
    // A request begins.
    void add(int64_t request_id, int vocab_size, int max_new_tokens);
    // A request ends, in whatever way: poll() tells the other side. Harmless when it is not known.
    void drop(int64_t request_id);

    // The engine's. show: `logits` are those of the token after `output`.
    void show(int64_t request_id, std::span<const int32_t> output, std::span<const float> logits);
    // What was made of them, valid until the next show or drop. Throws std::runtime_error when nothing came
    // by `deadline`, or with the reason why nothing comes.
    [[nodiscard]] std::span<const float> wait(int64_t request_id,
                                              std::chrono::steady_clock::time_point deadline);

    // The other side's. poll: waits for the request's next row; nothing when the request has ended.
    [[nodiscard]] std::optional<LogitsWish> poll(int64_t request_id);
    // Ignored when the request has ended or goes on without it. `logits`: [vocab_size].
    void give(int64_t request_id, int num_output, std::span<const float> logits);
    void refuse(int64_t request_id, int num_output, const std::string& reason);
    void close();

private:
    struct Entry {
        std::vector<float> logits;
        std::vector<int32_t> fresh;  // tokens that no wish has told yet
        int num_output = 0;
        bool shown = false;  // to be polled
        bool ready = false;  // to be taken
        bool dropped = false;
        std::string refused;
        std::condition_variable changed;
    };

    // Under mutex_. Null when the request is not known.
    [[nodiscard]] std::shared_ptr<Entry> find(int64_t request_id) const;

    std::mutex mutex_;
    bool closed_ = false;
    std::map<int64_t, std::shared_ptr<Entry>> entries_;
};

}  // namespace castiron
