// Products with quantized weights against double precision, for every format of weights and activations.
#include <functional>

#include "host_support.h"
#include "small_floats.h"

namespace castiron::test {
namespace {

// What is left of a row after rounding to `format` (graph/fake_quant.py).
std::vector<double> rounded(const Floats& x, const std::string& format, size_t group, float scale) {
    std::vector<double> out(x.begin(), x.end());
    if (format == "float") return out;
    const auto amax = [&](size_t begin, size_t end) {
        float m = 0;
        for (size_t i = begin; i < end; ++i) m = std::max(m, std::abs(x[i]));
        return m;
    };
    if (format == "nvfp4") group = 16;
    if (format.starts_with("mx")) group = 32;
    if (group == 0) group = x.size();
    const float over = scale > 0 ? scale : amax(0, x.size()) / 2688.0f;
    for (size_t begin = 0; begin < x.size(); begin += group) {
        const size_t end = std::min(begin + group, x.size());
        const float largest = amax(begin, end);
        float s = scale;
        if (format == "int8" && scale == 0) s = largest / 127.0f;
        if (format == "fp8" && scale == 0) s = largest / 448.0f;
        if (format == "nvfp4") s = static_cast<float>(to_e4m3(double{largest / 6.0f / over})) * over;
        if (format.starts_with("mx")) {
            s = std::exp2(std::floor(std::log2(largest)) - (format == "mxfp4" ? 2.0f : 8.0f));
        }
        for (size_t i = begin; i < end; ++i) {
            const double ratio = double{x[i] / s};
            double value = 0;
            if (s > 0 && format == "int8") value = std::clamp(std::nearbyint(ratio), -127.0, 127.0);
            if (s > 0 && (format == "fp8" || format == "mxfp8"))
                value = to_e4m3(std::clamp(ratio, -448.0, 448.0));
            if (s > 0 && (format == "nvfp4" || format == "mxfp4"))
                value = to_e2m1(std::clamp(ratio, -6.0, 6.0));
            out[i] = value * double{s};
        }
    }
    return out;
}

double activated(const std::string& name, double x) {
    return name == "silu" ? x / (1 + std::exp(-x)) : x;
}

struct Case {
    DType dtype = DType::kI8;
    int rows = 1, k = 64, n = 32;
    int64_t group = 0;
    std::string x_format = "int8";
    int64_t x_group = 0;
    float x_scale = 0;
    bool half = false, offsets = false, columns = false, bias = false, residual = false, gated = false;
};

std::string text(const Case& c) {
    std::string s = "dtype " + std::to_string(int(c.dtype)) + " rows " + std::to_string(c.rows) + " k " +
                    std::to_string(c.k) + " n " + std::to_string(c.n) + " group " + std::to_string(c.group) +
                    " x " + c.x_format + " " + std::to_string(c.x_group) + " " + std::to_string(c.x_scale);
    for (const auto& [on, name] : {std::pair{c.half, " half"},
                                   {c.offsets, " offsets"},
                                   {c.columns, " columns"},
                                   {c.bias, " bias"},
                                   {c.residual, " residual"},
                                   {c.gated, " gated"}}) {
        if (on) s += name;
    }
    return s;
}

// One quantized product over random numbers, and what it should give.
struct Product {
    Product(const Case& given, uint32_t seed) : c(given), random(seed), graph(given.rows) {
        const auto m = static_cast<size_t>(c.rows), k = static_cast<size_t>(c.k),
                   n = static_cast<size_t>(c.n);
        const size_t padded = (n + 15) / 16 * 16;
        outputs = c.gated ? 2 * padded : n;
        const auto group = static_cast<size_t>(c.group > 0 ? c.group : c.k);
        groups = (k + group - 1) / group;
        x = random.floats(m * k);
        // A few large inputs, and a group of zeros, as real activations have them.
        for (size_t i = 0; i < x.size(); i += 37) x[i] *= 8;
        for (size_t i = 0; i < std::min<size_t>(k, 32); ++i) x[(m - 1) * k + i] = 0;
        codes.resize(outputs * k);
        for (int& code : codes) {
            code = c.dtype == DType::kI8       ? random.integer(-128, 127)
                   : c.dtype == DType::kI4     ? random.integer(-8, 7)
                   : c.dtype == DType::kF4E2M1 ? random.integer(0, 15)
                                               : (random.integer(0, 1) << 7 | random.integer(0, 0x7e));
        }
        scales = random.floats(outputs * groups, 0.02f);
        offsets = random.floats(outputs * groups, 0.02f);
        if (c.half) {
            for (Floats* all : {&scales, &offsets}) {
                for (float& value : *all) value = static_cast<float>(static_cast<_Float16>(value));
            }
        }
        for (size_t i = 0; i < k; ++i) columns.push_back(static_cast<int32_t>((i * 7 + 3) % k));
        if (std::gcd(7, c.k) != 1) std::iota(columns.rbegin(), columns.rend(), 0);
        bias = random.floats(outputs);
        residual = random.floats(m * n);

        std::vector<int> inputs = {graph.input(x, c.k)};
        if (c.residual) inputs.push_back(graph.input(residual, c.n));
        const auto out = static_cast<int64_t>(outputs), g = static_cast<int64_t>(groups);
        std::vector<int> weights = {graph.codes(codes, out, c.k, c.dtype),
                                    graph.scale_panels(scales, out, g, c.half)};
        if (c.offsets) weights.push_back(graph.scale_panels(offsets, out, g, c.half));
        if (c.columns) weights.push_back(graph.indices(columns));
        if (c.bias) weights.push_back(graph.plain(bias, {out}));
        const int y = graph.value({kT, Dim{c.n}});
        Attrs attrs = {{"group", c.group},         {"x_format", c.x_format},
                       {"x_group", c.x_group},     {"x_scale", double{c.x_scale}},
                       {"has_offsets", c.offsets}, {"has_columns", c.columns},
                       {"has_bias", c.bias},       {"activation", activation()}};
        if (!c.gated) attrs["has_residual"] = c.residual;
        graph.step(c.gated ? "quantized_gated_linear" : "quantized_linear", inputs, weights, {y}, attrs);
        graph.output(y);
    }

    [[nodiscard]] std::string activation() const { return c.gated || c.bias ? "silu" : "none"; }

    [[nodiscard]] double weight(size_t o, size_t i) const {
        const int code = codes[o * static_cast<size_t>(c.k) + i];
        const size_t g = o * groups + (c.group > 0 ? i / static_cast<size_t>(c.group) : 0);
        const double value = c.dtype == DType::kF8E4M3   ? e4m3_value(code)
                             : c.dtype == DType::kF4E2M1 ? e2m1_value(code)
                                                         : code;
        return value * double{scales[g]} + (c.offsets ? double{offsets[g]} : 0.0);
    }

    // Also the size of the sums, which rounding errors go with.
    [[nodiscard]] std::vector<double> expected(double& size) const {
        const auto k = static_cast<size_t>(c.k), n = static_cast<size_t>(c.n);
        std::vector<double> w(outputs * k), out;
        for (size_t o = 0; o < outputs; ++o) {
            for (size_t i = 0; i < k; ++i) w[o * k + i] = weight(o, i);
        }
        size = 0;
        for (size_t r = 0; r < static_cast<size_t>(c.rows); ++r) {
            Floats row(k);
            for (size_t i = 0; i < k; ++i)
                row[i] = x[r * k + (c.columns ? static_cast<size_t>(columns[i]) : i)];
            const std::vector<double> left =
                rounded(row, c.x_format, static_cast<size_t>(c.x_group), c.x_scale);
            const auto sum_of = [&](size_t o) {
                double sum = c.bias ? double{bias[o]} : 0.0, magnitude = 0;
                for (size_t i = 0; i < k; ++i) {
                    sum += left[i] * w[o * k + i];
                    magnitude += std::abs(left[i] * w[o * k + i]);
                }
                size = std::max(size, magnitude);
                return sum;
            };
            for (size_t o = 0; o < n; ++o) {
                const size_t at = c.gated ? o / 16 * 32 + o % 16 : o;
                double y = activated(activation(), sum_of(at));
                if (c.gated) y *= sum_of(at + 16);
                out.push_back(y + (c.residual ? double{residual[r * n + o]} : 0.0));
            }
        }
        return out;
    }

    Case c;
    Random random;
    Graph graph;
    size_t outputs = 0, groups = 0;
    Floats x, scales, offsets, bias, residual;
    std::vector<int> codes;
    std::vector<int32_t> columns;
};

void check_product(const Case& c, uint32_t seed) {
    CAPTURE(text(c));
    CAPTURE(seed);
    Product product(c, seed);
    double size = 0;
    const std::vector<double> expected = product.expected(size);
    // Codes, and integer sums of them, are exact: what is left is float32 rounding of the sums, a few units
    // in the last place of the largest.
    const double tolerance = 1e-6 * (1 + size) * (c.gated ? 1 + size : 1);
    Floats first;
    for (const std::string& isa : isas()) {
        CAPTURE(isa);
        const Floats y = forward(*product.graph.device(isa), c.rows);
        check_close(y, expected, tolerance, 1e-6);
        if (first.empty()) first = y;
        CHECK(same_bits(first, y));
    }
}

TEST_CASE("quantized products equal double precision for every format, shape, group and operand") {
    uint32_t seed = 1;
    for (const DType dtype : {DType::kI8, DType::kI4, DType::kF4E2M1, DType::kF8E4M3}) {
        for (const char* format : {"int8", "float", "fp8", "nvfp4", "mxfp4", "mxfp8"}) {
            const bool integer = std::string(format) == "int8";
            for (const int rows : {1, 7, 29}) {
                const int k = rows == 7 ? 93 : 200, n = rows == 1 ? 37 : 50;
                check_product({.dtype = dtype, .rows = rows, .k = k, .n = n, .x_format = format}, seed++);
                check_product({.dtype = dtype,
                               .rows = rows,
                               .k = k,
                               .n = n,
                               .group = 32,
                               .x_format = format,
                               .x_group = 32,
                               .half = true,
                               .offsets = true},
                              seed++);
                check_product({.dtype = dtype,
                               .rows = rows,
                               .k = k,
                               .n = n,
                               .group = 64,
                               .x_format = format,
                               .x_group = integer ? 16 : 0,
                               .columns = true,
                               .bias = true,
                               .residual = true},
                              seed++);
                check_product({.dtype = dtype,
                               .rows = rows,
                               .k = k,
                               .n = n,
                               .group = 16,
                               .x_format = format,
                               .bias = true,
                               .gated = true},
                              seed++);
            }
        }
    }
}

TEST_CASE("quantized products take static scales, whole-row groups of either operand and long inputs") {
    uint32_t seed = 500;
    for (const DType dtype : {DType::kI8, DType::kI4, DType::kF4E2M1}) {
        check_product({.dtype = dtype, .rows = 3, .k = 1100, .n = 20, .x_scale = 0.03f}, seed++);
        check_product({.dtype = dtype, .rows = 9, .k = 1100, .n = 20, .group = 128, .offsets = true}, seed++);
        check_product({.dtype = dtype, .rows = 9, .k = 515, .n = 20, .x_group = 64, .half = true}, seed++);
        check_product({.dtype = dtype, .rows = 2, .k = 515, .n = 20, .group = 4, .x_group = 128}, seed++);
        check_product({.dtype = dtype, .rows = 20, .k = 100, .n = 40, .group = 48}, seed++);
        check_product({.dtype = dtype, .rows = 1, .k = 3, .n = 1, .gated = true}, seed++);
        check_product({.dtype = dtype, .rows = 2, .k = 300, .n = 20, .group = 7, .x_format = "float"},
                      seed++);
        check_product({.dtype = dtype, .rows = 2, .k = 300, .n = 20, .x_format = "fp8", .x_scale = 0.01f},
                      seed++);
        check_product({.dtype = dtype, .rows = 2, .k = 300, .n = 20, .x_format = "nvfp4", .x_scale = 0.001f},
                      seed++);
    }
}

TEST_CASE("int8 activations whose groups do not nest with the weights' come back as floats") {
    check_product({.rows = 9, .k = 200, .n = 20, .group = 16, .x_group = 24}, 600);
    check_product({.rows = 9, .k = 200, .n = 20, .group = 6, .x_group = 0}, 601);
    check_product({.dtype = DType::kI4, .rows = 1, .k = 200, .n = 20, .group = 7, .x_scale = 0.05f}, 602);
}

TEST_CASE("round leaves of a row what its format can hold") {
    uint32_t seed = 700;
    for (const char* format : {"float", "int8", "fp8", "nvfp4", "mxfp4", "mxfp8"}) {
        CAPTURE(format);
        Random random(seed++);
        const Floats x = random.floats(size_t{3} * 77);
        for (const std::string& isa : isas()) {
            Graph g(3);
            const int y = g.value({kT, Dim{77}});
            g.step("round", {g.input(x, 77)}, {}, {y},
                   {{"x_format", std::string(format)}, {"x_group", int64_t{20}}});
            g.output(y);
            std::vector<double> expected;
            for (size_t r = 0; r < 3; ++r) {
                const Floats row(x.begin() + static_cast<long>(r * 77),
                                 x.begin() + static_cast<long>(r * 77 + 77));
                for (const double v : rounded(row, format, 20, 0)) expected.push_back(v);
            }
            check_close(forward(*g.device(isa), 3), expected, 1e-30, 1.2e-7);  // one float32 product
        }
    }
}

TEST_CASE("extreme codes stay exact: weights of -128 beside activations of 127") {
    for (const std::string& isa : isas()) {
        CAPTURE(isa);
        const int k = 200, n = 16;
        Graph g(2);
        Floats x(size_t{2} * k, 127.0f);
        for (size_t i = 0; i < static_cast<size_t>(k); ++i) x[i] = i % 3 == 0 ? -127.0f : 127.0f;
        std::vector<int> codes(size_t{n} * k, -128);
        for (size_t i = 0; i < codes.size(); i += 5) codes[i] = 127;
        const int y = g.value({kT, Dim{n}});
        g.step("quantized_linear", {g.input(x, k)},
               {g.codes(codes, n, k, DType::kI8), g.scale_panels(Floats(n, 1.0f), n, 1, false)}, {y},
               {{"group", int64_t{0}}, {"x_format", std::string("int8")}, {"x_scale", 1.0}});
        g.output(y);
        std::vector<double> expected;
        for (size_t r = 0; r < 2; ++r) {
            for (size_t o = 0; o < n; ++o) {
                double sum = 0;
                for (size_t i = 0; i < static_cast<size_t>(k); ++i) {
                    sum += double{x[r * static_cast<size_t>(k) + i]} * codes[o * static_cast<size_t>(k) + i];
                }
                expected.push_back(sum);
            }
        }
        check_close(forward(*g.device(isa), 2), expected, 0.5, 0);  // whole numbers below 2^24
    }
}

TEST_CASE("a row of a quantized product is the same bit for bit in any company, on any threads and ISA") {
    uint32_t seed = 900;
    for (const auto& [dtype, format] : {std::pair{DType::kI8, "int8"},
                                        {DType::kI4, "int8"},
                                        {DType::kF4E2M1, "int8"},
                                        {DType::kF8E4M3, "fp8"},
                                        {DType::kI4, "float"}}) {
        CAPTURE(int(dtype));
        constexpr int kRows = 150, kOut = 83;
        Product product({.dtype = dtype,
                         .rows = kRows,
                         .k = 612,
                         .n = kOut,
                         .group = 64,
                         .x_format = format,
                         .x_group = 32,
                         .offsets = true},
                        seed++);
        const Floats all = forward(*product.graph.device(main_isa(), 1), kRows);
        CHECK(same_bits(all, forward(*product.graph.device(main_isa(), 5), kRows)));
        for (const std::string& isa : isas()) {
            CAPTURE(isa);
            const auto device = product.graph.device(isa, 2);
            for (const auto& [first, count] :
                 {std::pair{0, 1}, {17, 1}, {5, 2}, {9, 3}, {100, 5}, {60, 8}, {40, 9}, {3, 37}}) {
                CAPTURE(count);
                const Floats part = forward(*device, {Run{first, 0, count, {}}});
                CHECK(same_bits(part,
                                Floats(all.begin() + first * kOut, all.begin() + (first + count) * kOut)));
            }
        }
    }
}

TEST_CASE("a float product with codes is the product with the dequantized matrix bit for bit") {
    Product product({.dtype = DType::kI4, .rows = 11, .k = 400, .n = 40, .group = 32, .x_format = "float"},
                    77);
    Floats w;
    for (size_t o = 0; o < 40; ++o) {
        for (size_t i = 0; i < 400; ++i) w.push_back(static_cast<float>(product.weight(o, i)));
    }
    Graph g(11);
    const int y = g.value({kT, Dim{40}});
    g.step("linear", {g.input(product.x, 400)}, {g.panels(w, 40, 400, false)}, {y});
    g.output(y);
    CHECK(same_bits(forward(*g.device(), 11), forward(*product.graph.device(), 11)));
}

std::string refusal(const Case& c, const std::function<void(Program&)>& damage) {
    Product product(c, 5);
    damage(product.graph.program());
    try {
        (void)product.graph.device();
    } catch (const std::invalid_argument& error) {
        return error.what();
    }
    return "accepted";
}

TEST_CASE("quantized products that are not valid are refused with the reason") {
    const auto attr = [](const char* name, Attr value) {
        return [=](Program& p) {
            for (Step& s : p.steps) {
                if (s.kernel == "quantized_linear") s.attrs[name] = value;
            }
        };
    };
    const auto check = [](const std::string& found, const char* part) {
        CHECK_MESSAGE(found.find(part) != std::string::npos, found);
    };
    check(refusal({}, [](Program&) {}), "accepted");
    check(refusal({}, attr("x_format", std::string("int3"))), "unknown x_format 'int3'");
    check(refusal({}, attr("x_scale", -1.0)), "x_scale is negative");
    check(refusal({}, attr("group", int64_t{16})), "expected [32, 4]");
    check(refusal({.columns = true},
                  [](Program& p) {
                      for (Weight& w : p.weights) {
                          if (w.dtype != DType::kI32) continue;
                          static const std::vector<int32_t> bad(64, 64);
                          w.data = reinterpret_cast<const std::byte*>(bad.data());
                      }
                  }),
          "names column 64 of 64");
    check(refusal({}, [](Program& p) { std::swap(p.steps[1].weights[0], p.steps[1].weights[1]); }),
          "must be codes");
    check(refusal({}, [](Program& p) { p.weights[1].bytes = 100; }), "bytes, its shape and layout need");
    check(refusal({}, [](Program& p) { p.weights[1].layout = Layout::kPanel16; }),
          "panel16 is for f32 or f16");
}

}  // namespace
}  // namespace castiron::test
