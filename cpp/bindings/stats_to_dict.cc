#include "bindings/stats_to_dict.h"

#include <nanobind/stl/string.h>

namespace castiron::bindings {
namespace {

namespace nb = nanobind;

const char* name_of(Blocked blocked) {
    switch (blocked) {
        case Blocked::kNothing:
            return "";
        case Blocked::kBatchSize:
            return "batch_size";
        case Blocked::kKvBlocks:
            return "kv_blocks";
        case Blocked::kNumTokens:
            return "num_tokens";
        case Blocked::kAdapters:
            return "adapters";
    }
    return "";
}

nb::dict record_to_dict(const StepRecord& record) {
    nb::dict dict;
    dict["step"] = record.step;
    dict["start_s"] = record.start;
    dict["prefill_tokens"] = record.prefill_tokens;
    dict["decode_tokens"] = record.decode_tokens;
    dict["draft_tokens"] = record.draft_tokens;
    dict["accepted_tokens"] = record.accepted_tokens;
    dict["logit_rows"] = record.logit_rows;
    dict["queried_tokens"] = record.queried_tokens;
    dict["cached_tokens"] = record.cached_tokens;
    dict["recomputed_tokens"] = record.recomputed_tokens;
    dict["preemptions"] = record.preemptions;
    dict["running"] = record.running;
    dict["waiting"] = record.waiting;
    dict["finished"] = record.finished;
    dict["kv_blocks_used"] = record.kv_blocks_used;
    dict["kv_blocks_cached"] = record.kv_blocks_cached;
    dict["graph"] = record.graph;
    dict["device_sampled"] = record.device_sampled;
    dict["ahead"] = record.ahead;
    dict["intake_s"] = record.intake;
    dict["schedule_s"] = record.schedule;
    dict["draft_s"] = record.draft;
    dict["queued_s"] = record.queued;
    dict["forward_s"] = record.forward;
    dict["sample_s"] = record.sample;
    return dict;
}

nb::dict facts_to_dict(const CudaFacts& facts) {
    nb::dict dict;
    dict["name"] = facts.name;
    dict["compute_capability"] = facts.compute_capability;
    dict["input_bytes"] = facts.input_bytes;
    dict["result_bytes"] = facts.result_bytes;
    dict["graphs"] = facts.graphs;
    dict["largest_graph"] = facts.largest_graph;
    dict["graph_bytes"] = facts.graph_bytes;
    dict["graph_seconds"] = facts.graph_seconds;
    dict["lora_bytes"] = facts.lora_bytes;
    return dict;
}

}  // namespace

nb::dict stats_to_dict(const EngineStats& stats, const SchedulerLimits& limits, const PoolSize& pool,
                       const StaticStats& fixed) {
    nb::dict dict;
    dict["running"] = stats.running;
    dict["waiting"] = stats.waiting;
    dict["waiting_tokens"] = stats.waiting_tokens;
    dict["waiting_for"] = name_of(stats.blocked);
    dict["kv_blocks_total"] = stats.kv_blocks_total;
    dict["kv_blocks_used"] = stats.kv_blocks_used;
    dict["kv_blocks_cached"] = stats.kv_blocks_cached;
    dict["kv_blocks_free"] = stats.kv_blocks_free;
    dict["kv_blocks_promised"] = stats.kv_blocks_promised;
    dict["kv_blocks_evicted"] = stats.kv_blocks_evicted;
    dict["kv_window_blocks_total"] = stats.window_blocks_total;
    dict["kv_window_blocks_used"] = stats.window_blocks_used;
    dict["kv_window_blocks_cached"] = stats.window_blocks_cached;
    dict["kv_window_blocks_free"] = stats.window_blocks_free;
    dict["kv_window_blocks_promised"] = stats.window_blocks_promised;
    dict["kv_window_blocks_evicted"] = stats.window_blocks_evicted;
    dict["kv_host_blocks_total"] = stats.host_blocks_total;
    dict["kv_host_blocks"] = stats.host_blocks;
    dict["kv_host_blocks_saved"] = stats.host_blocks_saved;
    dict["kv_host_blocks_restored"] = stats.host_blocks_loaded;
    dict["kv_host_tokens_restored"] = stats.host_blocks_loaded * kBlockTokens;
    dict["kv_host_window_blocks_total"] = stats.host_window_blocks_total;
    dict["kv_host_window_blocks"] = stats.host_window_blocks;
    dict["kv_host_window_blocks_saved"] = stats.host_window_blocks_saved;
    dict["kv_host_window_blocks_restored"] = stats.host_window_blocks_loaded;
    dict["kv_disk_blocks_total"] = stats.disk_blocks_total;
    dict["kv_disk_blocks"] = stats.disk_blocks;
    dict["kv_disk_blocks_spilled"] = stats.disk_blocks_spilled;
    dict["kv_disk_blocks_fetched"] = stats.disk_blocks_fetched;
    dict["kv_disk_error"] = stats.disk_error;
    PoolSize tiers;
    tiers.blocks = stats.host_blocks_total;
    tiers.window_blocks = stats.host_window_blocks_total;
    dict["kv_host_bytes"] = bytes_of(tiers, fixed.kv_shape);
    dict["kv_integrity_error"] = stats.kv_integrity_error;
    dict["prefix_query_tokens"] = stats.prefix_query_tokens;
    dict["prefix_cached_tokens"] = stats.prefix_cached_tokens;
    dict["preemptions"] = stats.preemptions;
    dict["recomputed_tokens"] = stats.recomputed_tokens;
    dict["kv_blocks_limited_by"] = pool.limited_by;
    dict["steps"] = stats.steps;
    dict["graph_steps"] = stats.graph_steps;
    dict["device_sampled_steps"] = stats.device_sampled_steps;
    dict["ahead_steps"] = stats.ahead_steps;
    dict["prompt_tokens"] = stats.prompt_tokens;
    dict["generated_tokens"] = stats.generated_tokens;
    dict["draft_tokens"] = stats.draft_tokens;
    dict["accepted_tokens"] = stats.accepted_tokens;
    dict["requests_submitted"] = stats.requests_submitted;
    nb::dict finished;
    for (const FinishReason reason :
         {FinishReason::kStop, FinishReason::kLength, FinishReason::kCancelled, FinishReason::kError}) {
        finished[to_string(reason)] = stats.requests_finished[static_cast<size_t>(reason)];
    }
    dict["requests_finished"] = finished;
    dict["device_failures"] = stats.device_failures;
    dict["lora_adapters"] = stats.adapters;
    dict["lora_bytes"] = stats.adapter_bytes;
    dict["dead"] = stats.dead;
    dict["stall_report"] = stats.stall_report;
    dict["last_step"] = record_to_dict(stats.last_step);
    dict["max_batch_size"] = limits.max_batch_size;
    dict["max_num_tokens"] = limits.max_num_tokens;
    dict["max_logit_rows"] = limits.max_logit_rows;
    dict["max_seq_len"] = limits.max_seq_len;
    dict["kv_window"] = limits.kv_window;
    dict["target"] = fixed.target;
    if (fixed.cuda.has_value()) dict["cuda"] = facts_to_dict(*fixed.cuda);
    dict["isa"] = fixed.isa;
    dict["num_threads"] = fixed.num_threads;
    dict["arena_bytes"] = fixed.arena_bytes;
    dict["weights_bytes"] = fixed.weights_bytes;
    dict["kv_bytes"] = fixed.kv_bytes;
    if (!stats.recent_steps.empty()) {
        nb::list records;
        for (const StepRecord& record : stats.recent_steps) records.append(record_to_dict(record));
        dict["recent_steps"] = records;
    }
    return dict;
}

}  // namespace castiron::bindings
