#include "batching/stall_report.h"

#include <algorithm>
#include <cstdio>

namespace castiron {
namespace {

constexpr size_t kMostRequests = 64;  // that are described one by one

template <typename... Args>
void line(std::string& text, const char* format, Args... args) {
    char buffer[256];
    std::snprintf(buffer, sizeof(buffer), format, args...);
    text += buffer;
    text += '\n';
}

}  // namespace

std::string describe_stall(int64_t step, double seconds, const StepPlan& plan, const Scheduler& scheduler,
                           const BlockPool& pool, std::span<const StepRecord> before) {
    std::string text;
    line(text, "castiron: step %lld has been on the device for %.1f s", static_cast<long long>(step),
         seconds);
    line(text, "  step: %d decodes, %d drafts, %d prefill tokens, %d rows of logits, %zu block copies",
         plan.num_decodes, plan.num_drafts, plan.num_prefill_tokens(), plan.num_logit_rows,
         plan.moves.size());
    line(text, "  KV blocks: %d used, %d cached, %d free, %d promised", pool.used(), pool.cached(),
         pool.free(), pool.promised());
    if (const WindowPool* windows = pool.windows()) {
        line(text, "  window blocks: %d used, %d cached, %d free, %d promised", windows->used(),
             windows->cached(), windows->free(), windows->promised());
    }
    line(text, "  waiting: %d requests, %lld tokens", scheduler.waiting().size(),
         static_cast<long long>(scheduler.waiting().num_tokens()));
    const auto running = scheduler.running();
    line(text, "  running: %zu requests", running.size());
    for (const Request* request : running.first(std::min(running.size(), kMostRequests))) {
        const auto chunk = std::find_if(plan.chunks.begin(), plan.chunks.end(),
                                        [&](const ScheduledChunk& c) { return c.request == request; });
        line(text, "    request %lld: %d prompt tokens, %d generated, %d in the KV cache, %d in this step",
             static_cast<long long>(request->id), request->prompt_tokens, request->num_output(),
             request->num_computed, chunk == plan.chunks.end() ? 0 : chunk->num_tokens);
    }
    for (const StepRecord& record : before) {
        line(text, "  step %lld: %d decodes, %d prefill tokens, %.6f s on the device",
             static_cast<long long>(record.step), record.decode_tokens, record.prefill_tokens,
             record.forward);
    }
    return text;
}

}  // namespace castiron
