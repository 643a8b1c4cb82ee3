// The CUDA device on a driver that only remembers: what it calls, what it says when something is wrong.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "cuda_fake_driver.h"
#include "device/cuda/cuda_device.h"

using namespace castiron;
using namespace castiron::testing;

namespace {

constexpr int kVocab = 8;

// One step whose kernel is given (logits, token ids, weight, k_cache, T, 7, 0.5, hidden).
// With feeding, a kernel ahead of it is given (token ids, token sources, sampled, T).
std::shared_ptr<Program> make_program(bool sampling = false, bool feeding = false) {
    auto program = std::make_shared<Program>();
    program->target = "sm_90";
    program->vocab_size = kVocab;
    program->limits = {4, 16, 6, 96};
    program->arena_bytes = 4096;
    program->prefill_tile = 4;
    const Dim rows{Dim::kRows};
    program->values = {{"token_ids", DType::kI32, {Dim{Dim::kTokens}}, 0, -1, 0},
                       {"logits", DType::kF32, {rows, Dim{kVocab}}, 64, -1, 0},
                       {"sampled", DType::kI32, {rows, Dim{2}}, 256, -1, 0},
                       {"sample_top_ids", DType::kI32, {rows, Dim{20}}, 512, -1, 0},
                       {"sample_top_logprobs", DType::kF32, {rows, Dim{21}}, 1024, -1, 0}};
    static const float weight[4] = {1, 2, 3, 4};
    Weight w{"w", DType::kF32, Layout::kPlain, {4}, reinterpret_cast<const std::byte*>(weight), 16};
    program->weights.push_back(w);
    program->kv_layers = {{1, 8, 8, DType::kBF16}};
    using P = Kernel::Param;
    program->kernels.push_back({"head",
                                "head_kernel",
                                "cubin",
                                "",
                                128,
                                4096,
                                {P::kPtr, P::kPtr, P::kPtr, P::kPtr, P::kI32, P::kI32, P::kF32},
                                1,
                                0});
    program->kernels.push_back(
        {"sample", "sample_kernel", "cubin", "", 32, 0, {P::kPtr, P::kPtr, P::kI32}, 0, 0});
    using K = Arg::Kind;
    Launch launch;
    launch.kernel = 0;
    launch.grid = {{Dim::kTokens, 2, 1, 0}, {0, 1, 3, 0}};
    launch.args = {{K::kValue, 1, 0},           {K::kValue, 0, 0}, {K::kWeight, 0, 0}, {K::kKCache, 0, 0},
                   {K::kSize, Dim::kTokens, 0}, {K::kI32, 7, 0},   {K::kF32, 0, 0.5F}};
    Step step;
    step.kernel = "head";
    step.launches.push_back(launch);
    program->steps.push_back(step);
    if (!sampling) return program;
    Launch sample;
    sample.kernel = 1;
    sample.grid = {{Dim::kRows, 1, 1, 0}};
    sample.args = {{K::kValue, 2, 0},
                   {K::kInput, static_cast<int64_t>(StepInput::kTemperature), 0},
                   {K::kSize, Dim::kRandom, 0}};
    Step choose;
    choose.kernel = "sample";
    choose.launches.push_back(sample);
    program->sampling.push_back(choose);
    if (!feeding) return program;
    program->kernels.push_back(
        {"feed", "feed_kernel", "cubin", "", 32, 0, {P::kPtr, P::kPtr, P::kPtr, P::kI32}, 0, 0});
    Launch feed;
    feed.kernel = 2;
    feed.grid = {{Dim::kTokens, 1, 1, 0}};
    feed.args = {{K::kInput, static_cast<int64_t>(StepInput::kTokenIds), 0},
                 {K::kInput, static_cast<int64_t>(StepInput::kTokenSource), 0},
                 {K::kValue, 2, 0},
                 {K::kSize, Dim::kTokens, 0}};
    Step take;
    take.kernel = "feed";
    take.launches.push_back(feed);
    program->feeding.push_back(take);
    return program;
}

// A machine whose kernels are written here: the logits of row i are the row's token id everywhere; the token
// that is chosen for a row is the row's number.
struct Machine {
    Machine() {
        cuda.signatures["head_kernel"] = {8, 8, 8, 8, 4, 4, 4, 8};
        cuda.signatures["sample_kernel"] = {8, 8, 4};
        cuda.signatures["feed_kernel"] = {8, 8, 8, 4};
        cuda.kernel = [this](const FakeLaunch& launch) {
            last = launch;
            if (launch.function == "feed_kernel") {
                auto* ids = reinterpret_cast<int32_t*>(launch.param<cu::Address>(0));
                const auto* sources = reinterpret_cast<const int32_t*>(launch.param<cu::Address>(1));
                const auto* sampled = reinterpret_cast<const int32_t*>(launch.param<cu::Address>(2));
                for (int i = 0; i < launch.param<int32_t>(3); ++i)
                    if (sources[i] >= 0) ids[i] = sampled[2 * sources[i]];
                return;
            }
            if (launch.function == "sample_kernel") {
                auto* rows = reinterpret_cast<int32_t*>(launch.param<cu::Address>(0));
                for (unsigned i = 0; i < launch.grid[0]; ++i)
                    rows[2 * i] = static_cast<int32_t>(i) + first_token, rows[2 * i + 1] = 0;
                random = launch.param<int32_t>(2);
                return;
            }
            CHECK(launch.param<int32_t>(5) == 7);
            CHECK(launch.param<float>(6) == 0.5F);
            CHECK(launch.param<cu::Address>(7) == 0);
            CHECK(*reinterpret_cast<const float*>(launch.param<cu::Address>(2) + 8) == 3);
            auto* logits = reinterpret_cast<float*>(launch.param<cu::Address>(0));
            const auto* ids = reinterpret_cast<const int32_t*>(launch.param<cu::Address>(1));
            tokens = launch.param<int32_t>(4);
            for (int i = 0; i < std::min(tokens, 6) * kVocab; ++i)
                logits[i] = static_cast<float>(ids[i / kVocab]);
        };
    }

    std::unique_ptr<CudaDevice> device(bool sampling = false, bool graphs = true, bool feeding = false) {
        driver = cuda.driver();
        CudaOptions options;
        options.graphs = graphs;
        auto made = make_cuda_device(make_program(sampling, feeding), options, driver);
        made->reserve_kv(8, 0);
        return made;
    }

    std::string refusal(std::shared_ptr<Program> program) {
        driver = cuda.driver();
        try {
            make_cuda_device(std::move(program), {}, driver)->reserve_kv(8, 0);
        } catch (const std::exception& error) {
            return error.what();
        }
        return "";
    }

    FakeCuda cuda;
    cu::Driver driver;
    FakeLaunch last;
    int32_t tokens = 0;
    int32_t random = 0;
    int32_t first_token = 0;  // that the next sampling chooses for row 0
};

// `count` sequences that decode their second token.
struct DecodeStep {
    explicit DecodeStep(int count) {
        for (int i = 0; i < count; ++i) {
            tokens.push_back(3 + i);
            positions.push_back(1);
            rows.push_back(i);
            tables.push_back({i});
        }
        for (int i = 0; i < count; ++i) sequences.push_back({i, 1, 1, tables[static_cast<size_t>(i)]});
    }
    [[nodiscard]] Batch batch() const { return {tokens, positions, rows, sequences}; }

    std::vector<int32_t> tokens;
    std::vector<int32_t> positions;
    std::vector<int32_t> rows;
    std::vector<std::vector<int32_t>> tables;
    std::vector<SequenceSlice> sequences;
};

using Log = std::vector<std::string>;

}  // namespace

TEST_CASE("a decode step is one graph launch and one wait, and gives what launching its kernels gives") {
    std::vector<float> eager;
    {
        Machine machine;
        auto device = machine.device(false, false);
        const DecodeStep step(3);
        machine.cuda.calls.clear();
        machine.cuda.log.clear();
        const auto logits = device->forward(step.batch());
        eager.assign(logits.begin(), logits.end());
        CHECK(device->graph_bucket() == 0);
        CHECK(machine.tokens == 3);
        CHECK(machine.last.grid == std::array<unsigned, 3>{2, 3, 1});
        CHECK(machine.last.threads == 128);
        CHECK(machine.last.shared_bytes == 4096);
        CHECK(machine.cuda.log == Log{"cuMemcpyHtoDAsync", "head_kernel", "cuMemcpyDtoHAsync"});
        CHECK(machine.cuda.calls["cuStreamSynchronize"] == 1);
    }
    Machine machine;
    auto device = machine.device();
    CHECK(device->facts().graphs == 3);  // 1, 2, 4
    CHECK(device->facts().largest_graph == 4);
    const DecodeStep step(3);
    machine.cuda.calls.clear();
    machine.cuda.log.clear();
    const auto logits = device->forward(step.batch());
    CHECK(machine.cuda.calls == std::map<std::string, int>{{"cuGraphLaunch", 1}, {"cuStreamSynchronize", 1}});
    CHECK(machine.cuda.log == Log{"cuMemcpyHtoDAsync", "head_kernel", "cuMemcpyDtoHAsync"});
    CHECK(device->graph_bucket() == 4);
    CHECK(machine.tokens == 4);  // padded
    CHECK(std::equal(eager.begin(), eager.end(), logits.begin(), logits.end()));
    CHECK(eager[0] == 3);
    CHECK(eager[2 * kVocab] == 5);
}

TEST_CASE("prefill steps and batches past the largest graph run without one") {
    Machine machine;
    auto device = machine.device();
    const std::vector<int32_t> tokens{1, 2, 3};
    const std::vector<int32_t> positions{0, 1, 2};
    const std::vector<int32_t> rows{2};
    const std::vector<int32_t> table{0};
    const std::vector<SequenceSlice> sequences{{0, 3, 0, table}};
    CHECK(device->forward({tokens, positions, rows, sequences}).size() == kVocab);
    CHECK(device->graph_bucket() == 0);
    CHECK(machine.tokens == 3);
}

TEST_CASE("everything is given back, in whatever thread the device ends") {
    Machine machine;
    {
        auto device = machine.device();
    }
    CHECK(machine.cuda.device_memory.empty());
    CHECK(machine.cuda.live.empty());
    CHECK(machine.cuda.calls["cuDevicePrimaryCtxRelease"] == 1);
}

TEST_CASE("tokens are chosen on the device: within the graph if plain, behind it if rows want more") {
    Machine machine;
    auto device = machine.device(true);
    CHECK(device->samples());
    CHECK(device->facts().graphs == 9);
    const DecodeStep step(3);
    std::vector<RowSampling> rows(3);
    const auto run = [&](std::span<const LogitEdit> edits) {
        machine.cuda.calls.clear();
        machine.cuda.log.clear();
        const SampledRows sampled = device->forward_and_sample(step.batch(), {rows, edits});
        REQUIRE(sampled.rows.size() == 3);
        for (int i = 0; i < 3; ++i) CHECK(sampled.rows[static_cast<size_t>(i)].token == i);
        return sampled;
    };
    run({});
    CHECK(machine.random == 0);
    CHECK(machine.cuda.calls == std::map<std::string, int>{{"cuGraphLaunch", 1}, {"cuStreamSynchronize", 1}});
    CHECK(machine.cuda.log == Log{"cuMemcpyHtoDAsync", "head_kernel", "sample_kernel", "cuMemcpyDtoHAsync"});
    rows[1].temperature = 1;
    run({});
    CHECK(machine.random == 4);  // the graph's: any of its rows may be drawn
    CHECK(machine.cuda.calls["cuGraphLaunch"] == 1);
    CHECK(machine.cuda.calls["cuLaunchKernel"] == 0);
    const std::vector<LogitEdit> edits{{0, 5, -1}};
    run(edits);
    CHECK(machine.random == 1);
    CHECK(machine.cuda.log ==
          Log{"cuMemcpyHtoDAsync", "head_kernel", "cuMemcpyHtoDAsync", "sample_kernel", "cuMemcpyDtoHAsync"});
    rows[2].num_logprobs = 2;
    const SampledRows sampled = run({});
    CHECK(sampled.top_ids.size() == 3 * 20);
    CHECK(sampled.top_logprobs.size() == 3 * 21);
    CHECK(device->forward(step.batch())[kVocab] == 4);  // and the logits can still be had
    const std::vector<LogitEdit> wild{{3, 5, -1}};
    CHECK_THROWS_AS(static_cast<void>(device->forward_and_sample(step.batch(), {rows, wild})),
                    std::invalid_argument);
}

TEST_CASE(
    "a step is started behind another: it takes its tokens, and neither overwrites what is the other's") {
    for (const bool graphs : {false, true}) {
        Machine machine;
        auto device = machine.device(true, graphs, true);
        CHECK(device->queues());
        CHECK(device->facts().graphs == (graphs ? 18 : 0));  // 1, 2, 4 in three kinds, for two slots
        const DecodeStep first(3);
        const DecodeStep second(2);
        const std::vector<RowSampling> sampling(3);
        const auto two = std::span(sampling).first(2);
        machine.first_token = 4;
        device->start(first.batch(), {sampling, {}});
        CHECK(device->graph_bucket() == (graphs ? 4 : 0));
        // The requests of rows 2 and 0 go on.
        const std::vector<int32_t> sources{2, 0};
        Batch behind = second.batch();
        behind.token_sources = sources;
        machine.cuda.calls.clear();
        machine.first_token = 1;
        device->start(behind, {two, {}});
        if (graphs) {
            CHECK(machine.cuda.calls ==
                  std::map<std::string, int>{{"cuEventRecord", 1}, {"cuGraphLaunch", 1}});
        }
        CHECK_THROWS_AS(device->start(behind, {two, {}}), std::logic_error);  // which drops what is under way
        CHECK_THROWS_AS(static_cast<void>(device->finish()), std::logic_error);
        device->start(first.batch(), {sampling, {}});
        machine.cuda.failures["cuMemcpyDtoDAsync"] = cu::Result::kOutOfMemory;
        CHECK_THROWS_AS(device->copy_kv_block(KvGroup::kAll, 0, 1), std::runtime_error);  // so does this
        machine.cuda.failures.clear();
        CHECK_THROWS_AS(static_cast<void>(device->finish()), std::logic_error);

        machine.first_token = 4;
        device->start(first.batch(), {sampling, {}});
        machine.first_token = 1;
        device->start(behind, {two, {}});
        machine.cuda.calls.clear();
        const SampledRows one = device->finish();
        REQUIRE(one.rows.size() == 3);
        for (int i = 0; i < 3; ++i) CHECK(one.rows[static_cast<size_t>(i)].token == 4 + i);
        const SampledRows other = device->finish();
        REQUIRE(other.rows.size() == 2);
        for (int i = 0; i < 2; ++i) CHECK(other.rows[static_cast<size_t>(i)].token == 1 + i);
        CHECK(one.rows[0].token == 4);  // still
        CHECK(machine.cuda.calls ==
              std::map<std::string, int>{{"cuEventSynchronize", 1}, {"cuStreamSynchronize", 1}});
        // The head's logits are the token ids that it was given.
        device->start(first.batch(), {sampling, {}});
        static_cast<void>(device->finish());
        const auto logits = device->forward(behind);
        CHECK(logits[0] == 3);
        CHECK(logits[kVocab] == 1);

        behind.token_sources = std::span(sources).first(1);
        CHECK_THROWS_AS(device->start(behind, {two, {}}), std::invalid_argument);
        const std::vector<int32_t> beyond{3, -1};
        behind.token_sources = beyond;
        CHECK_THROWS_AS(device->start(behind, {two, {}}), std::invalid_argument);
    }
}

TEST_CASE("a failure in a step names what failed; a sticky one loses the device") {
    Machine machine;
    auto device = machine.device(false, false);
    const DecodeStep step(2);
    const auto failure = [&](const char* symbol, cu::Result result) -> std::string {
        machine.cuda.failures[symbol] = result;
        try {
            static_cast<void>(device->forward(step.batch()));
        } catch (const DeviceLostError& error) {
            return std::string("lost: ") + error.what();
        } catch (const std::exception& error) {
            return error.what();
        }
        return "";
    };
    CHECK(failure("cuLaunchKernel", cu::Result::kInvalidValue) ==
          "the CUDA driver failed while launching steps[0] (head), kernel \"head\": a fake error "
          "(CUDA_ERROR_FAKE, 1)");
    CHECK(device->forward(step.batch()).size() == 2 * kVocab);  // the device goes on
    const std::string lost = failure("cuStreamSynchronize", cu::Result::kIllegalAddress);
    CHECK(lost.find("lost: the CUDA driver failed while running a step of 2 tokens of 2 sequences, without a "
                    "graph") == 0);
    CHECK(lost.find("CUDA_LAUNCH_BLOCKING=1") != std::string::npos);
}

TEST_CASE("a device that cannot run the engine says what was found, what was expected and what to do") {
    Machine machine;
    machine.cuda.total_memory = 4000;
    CHECK(machine.refusal(make_program()) ==
          "the engine does not fit into the memory of device 0 (Fake GPU, 3.9 KiB, of which 3.9 KiB are "
          "free): weights "
          "take 256 B, activations 4.0 KiB, step inputs 400 B, each KV block 1.0 KiB; free memory on the "
          "device, choose "
          "another one (device_index), or rebuild the engine with smaller --max-num-tokens and "
          "--max-batch-size");
    machine.cuda.total_memory = size_t{64} << 20;

    machine.cuda.major = 8;
    CHECK(machine.refusal(make_program()) ==
          "kernel \"head\" has no code for Fake GPU (compute capability 8.0): it was built for sm_90; "
          "rebuild the engine "
          "with --target sm_80 (or compute_80, if that is no target)");
    machine.cuda.major = 9;

    machine.cuda.version = 12080;
    machine.cuda.failures["cuModuleLoadDataEx"] = cu::Result::kInvalidImage;
    auto program = make_program();
    program->kernels[0].image = "...Cuda compilation tools, release 13.0, V13.0.88...";
    CHECK(machine.refusal(program) ==
          "kernel \"head\" cannot be loaded on Fake GPU: a fake error (CUDA_ERROR_FAKE, 200). Its machine "
          "code comes from "
          "CUDA 13.0, the driver speaks CUDA 12.8; a driver of the same major release or later is expected "
          "(CUDA 12: 525, "
          "CUDA 13: 580): update the driver");

    machine.cuda.failures["cuModuleLoadDataEx"] = cu::Result::kUnsupportedPtxVersion;
    program = make_program();
    program->target = "compute_80";
    program->kernels[0].image.clear();
    program->kernels[0].ptx = ".version 8.7\n.target sm_80\n";
    CHECK(machine.refusal(program) ==
          "kernel \"head\" cannot be loaded on Fake GPU: a fake error (CUDA_ERROR_FAKE, 222). Its PTX has "
          "version 8.7, the "
          "driver speaks CUDA 12.8: update the driver, or rebuild the engine for this GPU (--target sm_90)");

    program = make_program();
    program->kernels[0].shared_bytes = 200000;
    CHECK(machine.refusal(program) ==
          "kernel \"head\" needs 200000 bytes of shared memory; a block on Fake GPU has at most 100000");
    machine.cuda.failures["cuModuleGetFunction"] = cu::Result::kNotFound;
    CHECK(machine.refusal(make_program()) ==
          "kernel \"head\": its image has no function \"head_kernel\"; the engine is damaged or was made by "
          "hand");
    CHECK(machine.cuda.device_memory.empty());
    CHECK(machine.cuda.live.empty());
}

TEST_CASE("a program whose parts do not fit together is refused with the place") {
    Machine machine;
    const auto refusal = [&](auto change) {
        auto program = make_program(true);
        change(*program);
        return machine.refusal(program);
    };
    CHECK(refusal([](Program&) {}).empty());
    CHECK(refusal([](Program& p) { p.values[1].offset = 4032; }) ==
          "value \"logits\" takes 192 bytes from byte 4032 on; the arena has 4096");
    CHECK(refusal([](Program& p) { p.values[1].offset = 20; }) ==
          "value \"logits\" begins at byte 20; a multiple of 64 is expected");
    CHECK(refusal([](Program& p) { p.values[1].dtype = DType::kBF16; }) ==
          "value \"logits\" is bf16 [N, 8]; expected f32 [N, 8]");
    CHECK(refusal([](Program& p) { p.values[1].name = "x"; }) ==
          "the program has no value \"logits\" (f32 [N, 8])");
    CHECK(refusal([](Program& p) { p.weights[0].bytes = 12; }) ==
          "weight \"w\" has 12 bytes; its shape needs 16");
    CHECK(refusal([](Program& p) { p.weights[0].layout = Layout::kPanel16; }) ==
          "weight \"w\": a CUDA program has codes of four bits in words, and all else in plain layout");
    CHECK(refusal([](Program& p) { p.steps[0].launches.clear(); }) ==
          "steps[0] (head) has no launches; a step of a CUDA program has at least one");
    CHECK(refusal([](Program& p) { p.steps[0].launches[0].args.pop_back(); }) ==
          "steps[0] (head), kernel \"head\": 6 arguments for a kernel of 7 parameters");
    CHECK(refusal([](Program& p) { p.steps[0].launches[0].args[5].kind = Arg::Kind::kI64; }) ==
          "steps[0] (head), kernel \"head\", argument 5 is of type i64; the kernel's parameter is i32");
    CHECK(refusal([](Program& p) { p.steps[0].launches[0].args[3].index = 1; }) ==
          "steps[0] (head), kernel \"head\", argument 3 names KV layer 1 of 1");
    CHECK(refusal([](Program& p) { p.steps[0].launches[0].grid[1].times = 70000; }) ==
          "steps[0] (head), kernel \"head\": grid dimension 1 reaches 70000 blocks; at most 65535 are "
          "possible: rebuild "
          "the engine with smaller limits");
    CHECK(refusal([](Program& p) { p.sampling[0].launches[0].kernel = 5; }) ==
          "sampling[0] launches kernel 5 of 2");
    CHECK(refusal([](Program& p) { p.prefill_tile = 0; }) ==
          "prefill_tile is 0; a CUDA program has query tiles of at least one row");
}

TEST_CASE("a batch that would write outside its blocks is not run") {
    Machine machine;
    auto device = machine.device();
    DecodeStep step(2);
    step.tables[1][0] = 8;  // the pool has 8 blocks
    CHECK_THROWS_WITH_AS(static_cast<void>(device->forward(step.batch())),
                         "batch: KV block 8 is outside the pool", std::invalid_argument);
}

TEST_CASE("scratch memory is reserved for the largest grid and is behind the first hidden pointer") {
    Machine machine;
    auto program = make_program();
    program->kernels[0].scratch_bytes = 256;
    cu::Address scratch = 0;
    machine.cuda.kernel = [&](const FakeLaunch& launch) { scratch = launch.param<cu::Address>(7); };
    machine.driver = machine.cuda.driver();
    CudaOptions options;
    options.graphs = false;
    auto device = make_cuda_device(program, options, machine.driver);
    device->reserve_kv(8, 0);
    const DecodeStep step(1);
    static_cast<void>(device->forward(step.batch()));
    REQUIRE(machine.cuda.device_memory.contains(scratch));
    CHECK(machine.cuda.device_memory[scratch] == 256 * 8 * 3);  // 16 tokens, two a block, times 3
}
