// Stream capture and graphs. A graph is kept as the list of its nodes in the order in which they were made,
// which respects every dependency; edges are not kept.
#include <algorithm>
#include <cstring>

#include "state.h"

using namespace vcuda;

namespace {

CUresult stale(const char* name) {
    return fault(CUDA_ERROR_INVALID_HANDLE, std::string(name) + ": stale handle");
}

CUgraph make_graph() {
    auto* graph = new CUgraph_st;
    std::lock_guard lock(state().state_mutex);
    state().graphs.insert(graph);
    return graph;
}

bool known(CUgraph graph) {
    std::lock_guard lock(state().state_mutex);
    return state().graphs.count(graph) != 0;
}

bool known(CUgraphExec exec) {
    std::lock_guard lock(state().state_mutex);
    return state().execs.count(exec) != 0;
}

CUresult instantiate(CUgraphExec* out, CUgraph graph) {
    if (!known(graph)) return stale("cuGraphInstantiate");
    auto works = std::make_shared<std::vector<Work>>();
    auto exec = std::make_unique<CUgraphExec_st>();
    for (const auto& node : graph->nodes) {
        works->push_back(node->work);
        exec->sources.push_back(node.get());
    }
    exec->works = std::move(works);
    std::lock_guard lock(state().state_mutex);
    state().execs.insert(exec.get());
    *out = exec.release();
    return CUDA_SUCCESS;
}

CUresult work_from(const CUDA_KERNEL_NODE_PARAMS& params, Work& work) {
    const uint32_t grid[3] = {params.gridDimX, params.gridDimY, params.gridDimZ};
    const uint32_t block[3] = {params.blockDimX, params.blockDimY, params.blockDimZ};
    KernelWork kernel;
    const CUresult code = make_kernel_work(params.func, grid, block, params.sharedMemBytes,
                                           params.kernelParams, params.extra, kernel);
    if (code == CUDA_SUCCESS) work.what = std::move(kernel);
    return code;
}

CUresult add(CUgraphNode* out, CUgraph graph, Work work) {
    if (!known(graph)) return stale("cuGraphAdd...Node");
    graph->nodes.push_back(std::make_unique<CUgraphNode_st>(CUgraphNode_st{std::move(work)}));
    *out = graph->nodes.back().get();
    return CUDA_SUCCESS;
}

// Replace one work of an instantiated graph; running launches keep the list that they started with.
CUresult replace(CUgraphExec exec, CUgraphNode node, Work work) {
    const auto found = std::find(exec->sources.begin(), exec->sources.end(), node);
    if (found == exec->sources.end())
        return fault(CUDA_ERROR_INVALID_VALUE, "the node is not of this executable graph");
    auto works = std::make_shared<std::vector<Work>>(*exec->works);
    (*works)[static_cast<size_t>(found - exec->sources.begin())] = std::move(work);
    exec->works = std::move(works);
    return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

CUresult cuStreamBeginCapture(CUstream handle, CUstreamCaptureMode mode) {
    VCUDA_ENTER(cuStreamBeginCapture, kContext);
    CUstream stream = resolve(handle);
    if (stream == nullptr) return stale("cuStreamBeginCapture");
    if (stream == &state().null_stream)
        return fault(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "the default stream cannot be captured");
    if (stream->capture) return fault(CUDA_ERROR_ILLEGAL_STATE, "the stream is being captured already");
    auto capture = std::make_shared<Capture>();
    capture->graph = make_graph();
    capture->origin = stream;
    capture->mode = mode;
    std::lock_guard lock(state().state_mutex);
    // In relaxed mode allocation and the like stay allowed.
    if (mode != CU_STREAM_CAPTURE_MODE_RELAXED) ++state().global_captures;
    stream->capture = std::move(capture);
    return CUDA_SUCCESS;
}

CUresult cuStreamEndCapture(CUstream handle, CUgraph* graph) {
    VCUDA_ENTER(cuStreamEndCapture, kContext);
    CUstream stream = resolve(handle);
    *graph = nullptr;
    if (stream == nullptr) return stale("cuStreamEndCapture");
    if (!stream->capture) return fault(CUDA_ERROR_ILLEGAL_STATE, "cuStreamEndCapture without a capture");
    const std::shared_ptr<Capture> capture = stream->capture;
    if (capture->origin != stream)
        return fault(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "capture was begun in another stream");
    {
        std::lock_guard lock(state().state_mutex);
        for (CUstream other : state().streams)
            if (other->capture == capture) other->capture.reset();
        state().per_thread_stream.capture.reset();
        if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED) --state().global_captures;
    }
    if (capture->invalid)
        return fault(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "an earlier call spoiled the capture");
    if (!capture->unjoined.empty())
        return fault(CUDA_ERROR_STREAM_CAPTURE_UNJOINED,
                     "a forked stream has work that the origin does not wait for");
    *graph = capture->graph;
    return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus* status) {
    VCUDA_ENTER(cuStreamIsCapturing, kContext);
    CUstream stream = resolve(handle);
    if (stream == nullptr) return stale("cuStreamIsCapturing");
    *status = !stream->capture           ? CU_STREAM_CAPTURE_STATUS_NONE
              : stream->capture->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                         : CU_STREAM_CAPTURE_STATUS_ACTIVE;
    return CUDA_SUCCESS;
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
    VCUDA_ENTER(cuThreadExchangeStreamCaptureMode, kContext);
    thread_local CUstreamCaptureMode t_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    std::swap(*mode, t_mode);
    return CUDA_SUCCESS;
}

CUresult cuGraphCreate(CUgraph* graph, unsigned int) {
    VCUDA_ENTER(cuGraphCreate, kContext);
    *graph = make_graph();
    return CUDA_SUCCESS;
}

CUresult cuGraphDestroy(CUgraph graph) {
    VCUDA_ENTER(cuGraphDestroy, kContext);
    std::lock_guard lock(state().state_mutex);
    if (state().graphs.erase(graph) == 0) return CUDA_ERROR_INVALID_HANDLE;
    delete graph;
    return CUDA_SUCCESS;
}

CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode* nodes, size_t* count) {
    VCUDA_ENTER(cuGraphGetNodes, kContext);
    if (!known(graph)) return stale("cuGraphGetNodes");
    if (nodes != nullptr)
        for (size_t i = 0; i < std::min(*count, graph->nodes.size()); ++i) nodes[i] = graph->nodes[i].get();
    *count = graph->nodes.size();
    return CUDA_SUCCESS;
}

CUresult cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType* type) {
    VCUDA_ENTER(cuGraphNodeGetType, kContext);
    *type = std::holds_alternative<KernelWork>(node->work.what) ? CU_GRAPH_NODE_TYPE_KERNEL
            : std::holds_alternative<CopyWork>(node->work.what) ? CU_GRAPH_NODE_TYPE_MEMCPY
            : std::holds_alternative<SetWork>(node->work.what)  ? CU_GRAPH_NODE_TYPE_MEMSET
            : std::holds_alternative<HostWork>(node->work.what) ? CU_GRAPH_NODE_TYPE_HOST
                                                                : CU_GRAPH_NODE_TYPE_EMPTY;
    return CUDA_SUCCESS;
}

CUresult cuGraphAddKernelNode(CUgraphNode* node, CUgraph graph, const CUgraphNode*, size_t,
                              const CUDA_KERNEL_NODE_PARAMS* params) {
    VCUDA_ENTER(cuGraphAddKernelNode, kContext);
    Work work;
    if (CUresult code = work_from(*params, work); code != CUDA_SUCCESS) return code;
    return add(node, graph, std::move(work));
}

CUresult cuGraphAddEmptyNode(CUgraphNode* node, CUgraph graph, const CUgraphNode*, size_t) {
    VCUDA_ENTER(cuGraphAddEmptyNode, kContext);
    return add(node, graph, {});
}

CUresult cuGraphInstantiate(CUgraphExec* exec, CUgraph graph, unsigned long long) {
    VCUDA_ENTER(cuGraphInstantiate, kContext);
    return instantiate(exec, graph);
}

CUresult cuGraphInstantiateWithParams(CUgraphExec* exec, CUgraph graph,
                                      CUDA_GRAPH_INSTANTIATE_PARAMS* params) {
    VCUDA_ENTER(cuGraphInstantiateWithParams, kContext);
    params->result_out = CUDA_GRAPH_INSTANTIATE_SUCCESS;
    return instantiate(exec, graph);
}

CUresult cuGraphExecDestroy(CUgraphExec exec) {
    VCUDA_ENTER(cuGraphExecDestroy, kContext);
    std::lock_guard lock(state().state_mutex);
    if (state().execs.erase(exec) == 0) return CUDA_ERROR_INVALID_HANDLE;
    delete exec;
    return CUDA_SUCCESS;
}

CUresult cuGraphUpload(CUgraphExec exec, CUstream) {
    VCUDA_ENTER(cuGraphUpload, kContext);
    return known(exec) ? CUDA_SUCCESS : stale("cuGraphUpload");
}

CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream) {
    VCUDA_ENTER(cuGraphLaunch, kContext);
    if (!known(exec)) return stale("cuGraphLaunch");
    return enqueue(stream, {GraphWork{exec->works}});
}

CUresult cuGraphExecKernelNodeSetParams(CUgraphExec exec, CUgraphNode node,
                                        const CUDA_KERNEL_NODE_PARAMS* params) {
    VCUDA_ENTER(cuGraphExecKernelNodeSetParams, kContext);
    if (!known(exec)) return stale("cuGraphExecKernelNodeSetParams");
    Work work;
    if (CUresult code = work_from(*params, work); code != CUDA_SUCCESS) return code;
    return replace(exec, node, std::move(work));
}

CUresult cuGraphExecUpdate(CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo* info) {
    VCUDA_ENTER(cuGraphExecUpdate, kContext);
    if (!known(exec) || !known(graph)) return stale("cuGraphExecUpdate");
    info->result = CU_GRAPH_EXEC_UPDATE_SUCCESS;
    info->errorNode = nullptr;
    info->errorFromNode = nullptr;
    auto works = std::make_shared<std::vector<Work>>();
    for (const auto& node : graph->nodes) works->push_back(node->work);
    bool same = works->size() == exec->works->size();
    for (size_t i = 0; same && i < works->size(); ++i)
        same = (*works)[i].what.index() == (*exec->works)[i].what.index();
    if (!same) {
        info->result = CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
        return fault(CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE, "the new graph has other nodes");
    }
    exec->works = std::move(works);
    return CUDA_SUCCESS;
}

}  // extern "C"
