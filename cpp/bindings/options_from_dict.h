// The options of an engine, from Python.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>

#include "batching/engine.h"
#include "device/cuda/cuda_device.h"
#include "device/device.h"
#include "speculation/lookup_drafter.h"

namespace castiron::bindings {

struct Options {
    EngineOptions engine;
    HostOptions host;
    CudaOptions cuda;
    nanobind::object kernel_images = nanobind::none();
    std::optional<LookupMethod> lookup;  // who guesses tokens; none: nobody
    int num_speculative_tokens = 8;
};

// Absent ones and None leave the default. Throws ValueError that names what is wrong or unknown.
[[nodiscard]] Options options_from_dict(nanobind::handle dict);

}  // namespace castiron::bindings
