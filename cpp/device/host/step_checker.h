// Reads one step of a program and refuses what is not valid, with a message that names the step and the
// reason.
#pragma once

#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "device/host/kernels/table.h"
#include "device/host/operand.h"

namespace castiron::host {

class StepChecker {
public:
    StepChecker(const Program& program, size_t index, std::span<Operand> values,
                std::span<const ResolvedWeight> weights, const KernelTable& kernels);

    [[nodiscard]] const Step& step() const { return step_; }
    [[nodiscard]] size_t index() const { return index_; }
    [[nodiscard]] const Program& program() const { return program_; }
    [[nodiscard]] const KernelTable& kernels() const { return kernels_; }

    // Throws std::invalid_argument: "step 12 (linear): <what>".
    [[noreturn]] void fail(const std::string& what) const;

    // Operands must be exactly this many.
    void expect(size_t inputs, size_t weights, size_t outputs) const;
    [[nodiscard]] const Operand& input(size_t i) const;
    [[nodiscard]] const Operand& output(size_t i) const;
    [[nodiscard]] const ResolvedWeight& weight(size_t i) const;

    // A value of `dtype` and exactly `shape`; contiguous unless `view_allowed`.
    void check(const Operand& o, DType dtype, const std::vector<Dim>& shape, bool view_allowed = false) const;
    void check_f32(const Operand& o) const;
    void check_contiguous(const Operand& o) const;
    // Two-dimensional float32; returns its columns.
    [[nodiscard]] int64_t matrix(const Operand& o, bool view_allowed) const;
    // A plain float32 weight of `shape`.
    [[nodiscard]] const float* vector_weight(size_t i, const std::vector<int64_t>& shape) const;

    [[nodiscard]] bool flag(const char* name);
    [[nodiscard]] int64_t integer(const char* name, int64_t low, int64_t high);
    [[nodiscard]] int64_t integer_or(const char* name, int64_t fallback, int64_t low, int64_t high);
    [[nodiscard]] double number(const char* name);
    [[nodiscard]] double number_or(const char* name, double fallback);
    [[nodiscard]] std::string text(const char* name);
    [[nodiscard]] std::string text_or(const char* name, const char* fallback);
    [[nodiscard]] std::vector<int64_t> integers(const char* name);

    // An output may lie on an input only as a pair named here, at the same place with the same shape.
    struct InPlace {
        size_t output = 0;
        size_t input = 0;
    };
    // Whether output i may be rows of bf16 (Operand::may_round); whoever reads it is told that it is. Only of
    // a step that reads nothing where it writes, because the rows are shorter.
    [[nodiscard]] bool round_output(size_t i);
    // Called last: every attribute was understood, and outputs lie apart from inputs and from each other.
    void finish(const std::vector<InPlace>& in_place = {}) const;

private:
    [[nodiscard]] const Attr* find(const char* name);
    [[nodiscard]] const Operand& value(int index) const;

    const Program& program_;
    size_t index_;
    const Step& step_;
    std::span<Operand> values_;
    std::span<const ResolvedWeight> weights_;
    const KernelTable& kernels_;
    std::set<std::string> known_;
};

}  // namespace castiron::host
