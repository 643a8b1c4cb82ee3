// What is evicted from the pool, kept in the host tier and found there again.
#include <doctest/doctest.h>
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstring>
#include <list>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "kv/digest.h"
#include "kv/host_tier.h"
#include "tests/engine_support.h"

using namespace castiron;
using namespace castiron::testing;
using Kind = BlockMove::Kind;

namespace {

std::string hex(const Digest& digest) {
    std::string text;
    for (const std::byte byte : std::as_bytes(std::span(digest))) {
        constexpr char kDigits[] = "0123456789abcdef";
        text += kDigits[static_cast<size_t>(byte) >> 4];
        text += kDigits[static_cast<size_t>(byte) & 15];
    }
    return text;
}

PathKey key_of(int32_t number) {
    const std::vector<int32_t> tokens(kBlockTokens, number);
    return path_key(nullptr, {}, tokens);
}

}  // namespace

TEST_CASE("digests are those of Python's hashlib.blake2b(digest_size=32)") {
    std::vector<std::byte> bytes(1000);
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 7 % 256);
    const auto of = [&](size_t count) { return hex(digest_of(std::span(bytes).first(count))); };
    CHECK(of(0) == "0e5751c026e543b2e8ab2eb06099daa1d1e5df47778f7787faab45cdf12fe3a8");
    CHECK(of(3) == "b316f3683ac87007461037a8ff6547de35618800044bb3a4e98b3560c92c3794");
    CHECK(of(128) == "14696d2a98d9f8a280da8b132b1045b345e1033759c6b02fcc4ee885c8ae7c37");
    CHECK(of(129) == "3934215260b1039be9d9d2b073b059bcd50120c327a22af93eb4d98cf821c14c");
    CHECK(of(1000) == "6ac4bea923678eb024090384d6e767b5870f849057dc19b172d8d9f2df30bf8e");
    Blake2b in_parts;
    for (size_t i = 0; i < 1000; i += 40) in_parts.add(std::span(bytes).subspan(i, 40));
    CHECK(hex(in_parts.finish()) == of(1000));
}

TEST_CASE("a key depends on the tokens, on all before them, on the salt and on the adapter") {
    const std::vector<int32_t> a(kBlockTokens, 1), b(kBlockTokens, 2);
    const PathKey first = path_key(nullptr, {}, a);
    CHECK(first == path_key(nullptr, {}, a));
    CHECK_FALSE(first == path_key(nullptr, {}, b));
    CHECK_FALSE(first == path_key(nullptr, {1, 0, 0}, a));
    CHECK_FALSE(first == path_key(nullptr, {0, 1, 0}, a));
    CHECK_FALSE(first == path_key(nullptr, {0, 0, 1}, a));
    CHECK_FALSE(first == path_key(&first, {}, a));
    const PathKey other = path_key(nullptr, {}, b);
    CHECK_FALSE(path_key(&first, {}, a) == path_key(&other, {}, a));
}

TEST_CASE("slots are found by their keys and go by their last use, like a list that is searched through") {
    for (uint32_t seed = 0; seed < 60; ++seed) {
        CAPTURE(seed);
        std::mt19937 random(seed);
        const int count = 1 + static_cast<int>(random() % 12);
        KeyedSlots slots(count);
        std::list<std::pair<int32_t, int32_t>> twin;  // slot and key, the latest last
        for (int turn = 0; turn < 500; ++turn) {
            const auto number = static_cast<int32_t>(random() % 20);
            const auto known = std::find_if(twin.begin(), twin.end(),
                                            [&](const auto& entry) { return entry.second == number; });
            const int32_t slot = slots.find(key_of(number));
            REQUIRE((slot == KeyedSlots::kNone) == (known == twin.end()));
            if (known != twin.end()) {
                REQUIRE(slot == known->first);
                if (random() % 3 == 0) {
                    slots.clear(slot);
                    twin.erase(known);
                } else {
                    slots.touch(slot);
                    twin.splice(twin.end(), twin, known);
                }
            } else {
                const int32_t oldest = slots.oldest();
                REQUIRE(slots.is_filled(oldest) == (static_cast<int>(twin.size()) == count));
                if (slots.is_filled(oldest)) {
                    REQUIRE(oldest == twin.front().first);
                    twin.pop_front();
                }
                slots.assign(oldest, key_of(number));
                twin.emplace_back(oldest, number);
            }
            REQUIRE(slots.filled() == static_cast<int>(twin.size()));
        }
    }
}

TEST_CASE("a slot that is being copied to or from is given to nobody else") {
    std::vector<std::byte> memory(2);
    HostTier tier(memory.data(), 2, 1);
    std::vector<BlockMove> moves;
    tier.save(key_of(1), 7, moves);
    CHECK(moves.back() == BlockMove{Kind::kSave, 7, 0});
    tier.save(key_of(1), 9, moves);  // it is there
    CHECK(moves.size() == 1);
    tier.save(key_of(2), 8, moves);
    CHECK(moves.back() == BlockMove{Kind::kSave, 8, 1});
    tier.save(key_of(3), 9, moves);  // nothing to spare
    CHECK(moves.size() == 2);
    tier.settle(moves);
    CHECK(tier.load(key_of(1), 5, moves));
    CHECK(moves.back() == BlockMove{Kind::kLoad, 0, 5});
    tier.save(key_of(3), 9, moves);  // the one used last is being read
    CHECK(moves.back() == BlockMove{Kind::kSave, 9, 1});
    CHECK_FALSE(tier.contains(key_of(2)));
    tier.abandon_moves();
    CHECK(tier.filled() == 0);
    CHECK_FALSE(tier.load(key_of(1), 5, moves));
}

TEST_CASE("what memory has no room for goes to the file, and comes back through memory") {
    std::vector<std::byte> memory(8);
    HostTier tier(memory.data(), 2, 4, std::make_unique<BlockFile>("/tmp", 5, 4));
    std::array<std::array<char, 4>, 6> pool{};  // a block's contents are its number
    std::vector<BlockMove> moves;
    const auto make = [&] {
        for (const BlockMove& move : moves) {
            if (move.kind == Kind::kSave) {
                std::memcpy(tier.data(move.to), pool[static_cast<size_t>(move.from)].data(), 4);
            } else if (move.kind == Kind::kLoad) {
                std::memcpy(pool[static_cast<size_t>(move.to)].data(), tier.data(move.from), 4);
            } else {
                tier.make(move);
            }
        }
        tier.settle(moves);
        moves.clear();
    };
    for (int number = 1; number <= 5; ++number) {
        pool[static_cast<size_t>(number)].fill(static_cast<char>(number));
        tier.save(key_of(number), number, moves);
        make();
    }
    CHECK(tier.filled() == 2);
    CHECK(tier.disk_filled() == 3);
    CHECK(tier.spilled() == 3);
    for (int turn = 0; turn < 20; ++turn) {
        const int number = 1 + turn * 3 % 5;
        pool[0].fill(0);
        REQUIRE(tier.load(key_of(number), 0, moves));
        make();
        CHECK(pool[0][0] == number);
        CHECK(pool[0][3] == number);
    }
    CHECK(tier.fetched() > 10);
    CHECK(tier.spilled() == 5);  // what comes back stays there
    CHECK_FALSE(tier.contains(key_of(6)));
}

TEST_CASE("a disk that cannot be written to is left alone, and what may be wrong is not read") {
    std::vector<std::byte> memory(1 << 12);
    HostTier tier(memory.data(), 1, 1 << 12, std::make_unique<BlockFile>("/tmp", 2, 1 << 12));
    std::vector<BlockMove> moves;
    tier.save(key_of(1), 0, moves);
    tier.settle(moves);
    moves.clear();
    tier.save(key_of(2), 0, moves);
    REQUIRE(moves[0].kind == Kind::kSpill);
    rlimit before{};
    getrlimit(RLIMIT_FSIZE, &before);
    const auto handler = std::signal(SIGXFSZ, SIG_IGN);
    const rlimit none{0, before.rlim_max};
    setrlimit(RLIMIT_FSIZE, &none);
    tier.make(moves[0]);
    setrlimit(RLIMIT_FSIZE, &before);
    std::signal(SIGXFSZ, handler);
    CHECK(tier.disk_error().find("File too large") != std::string::npos);
    CHECK_FALSE(tier.contains(key_of(1)));
    CHECK_THROWS_AS(tier.make({Kind::kFetch, moves[0].to, 0}), std::runtime_error);
}

std::vector<std::vector<int32_t>> four_prompts(std::mt19937& random) {
    std::vector<std::vector<int32_t>> prompts;
    for (int i = 0; i < 4; ++i) prompts.push_back(random_prompt(random, 200));
    return prompts;
}

// Conversations that one engine has one after the other: each answer is what it would be alone.
struct Conversations {
    Engine& engine;
    const Limits& limits;
    Outcomes outcomes;
    size_t sent = 0;

    const std::vector<int32_t>& answer(const std::vector<int32_t>& history) {
        const RequestId id = engine.submit(history, greedy(20));
        finish_all(engine, outcomes, ++sent);
        const std::vector<int32_t>& tokens = outcomes.at(id).tokens;
        CHECK(tokens == alone(history, greedy(20), limits.max_seq_len).tokens);
        return tokens;
    }
};

TEST_CASE("conversations that do not fit into the pool come back from the host tier") {
    const Limits limits{2, 64, 2, 400};
    for (const bool on_device : {false, true}) {
        auto owned = std::make_unique<FakeDevice>(limits, kVocab, on_device, on_device);
        EngineOptions options;
        options.kv_cache_blocks = 13;  // one conversation of full length
        options.host_tier_bytes = 60 * FakeDevice::kBlockBytes;
        Engine engine(std::move(owned), limits, kVocab, options);
        std::mt19937 random(3);
        auto histories = four_prompts(random);
        Conversations all{engine, limits, {}};
        for (int turn = 0; turn < 4; ++turn) {
            for (auto& history : histories) {
                const auto before = engine.stats(0).prefix_cached_tokens;
                const std::vector<int32_t>& answer = all.answer(history);
                const auto found = idle_stats(engine).prefix_cached_tokens - before;
                // All full blocks of the turn before, though three others have filled the pool since.
                if (turn > 0) CHECK(found >= (static_cast<int64_t>(history.size()) - 12) / 32 * 32);
                history.insert(history.end(), answer.begin(), answer.end());
                for (const int32_t token : random_prompt(random, 10)) history.push_back(token);
            }
        }
        const EngineStats stats = idle_stats(engine);
        CHECK(stats.host_blocks_total == 60);
        CHECK(stats.host_blocks_loaded > 50);
        CHECK(stats.host_blocks_saved > 20);
        CHECK(stats.kv_integrity_error == "");
    }
}

TEST_CASE("conversations come back from the disk, where the host tier has no room either") {
    const Limits limits{2, 64, 2, 400};
    for (const bool on_device : {false, true}) {
        EngineOptions options;
        options.kv_cache_blocks = 13;
        options.host_tier_bytes = 16 * FakeDevice::kBlockBytes;
        options.disk_tier_bytes = 60 * FakeDevice::kBlockBytes;
        options.disk_tier_folder = "/tmp";
        Engine engine(std::make_unique<FakeDevice>(limits, kVocab, on_device, on_device), limits, kVocab,
                      options);
        std::mt19937 random(4);
        const auto histories = four_prompts(random);
        Conversations all{engine, limits, {}};
        for (int turn = 0; turn < 3; ++turn) {
            for (const auto& history : histories) all.answer(history);
        }
        const EngineStats stats = idle_stats(engine);
        CHECK(stats.disk_blocks_total == 60);
        CHECK(stats.disk_blocks_fetched > 20);
        CHECK(stats.disk_blocks_spilled > 15);
        CHECK(stats.disk_error == "");
        CHECK(stats.kv_integrity_error == "");
    }
}

TEST_CASE("a host tier without a prefix cache, or smaller than a block, is refused") {
    const Limits limits{2, 64, 2, 400};
    EngineOptions options;
    options.host_tier_bytes = 5;
    CHECK_THROWS_WITH_AS(Bench(limits, options), "kv_cache_host_tier is 5 bytes; one block takes 128",
                         std::invalid_argument);
    options.host_tier_bytes = 1280;
    options.prefix_caching = false;
    CHECK_THROWS_AS(Bench(limits, options), std::invalid_argument);
}
