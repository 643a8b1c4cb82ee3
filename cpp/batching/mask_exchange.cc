#include "batching/mask_exchange.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace castiron {

void MaskExchange::add(int64_t request_id, std::vector<uint32_t> mask, int max_new_tokens) {
    auto entry = std::make_unique<Entry>();
    entry->masks = std::move(mask);
    for (auto* tokens : {&entry->fresh, &entry->drafts}) {
        tokens->reserve(static_cast<size_t>(std::max(max_new_tokens, 1)));
    }
    const std::lock_guard lock(mutex_);
    entries_[request_id] = std::move(entry);
    // Each entry is in the list once at most.
    if (wishes_.capacity() < entries_.size()) wishes_.reserve(2 * entries_.size() + 16);
}

void MaskExchange::drop(int64_t request_id) {
    const std::lock_guard lock(mutex_);
    entries_.erase(request_id);
}

// Under mutex_.
void MaskExchange::wish(int64_t request_id, Entry& entry) {
    if (std::exchange(entry.wished, true)) return;
    wishes_.push_back(request_id);
    wished_.notify_one();
}

void MaskExchange::ask(int64_t request_id, std::span<const int32_t> tokens, int num_output) {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(request_id);
    if (found == entries_.end()) return;
    Entry& entry = *found->second;
    entry.fresh.insert(entry.fresh.end(), tokens.begin(), tokens.end());
    entry.drafts.clear();
    entry.num_output = num_output;
    wish(request_id, entry);
}

void MaskExchange::ask_along(int64_t request_id, std::span<const int32_t> drafts) {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(request_id);
    if (found == entries_.end()) return;
    found->second->drafts.assign(drafts.begin(), drafts.end());
    wish(request_id, *found->second);
}

MaskRows MaskExchange::wait(int64_t request_id, int num_output, int num_drafts,
                            std::chrono::duration<double> patience) {
    std::unique_lock lock(mutex_);
    const auto found = entries_.find(request_id);
    if (found == entries_.end()) throw std::runtime_error("the request has no grammar");
    Entry& entry = *found->second;
    const auto given = [&] { return entry.masks_for == num_output && entry.num_drafts >= num_drafts; };
    const bool ready =
        given_.wait_for(lock, patience, [&] { return given() || !entry.refused.empty() || closed_; });
    if (!entry.refused.empty()) throw std::runtime_error(entry.refused);
    if (given()) return {entry.masks, entry.num_masks};
    throw std::runtime_error(ready ? "the engine ends"
                                   : "the grammar took longer than " + std::to_string(patience.count()) +
                                         " seconds to tell what may come next");
}

std::vector<MaskWish> MaskExchange::poll(std::chrono::duration<double> timeout) {
    std::unique_lock lock(mutex_);
    wished_.wait_for(lock, timeout, [this] { return !wishes_.empty() || closed_; });
    std::vector<MaskWish> wishes;
    wishes.reserve(wishes_.size());
    for (const int64_t id : wishes_) {
        const auto found = entries_.find(id);
        if (found == entries_.end()) continue;
        Entry& entry = *found->second;
        wishes.push_back({id, entry.num_output, entry.fresh, entry.drafts});
        entry.fresh.clear();
        entry.drafts.clear();
        entry.wished = false;
    }
    wishes_.clear();
    return wishes;
}

void MaskExchange::give(int64_t request_id, int num_output, int num_drafts, const MaskRows& masks) {
    {
        const std::lock_guard lock(mutex_);
        const auto found = entries_.find(request_id);
        if (found == entries_.end() || found->second->num_output != num_output) return;
        Entry& entry = *found->second;
        entry.masks.assign(masks.words.begin(), masks.words.end());
        entry.num_masks = masks.count;
        entry.masks_for = num_output;
        entry.num_drafts = num_drafts;
    }
    given_.notify_all();
}

void MaskExchange::refuse(int64_t request_id, int num_output, const std::string& reason) {
    {
        const std::lock_guard lock(mutex_);
        const auto found = entries_.find(request_id);
        if (found == entries_.end() || found->second->num_output != num_output) return;
        found->second->refused = reason.empty() ? "the grammar refuses what was generated" : reason;
    }
    given_.notify_all();
}

void MaskExchange::close() {
    {
        const std::lock_guard lock(mutex_);
        closed_ = true;
    }
    wished_.notify_all();
    given_.notify_all();
}

}  // namespace castiron
