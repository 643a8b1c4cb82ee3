// The state of the stand-in driver: one process-wide device with streams, modules and memory.
//
// Two locks. `state_mutex` guards the tables and is held for moments only. `run_mutex` is held by the thread
// that executes queued work, which may call back into Python: a call that merely reads a table must never
// wait for it.
#pragma once

#include <cuda.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "image.h"
#include "memory.h"
#include "work.h"

// The driver's opaque handle types are ours to define, so that no cast is needed anywhere.
struct CUctx_st {
    int device = 0;
};

struct CUmod_st {
    vcuda::Image image;
    std::map<std::string, std::unique_ptr<CUfunc_st>> functions;
};

struct CUfunc_st {
    CUmod_st* module = nullptr;
    vcuda::KernelInfo info;
    int max_dynamic_shared = 0;  // what cuFuncSetAttribute has opted in to
};

// A capture in progress: nodes of every stream that takes part go to one graph in the order of their calls,
// which is a valid order because a dependency is always captured before its dependent.
struct Capture {
    CUgraph graph = nullptr;
    CUstream origin = nullptr;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    bool invalid = false;
    std::set<CUstream> unjoined;  // forked streams with work that the origin has not waited for
};

struct CUstream_st {
    unsigned flags = 0;
    int priority = 0;
    std::deque<vcuda::Work> queue;
    uint64_t enqueued = 0;  // works ever put in
    uint64_t finished = 0;  // works done
    std::shared_ptr<Capture> capture;
};

struct CUevent_st {
    unsigned flags = 0;
    CUstream stream = nullptr;  // null: never recorded
    uint64_t position = 0;      // the event is reached when stream->finished >= position
    double seconds = 0;         // when the record was executed
    std::shared_ptr<Capture> capture;
};

struct CUgraphNode_st {
    vcuda::Work work;
};

struct CUgraph_st {
    std::vector<std::unique_ptr<CUgraphNode_st>> nodes;
};

struct CUgraphExec_st {
    std::vector<CUgraphNode> sources;  // the node that each work was instantiated from
    std::shared_ptr<const std::vector<vcuda::Work>> works;
};

namespace vcuda {

struct Config {
    int devices = 1;
    int driver_version = 13000;
    int compute_capability = 90;
    int multiprocessors = 132;
    uint64_t memory = 1ull << 30;
    int shared_optin = 227 << 10;
    int integrated = 0;
};

// What a callback that executes kernels gets. Field order is the ABI of tests/virtual_cuda/virtual_driver.py.
struct LaunchRecord {
    const char* function;
    uint64_t image_hash;
    uint32_t grid[3];
    uint32_t block[3];
    uint32_t shared_bytes;
    uint32_t param_count;
    const uint32_t* param_offsets;
    const uint32_t* param_sizes;
    const uint8_t* params;
};
using Executor = int (*)(const LaunchRecord*);

struct Injection {
    uint64_t at_call = 0;  // counted from when it was set; 1: the next one
    CUresult code = CUDA_SUCCESS;
};

struct State {
    std::mutex state_mutex;
    std::recursive_mutex run_mutex;

    Config config;
    Memory memory;
    Executor executor = nullptr;

    bool initialized = false;
    CUctx_st primary;
    int primary_references = 0;
    CUresult sticky = CUDA_SUCCESS;

    std::set<CUmodule> modules;
    std::set<CUfunction> functions;
    std::set<CUstream> streams;
    std::set<CUevent> events;
    std::set<CUgraph> graphs;
    std::set<CUgraphExec> execs;
    CUstream_st null_stream;
    CUstream_st per_thread_stream;
    int global_captures = 0;

    std::map<std::string, uint64_t> counters;
    std::map<std::string, Injection> injections;
    std::vector<std::string> faults;
};

State& state();

// Every entry point starts with this: counts the call, applies injected failures, refuses calls before
// cuInit, without a current context, or after a sticky error.
enum class Needs { kNothing, kInit, kContext };
CUresult enter(const char* name, Needs needs);

// Note why a call was refused; tests read it. Returns `code`.
CUresult fault(CUresult code, const std::string& text);
// The same, and the context is lost: every later call returns `code`, as after an illegal address.
CUresult lose(CUresult code, const std::string& text);
void count(const std::string& name, uint64_t amount = 1);

CUcontext current_context();
std::string error_name(CUresult code);

template <class... A>
std::string format(const char* pattern, A... args) {
    char text[512];
    std::snprintf(text, sizeof text, pattern, args...);
    return text;
}

}  // namespace vcuda

#define VCUDA_ENTER(name, needs)                                                                \
    if (CUresult entered_ = vcuda::enter(#name, vcuda::Needs::needs); entered_ != CUDA_SUCCESS) \
    return entered_
