#include "device/host/step_checker.h"

#include <cmath>
#include <stdexcept>

namespace castiron::host {

StepChecker::StepChecker(const Program& program, size_t index, std::span<Operand> values,
                         std::span<const ResolvedWeight> weights, const KernelTable& kernels)
    : program_(program),
      index_(index),
      step_(program.steps[index]),
      values_(values),
      weights_(weights),
      kernels_(kernels) {}

void StepChecker::fail(const std::string& what) const {
    throw std::invalid_argument("step " + std::to_string(index_) + " (" + step_.kernel + "): " + what);
}

void StepChecker::expect(size_t inputs, size_t weights, size_t outputs) const {
    if (step_.inputs.size() != inputs || step_.weights.size() != weights || step_.outputs.size() != outputs) {
        fail("has " + std::to_string(step_.inputs.size()) + " inputs, " +
             std::to_string(step_.weights.size()) + " weights, " + std::to_string(step_.outputs.size()) +
             " outputs; expected " + std::to_string(inputs) + ", " + std::to_string(weights) + ", " +
             std::to_string(outputs));
    }
}

const Operand& StepChecker::value(int index) const {
    if (index < 0 || static_cast<size_t>(index) >= values_.size())
        fail("names value " + std::to_string(index) + ", which does not exist");
    return values_[static_cast<size_t>(index)];
}

const Operand& StepChecker::input(size_t i) const {
    return value(step_.inputs.at(i));
}

const Operand& StepChecker::output(size_t i) const {
    const Operand& o = value(step_.outputs.at(i));
    if (o.view) fail("output '" + o.name + "' is a view; outputs are whole values");
    return o;
}

const ResolvedWeight& StepChecker::weight(size_t i) const {
    const int index = step_.weights.at(i);
    if (index < 0 || static_cast<size_t>(index) >= weights_.size())
        fail("names weight " + std::to_string(index) + ", which does not exist");
    return weights_[static_cast<size_t>(index)];
}

void StepChecker::check(const Operand& o, DType dtype, const std::vector<Dim>& shape,
                        bool view_allowed) const {
    if (o.dtype != dtype) fail("'" + o.name + "' must be " + (dtype == DType::kF32 ? "f32" : "i32"));
    if (o.shape != shape)
        fail("'" + o.name + "' has shape " + shape_text(o.shape) + ", expected " + shape_text(shape));
    if (!view_allowed) check_contiguous(o);
}

void StepChecker::check_f32(const Operand& o) const {
    if (o.dtype != DType::kF32) fail("'" + o.name + "' must be f32");
}

void StepChecker::check_contiguous(const Operand& o) const {
    if (o.view) fail("'" + o.name + "' is a view, which this operand cannot be");
}

int64_t StepChecker::matrix(const Operand& o, bool view_allowed) const {
    check_f32(o);
    if (o.shape.size() != 2)
        fail("'" + o.name + "' has shape " + shape_text(o.shape) + ", expected two axes");
    if (!view_allowed) check_contiguous(o);
    return o.shape[1].value;
}

const float* StepChecker::vector_weight(size_t i, const std::vector<int64_t>& shape) const {
    const ResolvedWeight& w = weight(i);
    if (w.weight->dtype != DType::kF32 || w.weight->layout != Layout::kPlain || w.weight->shape != shape) {
        std::string text;
        for (const int64_t d : shape) text += (text.empty() ? "" : ", ") + std::to_string(d);
        fail("weight '" + w.weight->name + "' must be plain f32 of shape [" + text + "]");
    }
    return reinterpret_cast<const float*>(w.data);
}

bool StepChecker::round_output(size_t i) {
    Operand& out = values_[static_cast<size_t>(step_.outputs.at(i))];
    out.rounded = out.may_round;
    for (size_t in = 0; in < step_.inputs.size(); ++in) {
        if (out.overlaps(input(in))) out.rounded = false;
    }
    return out.rounded;
}

const Attr* StepChecker::find(const char* name) {
    known_.insert(name);
    const auto it = step_.attrs.find(name);
    return it == step_.attrs.end() ? nullptr : &it->second;
}

bool StepChecker::flag(const char* name) {
    const Attr* a = find(name);
    if (a == nullptr) return false;
    if (const bool* b = std::get_if<bool>(a)) return *b;
    if (const int64_t* i = std::get_if<int64_t>(a); i != nullptr && (*i == 0 || *i == 1)) return *i == 1;
    fail(std::string("attribute ") + name + " must be a bool");
}

int64_t StepChecker::integer(const char* name, int64_t low, int64_t high) {
    if (find(name) == nullptr) fail(std::string("attribute ") + name + " is missing");
    return integer_or(name, 0, low, high);
}

int64_t StepChecker::integer_or(const char* name, int64_t fallback, int64_t low, int64_t high) {
    const Attr* a = find(name);
    if (a == nullptr) return fallback;
    const int64_t* i = std::get_if<int64_t>(a);
    if (i == nullptr) fail(std::string("attribute ") + name + " must be an integer");
    if (*i < low || *i > high) {
        fail(std::string("attribute ") + name + " is " + std::to_string(*i) + ", expected " +
             std::to_string(low) + " to " + std::to_string(high));
    }
    return *i;
}

double StepChecker::number(const char* name) {
    if (find(name) == nullptr) fail(std::string("attribute ") + name + " is missing");
    return number_or(name, 0);
}

double StepChecker::number_or(const char* name, double fallback) {
    const Attr* a = find(name);
    if (a == nullptr) return fallback;
    if (const int64_t* i = std::get_if<int64_t>(a)) return static_cast<double>(*i);
    const double* d = std::get_if<double>(a);
    if (d == nullptr || !std::isfinite(*d))
        fail(std::string("attribute ") + name + " must be a finite number");
    return *d;
}

std::string StepChecker::text(const char* name) {
    if (find(name) == nullptr) fail(std::string("attribute ") + name + " is missing");
    return text_or(name, "");
}

std::string StepChecker::text_or(const char* name, const char* fallback) {
    const Attr* a = find(name);
    if (a == nullptr) return fallback;
    const std::string* s = std::get_if<std::string>(a);
    if (s == nullptr) fail(std::string("attribute ") + name + " must be a string");
    return *s;
}

std::vector<int64_t> StepChecker::integers(const char* name) {
    const Attr* a = find(name);
    if (a == nullptr) fail(std::string("attribute ") + name + " is missing");
    const auto* list = std::get_if<std::vector<int64_t>>(a);
    if (list == nullptr) fail(std::string("attribute ") + name + " must be a list of integers");
    return *list;
}

void StepChecker::finish(const std::vector<InPlace>& in_place) const {
    for (const auto& [name, attr] : step_.attrs) {
        if (!known_.contains(name)) fail("unknown attribute '" + name + "'");
    }
    for (size_t o = 0; o < step_.outputs.size(); ++o) {
        const Operand& out = output(o);
        for (size_t other = 0; other < o; ++other) {
            if (out.overlaps(output(other)))
                fail("outputs '" + out.name + "' and '" + output(other).name + "' share memory");
        }
        for (size_t i = 0; i < step_.inputs.size(); ++i) {
            const Operand& in = input(i);
            if (!out.overlaps(in)) continue;
            bool allowed = false;
            for (const InPlace& pair : in_place) allowed = allowed || (pair.output == o && pair.input == i);
            if (!allowed || in.view || in.offset != out.offset || in.shape != out.shape) {
                fail("output '" + out.name + "' shares memory with input '" + in.name + "'");
            }
        }
    }
}

}  // namespace castiron::host
