// Who guesses the tokens that come next, so that one step of the model can check several of them.
#pragma once

#include <memory>
#include <span>

#include "speculation/step_value.h"

namespace castiron {

struct Request;

// What a drafter keeps of one request: allocated where the request is made, used by the engine thread alone.
struct DraftState {
    DraftState() = default;
    DraftState(const DraftState&) = delete;
    DraftState& operator=(const DraftState&) = delete;
    virtual ~DraftState() = default;
};

// A decoding request of the step, and how many guesses it has room for.
struct DraftWish {
    Request* request = nullptr;
    int room = 0;
};

// Guesses cost time when they are wrong, never a token: the model's own choice decides at every position.
// What became of the last guesses a drafter reads off the request's tokens at the next call.
class Drafter {
public:
    virtual ~Drafter() = default;

    // Guesses for one request in one step at most.
    [[nodiscard]] virtual int max_tokens() const = 0;
    // On any thread, with the request's prompt in its tokens.
    [[nodiscard]] virtual std::unique_ptr<DraftState> begin(const Request& request) const = 0;
    // Writes guesses to each request's `drafts`, at most as many as it has room for, those alone that
    // `value` takes. Allocates nothing. No throw: without guesses the step is an ordinary one.
    virtual void draft(std::span<const DraftWish> wishes, StepValue& value) = 0;
    // The request does not run any more, for now or for ever.
    virtual void release(Request& request) { static_cast<void>(request); }
};

}  // namespace castiron
