#include <array>

#include "host_support.h"

namespace castiron::test {
namespace {

constexpr int kInputs = 43, kWidth = 40;

// A product of 40 columns (80 when gated) that computes three modules: "q" its first 21 columns, "k" the next
// 9 in the order 8, 7, ... 0, "v" of 12 outputs columns 30 and on, all but its last two outputs.
struct Model {
    Graph graph{200};
    Floats x, w, bias;
    bool gated;

    Model(Random& random, bool gated_product, bool codes) : gated(gated_product) {
        const int columns = gated ? 2 * kWidth : kWidth;
        x = random.floats(200 * kInputs);
        w = random.floats(static_cast<size_t>(columns) * kInputs, 0.1f);
        bias = random.floats(static_cast<size_t>(columns));
        if (codes) {
            for (float& v : w) v = std::round(v * 200) / 256;
        }
        const int y = graph.value({kT, Dim{kWidth}}), in = graph.input(x, kInputs);
        const Floats packed_w = panel_order(w, kInputs), packed_bias = panel_order(bias, 1);
        const auto rows = static_cast<int64_t>(packed_bias.size());
        const int b = graph.plain(packed_bias, {rows});
        Attrs attrs{{"has_bias", true}, {"activation", std::string("silu")}};
        if (codes) {
            std::vector<int> values;
            for (const float v : packed_w) values.push_back(static_cast<int>(v * 256));
            const int q = graph.codes(values, rows, kInputs, DType::kI8);
            const int s = graph.scale_panels(Floats(static_cast<size_t>(rows), 1.0f / 256), rows, 1, false);
            attrs["x_format"] = std::string("float");
            attrs["group"] = int64_t{0};
            graph.step(gated ? "quantized_gated_linear" : "quantized_linear", {in}, {q, s, b}, {y}, attrs);
        } else {
            graph.step(gated ? "gated_linear" : "linear", {in},
                       {graph.panels(packed_w, rows, kInputs, false), b}, {y}, attrs);
        }
        std::vector<ModuleColumns>& modules = graph.program().steps.back().modules;
        modules.push_back({"q", 0, 0, 21});
        for (int i = 0; i < 9; ++i) modules.push_back({"k", 21 + i, 8 - i, 1});
        modules.push_back({"v", 30, 0, 10});
        if (gated) modules.push_back({"up", kWidth, 0, kWidth});
        graph.output(y);
    }

    // Rows [columns, width] as the kernel takes them: gated ones alternate by sixteen, padded with zeros.
    [[nodiscard]] Floats panel_order(const Floats& rows, int width) const {
        if (!gated) return rows;
        Floats out;
        for (int block = 0; block < kWidth; block += 16) {
            for (const int half : {0, kWidth}) {
                for (int i = block; i < block + 16; ++i) {
                    const auto* from = rows.data() + (half + i) * width;
                    for (int j = 0; j < width; ++j) out.push_back(i < kWidth ? from[j] : 0);
                }
            }
        }
        return out;
    }

    [[nodiscard]] std::unique_ptr<Device> device(const std::string& isa, int threads) {
        HostOptions options;
        options.num_threads = threads;
        options.isa = isa;
        options.max_lora_rank = 20;
        return make_host_device(graph.shared(), options);
    }
};

struct Lora {
    int rank;
    float scale;
    std::map<std::string, std::pair<Floats, Floats>> pairs;

    Lora(Random& random, int ranks, float factor, const std::vector<std::string>& names)
        : rank(ranks), scale(factor) {
        for (const std::string& name : names) {
            pairs[name] = {random.floats(static_cast<size_t>(rank) * kInputs),
                           random.floats(static_cast<size_t>(outputs(name) * rank), 0.2f)};
        }
    }

    static int64_t outputs(const std::string& name) {
        return name == "q" ? 21 : name == "k" ? 9 : name == "v" ? 12 : kWidth;
    }
    [[nodiscard]] LoraModules modules() const {
        LoraModules made;
        for (const auto& [name, pair] : pairs)
            made[name] = {pair.first, pair.second, rank, kInputs, outputs(name), scale};
        return made;
    }
    // What it adds to column `column`, in double.
    [[nodiscard]] double delta(const Model& model, int row, int column) const {
        std::string name = "up";
        int output = column - kWidth;
        if (column < 21) {
            name = "q", output = column;
        } else if (column < 30) {
            name = "k", output = 29 - column;
        } else if (column < kWidth) {
            name = "v", output = column - 30;
        }
        const auto found = pairs.find(name);
        if (found == pairs.end()) return 0;
        double sum = 0;
        for (int r = 0; r < rank; ++r) {
            double shrunk = 0;
            for (int i = 0; i < kInputs; ++i) {
                shrunk += double{model.x[static_cast<size_t>(row * kInputs + i)]} *
                          double{found->second.first[static_cast<size_t>(r * kInputs + i)]};
            }
            sum += shrunk * double{found->second.second[static_cast<size_t>(output * rank + r)]};
        }
        return sum * double{scale};
    }
};

double column_of(const Model& model, const Lora* lora, int row, int column) {
    double sum = double{model.bias[static_cast<size_t>(column)]};
    for (int i = 0; i < kInputs; ++i) {
        sum += double{model.x[static_cast<size_t>(row * kInputs + i)]} *
               double{model.w[static_cast<size_t>(column * kInputs + i)]};
    }
    return sum + (lora == nullptr ? 0 : lora->delta(model, row, column));
}

// Rows of one sequence, with their adapter.
struct Part {
    Run run;
    const Adapter* adapter;
};

Floats forward_with(Device& device, const std::vector<Part>& parts) {
    std::vector<int32_t> ids, positions, rows;
    std::vector<SequenceSlice> slices;
    for (const auto& [run, adapter] : parts) {
        slices.push_back({static_cast<int>(ids.size()), run.count, 0, {}, adapter});
        for (int i = 0; i < run.count; ++i) {
            ids.push_back(run.first_id + i);
            positions.push_back(i);
            rows.push_back(static_cast<int32_t>(rows.size()));
        }
    }
    const std::span<const float> logits = device.forward({ids, positions, rows, slices});
    return {logits.begin(), logits.end()};
}

TEST_CASE("adapters add to the columns of their modules, before bias and activation, row by row") {
    for (const std::string& isa : isas()) {
        for (const bool codes : {false, true}) {
            for (const bool gated : {false, true}) {
                CAPTURE(isa);
                CAPTURE(codes);
                CAPTURE(gated);
                Random random(17);
                Model model(random, gated, codes);
                std::vector<std::string> all{"q", "k", "v"};
                if (gated) all.emplace_back("up");
                const std::array<Lora, 3> loras{Lora(random, 5, 0.5f, all), Lora(random, 20, 1.0f, {"k"}),
                                                Lora(random, 1, 2.0f, {"v", gated ? "up" : "q"})};
                const auto device = model.device(isa, 2);
                std::vector<std::shared_ptr<const Adapter>> made;
                std::vector<const Lora*> of_row;
                for (const Lora& lora : loras) made.push_back(device->make_adapter(lora.modules()));
                // Alone, in small groups and in a run of more rows than a tile holds.
                std::vector<Part> parts;
                int row = 0;
                for (const auto& [count, which] :
                     {std::pair{1, 0}, {1, 1}, {7, -1}, {3, 2}, {110, 0}, {20, 1}, {1, -1}, {9, 2}}) {
                    parts.push_back({{row, 0, count, {}}, which < 0 ? nullptr : made[size_t(which)].get()});
                    of_row.insert(of_row.end(), size_t(count), which < 0 ? nullptr : &loras[size_t(which)]);
                    row += count;
                }
                const Floats found = forward_with(*device, parts);
                std::vector<double> expected;
                for (int r = 0; r < row; ++r) {
                    for (int c = 0; c < kWidth; ++c) {
                        const double gate = column_of(model, of_row[size_t(r)], r, c);
                        const double up = gated ? column_of(model, of_row[size_t(r)], r, kWidth + c) : 1;
                        expected.push_back(gate / (1 + std::exp(-gate)) * up);
                    }
                }
                // Sums of up to 43 products and 20 ranks of size one to ten, twice multiplied.
                check_close(found, expected, 1e-4, 1e-4);
                // Each part alone, on another number of threads.
                const auto other = model.device(isa, 1);
                std::vector<std::shared_ptr<const Adapter>> remade;
                for (const Lora& lora : loras) remade.push_back(other->make_adapter(lora.modules()));
                for (const Part& part : parts) {
                    Part alone = part;
                    for (size_t i = 0; i < made.size(); ++i) {
                        if (part.adapter == made[i].get()) alone.adapter = remade[i].get();
                    }
                    const auto* begin = found.data() + part.run.first_id * kWidth;
                    const Floats mine(begin, begin + part.run.count * kWidth);
                    CHECK(same_bits(forward_with(*other, {alone}), mine));
                }
            }
        }
    }
}

TEST_CASE("adapters that do not fit are refused with the module and the reason") {
    Random random(3);
    Model model(random, false, false);
    const auto device = model.device(main_isa(), 1);
    Lora lora(random, 4, 1, {"q"});
    const auto refused = [&](auto change, const char* message) {
        LoraModules modules = lora.modules();
        change(modules);
        CHECK_THROWS_WITH_AS(static_cast<void>(device->make_adapter(modules)), doctest::Contains(message),
                             std::invalid_argument);
    };
    refused([](LoraModules& m) { m["w"] = m["q"]; }, "\"w\": the engine has no such module");
    refused([](LoraModules& m) { m["q"].rank = 21; }, "its rank is 21; max_lora_rank is 20");
    refused([](LoraModules& m) { m["q"].rank = 0; }, "its rank is 0");
    refused([](LoraModules& m) { m["q"].rank = 3; }, "do not have the sizes");
    refused(
        [](LoraModules& m) {
            m["q"].inputs = 22;
            m["q"].rank = 2;
            m["q"].a = m["q"].a.first(44);
            m["q"].b = m["q"].b.first(42);
        },
        "22 inputs, the engine's module 43");
    refused(
        [](LoraModules& m) {
            m["q"].outputs = 20;
            m["q"].b = m["q"].b.first(80);
        },
        "20 outputs, the engine's module 21 or more");

    HostOptions without;
    CHECK_THROWS_WITH_AS(
        static_cast<void>(make_host_device(model.graph.shared(), without)->make_adapter(lora.modules())),
        doctest::Contains("takes no LoRA adapters"), std::invalid_argument);
    const auto foreign = model.device(main_isa(), 1)->make_adapter(lora.modules());
    CHECK_NOTHROW(
        static_cast<void>(forward_with(*device, {{{0, 0, 2, {}}, foreign.get()}})));  // same program
    Model another(random, false, false);
    CHECK_THROWS_WITH_AS(
        static_cast<void>(forward_with(*another.device(main_isa(), 1), {{{0, 0, 2, {}}, foreign.get()}})),
        doctest::Contains("adapter of another device"), std::invalid_argument);
    another.graph.program().steps[1].modules[1].column = 3;
    CHECK_THROWS_WITH_AS(static_cast<void>(another.device(main_isa(), 1)),
                         doctest::Contains("not in the product, or twice"), std::invalid_argument);
}

}  // namespace
}  // namespace castiron::test
