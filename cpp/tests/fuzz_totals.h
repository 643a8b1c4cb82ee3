// What a number of lives came across: a fuzzer that meets nothing proves nothing.
#pragma once

#include <cstdint>

namespace castiron::testing {

struct FuzzTotals {
    int64_t requests = 0;
    int64_t steps = 0;
    int64_t ahead = 0;         // of them: planned and started while another was under way
    int64_t dropped_rows = 0;  // of requests that had ended by the time
    int64_t cached_tokens = 0;
    int64_t copies = 0;
    int64_t preemptions = 0;
    int64_t recomputed_tokens = 0;
    int64_t evictions = 0;
    int64_t drafted = 0;
    int64_t accepted = 0;
    int64_t drafted_in_grammars = 0;  // drafts that a grammar takes
    int64_t cancelled = 0;
    int64_t failures = 0;
    int64_t poisoned = 0;
    int64_t beam_searches = 0;   // that came to their end
    int64_t adapted = 0;         // requests with an adapter that did
    int64_t released = 0;        // blocks given back behind the window, by requests at their end
    int64_t saved = 0;           // blocks copied to the host tier
    int64_t loaded = 0;          // and back
    int64_t fetched = 0;         // blocks that came from its file
    int64_t slid = 0;            // requests that gave some back
    int64_t windows_passed = 0;  // window blocks that requests no longer read at their end
    int64_t windows_evicted = 0;
    int64_t windows_loaded = 0;  // of loaded
};

}  // namespace castiron::testing
