#include "program/sliding_window.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

namespace castiron {
namespace {

int64_t integer(const Step& step, const char* name) {
    const auto found = step.attrs.find(name);
    const auto* value = found == step.attrs.end() ? nullptr : std::get_if<int64_t>(&found->second);
    return value == nullptr ? 0 : *value;
}

// What the queries of an attention step see; 0: everything.
int64_t seen(const Step& step) {
    const int64_t window = integer(step, "window"), chunk = integer(step, "chunk");
    return window > 0 && chunk > 0 ? std::min(window, chunk) : std::max(window, chunk);
}

bool touches_cache(const Step& step) {
    return std::any_of(step.launches.begin(), step.launches.end(), [](const Launch& launch) {
        return std::any_of(launch.args.begin(), launch.args.end(), [](const Arg& arg) {
            return arg.kind == Arg::Kind::kKCache || arg.kind == Arg::Kind::kVCache;
        });
    });
}

bool writes_cache(const Step& step) {
    return step.kernel == "write_kv" || step.kernel == "rope_write_kv";
}

}  // namespace

int sliding_window(const Program& program) {
    std::vector<bool> slides(program.kv_layers.size(), false);
    int64_t longest = 0;
    for (const Step& step : program.steps) {
        if (step.kernel == "paged_attention") {
            const int64_t window = seen(step);
            const auto layer = static_cast<size_t>(integer(step, "layer"));
            if (window <= 0 || layer >= slides.size()) return 0;
            slides[layer] = true;
            longest = std::max(longest, window);
        } else if (touches_cache(step) && !writes_cache(step)) {
            return 0;
        }
    }
    const bool all = std::all_of(slides.begin(), slides.end(), [](bool layer) { return layer; });
    return all && longest < program.limits.max_seq_len ? static_cast<int>(longest) : 0;
}

int layer_window(const Program& program) {
    for (const Step& step : program.steps) {
        const auto layer = static_cast<size_t>(integer(step, "layer"));
        if (step.kernel != "paged_attention" || layer >= program.kv_layers.size()) continue;
        const int window = program.kv_layers[layer].window;
        if (window > 0 && (seen(step) == 0 || seen(step) > window)) {
            throw std::invalid_argument("KV layer " + std::to_string(layer) + " has a window of " +
                                        std::to_string(window) + " tokens, and its attention sees " +
                                        (seen(step) == 0 ? "everything" : std::to_string(seen(step))));
        }
    }
    int longest = 0;
    for (const KvLayer& layer : program.kv_layers) longest = std::max(longest, layer.window);
    return longest;
}

}  // namespace castiron
