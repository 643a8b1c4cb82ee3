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

#include "batching/mask_rows.h"

namespace castiron {

// A request's new tokens, of which somebody is to make the mask of the token after them, and guesses of what
// comes then, behind each of which a mask is wanted as well.
struct MaskWish {
    int64_t request_id = 0;
    int num_output = 0;           // tokens generated so far: what the first mask is for
    std::vector<int32_t> tokens;  // since the last wish
    std::vector<int32_t> drafts;
};

// The engine asks for a mask as soon as a token is known, goes on with the next step, and needs the mask only
// when that step's logits are there; for those behind drafts it asks when it begins the step that checks
// them. Thread-safe; the engine thread allocates nothing here.
class MaskExchange {
public:
    // A request begins: `mask` is for its first token.
    void add(int64_t request_id, std::vector<uint32_t> mask, int max_new_tokens);
    // A request ends, in whatever way. Harmless when it is not known.
    void drop(int64_t request_id);

    // The engine's. ask: `tokens` were generated, `num_output` there are now.
    void ask(int64_t request_id, std::span<const int32_t> tokens, int num_output);
    // A step checks `drafts`, as no other has since the last ask.
    void ask_along(int64_t request_id, std::span<const int32_t> drafts);
    // The mask for the token after `num_output` tokens and those behind the drafts asked for, as far as
    // somebody gave them, valid until the next ask or drop; waits for them. Throws std::runtime_error when
    // nobody gives any within `patience`, or with the reason why there is none.
    [[nodiscard]] MaskRows wait(int64_t request_id, int num_output, int num_drafts,
                                std::chrono::duration<double> patience);

    // The other side's. poll: wishes, waiting up to `timeout` for some; empty at once after close.
    [[nodiscard]] std::vector<MaskWish> poll(std::chrono::duration<double> timeout);
    // Ignored when the request has ended or goes on without it. Masks may be shorter than those before.
    // num_drafts: of the wish; masks may end earlier, and then no draft from there on is taken.
    void give(int64_t request_id, int num_output, int num_drafts, const MaskRows& masks);
    void refuse(int64_t request_id, int num_output, const std::string& reason);
    void close();

private:
    struct Entry {
        std::vector<uint32_t> masks;
        size_t num_masks = 1;
        int masks_for = 0;   // tokens generated before the one that the first is for
        int num_drafts = 0;  // that they answer
        std::string refused;
        std::vector<int32_t> fresh;   // tokens that no wish has told yet
        std::vector<int32_t> drafts;  // that none has told
        int num_output = 0;
        bool wished = false;  // is in wishes_
    };

    void wish(int64_t request_id, Entry& entry);

    std::mutex mutex_;
    std::condition_variable wished_;
    std::condition_variable given_;
    bool closed_ = false;
    std::map<int64_t, std::unique_ptr<Entry>> entries_;
    std::vector<int64_t> wishes_;
};

}  // namespace castiron
