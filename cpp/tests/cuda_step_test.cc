// What a step is for a CUDA device before anything runs: its input block, its counts and grids, the cache's
// layout.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "device/cuda/counts.h"
#include "device/cuda/input_block.h"
#include "device/cuda/kernel_set.h"
#include "device/cuda/kv_layout.h"
#include "device/cuda/step_graphs.h"

using namespace castiron;
using namespace castiron::cuda;

namespace {

Program small_program() {
    Program program;
    program.target = "sm_90";
    program.vocab_size = 50;
    program.limits = {4, 32, 6, 96};  // a table of three blocks
    program.prefill_tile = 4;
    return program;
}

// Reads an array of the packed block.
template <typename T = int32_t>
std::vector<T> array(const std::vector<std::byte>& block, const InputLayout& layout, StepInput input,
                     size_t length) {
    std::vector<T> values(length);
    std::memcpy(values.data(), block.data() + layout.offsets[static_cast<size_t>(input)], length * sizeof(T));
    return values;
}

using Ints = std::vector<int32_t>;

}  // namespace

TEST_CASE("a mixed step is packed as docs/cuda-program.md says") {
    const Program program = small_program();
    const InputPacker packer(program, 50);
    // Sequence 0 decodes position 33 in blocks 7, 2; sequence 1 prefills positions 30..34; sequence 2 decodes
    // its first.
    const Ints tokens{11, 20, 21, 22, 23, 24, 31};
    const Ints positions{33, 30, 31, 32, 33, 34, 0};
    const Ints rows{0, 5, 6};
    const Ints table0{7, 2};
    const Ints table1{1, 5};
    const Ints table2{3};
    const std::vector<SequenceSlice> sequences{{0, 1, 33, table0}, {1, 5, 30, table1}, {6, 1, 0, table2}};
    const Batch batch{tokens, positions, rows, sequences};

    const Counts counts = packer.count(batch, nullptr, {});
    CHECK(counts[Dim::kTokens] == 7);
    CHECK(counts[Dim::kRows] == 3);
    CHECK(counts[Dim::kSequences] == 3);
    CHECK(counts[Dim::kDecodes] == 2);
    CHECK(counts[Dim::kTiles] == 2);  // 5 rows in tiles of 4
    const InputLayout layout = packer.layout(counts);
    for (const uint64_t offset : layout.offsets) CHECK(offset % 16 == 0);
    // 7, 7, 3, 7, 4, 3, 9, 2, 2, 2 numbers, each array rounded up to 16 bytes.
    CHECK(layout.bytes == 32 + 32 + 16 + 32 + 16 + 16 + 48 + 16 + 16 + 16);
    std::vector<std::byte> block(layout.bytes);
    packer.pack(batch, nullptr, {}, counts, block.data());
    CHECK(array(block, layout, StepInput::kTokenIds, 7) == tokens);
    CHECK(array(block, layout, StepInput::kPositions, 7) == positions);
    CHECK(array(block, layout, StepInput::kLogitRows, 3) == rows);
    CHECK(array(block, layout, StepInput::kSlots, 7) ==
          Ints{2 * 32 + 1, 1 * 32 + 30, 1 * 32 + 31, 5 * 32 + 0, 5 * 32 + 1, 5 * 32 + 2, 3 * 32 + 0});
    CHECK(array(block, layout, StepInput::kQueryStart, 4) == Ints{0, 1, 6, 7});
    CHECK(array(block, layout, StepInput::kKvLen, 3) == Ints{34, 35, 1});
    CHECK(array(block, layout, StepInput::kBlockTable, 9) == Ints{7, 2, 0, 1, 5, 0, 3, 0, 0});
    CHECK(array(block, layout, StepInput::kDecodeSeq, 2) == Ints{0, 2});
    CHECK(array(block, layout, StepInput::kTileSeq, 2) == Ints{1, 1});
    CHECK(array(block, layout, StepInput::kTileRow, 2) == Ints{0, 4});
}

TEST_CASE("a padded decode step ends in rows that store and compute nothing") {
    const InputPacker packer(small_program(), 50);
    const Ints tokens{11};
    const Ints positions{2};
    const Ints rows{0};
    const Ints table{1};
    const std::vector<SequenceSlice> sequences{{0, 1, 2, table}};
    const Counts counts = packer.decode_counts(3, false, false);
    const InputLayout layout = packer.layout(counts);
    std::vector<std::byte> block(layout.bytes, std::byte{0xAA});
    packer.pack({tokens, positions, rows, sequences}, nullptr, {}, counts, block.data());
    CHECK(array(block, layout, StepInput::kTokenIds, 3) == Ints{11, 0, 0});
    CHECK(array(block, layout, StepInput::kPositions, 3) == Ints{2, 0, 0});
    CHECK(array(block, layout, StepInput::kLogitRows, 3) == Ints{0, 0, 0});
    CHECK(array(block, layout, StepInput::kSlots, 3) == Ints{34, -1, -1});
    CHECK(array(block, layout, StepInput::kQueryStart, 4) == Ints{0, 1, 1, 1});
    CHECK(array(block, layout, StepInput::kKvLen, 3) == Ints{3, 0, 0});
    CHECK(array(block, layout, StepInput::kBlockTable, 9) == Ints{1, 0, 0, 0, 0, 0, 0, 0, 0});
    CHECK(array(block, layout, StepInput::kDecodeSeq, 3) == Ints{0, -1, -1});
}

TEST_CASE("sampling's arrays follow, the edits last, so that a block without edits is a block's beginning") {
    Program program = small_program();
    const InputPacker without(program, 50);
    program.sampling.push_back({});
    const InputPacker packer(program, 48);
    const Ints tokens{1, 2};
    const Ints positions{0, 0};
    const Ints rows{0, 1};
    const Ints table{0};
    const std::vector<SequenceSlice> sequences{{0, 1, 0, table}, {1, 1, 0, table}};
    RowSampling warm;
    warm.temperature = 0.5F;
    warm.top_k = 40;
    warm.uniform = 0.25F;
    warm.num_logprobs = 3;
    const std::vector<RowSampling> row_sampling{RowSampling{}, warm};
    const std::vector<LogitEdit> edits{{1, 9, -1}, {1, 8, 2}};
    const SamplingBatch sampling{row_sampling, edits};
    const Batch batch{tokens, positions, rows, sequences};
    const Counts counts = packer.count(batch, &sampling, {});
    CHECK(counts[Dim::kRandom] == 1);
    CHECK(counts[Dim::kLogprobs] == 1);
    CHECK(counts[Dim::kEdits] == 2);
    CHECK(counts[Dim::kVocabLimit] == 48);
    const InputLayout layout = packer.layout(counts);
    std::vector<std::byte> block(layout.bytes);
    packer.pack(batch, &sampling, {}, counts, block.data());
    CHECK(array<float>(block, layout, StepInput::kTemperature, 2) == std::vector<float>{0, 0.5F});
    CHECK(array(block, layout, StepInput::kTopK, 2) == Ints{0, 40});
    CHECK(array<float>(block, layout, StepInput::kTopP, 2) == std::vector<float>{1, 1});
    CHECK(array<float>(block, layout, StepInput::kUniform, 2) == std::vector<float>{0, 0.25F});
    CHECK(array(block, layout, StepInput::kNumLogprobs, 2) == Ints{-1, 3});
    CHECK(array<float>(block, layout, StepInput::kRepetition, 2) == std::vector<float>{1, 1});
    CHECK(array(block, layout, StepInput::kEditRow, 2) == Ints{1, 1});
    CHECK(array(block, layout, StepInput::kEditToken, 2) == Ints{9, 8});
    CHECK(array(block, layout, StepInput::kEditCount, 2) == Ints{-1, 2});

    Counts no_edits = counts;
    no_edits[Dim::kEdits] = 0;
    const InputLayout shorter = packer.layout(no_edits);
    CHECK(shorter.bytes == layout.offsets[static_cast<size_t>(StepInput::kEditRow)]);
    for (size_t i = 0; i < static_cast<size_t>(StepInput::kEditRow); ++i) {
        CHECK(shorter.offsets[i] == layout.offsets[i]);
    }
    CHECK(without.layout(counts).bytes < shorter.bytes);
    CHECK(packer.max_bytes() >= layout.bytes);
}

TEST_CASE("a grid follows the counts, and a launch happens in its range alone") {
    Counts counts;
    counts[Dim::kTokens] = 100;
    CHECK(grid_blocks({}, counts, 8) == 1);
    CHECK(grid_blocks({0, 1, 7, 0}, counts, 8) == 7);
    CHECK(grid_blocks({Dim::kTokens, 16, 1, 0}, counts, 8) == 7);  // ceil(100 / 16)
    CHECK(grid_blocks({Dim::kTokens, 16, 3, 0}, counts, 8) == 21);
    CHECK(grid_blocks({Dim::kTokens, 16, 3, 2}, counts, 8) == 16);  // two on each of eight
    CHECK(grid_blocks({Dim::kTokens, 16, 3, 4}, counts, 8) == 21);
    CHECK(grid_blocks({Dim::kDecodes, 1, 5, 0}, counts, 8) == 0);
    CHECK(happens({}, counts));
    CHECK(happens({Dim::kTokens, 100, 100}, counts));
    CHECK_FALSE(happens({Dim::kTokens, 101, 200}, counts));
    CHECK_FALSE(happens({Dim::kTokens, 0, 99}, counts));
    CHECK_FALSE(happens({Dim::kDecodes, 1, 99}, counts));
}

TEST_CASE("the cache's parts are aligned to 256 bytes, layer after layer") {
    // 32 tokens * 2 heads * 20 columns * 2 bytes = 2560; values of 3 columns: 384, rounded up to 512.
    const std::vector<KvLayer> layers{{2, 20, 3, DType::kBF16}, {1, 4, 4, DType::kF32}};
    const KvLayout layout = kv_layout(layers);
    CHECK(layout.k_offsets == std::vector<uint64_t>{0, 3072});
    CHECK(layout.v_offsets == std::vector<uint64_t>{2560, 3584});
    CHECK(layout.stride(KvGroup::kAll) == 4096);
    CHECK(layout.stride(KvGroup::kWindow) == 0);
    CHECK_THROWS_WITH_AS(static_cast<void>(kv_layout(std::vector<KvLayer>{{1, 1, 1, DType::kI32}})),
                         doctest::Contains("KV layer 0: kv_heads, head_dim and v_head_dim must be 1 to 4096"),
                         std::invalid_argument);
}

TEST_CASE("graph sizes double to 8 and then grow by an eighth at most") {
    CHECK(graph_buckets(0).empty());
    CHECK(graph_buckets(1) == std::vector<int>{1});
    CHECK(graph_buckets(5) == std::vector<int>{1, 2, 4, 5});
    CHECK(graph_buckets(32) == std::vector<int>{1, 2, 4, 8, 16, 24, 32});
    const std::vector<int> many = graph_buckets(1024);
    CHECK(many.back() == 1024);
    // Products change their tiles behind these sizes; a graph that is padded across one would round
    // otherwise.
    for (const int size : {16, 64, 256}) CHECK(std::find(many.begin(), many.end(), size) != many.end());
    CHECK(many.size() < 50);
    for (size_t i = 5; i < many.size(); ++i) CHECK(many[i] - many[i - 1] <= std::max(8, many[i - 1] / 8));
}

TEST_CASE("machine code runs within its major version, and from sm_90 on on its own architecture alone") {
    CHECK(machine_code_fits("sm_80", 80));
    CHECK(machine_code_fits("sm_80", 86));
    CHECK(machine_code_fits("sm_86", 89));
    CHECK_FALSE(machine_code_fits("sm_86", 80));
    CHECK_FALSE(machine_code_fits("sm_80", 90));
    CHECK(machine_code_fits("sm_90", 90));
    CHECK_FALSE(machine_code_fits("sm_100", 103));
    CHECK_FALSE(machine_code_fits("compute_80", 80));
    CHECK(ptx_fits(".version 8.0\n.target sm_80\n", 120));
    CHECK_FALSE(ptx_fits(".version 8.0\n.target sm_90\n", 89));
    CHECK_FALSE(ptx_fits(".version 8.0\n.target sm_90a\n", 100));
    CHECK(ptx_fits(".version 8.0\n.target sm_90a, debug\n", 90));
    CHECK_FALSE(ptx_fits("", 90));
}
