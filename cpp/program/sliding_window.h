// How far back the attention of a program looks.
#pragma once

#include "program/program.h"

namespace castiron {

// Tokens that a query sees at most, itself among them, in whatever layer: the largest `window` (or `chunk`)
// of its attention steps. 0 where a layer sees everything, where a layer of the cache has no attention step
// that says so, and where a step of another kind reads the cache (a plugin's): nobody knows then what it
// reads.
[[nodiscard]] int sliding_window(const Program& program);

// The longest KvLayer::window; 0: no layer has one. Throws std::invalid_argument where an attention step sees
// more of such a layer than it says.
[[nodiscard]] int layer_window(const Program& program);

}  // namespace castiron
