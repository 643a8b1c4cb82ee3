#include "bindings/options_from_dict.h"

#include <initializer_list>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>

#include "bindings/python_value.h"

namespace castiron::bindings {
namespace {

// One of a few names; `now` when the field is absent.
template <typename T>
T choice(Fields& fields, const char* key, T now, std::initializer_list<std::pair<const char*, T>> names) {
    const nb::object value = fields.optional(key);
    if (!value.is_valid() || value.is_none()) return now;
    const std::string found = as_string(value, fields.path(key));
    std::string expected;
    for (const auto& [name, meaning] : names) {
        if (found == name) return meaning;
        expected += (expected.empty() ? "\"" : " or \"") + std::string(name) + "\"";
    }
    bad_value(fields.path(key), value, expected);
}

}  // namespace

Options options_from_dict(nb::handle dict) {
    Fields fields(dict, "options");
    Options options;
    const auto given = [&](const char* key, auto read) {
        const nb::object value = fields.optional(key);
        if (value.is_valid() && !value.is_none()) read(value, fields.path(key));
    };
    // Of whatever integer type `to` is, up to `max`.
    const auto whole = [&](const char* key, int64_t min, int64_t max, auto& to) {
        given(key, [&](const nb::object& value, const std::string& path) {
            to = static_cast<std::remove_reference_t<decltype(to)>>(as_integer(value, path, min, max));
        });
    };
    const auto integer = [&](const char* key, int min, int& to) {
        whole(key, min, std::numeric_limits<int32_t>::max(), to);
    };
    const auto boolean = [&](const char* key, bool& to) {
        given(key, [&](const nb::object& value, const std::string& path) { to = as_bool(value, path); });
    };
    const auto number = [&](const char* key, double& to) {
        given(key, [&](const nb::object& value, const std::string& path) {
            if (!PyFloat_Check(value.ptr())) bad_value(path, value, "a float");
            to = PyFloat_AS_DOUBLE(value.ptr());
        });
    };
    constexpr int64_t kAnything = std::numeric_limits<int64_t>::max();
    integer("num_threads", 0, options.host.num_threads);
    integer("kv_cache_blocks", 0, options.engine.kv_cache_blocks);
    integer("max_batch_size", 0, options.engine.max_batch_size);
    integer("max_num_tokens", 0, options.engine.max_num_tokens);
    integer("max_queue_size", 1, options.engine.max_queue_size);
    whole("max_queued_tokens", 0, kAnything, options.engine.max_queued_tokens);
    boolean("prefix_caching", options.engine.prefix_caching);
    whole("kv_cache_bytes", 0, kAnything, options.engine.kv_cache_bytes);
    whole("host_tier_bytes", 0, kAnything, options.engine.host_tier_bytes);
    whole("disk_tier_bytes", 0, kAnything, options.engine.disk_tier_bytes);
    given("disk_tier_folder", [&](const nb::object& value, const std::string& path) {
        options.engine.disk_tier_folder = as_string(value, path);
    });
    options.engine.scheduling =
        choice(fields, "scheduling_policy", options.engine.scheduling,
               {{"fcfs", SchedulingPolicy::kFcfs}, {"priority", SchedulingPolicy::kPriority}});
    options.engine.capacity = choice(fields, "capacity_scheduler_policy", options.engine.capacity,
                                     {{"guaranteed_no_evict", CapacityPolicy::kGuaranteedNoEvict},
                                      {"max_utilization", CapacityPolicy::kMaxUtilization}});
    options.lookup = choice<std::optional<LookupMethod>>(
        fields, "speculative_decoding", std::nullopt,
        {{"none", std::nullopt}, {"ngram", LookupMethod::kNgram}, {"suffix", LookupMethod::kSuffix}});
    integer("num_speculative_tokens", 1, options.num_speculative_tokens);
    integer("vocab_limit", 0, options.engine.vocab_limit);
    integer("device_index", 0, options.cuda.device_index);
    options.cuda.max_batch_size = options.engine.max_batch_size;
    options.cuda.vocab_limit = options.engine.vocab_limit;
    boolean("cuda_graphs", options.cuda.graphs);
    number("kv_cache_fraction", options.cuda.kv_cache_fraction);
    number("watchdog_timeout", options.engine.watchdog_seconds);
    integer("max_loras", 0, options.engine.max_loras);
    integer("max_lora_rank", 0, options.host.max_lora_rank);
    options.cuda.max_loras = options.engine.max_loras;
    options.cuda.max_lora_rank = options.host.max_lora_rank;
    boolean("huge_pages", options.host.huge_pages);
    given("isa", [&](const nb::object& value, const std::string& path) {
        options.host.isa = as_string(value, path);
    });
    if (const nb::object value = fields.optional("kernel_images"); value.is_valid()) {
        options.kernel_images = value;
    }
    fields.finish({"num_threads",
                   "kv_cache_blocks",
                   "kv_cache_bytes",
                   "max_batch_size",
                   "max_num_tokens",
                   "max_queue_size",
                   "max_queued_tokens",
                   "prefix_caching",
                   "host_tier_bytes",
                   "disk_tier_bytes",
                   "disk_tier_folder",
                   "watchdog_timeout",
                   "scheduling_policy",
                   "capacity_scheduler_policy",
                   "speculative_decoding",
                   "num_speculative_tokens",
                   "vocab_limit",
                   "huge_pages",
                   "isa",
                   "kernel_images",
                   "device_index",
                   "cuda_graphs",
                   "kv_cache_fraction",
                   "max_loras",
                   "max_lora_rank"});
    return options;
}

}  // namespace castiron::bindings
