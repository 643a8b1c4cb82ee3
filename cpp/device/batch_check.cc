#include "device/batch_check.h"

#include <string>

namespace castiron {

namespace {

[[noreturn]] void refuse(const std::string& what) {
    throw std::invalid_argument("batch: " + what);
}

void check_table(std::span<const int32_t> table, int64_t blocks, int total, const char* name) {
    if (static_cast<int64_t>(table.size()) < blocks)
        refuse("a table of " + std::string(name) + "s is too short");
    for (int64_t b = 0; b < blocks; ++b) {
        const int32_t block = table[static_cast<size_t>(b)];
        if (block < 0 || block >= total)
            refuse(std::string(name) + " " + std::to_string(block) + " is outside the pool");
    }
}

}  // namespace

void check_batch(const Batch& batch, const Limits& limits, bool has_cache, const PoolBlocks& pools) {
    const size_t tokens = batch.token_ids.size();
    if (tokens > static_cast<size_t>(limits.max_num_tokens)) {
        refuse(std::to_string(tokens) + " tokens pass max_num_tokens");
    }
    if (batch.logit_rows.size() > static_cast<size_t>(limits.max_logit_rows)) refuse("too many logit rows");
    if (batch.sequences.size() > static_cast<size_t>(limits.max_batch_size)) refuse("too many sequences");
    if (batch.positions.size() != tokens) refuse("positions and token_ids differ in length");
    for (const int32_t row : batch.logit_rows) {
        if (row < 0 || static_cast<size_t>(row) >= tokens) {
            refuse("logit row " + std::to_string(row) + " is out of range");
        }
    }
    int64_t next = 0;
    for (const SequenceSlice& s : batch.sequences) {
        if (s.first_row != next || s.num_rows < 1) refuse("sequences do not cover the rows in order");
        next += s.num_rows;
        const int64_t length = int64_t{s.start_position} + s.num_rows;
        if (s.start_position < 0 || length > limits.max_seq_len) refuse("a sequence passes max_seq_len");
        if (!has_cache) continue;
        const int64_t blocks = (length + kBlockTokens - 1) / kBlockTokens;
        check_table(s.block_table, blocks, pools.blocks, "KV block");
        if (pools.window_blocks > 0) check_table(s.window_table, blocks, pools.window_blocks, "window block");
    }
    if (next != static_cast<int64_t>(tokens)) refuse("sequences do not cover all rows");
}

void check_token_sources(const Batch& batch, size_t rows) {
    const auto& sources = batch.token_sources;
    if (!sources.empty() && sources.size() != batch.token_ids.size()) {
        refuse("token_sources and token_ids differ in length");
    }
    for (const int32_t source : sources) {
        if (source >= 0 && static_cast<size_t>(source) >= rows) {
            refuse("a token comes from row " + std::to_string(source) + " of " + std::to_string(rows) +
                   " of the step before");
        }
    }
}

void check_sampling(const Batch& batch, const SamplingBatch& sampling, int vocab_size) {
    const auto fail = [](const char* what) { throw std::invalid_argument(std::string("sampling: ") + what); };
    if (sampling.rows.size() != batch.logit_rows.size()) fail("not one entry for each row of logits");
    if (sampling.edits.size() > kMaxLogitEdits) fail("too many edits");
    for (const RowSampling& row : sampling.rows) {
        if (row.num_logprobs > kMaxDeviceLogprobs) fail("too many log-probabilities");
    }
    for (const LogitEdit& edit : sampling.edits) {
        if (edit.row < 0 || static_cast<size_t>(edit.row) >= sampling.rows.size() || edit.token < 0 ||
            edit.token >= vocab_size) {
            fail("an edit is out of range");
        }
    }
}

}  // namespace castiron
