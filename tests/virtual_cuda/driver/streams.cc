// Queues and their execution, as late as the programming model allows: work happens when somebody waits for
// it. A runtime that forgets to wait, or reuses a staging buffer too early, therefore sees wrong data every
// time, not once in a while.
#include <chrono>
#include <cstring>

#include "state.h"

namespace vcuda {
namespace {

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

template <class... F>
struct Overloaded : F... {
    using F::operator()...;
};

CUresult run_kernel(const KernelWork& kernel) {
    State& s = state();
    const KernelInfo& info = kernel.function->info;
    count("executed:kernels");
    if (s.executor == nullptr) return CUDA_SUCCESS;
    LaunchRecord record{};
    record.function = info.name.c_str();
    record.image_hash = kernel.function->module->image.hash;
    std::memcpy(record.grid, kernel.grid.data(), sizeof record.grid);
    std::memcpy(record.block, kernel.block.data(), sizeof record.block);
    record.shared_bytes = kernel.shared_bytes;
    record.param_count = static_cast<uint32_t>(info.param_sizes.size());
    record.param_offsets = info.param_offsets.data();
    record.param_sizes = info.param_sizes.data();
    record.params = kernel.params.data();
    const auto code = static_cast<CUresult>(s.executor(&record));
    if (code == CUDA_SUCCESS) return code;
    return lose(code, format("kernel %s <<<%u,%u,%u>>> failed", info.name.c_str(), kernel.grid[0],
                             kernel.grid[1], kernel.grid[2]));
}

// Checked when the copy happens: memory may have been freed since the call. Pageable memory is not ours to
// check.
std::string check_side(uint64_t address, uint64_t bytes) {
    const Memory& memory = state().memory;
    return memory.is_device(address) || memory.find(address) ? memory.check(address, bytes) : std::string();
}

CUresult run_copy(const CopyWork& copy) {
    const uint64_t from = copy.staged ? reinterpret_cast<uint64_t>(copy.staged->data()) : copy.from;
    for (const std::string& text :
         {check_side(copy.to, copy.bytes), copy.staged ? "" : check_side(from, copy.bytes)})
        if (!text.empty()) return lose(CUDA_ERROR_ILLEGAL_ADDRESS, "copy: " + text);
    std::memmove(reinterpret_cast<void*>(copy.to), reinterpret_cast<const void*>(from), copy.bytes);
    count("executed:copies");
    count("executed:copied_bytes", copy.bytes);
    return CUDA_SUCCESS;
}

CUresult run_set(const SetWork& set) {
    if (const std::string text = state().memory.check(set.to, set.count * set.width); !text.empty())
        return lose(CUDA_ERROR_ILLEGAL_ADDRESS, "memset: " + text);
    auto* at = reinterpret_cast<uint8_t*>(set.to);
    for (uint64_t i = 0; i < set.count; ++i) std::memcpy(at + i * set.width, &set.value, set.width);
    count("executed:memsets");
    return CUDA_SUCCESS;
}

CUresult run_work(const Work& work) {
    return std::visit(
        Overloaded{
            [](const EmptyWork&) { return CUDA_SUCCESS; },
            [](const KernelWork& kernel) { return run_kernel(kernel); },
            [](const CopyWork& copy) { return run_copy(copy); },
            [](const SetWork& set) { return run_set(set); },
            [](const HostWork& host) {
                host.function(host.user_data);
                return CUDA_SUCCESS;
            },
            [](const RecordWork& record) {
                if (state().events.count(record.event) != 0) record.event->seconds = now();
                return CUDA_SUCCESS;
            },
            [](const WaitWork& wait) {
                return state().streams.count(wait.stream) != 0 || wait.stream == resolve(nullptr)
                           ? run_until(wait.stream, wait.position)
                           : CUDA_SUCCESS;
            },
            [](const FreeWork& free) {
                return state().memory.release(free.address) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
            },
            [](const GraphWork& graph) {
                for (const Work& inner : *graph.works)
                    if (CUresult code = run_work(inner); code != CUDA_SUCCESS) return code;
                return CUDA_SUCCESS;
            },
        },
        work.what);
}

void push(CUstream stream, Work work) {
    stream->queue.push_back(std::move(work));
    ++stream->enqueued;
}

// The legacy default stream waits for every blocking stream, and they for it.
void order_with_null_stream(CUstream stream) {
    State& s = state();
    if (stream == &s.null_stream) {
        for (CUstream other : s.streams)
            if ((other->flags & CU_STREAM_NON_BLOCKING) == 0 && other->finished < other->enqueued &&
                !other->capture)
                push(stream, {WaitWork{other, other->enqueued}});
    } else if ((stream->flags & CU_STREAM_NON_BLOCKING) == 0 &&
               s.null_stream.finished < s.null_stream.enqueued) {
        push(stream, {WaitWork{&s.null_stream, s.null_stream.enqueued}});
    }
}

}  // namespace

CUstream resolve(CUstream handle) {
    State& s = state();
    if (handle == nullptr || handle == CU_STREAM_LEGACY) return &s.null_stream;
    if (handle == CU_STREAM_PER_THREAD) return &s.per_thread_stream;
    return s.streams.count(handle) != 0 ? handle : nullptr;
}

CUresult enqueue(CUstream handle, Work work) {
    State& s = state();
    std::unique_lock lock(s.state_mutex);
    CUstream stream = resolve(handle);
    if (stream == nullptr) {
        lock.unlock();
        return fault(CUDA_ERROR_INVALID_HANDLE, "no such stream");
    }
    if (stream->capture) {
        Capture& capture = *stream->capture;
        if (capture.invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        if (stream != capture.origin) capture.unjoined.insert(stream);
        capture.graph->nodes.push_back(std::make_unique<CUgraphNode_st>(CUgraphNode_st{std::move(work)}));
        return CUDA_SUCCESS;
    }
    if (stream == &s.null_stream && s.global_captures > 0) {
        lock.unlock();
        return fault(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
                     "work on the default stream while another stream is being captured");
    }
    order_with_null_stream(stream);
    push(stream, std::move(work));
    return CUDA_SUCCESS;
}

CUresult run_until(CUstream stream, uint64_t position) {
    State& s = state();
    std::lock_guard running(s.run_mutex);
    AccessWindow window(s.memory);
    while (true) {
        Work work;
        {
            std::lock_guard lock(s.state_mutex);
            if (s.sticky != CUDA_SUCCESS) return s.sticky;  // nothing runs after a lost context
            if (stream->finished >= position || stream->queue.empty()) return CUDA_SUCCESS;
            work = std::move(stream->queue.front());
            stream->queue.pop_front();
        }
        const CUresult code = run_work(work);
        {
            std::lock_guard lock(s.state_mutex);
            ++stream->finished;
        }
        if (code != CUDA_SUCCESS) return code;
    }
}

CUresult run_all(CUstream stream) {
    uint64_t end = 0;
    {
        std::lock_guard lock(state().state_mutex);
        end = stream->enqueued;
    }
    return run_until(stream, end);
}

CUresult run_everything() {
    std::vector<CUstream> streams;
    {
        std::lock_guard lock(state().state_mutex);
        streams.assign(state().streams.begin(), state().streams.end());
    }
    streams.push_back(&state().null_stream);
    streams.push_back(&state().per_thread_stream);
    for (CUstream stream : streams)
        if (CUresult code = run_all(stream); code != CUDA_SUCCESS) return code;
    return CUDA_SUCCESS;
}

}  // namespace vcuda
