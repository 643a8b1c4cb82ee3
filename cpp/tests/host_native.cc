// Plugins' kernels for the CPU: loaded from bytes, given every operand, and held responsible for failures.
#include <fstream>
#include <iterator>

#include "host_support.h"

namespace castiron::test {
namespace {

std::string library() {
    std::ifstream file(CASTIRON_TEST_PLUGIN, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

// x [T, 6] -> its columns 2 to 5, times w -> logits.
struct Model {
    explicit Model(const std::string& function, std::string image = library()) : g(8) {
        Random random(3);
        rows = random.floats(8 * 6);
        const int x = g.input(rows, 6);
        const int y = g.value({kT, Dim{4}});
        g.step("native", {g.view(x, 2, 4)}, {g.plain({2, 3, 4, 5}, {4})}, {y});
        g.program().steps.back().launches.push_back({0, {GridDim{}}, {}, {}});
        Kernel kernel;
        kernel.name = "demo";
        kernel.function = function;
        kernel.image = std::move(image);
        g.program().kernels.push_back(kernel);
        g.output(y);
    }

    [[nodiscard]] std::string failure() {
        try {
            (void)forward(*g.device(), {Run{0, 0, 8, {}}});
        } catch (const std::exception& error) {
            return error.what();
        }
        return "none";
    }

    Graph g;
    Floats rows;
};

TEST_CASE("a plugin kernel gets views, weights and its share of the work") {
    for (const int threads : {1, 3}) {
        Model m("scale_columns");
        const Floats y = forward(*m.g.device(main_isa(), threads), {Run{0, 0, 8, {}}});
        REQUIRE(y.size() == 8 * 4);
        for (size_t row = 0; row < 8; ++row) {
            for (size_t c = 0; c < 4; ++c) {
                CHECK(y[row * 4 + c] == m.rows[row * 6 + 2 + c] * static_cast<float>(c + 2));
            }
        }
    }
}

TEST_CASE("a plugin kernel that reports or throws fails the step with its words") {
    CHECK(Model("complains").failure() == "the plugin is not in the mood");
    CHECK(Model("throws").failure() == "a plugin kernel threw: nine lives are over");
}

TEST_CASE("a plugin library that cannot be used is refused when the engine is loaded") {
    CHECK(Model("missing").failure().find("has no function 'missing'") != std::string::npos);
    CHECK(Model("scale_columns", "not ELF").failure().find("cannot be loaded") != std::string::npos);
    Model m("scale_columns");
    m.g.program().kernels.clear();
    CHECK(m.failure().find("names a kernel that the program lacks") != std::string::npos);
}

}  // namespace
}  // namespace castiron::test
