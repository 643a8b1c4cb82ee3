#include "batching/logits_exchange.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace castiron {

std::shared_ptr<LogitsExchange::Entry> LogitsExchange::find(int64_t request_id) const {
    const auto found = entries_.find(request_id);
    return found == entries_.end() ? nullptr : found->second;
}

void LogitsExchange::add(int64_t request_id, int vocab_size, int max_new_tokens) {
    auto entry = std::make_shared<Entry>();
    entry->logits.resize(static_cast<size_t>(vocab_size));
    entry->fresh.reserve(static_cast<size_t>(max_new_tokens));
    const std::lock_guard lock(mutex_);
    entries_[request_id] = std::move(entry);
}

void LogitsExchange::drop(int64_t request_id) {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(request_id);
    if (found == entries_.end()) return;
    found->second->dropped = true;
    found->second->changed.notify_all();
    entries_.erase(found);
}

void LogitsExchange::show(int64_t request_id, std::span<const int32_t> output,
                          std::span<const float> logits) {
    const std::lock_guard lock(mutex_);
    const auto entry = find(request_id);
    if (entry == nullptr) return;
    entry->fresh.insert(entry->fresh.end(), output.begin() + entry->num_output, output.end());
    entry->num_output = static_cast<int>(output.size());
    std::copy(logits.begin(), logits.end(), entry->logits.begin());
    entry->shown = true;
    entry->ready = false;
    entry->changed.notify_all();
}

std::span<const float> LogitsExchange::wait(int64_t request_id,
                                            std::chrono::steady_clock::time_point deadline) {
    std::unique_lock lock(mutex_);
    const auto entry = find(request_id);
    if (entry == nullptr) throw std::runtime_error("the request has no logits processor");
    entry->changed.wait_until(lock, deadline,
                              [&] { return entry->ready || !entry->refused.empty() || closed_; });
    entry->shown = false;
    if (!entry->refused.empty()) throw std::runtime_error(entry->refused);
    if (entry->ready) return entry->logits;
    throw std::runtime_error(closed_ ? "the engine ends" : "the logits processor took too long over a token");
}

std::optional<LogitsWish> LogitsExchange::poll(int64_t request_id) {
    std::unique_lock lock(mutex_);
    const auto entry = find(request_id);
    if (entry == nullptr) return std::nullopt;
    entry->changed.wait(lock, [&] { return entry->shown || entry->dropped || closed_; });
    if (entry->dropped || closed_) return std::nullopt;
    entry->shown = false;
    LogitsWish wish{entry->num_output, entry->fresh, entry->logits};
    entry->fresh.clear();
    return wish;
}

void LogitsExchange::give(int64_t request_id, int num_output, std::span<const float> logits) {
    const std::lock_guard lock(mutex_);
    const auto entry = find(request_id);
    if (entry == nullptr || entry->num_output != num_output || entry->ready) return;
    if (logits.size() != entry->logits.size()) {
        entry->refused = "a row of " + std::to_string(logits.size()) + " logits was given back, expected " +
                         std::to_string(entry->logits.size());
    } else {
        std::copy(logits.begin(), logits.end(), entry->logits.begin());
        entry->ready = true;
    }
    entry->changed.notify_all();
}

void LogitsExchange::refuse(int64_t request_id, int num_output, const std::string& reason) {
    const std::lock_guard lock(mutex_);
    const auto entry = find(request_id);
    if (entry == nullptr || entry->num_output != num_output) return;
    entry->refused = reason.empty() ? "the logits processor failed" : reason;
    entry->changed.notify_all();
}

void LogitsExchange::close() {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    for (const auto& [id, entry] : entries_) entry->changed.notify_all();
}

}  // namespace castiron
