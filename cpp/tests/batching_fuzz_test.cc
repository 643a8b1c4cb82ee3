#include <doctest/doctest.h>

#include <exception>
#include <string>

#include "tests/schedule_fuzz.h"

using castiron::testing::FuzzTotals;
using castiron::testing::ScheduleFuzz;

// `schedule_fuzz` runs as many as one likes.
TEST_CASE(
    "random lives of the scheduler: what each request says, and whose every block is, is always right") {
    FuzzTotals totals;
    for (uint32_t seed = 0; seed < 600; ++seed) {
        CAPTURE(seed);
        std::string error;
        try {
            ScheduleFuzz(seed, totals).run();
        } catch (const std::exception& failure) {
            error = failure.what();
        }
        REQUIRE(error == "");
    }
    CHECK(totals.ahead > 500);
    CHECK(totals.dropped_rows > 3);
    CHECK(totals.cached_tokens > 1000);
    CHECK(totals.copies > 100);
    CHECK(totals.preemptions > 50);
    CHECK(totals.recomputed_tokens > 100);
    CHECK(totals.evictions > 100);
    CHECK(totals.drafted > 10000);
    CHECK(totals.accepted > 5000);
    CHECK(totals.drafted - totals.accepted > 1000);
    CHECK(totals.drafted_in_grammars > 300);
    CHECK(totals.cancelled > 10);
    CHECK(totals.failures > 10);
    CHECK(totals.poisoned > 5);
    CHECK(totals.beam_searches > 100);
    CHECK(totals.adapted > 100);
    CHECK(totals.slid > 100);
    CHECK(totals.saved > 100);
    CHECK(totals.loaded > 20);
    CHECK(totals.fetched > 3);
    CHECK(totals.released > 200);
    CHECK(totals.windows_passed > 200);
    CHECK(totals.windows_evicted > 200);
    CHECK(totals.windows_loaded > 10);
}
