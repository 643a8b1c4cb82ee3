// Weights from the mapped file to the device.
#pragma once

#include "device/cuda/handles.h"
#include "device/cuda/layout.h"

namespace castiron::cuda {

// Copies every weight to its place behind `to`, through two pinned chunks: one is filled while the other
// travels. Returns when all of it is there.
void upload_weights(const Driver& driver, const Program& program, const WeightPlaces& places, Address to,
                    StreamHandle stream);

}  // namespace castiron::cuda
