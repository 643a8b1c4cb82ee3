// schedule_fuzz [first seed] [how many]: random lives of the scheduler, for as long as one likes.
#include "tests/schedule_fuzz.h"

#include <cstdio>
#include <cstdlib>
#include <exception>

int main(int argc, char** argv) {
    const auto first = static_cast<uint32_t>(argc > 1 ? std::atoll(argv[1]) : 0);
    const auto count = static_cast<uint32_t>(argc > 2 ? std::atoll(argv[2]) : 20000);
    castiron::testing::FuzzTotals totals;
    for (uint32_t i = 0; i < count; ++i) {
        try {
            castiron::testing::ScheduleFuzz(first + i, totals).run();
        } catch (const std::exception& error) {
            std::printf("seed %u: %s\n", first + i, error.what());
            return 1;
        }
    }
    std::printf(
        "%u schedules, %lld requests, %lld steps, %lld started ahead (%lld rows dropped): %lld tokens from "
        "the cache, %lld blocks copied, %lld "
        "evicted, %lld of %lld drafts right, %lld preemptions (%lld tokens computed again), %lld cancelled, "
        "%lld device failures, "
        "%lld poisoned, %lld beam searches, %lld requests with adapters, %lld that gave back %lld blocks "
        "behind "
        "their window, %lld blocks copied to the host tier and %lld back; %lld window blocks passed, %lld "
        "evicted, %lld copied back\n",
        count, static_cast<long long>(totals.requests), static_cast<long long>(totals.steps),
        static_cast<long long>(totals.ahead), static_cast<long long>(totals.dropped_rows),
        static_cast<long long>(totals.cached_tokens), static_cast<long long>(totals.copies),
        static_cast<long long>(totals.evictions), static_cast<long long>(totals.accepted),
        static_cast<long long>(totals.drafted), static_cast<long long>(totals.preemptions),
        static_cast<long long>(totals.recomputed_tokens), static_cast<long long>(totals.cancelled),
        static_cast<long long>(totals.failures), static_cast<long long>(totals.poisoned),
        static_cast<long long>(totals.beam_searches), static_cast<long long>(totals.adapted),
        static_cast<long long>(totals.slid), static_cast<long long>(totals.released),
        static_cast<long long>(totals.saved), static_cast<long long>(totals.loaded),
        static_cast<long long>(totals.windows_passed), static_cast<long long>(totals.windows_evicted),
        static_cast<long long>(totals.windows_loaded));
    return 0;
}
