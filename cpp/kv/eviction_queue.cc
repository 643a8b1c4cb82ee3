#include "kv/eviction_queue.h"

namespace castiron {

EvictionQueue::EvictionQueue(int num_blocks) : entries_(static_cast<size_t>(num_blocks)) {
    heap_.reserve(entries_.size());
}

bool EvictionQueue::sooner(int32_t a, int32_t b) const {
    const Entry& x = entry(a);
    const Entry& y = entry(b);
    return x.priority != y.priority ? x.priority > y.priority : x.last_used < y.last_used;
}

void EvictionQueue::put(size_t place, int32_t block) {
    heap_[place] = block;
    entries_[static_cast<size_t>(block)].place = static_cast<int32_t>(place);
}

void EvictionQueue::sift_up(size_t place) {
    const int32_t block = heap_[place];
    while (place > 0 && sooner(block, heap_[(place - 1) / 2])) {
        put(place, heap_[(place - 1) / 2]);
        place = (place - 1) / 2;
    }
    put(place, block);
}

void EvictionQueue::sift_down(size_t place) {
    const int32_t block = heap_[place];
    for (;;) {
        size_t child = 2 * place + 1;
        if (child >= heap_.size()) break;
        if (child + 1 < heap_.size() && sooner(heap_[child + 1], heap_[child])) ++child;
        if (!sooner(heap_[child], block)) break;
        put(place, heap_[child]);
        place = child;
    }
    put(place, block);
}

void EvictionQueue::push(int32_t block, int32_t priority, uint64_t last_used) {
    entries_[static_cast<size_t>(block)] = {last_used, priority, kAbsent};
    heap_.push_back(block);
    sift_up(heap_.size() - 1);
}

void EvictionQueue::remove(int32_t block) {
    const int32_t place = entry(block).place;
    if (place == kAbsent) return;
    entries_[static_cast<size_t>(block)].place = kAbsent;
    const int32_t last = heap_.back();
    heap_.pop_back();
    if (last == block) return;
    put(static_cast<size_t>(place), last);
    sift_up(static_cast<size_t>(place));
    sift_down(static_cast<size_t>(entry(last).place));
}

int32_t EvictionQueue::pop() {
    const int32_t block = heap_.front();
    remove(block);
    return block;
}

}  // namespace castiron
