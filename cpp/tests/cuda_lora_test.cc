// LoRA adapters of a CUDA device before any kernel runs: tiles of rows, what is packed, who has which slot.
#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "cuda_fake_driver.h"
#include "device/cuda/adapter.h"
#include "device/cuda/lora_rows.h"
#include "device/half.h"

using namespace castiron;
using namespace castiron::cuda;
using castiron::testing::FakeCuda;

namespace {

using Ints = std::vector<int32_t>;

float from_bf16(uint16_t bits) {
    return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// A product of 3 inputs and 5 columns: q has columns 0 to 2, its outputs in another order, k the last two.
Program small_program(DType dtype = DType::kBF16) {
    Program program;
    program.limits = {4, 64, 8, 96};
    program.adapters = {16, dtype, 1024};
    Step step;
    step.kernel = "linear";
    step.modules = {{"q", 0, 1, 2}, {"q", 2, 0, 1}, {"k", 3, 0, 2}};
    step.adapter = AdapterPlace{3, 256, 512};
    program.steps.push_back(step);
    return program;
}

struct Pair {
    std::vector<float> a, b;
    int64_t rank = 0, outputs = 0;
    float scale = 1;

    Pair(int64_t rank_, int64_t outputs_, float first, float scale_ = 1)
        : rank(rank_), outputs(outputs_), scale(scale_) {
        for (int64_t i = 0; i < rank * 3; ++i) a.push_back(first + static_cast<float>(i));
        for (int64_t i = 0; i < rank * outputs; ++i) b.push_back(-first - static_cast<float>(i));
    }
    [[nodiscard]] LoraPair lora() const { return {a, b, rank, 3, outputs, scale}; }
};

}  // namespace

TEST_CASE("rows of one adapter share tiles, those of another begin one of their own") {
    const Ints ids(29), logit_rows{0, 1, 19, 24, 28};
    // 18 rows of slot 2, one of none, five of slot 0, four of slot 2, one of slot 0.
    const std::vector<SequenceSlice> sequences{
        {0, 18, 0, {}}, {18, 1, 0, {}}, {19, 5, 0, {}}, {24, 4, 0, {}}, {28, 1, 0, {}}};
    const Batch batch{ids, ids, logit_rows, sequences};
    const Ints slots{2, -1, 0, 2, 0};
    LoraRows lora({8, 64, 8, 96});
    CHECK(lora.empty());
    lora.set(batch, slots);
    CHECK_FALSE(lora.empty());
    CHECK(lora.tokens().slots == Ints{0, 2, 2});
    Ints rows{19, 20, 21, 22, 23, 28};
    rows.resize(16, -1);
    for (int32_t row = 0; row < 18; ++row) rows.push_back(row);
    for (int32_t row = 24; row < 28; ++row) rows.push_back(row);
    rows.resize(48, -1);
    CHECK(lora.tokens().rows == rows);
    // Rows of logits are counted among themselves.
    CHECK(lora.logits().slots == Ints{0, 2});
    Ints logits{2, 4};
    logits.resize(16, -1);
    logits.insert(logits.end(), {0, 1, 3});
    logits.resize(32, -1);
    CHECK(lora.logits().rows == logits);
    lora.set(batch, {});
    CHECK(lora.empty());
    CHECK(lora.logits().slots.empty());
}

TEST_CASE("no step has more tiles than are reserved for its rows and adapters, and one has as many") {
    constexpr unsigned kSeed = 5;
    INFO("seed " << kSeed);
    std::mt19937 random(kSeed);
    for (int trial = 0; trial < 2000; ++trial) {
        const int adapters = 1 + static_cast<int>(random() % 5);
        std::map<int, int> rows;
        int total = 0, tiles = 0;
        for (int i = 0; i < adapters; ++i) total += rows[i] = static_cast<int>(random() % 40);
        for (const auto& [slot, count] : rows) tiles += (count + kLoraTile - 1) / kLoraTile;
        CHECK(tiles <= lora_tiles(total, adapters));
    }
    CHECK(lora_tiles(3, 5) == 3);       // each its own
    CHECK(lora_tiles(33 + 1, 2) == 4);  // 33 rows and one
    CHECK(lora_tiles(64, 1) == 4);
    CHECK(lora_tiles(0, 4) == 0);
}

TEST_CASE("numbers in half precision are the nearest, ties to even") {
    const std::vector<std::pair<float, uint16_t>> known{{0.0F, 0},
                                                        {-0.0F, 0x8000},
                                                        {1.0F, 0x3c00},
                                                        {-2.0F, 0xc000},
                                                        {65504.0F, 0x7bff},
                                                        {65519.9F, 0x7bff},
                                                        {65520.0F, 0x7c00},
                                                        {0x1p-14F, 0x0400},
                                                        {0x1p-24F, 1},
                                                        {0x1p-25F, 0},
                                                        {0x1.8p-24F, 2},
                                                        {0x1.004p0F, 0x3c01},
                                                        {0x1.002p0F, 0x3c00},
                                                        {0x1.006p0F, 0x3c02},
                                                        {0x1.ffep-15F, 0x0400},
                                                        {0.1F, 0x2e66}};
    for (const auto& [number, bits] : known) {
        INFO(number);
        CHECK(to_f16(number) == bits);
    }
    CHECK(to_bf16(1.0F) == 0x3f80);
    CHECK(to_bf16(0x1.01p0F) == 0x3f80);
    CHECK(to_bf16(0x1.03p0F) == 0x3f82);
}

TEST_CASE("an adapter is packed with each module's ranks apart, and nothing where it has nothing") {
    const Program program = small_program();
    const Pair q(2, 3, 1, 0.5F), k(1, 2, 20);
    const CudaAdapter adapter(program, {{"q", q.lora()}, {"k", k.lora()}}, 16, 1);
    CHECK(adapter.bytes() == 1024);
    std::vector<uint16_t> image(512);
    std::memcpy(image.data(), adapter.image().data(), 1024);
    const auto at = [&](size_t i) { return from_bf16(image[i]); };
    const size_t a = 256 / 2, b = 512 / 2;
    for (size_t i = 0; i < 6; ++i) CHECK(at(a + i) == q.a[i]);
    for (size_t i = 6; i < 48; ++i) CHECK(at(a + i) == 0);
    for (size_t i = 0; i < 3; ++i) CHECK(at(a + 48 + i) == k.a[i]);
    const size_t outputs[] = {1, 2, 0, 0, 1};
    for (size_t column = 0; column < 5; ++column) {
        for (size_t r = 0; r < 16; ++r) {
            float expected = 0;
            if (column < 3 && r < 2) expected = q.b[outputs[column] * 2 + r] * 0.5F;
            if (column >= 3 && r < 1) expected = k.b[outputs[column]];
            INFO(column << ", " << r);
            CHECK(at(b + column * 16 + r) == expected);
        }
    }
    // One module alone leaves the other's places empty.
    const CudaAdapter half(program, {{"k", k.lora()}}, 16, 2);
    std::memcpy(image.data(), half.image().data(), 1024);
    CHECK(at(a) == 0);
    CHECK(at(a + 48) == k.a[0]);
}

TEST_CASE("an adapter that does not fit a CUDA program is refused") {
    const Pair wide(17, 3, 1), fine(2, 3, 1), large(1, 3, 1e6F);
    const auto refused = [](const Program& program, const LoraModules& modules, const char* message) {
        CHECK_THROWS_WITH_AS(CudaAdapter(program, modules, 16, 1), doctest::Contains(message),
                             std::invalid_argument);
    };
    refused(small_program(), {{"q", wide.lora()}}, "its rank is 17; max_lora_rank is 16");
    refused(small_program(), {{"v", fine.lora()}}, "no such module");
    LoraPair narrow = fine.lora();
    narrow.inputs = 2;
    narrow.a = narrow.a.first(4);
    refused(small_program(), {{"q", narrow}}, "the adapter has 2 inputs, the engine's module 3");
    refused(small_program(DType::kF16), {{"q", large.lora()}}, "float16");
    CHECK(CudaAdapter(small_program(), {{"q", large.lora()}}, 16, 1).bytes() == 1024);
}

TEST_CASE("adapters stay in their slots until another one needs the place that was unused for longest") {
    FakeCuda cuda;
    const Driver driver = cuda.driver();
    const Program program = small_program();
    std::vector<CudaAdapter> adapters;
    for (int i = 0; i < 4; ++i) {
        const Pair pair(1, 3, static_cast<float>(i + 1));
        adapters.emplace_back(program, LoraModules{{"q", pair.lora()}}, 16, static_cast<uint64_t>(i + 1));
    }
    AdapterMemory memory(driver, program, 2);
    const Ints ids(4);
    const auto place = [&](const std::vector<int>& wanted) {
        std::vector<SequenceSlice> sequences;
        for (const int one : wanted) {
            const Adapter* adapter = one < 0 ? nullptr : &adapters[static_cast<size_t>(one)];
            sequences.push_back({static_cast<int>(sequences.size()), 1, 0, {}, adapter});
        }
        const auto slots = memory.place(driver, {ids, ids, {}, sequences}, nullptr);
        for (size_t i = 0; i < slots.size(); ++i) {
            if (slots[i] < 0) continue;
            const auto* held = reinterpret_cast<const std::byte*>(memory.address()) + 1024 * slots[i];
            CHECK(std::memcmp(held, adapters[static_cast<size_t>(wanted[i])].image().data(), 1024) == 0);
        }
        return Ints(slots.begin(), slots.end());
    };
    const auto copies = [&] { return cuda.calls["cuMemcpyHtoDAsync"]; };
    CHECK(place({-1, -1}).empty());
    CHECK(copies() == 0);
    CHECK(place({0, -1, 1, 0}) == Ints{0, -1, 1, 0});
    CHECK(copies() == 2);
    CHECK(place({1}) == Ints{1});
    CHECK(copies() == 2);
    CHECK(place({2}) == Ints{0});  // 0 was unused for longer
    CHECK(copies() == 3);
    // One that comes first does not take the place of one that comes later in the same step.
    CHECK(place({3, 1}) == Ints{0, 1});
    CHECK(copies() == 4);
    CHECK_THROWS_WITH_AS(place({0, 1, 2}), doctest::Contains("more different adapters than the 2"),
                         std::invalid_argument);
    // A copy that failed left nothing behind.
    CHECK(place({0, 1}).size() == 2);
    cuda.failures["cuMemcpyHtoDAsync"] = Result::kInvalidValue;
    CHECK_THROWS(place({3}));
    const int before = copies();
    CHECK(place({3}).size() == 1);
    CHECK(copies() == before + 1);
    const Program other = small_program();
    const Pair pair(1, 3, 1);
    const CudaAdapter foreign(other, {{"q", pair.lora()}}, 16, 1);
    const std::vector<SequenceSlice> sequences{{0, 1, 0, {}, &foreign}};
    CHECK_THROWS_WITH_AS(static_cast<void>(memory.place(driver, {ids, ids, {}, sequences}, nullptr)),
                         doctest::Contains("adapter of another device"), std::invalid_argument);
}
