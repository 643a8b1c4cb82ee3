// Which tokens a grammar allows next, worked out by another thread while the engine's step runs.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

namespace castiron {

// A request's new tokens, of which somebody is to make the mask of the token after them.
struct MaskWish {
    int64_t request_id = 0;
    int num_output = 0;           // tokens generated so far: what the mask is for
    std::vector<int32_t> tokens;  // since the last wish
};

// The engine asks for a mask as soon as a token is known, goes on with the next step, and needs the mask only
// when that step's logits are there. Thread-safe; the engine thread allocates nothing here.
class MaskExchange {
public:
    // A request begins: `mask` is for its first token.
    void add(int64_t request_id, std::vector<uint32_t> mask, int max_new_tokens);
    // A request ends, in whatever way. Harmless when it is not known.
    void drop(int64_t request_id);

    // The engine's. ask: `token` was generated as number `num_output` - 1.
    void ask(int64_t request_id, int32_t token, int num_output);
    // The mask for the token after `num_output` tokens, valid until the next ask or drop; waits for it.
    // Throws std::runtime_error when nobody gives one within `patience`, or with the reason why there is
    // none.
    [[nodiscard]] std::span<const uint32_t> wait(int64_t request_id, int num_output,
                                                 std::chrono::duration<double> patience);

    // The other side's. poll: wishes, waiting up to `timeout` for some; empty at once after close.
    [[nodiscard]] std::vector<MaskWish> poll(std::chrono::duration<double> timeout);
    // Ignored when the request has ended or goes on without it. `mask` may be shorter than the one before.
    void give(int64_t request_id, int num_output, std::span<const uint32_t> mask);
    void refuse(int64_t request_id, int num_output, const std::string& reason);
    void close();

private:
    struct Entry {
        std::vector<uint32_t> mask;
        int mask_for = 0;  // tokens generated before the one that it is for
        std::string refused;
        std::vector<int32_t> fresh;  // tokens that no wish has told yet
        int num_output = 0;
        bool wished = false;  // is in wishes_
    };

    std::mutex mutex_;
    std::condition_variable wished_;
    std::condition_variable given_;
    bool closed_ = false;
    std::map<int64_t, std::unique_ptr<Entry>> entries_;
    std::vector<int64_t> wishes_;
};

}  // namespace castiron
