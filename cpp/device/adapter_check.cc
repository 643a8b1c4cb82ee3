#include "device/adapter_check.h"

#include <set>
#include <stdexcept>
#include <string>
#include <string_view>

namespace castiron {
namespace {

[[noreturn]] void refuse(const std::string& module, const std::string& what) {
    throw std::invalid_argument("module \"" + module + "\": " + what);
}

void check_pair(const std::string& module, const LoraPair& pair, int max_rank) {
    if (pair.rank < 1 || pair.rank > max_rank) {
        refuse(module,
               "its rank is " + std::to_string(pair.rank) + "; max_lora_rank is " + std::to_string(max_rank));
    }
    if (pair.a.size() != static_cast<size_t>(pair.rank * pair.inputs) ||
        pair.b.size() != static_cast<size_t>(pair.outputs * pair.rank)) {
        refuse(module, "its matrices do not have the sizes that they claim");
    }
}

void check_columns(const ModuleColumns& columns, const LoraPair& pair, int64_t inputs) {
    if (pair.inputs != inputs) {
        refuse(columns.module, "the adapter has " + std::to_string(pair.inputs) +
                                   " inputs, the engine's module " + std::to_string(inputs));
    }
    if (columns.row + columns.count > pair.outputs) {
        refuse(columns.module, "the adapter has " + std::to_string(pair.outputs) +
                                   " outputs, the engine's module " +
                                   std::to_string(columns.row + columns.count) + " or more");
    }
}

}  // namespace

int64_t adapter_inputs(const Program& program, const Step& step) {
    if (step.adapter.has_value()) return step.adapter->inputs;
    return program.values[static_cast<size_t>(step.inputs[0])].shape.back().value;
}

void check_adapter(const Program& program, const LoraModules& modules, int max_rank) {
    std::set<std::string_view> known;
    for (const Step& step : program.steps) {
        for (const ModuleColumns& columns : step.modules) known.insert(columns.module);
    }
    for (const auto& [module, pair] : modules) {
        if (!known.contains(module)) refuse(module, "the engine has no such module that takes an adapter");
        check_pair(module, pair, max_rank);
    }
    for (const Step& step : program.steps) {
        for (const ModuleColumns& columns : step.modules) {
            const auto found = modules.find(columns.module);
            if (found != modules.end()) check_columns(columns, found->second, adapter_inputs(program, step));
        }
    }
}

}  // namespace castiron
