// Streams, events and host callbacks.
#include "state.h"

using namespace vcuda;

namespace {

CUresult stale(const char* name) {
    return fault(CUDA_ERROR_INVALID_HANDLE, std::string(name) + ": stale handle");
}

CUresult refuse_if_capturing(const char* name, CUstream stream) {
    if (!stream->capture) return CUDA_SUCCESS;
    stream->capture->invalid = true;
    return fault(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                 std::string(name) + " on a stream that is being captured");
}

bool known(CUevent event) {
    std::lock_guard lock(state().state_mutex);
    return state().events.count(event) != 0;
}

// NOT_READY once if there is work to do, which is then done: the earliest that a host may see it finished.
CUresult query(CUstream stream, uint64_t position) {
    if (stream->finished >= position) return CUDA_SUCCESS;
    const CUresult code = run_until(stream, position);
    return code == CUDA_SUCCESS ? CUDA_ERROR_NOT_READY : code;
}

CUresult make_stream(CUstream* out, unsigned flags, int priority) {
    auto* stream = new CUstream_st;
    stream->flags = flags;
    stream->priority = priority;
    std::lock_guard lock(state().state_mutex);
    state().streams.insert(stream);
    *out = stream;
    return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

CUresult cuStreamCreate(CUstream* stream, unsigned int flags) {
    VCUDA_ENTER(cuStreamCreate, kContext);
    return make_stream(stream, flags, 0);
}

CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned int flags, int priority) {
    VCUDA_ENTER(cuStreamCreateWithPriority, kContext);
    return make_stream(stream, flags, priority);
}

CUresult cuStreamDestroy(CUstream stream) {
    VCUDA_ENTER(cuStreamDestroy, kContext);
    if (stream == nullptr || resolve(stream) == nullptr) return stale("cuStreamDestroy");
    run_all(stream);
    std::lock_guard lock(state().state_mutex);
    state().streams.erase(stream);
    for (CUevent event : state().events)
        if (event->stream == stream) event->stream = nullptr;
    delete stream;
    return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream handle) {
    VCUDA_ENTER(cuStreamSynchronize, kContext);
    CUstream stream = resolve(handle);
    if (stream == nullptr) return stale("cuStreamSynchronize");
    if (CUresult code = refuse_if_capturing("cuStreamSynchronize", stream); code != CUDA_SUCCESS) return code;
    return run_all(stream);
}

CUresult cuStreamQuery(CUstream handle) {
    VCUDA_ENTER(cuStreamQuery, kContext);
    CUstream stream = resolve(handle);
    if (stream == nullptr) return stale("cuStreamQuery");
    if (CUresult code = refuse_if_capturing("cuStreamQuery", stream); code != CUDA_SUCCESS) return code;
    return query(stream, stream->enqueued);
}

CUresult cuStreamGetFlags(CUstream handle, unsigned int* flags) {
    VCUDA_ENTER(cuStreamGetFlags, kContext);
    CUstream stream = resolve(handle);
    if (stream == nullptr) return stale("cuStreamGetFlags");
    *flags = stream->flags;
    return CUDA_SUCCESS;
}

CUresult cuStreamWaitEvent(CUstream handle, CUevent event, unsigned int) {
    VCUDA_ENTER(cuStreamWaitEvent, kContext);
    CUstream stream = resolve(handle);
    if (stream == nullptr || !known(event)) return stale("cuStreamWaitEvent");
    if (event->capture && !stream->capture) {
        stream->capture = event->capture;  // the stream joins the capture
        return CUDA_SUCCESS;
    }
    if (stream->capture) {
        if (event->capture == stream->capture) {
            stream->capture->unjoined.erase(event->stream);
            return CUDA_SUCCESS;
        }
        stream->capture->invalid = true;
        return fault(CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
                     "a captured stream waits for an event from outside");
    }
    if (event->stream == nullptr) return CUDA_SUCCESS;  // never recorded, or its stream is gone: complete
    return enqueue(handle, {WaitWork{event->stream, event->position}});
}

CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void* user_data) {
    VCUDA_ENTER(cuLaunchHostFunc, kContext);
    return enqueue(stream, {HostWork{function, user_data}});
}

CUresult cuEventCreate(CUevent* event, unsigned int flags) {
    VCUDA_ENTER(cuEventCreate, kContext);
    *event = new CUevent_st;
    (*event)->flags = flags;
    std::lock_guard lock(state().state_mutex);
    state().events.insert(*event);
    return CUDA_SUCCESS;
}

CUresult cuEventDestroy(CUevent event) {
    VCUDA_ENTER(cuEventDestroy, kContext);
    std::lock_guard lock(state().state_mutex);
    if (state().events.erase(event) == 0) return CUDA_ERROR_INVALID_HANDLE;
    delete event;
    return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent event, CUstream handle) {
    VCUDA_ENTER(cuEventRecord, kContext);
    CUstream stream = resolve(handle);
    if (stream == nullptr || !known(event)) return stale("cuEventRecord");
    event->capture = stream->capture;
    event->stream = stream;
    if (stream->capture) return CUDA_SUCCESS;  // an edge of the graph, not a node
    if (CUresult code = enqueue(handle, {RecordWork{event}}); code != CUDA_SUCCESS) return code;
    event->position = stream->enqueued;
    return CUDA_SUCCESS;
}

CUresult cuEventQuery(CUevent event) {
    VCUDA_ENTER(cuEventQuery, kContext);
    if (!known(event)) return stale("cuEventQuery");
    if (event->capture) return fault(CUDA_ERROR_CAPTURED_EVENT, "cuEventQuery of an event of a capture");
    return event->stream == nullptr ? CUDA_SUCCESS : query(event->stream, event->position);
}

CUresult cuEventSynchronize(CUevent event) {
    VCUDA_ENTER(cuEventSynchronize, kContext);
    if (!known(event)) return stale("cuEventSynchronize");
    if (event->capture)
        return fault(CUDA_ERROR_CAPTURED_EVENT, "cuEventSynchronize of an event of a capture");
    return event->stream == nullptr ? CUDA_SUCCESS : run_until(event->stream, event->position);
}

CUresult cuEventElapsedTime(float* milliseconds, CUevent start, CUevent end) {
    VCUDA_ENTER(cuEventElapsedTime, kContext);
    if (!known(start) || !known(end) || ((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING) != 0)
        return CUDA_ERROR_INVALID_HANDLE;
    if (start->seconds == 0 || end->seconds == 0) return CUDA_ERROR_NOT_READY;
    *milliseconds = static_cast<float>((end->seconds - start->seconds) * 1e3);
    return CUDA_SUCCESS;
}

#undef cuEventElapsedTime
// The entry point of drivers before 12.8.
CUresult cuEventElapsedTime(float* milliseconds, CUevent start, CUevent end) {
    return cuEventElapsedTime_v2(milliseconds, start, end);
}

}  // extern "C"
