#include "device/cuda/weight_upload.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace castiron::cuda {
namespace {

// Large enough for the full rate of the bus, small enough to be had on any machine.
constexpr uint64_t kChunkBytes = uint64_t{16} << 20;

struct Chunk {
    PinnedBuffer memory;
    Event free;  // the last copy out of it is done
    uint64_t used = 0;
};

}  // namespace

void upload_weights(const Driver& driver, const Program& program, const WeightPlaces& places, Address to,
                    StreamHandle stream) {
    const uint64_t chunk_bytes = std::min(kChunkBytes, std::max<uint64_t>(places.bytes, 1));
    std::array<Chunk, 2> chunks;
    for (Chunk& chunk : chunks) {
        chunk.memory = make_pinned_buffer(driver, chunk_bytes);
        chunk.free = make_event(driver);
    }
    // The device's memory is filled from its start on, gaps between weights included, so that small weights
    // share a copy.
    size_t current = 0;
    uint64_t sent = 0;
    const auto send = [&] {
        Chunk& chunk = chunks[current];
        if (chunk.used == 0) return;
        check(driver, driver.copy_to_device(to + sent, chunk.memory.get(), chunk.used, stream),
              "copying weights to the device");
        check(driver, driver.event_record(chunk.free.get(), stream), "copying weights to the device");
        sent += chunk.used;
        current = 1 - current;
        chunks[current].used = 0;
        check(driver, driver.event_synchronize(chunks[current].free.get()), "copying weights to the device");
    };
    for (size_t i = 0; i < program.weights.size(); ++i) {
        const std::byte* data = program.weights[i].data;
        const uint64_t end = i + 1 < places.offsets.size() ? places.offsets[i + 1] : places.bytes;
        const uint64_t padded = end - places.offsets[i];
        const uint64_t bytes = std::min<uint64_t>(program.weights[i].bytes, padded);
        for (uint64_t at = 0; at < padded;) {
            Chunk& chunk = chunks[current];
            const uint64_t piece = std::min(chunk_bytes - chunk.used, padded - at);
            const uint64_t filled = at < bytes ? std::min(piece, bytes - at) : 0;
            auto* place = static_cast<std::byte*>(chunk.memory.get()) + chunk.used;
            std::memcpy(place, data + at, filled);
            std::memset(place + filled, 0, piece - filled);
            chunk.used += piece;
            at += piece;
            if (chunk.used == chunk_bytes) send();
        }
    }
    send();
    check(driver, driver.stream_synchronize(stream), "copying weights to the device");
}

}  // namespace castiron::cuda
