#include "sampling/params.h"

#include <algorithm>
#include <cmath>
#include <sstream>
#include <stdexcept>
#include <string_view>

namespace castiron {
namespace {

template <typename T>
void require(bool holds, std::string_view field, T found, std::string_view expected) {
    if (holds) return;
    std::ostringstream message;
    message << field << " is " << found << "; expected " << expected;
    throw std::invalid_argument(message.str());
}

}  // namespace

float SamplingParams::top_p_after(std::span<const int32_t> output, std::span<const int32_t> drafts) const {
    if (top_p_decay == 1.0F) return top_p;
    const size_t count = output.size() + drafts.size();
    size_t since = 0;  // tokens behind the last one of top_p_reset_ids
    for (; since < count; ++since) {
        const size_t at = count - 1 - since;
        const int32_t token = at < output.size() ? output[at] : drafts[at - output.size()];
        if (std::find(top_p_reset_ids.begin(), top_p_reset_ids.end(), token) != top_p_reset_ids.end()) break;
    }
    if (since == 0) return top_p;
    return std::max(top_p_min, top_p * std::pow(top_p_decay, static_cast<float>(since)));
}

void SamplingParams::validate_beams(int vocab_size) const {
    require(beam_width > 0 && beam_width <= vocab_size, "beam_width", beam_width,
            "1 to the size of the vocabulary");
    require(max_tokens > 0, "max_tokens", max_tokens, "1 or more with a beam search");
    require(std::isfinite(length_penalty), "length_penalty", length_penalty, "a finite number (0: off)");
    require(logprobs <= 0, "logprobs", logprobs, "-1 or 0 with a beam search, which has no alternatives");
    require(first_mask.empty(), "first_mask", "given", "none with a beam search");
    require(!generation_logits, "generation_logits", "true", "false with a beam search");
    require(!process_logits, "process_logits", "true", "false with a beam search");
}

void SamplingParams::validate(int vocab_size) const {
    require(max_tokens >= 0, "max_tokens", max_tokens, "0 or more");
    require(min_tokens >= 0 && min_tokens <= max_tokens, "min_tokens", min_tokens, "0 to max_tokens");
    require(std::isfinite(temperature) && temperature >= 0, "temperature", temperature, "0 (greedy) or more");
    require(top_k >= 0, "top_k", top_k, "0 (off) or more");
    require(top_p > 0 && top_p <= 1, "top_p", top_p, "more than 0, at most 1 (off)");
    require(top_p_decay > 0 && top_p_decay <= 1, "top_p_decay", top_p_decay, "more than 0, at most 1 (off)");
    require(top_p_min > 0 && top_p_min <= 1, "top_p_min", top_p_min, "more than 0, at most 1");
    require(typical_p > 0 && typical_p <= 1, "typical_p", typical_p, "more than 0, at most 1 (off)");
    require(min_p >= 0 && min_p <= 1, "min_p", min_p, "0 (off) to 1");
    require(std::isfinite(repetition_penalty) && repetition_penalty > 0, "repetition_penalty",
            repetition_penalty, "more than 0 (1: off)");
    require(std::isfinite(presence_penalty), "presence_penalty", presence_penalty,
            "a finite number (0: off)");
    require(std::isfinite(frequency_penalty), "frequency_penalty", frequency_penalty,
            "a finite number (0: off)");
    require(logprobs >= -1 && logprobs <= kMaxLogprobs, "logprobs", logprobs, "-1 (none) to 128");
    require(prompt_logprobs >= -1 && prompt_logprobs <= kMaxLogprobs, "prompt_logprobs", prompt_logprobs,
            "-1 (none) to 128");
    if (beam_width != 0) validate_beams(vocab_size);
    require(num_speculative_tokens >= -1, "num_speculative_tokens", num_speculative_tokens,
            "0 (none) or more, or -1 for the engine's");
    rules.validate(vocab_size);
    for (const int32_t id : stop_token_ids) {
        require(id >= 0 && id < vocab_size, "an entry of stop_token_ids", id, "an id of the vocabulary");
    }
}

}  // namespace castiron
