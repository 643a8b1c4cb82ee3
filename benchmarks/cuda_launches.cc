// Host time of the CUDA device, on a driver whose functions return at once: what a launch costs before the
// driver, and what a replayed decode step costs (packing, one graph launch, one wait).
#include <chrono>
#include <cstdio>
#include <memory>
#include <vector>

#include "device/cuda/cuda_device.h"
#include "tests/cuda_fake_driver.h"

namespace {

using namespace castiron;
using testing::FakeCuda;
namespace cu = castiron::cuda;

constexpr int kLaunches = 320;  // ten for each of 32 layers
constexpr int kBatch = 64;
constexpr int kRepeats = 2000;

std::shared_ptr<Program> make_program() {
    auto program = std::make_shared<Program>();
    program->target = "sm_90";
    program->vocab_size = 128;
    program->limits = {kBatch, 256, kBatch, 8192};
    program->prefill_tile = 64;
    program->arena_bytes = 1 << 20;
    program->values = {{"logits", DType::kF32, {Dim{Dim::kRows}, Dim{128}}, 0, -1, 0}};
    program->kv_layers = {{8, 128, 128, DType::kBF16}};
    Kernel kernel;
    kernel.name = kernel.function = "kernel";
    kernel.image = "cubin";
    kernel.threads = 128;
    kernel.params.assign(8, Kernel::Param::kPtr);
    kernel.params.resize(12, Kernel::Param::kI32);
    kernel.hidden_pointers = 2;
    program->kernels.push_back(kernel);
    Launch launch;
    launch.grid = {{Dim::kTokens, 16, 32, 0}, {0, 1, 4, 0}};
    launch.args.assign(8, {Arg::Kind::kValue, 0, 0});
    launch.args.resize(12, {Arg::Kind::kSize, Dim::kTokens, 0});
    Step step;
    step.kernel = "kernel";
    step.launches.push_back(launch);
    program->steps.assign(kLaunches, step);
    return program;
}

double microseconds_per_step(bool graphs) {
    FakeCuda machine;
    machine.total_memory = size_t{1} << 30;
    machine.signatures["kernel"] = {8, 8, 8, 8, 8, 8, 8, 8, 4, 4, 4, 4, 8, 8};
    cu::Driver driver = machine.driver();
    driver.launch = [](cu::Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                       cu::StreamHandle, void**, void**) { return cu::Result::kSuccess; };
    driver.graph_launch = [](cu::GraphExecHandle, cu::StreamHandle) { return cu::Result::kSuccess; };
    driver.stream_synchronize = [](cu::StreamHandle) { return cu::Result::kSuccess; };
    driver.copy_to_device = [](cu::Address, const void*, size_t, cu::StreamHandle) {
        return cu::Result::kSuccess;
    };
    driver.copy_to_host = [](void*, cu::Address, size_t, cu::StreamHandle) { return cu::Result::kSuccess; };
    CudaOptions options;
    options.graphs = graphs;
    const auto device = make_cuda_device(make_program(), options, driver);
    device->reserve_kv(kBatch * 32, 0);

    std::vector<int32_t> ids(kBatch, 1);
    std::vector<int32_t> positions(kBatch, 1000);
    std::vector<int32_t> rows(kBatch);
    std::vector<std::vector<int32_t>> tables(kBatch, std::vector<int32_t>(32));
    std::vector<SequenceSlice> sequences;
    for (int i = 0; i < kBatch; ++i) {
        rows[static_cast<size_t>(i)] = i;
        sequences.push_back({i, 1, 1000, tables[static_cast<size_t>(i)]});
    }
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < kRepeats; ++i) static_cast<void>(device->forward({ids, positions, rows, sequences}));
    const std::chrono::duration<double, std::micro> passed = std::chrono::steady_clock::now() - begin;
    return passed.count() / kRepeats;
}

}  // namespace

int main() {
    const double eager = microseconds_per_step(false);
    const double replayed = microseconds_per_step(true);
    std::printf(
        "decode step of %d sequences, %d launches of 12 arguments, max_seq_len 8192, a driver that does "
        "nothing\n",
        kBatch, kLaunches);
    std::printf("replayed: %6.1f us (packing and two driver calls)\n", replayed);
    std::printf("eager:    %6.1f us, %.3f us a launch\n", eager, (eager - replayed) / kLaunches);
    return 0;
}
