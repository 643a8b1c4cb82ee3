#include "device/host/lora.h"

#include <algorithm>
#include <set>
#include <string_view>
#include <utility>

#include "device/adapter_check.h"

namespace castiron::host {
namespace {

constexpr int64_t kLanes = 16;

int64_t panels_of(int64_t columns) {
    return (columns + kLanes - 1) / kLanes;
}

// One product: its sizes, and the pairs of an adapter that belong to it.
class Product {
public:
    Product(const Program& program, const Step& step, const LoraModules& modules) : step_(step) {
        gated_ = is_gated(step);
        inputs_ = adapter_inputs(program, step);
        outputs_ = program.values[static_cast<size_t>(step.outputs[0])].shape.back().value;
        for (const ModuleColumns& columns : step.modules) {
            const auto found = modules.find(columns.module);
            if (found == modules.end()) continue;
            const LoraPair& pair = found->second;
            if (first_rank_.emplace(&pair, ranks_).second) ranks_ += pair.rank;
        }
    }

    [[nodiscard]] int64_t ranks() const { return ranks_; }
    [[nodiscard]] int64_t a_floats() const { return panels_of(ranks_) * inputs_ * kLanes; }

    // panel16 [ceil(ranks / 16)][inputs][16]
    void pack_a(float* to) const {
        for (const auto& [pair, first] : first_rank_) {
            for (int64_t r = 0; r < pair->rank; ++r) {
                const int64_t column = first + r;
                float* lane = to + column / kLanes * inputs_ * kLanes + column % kLanes;
                const float* row = pair->a.data() + r * inputs_;
                for (int64_t i = 0; i < inputs_; ++i) lane[i * kLanes] = row[i];
            }
        }
    }

    // The ranks that each panel needs, without memory for their b yet.
    [[nodiscard]] std::vector<LoraPanel> panels(const LoraModules& modules) const {
        std::vector<LoraPanel> panels(static_cast<size_t>(panels_of(outputs_) * (gated_ ? 2 : 1)));
        for_each_column(modules, [&](const LoraPair& pair, int64_t, int64_t panel, int64_t) {
            LoraPanel& one = panels[static_cast<size_t>(panel)];
            const int64_t first = first_rank_.at(&pair), last = first + pair.rank;
            const int64_t begin = one.count > 0 ? std::min<int64_t>(one.first, first) : first;
            const int64_t end = one.count > 0 ? std::max<int64_t>(one.first + one.count, last) : last;
            one.first = static_cast<int32_t>(begin);
            one.count = static_cast<int32_t>(end - begin);
        });
        return panels;
    }

    // b of each panel, which has memory by now, zero where a column has nothing to do with a rank.
    void pack_b(const LoraModules& modules, const std::vector<LoraPanel>& panels,
                const std::vector<float*>& memory) const {
        for_each_column(modules, [&](const LoraPair& pair, int64_t row, int64_t panel, int64_t lane) {
            const int64_t skipped = first_rank_.at(&pair) - panels[static_cast<size_t>(panel)].first;
            float* to = memory[static_cast<size_t>(panel)] + skipped * kLanes + lane;
            const float* from = pair.b.data() + row * pair.rank;
            for (int64_t r = 0; r < pair.rank; ++r) to[r * kLanes] = from[r] * pair.scale;
        });
    }

private:
    // f(pair, output of its module, panel, lane) for every column that an adapter adds to.
    template <typename F>
    void for_each_column(const LoraModules& modules, F f) const {
        for (const ModuleColumns& columns : step_.modules) {
            const auto found = modules.find(columns.module);
            if (found == modules.end()) continue;
            for (int64_t i = 0; i < columns.count; ++i) {
                const int64_t column = columns.column + i, place = column % outputs_;
                const int64_t panel = gated_ ? place / kLanes * 2 + column / outputs_ : place / kLanes;
                f(found->second, columns.row + i, panel, place % kLanes);
            }
        }
    }

    const Step& step_;  // the program's
    bool gated_ = false;
    int64_t inputs_ = 0, outputs_ = 0, ranks_ = 0;
    std::map<const LoraPair*, int64_t> first_rank_;
};

}  // namespace

bool is_gated(const Step& step) {
    return step.kernel.find("gated") != std::string::npos;
}

int64_t lora_columns(const Step& step, int max_rank) {
    std::set<std::string_view> modules;
    for (const ModuleColumns& columns : step.modules) modules.insert(columns.module);
    return panels_of(static_cast<int64_t>(modules.size()) * max_rank) * kLanes;
}

HostAdapter::HostAdapter(const Program& program, const LoraModules& modules, int max_rank, bool huge_pages)
    : program_(&program), steps_(program.steps.size()), panels_(program.steps.size()) {
    check_adapter(program, modules, max_rank);
    std::vector<std::pair<size_t, Product>> products;
    int64_t floats = 0;
    for (size_t i = 0; i < program.steps.size(); ++i) {
        if (program.steps[i].modules.empty()) continue;
        const Product product(program, program.steps[i], modules);
        if (product.ranks() == 0) continue;
        panels_[i] = product.panels(modules);
        floats += product.a_floats();
        for (const LoraPanel& panel : panels_[i]) floats += panel.count * kLanes;
        products.emplace_back(i, product);
    }
    memory_ = HugeBuffer(static_cast<size_t>(floats) * sizeof(float), huge_pages);
    auto* next = reinterpret_cast<float*>(memory_.data());
    for (const auto& [step, product] : products) {
        product.pack_a(next);
        steps_[step] = {next, panels_of(product.ranks()), panels_[step].data()};
        next += product.a_floats();
        std::vector<float*> memory;
        for (LoraPanel& panel : panels_[step]) {
            panel.b = next;
            memory.push_back(next);
            next += panel.count * kLanes;
        }
        product.pack_b(modules, panels_[step], memory);
    }
}

}  // namespace castiron::host
