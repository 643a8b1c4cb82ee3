#include "device/cuda/input_block.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace castiron::cuda {
namespace {

constexpr uint64_t kAlignment = 16;

// Writes one array: what it is given, then padding.
template <typename T = int32_t>
class Writer {
public:
    Writer(std::byte* block, const InputLayout& layout, StepInput input, int64_t length)
        : at_(reinterpret_cast<T*>(block + layout.offsets[static_cast<size_t>(input)])), end_(at_ + length) {}

    void put(T value) { *at_++ = value; }
    void put(std::span<const T> values) { at_ = std::copy(values.begin(), values.end(), at_); }
    void pad(T value) { at_ = std::fill_n(at_, end_ - at_, value); }
    void pad(T value, int64_t count) { at_ = std::fill_n(at_, count, value); }

private:
    T* at_;
    T* end_;
};

}  // namespace

Counts counts_at_limits(const Program& program) {
    const Limits& limits = program.limits;
    const int tile = std::max(program.prefill_tile, 1);
    Counts counts;
    counts[Dim::kTokens] = limits.max_num_tokens;
    counts[Dim::kRows] = limits.max_logit_rows;
    counts[Dim::kSequences] = limits.max_batch_size;
    counts[Dim::kDecodes] = limits.max_batch_size;
    counts[Dim::kTiles] = (limits.max_num_tokens + tile - 1) / tile + limits.max_batch_size;
    counts[Dim::kRandom] = limits.max_logit_rows;
    counts[Dim::kEdits] = kMaxLogitEdits;
    counts[Dim::kLogprobs] = limits.max_logit_rows;
    counts[Dim::kVocabLimit] = program.vocab_size;
    counts[Dim::kLoraTiles] = lora_tiles(limits.max_num_tokens, limits.max_batch_size);
    counts[Dim::kLogitLoraTiles] = lora_tiles(limits.max_logit_rows, limits.max_batch_size);
    return counts;
}

InputPacker::InputPacker(const Program& program, int vocab_limit, int max_loras)
    : prefill_tile_(program.prefill_tile),
      vocab_limit_(vocab_limit),
      max_loras_(max_loras),
      has_sampling_(!program.sampling.empty()),
      has_feeding_(!program.feeding.empty()),
      has_windows_(std::any_of(program.kv_layers.begin(), program.kv_layers.end(),
                               [](const KvLayer& layer) { return group_of(layer) == KvGroup::kWindow; })),
      table_width_((program.limits.max_seq_len + kBlockTokens - 1) / kBlockTokens) {
    if (prefill_tile_ < 1) {
        throw std::invalid_argument("prefill_tile is " + std::to_string(prefill_tile_) +
                                    "; a CUDA program has query tiles of at least one row");
    }
    max_bytes_ = layout(counts_at_limits(program)).bytes;
}

Counts InputPacker::count(const Batch& batch, const SamplingBatch* sampling, const LoraRows& lora) const {
    Counts counts;
    counts[Dim::kTokens] = static_cast<int32_t>(batch.token_ids.size());
    counts[Dim::kRows] = static_cast<int32_t>(batch.logit_rows.size());
    counts[Dim::kSequences] = static_cast<int32_t>(batch.sequences.size());
    for (const SequenceSlice& sequence : batch.sequences) {
        if (sequence.num_rows == 1) {
            ++counts[Dim::kDecodes];
        } else {
            counts[Dim::kTiles] += (sequence.num_rows + prefill_tile_ - 1) / prefill_tile_;
        }
    }
    counts[Dim::kLoraTiles] = static_cast<int32_t>(lora.tokens().slots.size());
    counts[Dim::kLogitLoraTiles] = static_cast<int32_t>(lora.logits().slots.size());
    counts[Dim::kVocabLimit] = vocab_limit_;
    if (sampling == nullptr) return counts;
    for (const RowSampling& row : sampling->rows) {
        if (row.temperature > 0) ++counts[Dim::kRandom];
        if (row.num_logprobs >= 0) ++counts[Dim::kLogprobs];
    }
    counts[Dim::kEdits] = static_cast<int32_t>(sampling->edits.size());
    return counts;
}

Counts InputPacker::decode_counts(int sequences, bool random, bool adapted) const {
    Counts counts;
    for (const int64_t symbol : {Dim::kTokens, Dim::kRows, Dim::kSequences, Dim::kDecodes}) {
        counts[symbol] = sequences;
    }
    if (random) counts[Dim::kRandom] = sequences;
    for (const int64_t symbol : {Dim::kLoraTiles, Dim::kLogitLoraTiles}) {
        if (adapted) counts[symbol] = lora_tiles(sequences, max_loras_);
    }
    counts[Dim::kVocabLimit] = vocab_limit_;
    return counts;
}

InputLayout InputPacker::layout(const Counts& counts) const {
    InputLayout layout;
    const auto place = [&](StepInput input, int64_t length) {
        layout.offsets[static_cast<size_t>(input)] = layout.bytes;
        layout.bytes += (static_cast<uint64_t>(length) * 4 + kAlignment - 1) / kAlignment * kAlignment;
    };
    const int64_t tokens = counts[Dim::kTokens];
    const int64_t rows = counts[Dim::kRows];
    const int64_t sequences = counts[Dim::kSequences];
    place(StepInput::kTokenIds, tokens);
    place(StepInput::kPositions, tokens);
    place(StepInput::kLogitRows, rows);
    place(StepInput::kSlots, tokens);
    place(StepInput::kQueryStart, sequences + 1);
    place(StepInput::kKvLen, sequences);
    place(StepInput::kBlockTable, sequences * table_width_);
    place(StepInput::kDecodeSeq, counts[Dim::kDecodes]);
    place(StepInput::kTileSeq, counts[Dim::kTiles]);
    place(StepInput::kTileRow, counts[Dim::kTiles]);
    if (has_windows_) {
        place(StepInput::kWindowSlots, tokens);
        place(StepInput::kWindowTable, sequences * table_width_);
    }
    if (max_loras_ > 0) {
        place(StepInput::kLoraRows, kLoraTile * int64_t{counts[Dim::kLoraTiles]});
        place(StepInput::kLoraSlots, counts[Dim::kLoraTiles]);
        place(StepInput::kLogitLoraRows, kLoraTile * int64_t{counts[Dim::kLogitLoraTiles]});
        place(StepInput::kLogitLoraSlots, counts[Dim::kLogitLoraTiles]);
    }
    if (has_feeding_) place(StepInput::kTokenSource, tokens);
    if (!has_sampling_) return layout;
    for (const StepInput input :
         {StepInput::kTemperature, StepInput::kTopK, StepInput::kTopP, StepInput::kMinP, StepInput::kUniform,
          StepInput::kNumLogprobs, StepInput::kRepetition, StepInput::kFrequency, StepInput::kPresence}) {
        place(input, rows);
    }
    for (const StepInput input : {StepInput::kEditRow, StepInput::kEditToken, StepInput::kEditCount}) {
        place(input, counts[Dim::kEdits]);
    }
    return layout;
}

void InputPacker::pack(const Batch& batch, const SamplingBatch* sampling, const LoraRows& lora,
                       const Counts& counts, std::byte* block) const {
    const InputLayout places = layout(counts);
    pack_sequences(batch, counts, places, block);
    pack_tables(batch, counts, places, block, StepInput::kSlots, StepInput::kBlockTable,
                [](const SequenceSlice& sequence) { return sequence.block_table; });
    if (has_windows_) {
        // Where nothing is kept apart, blocks have the same numbers in both pools.
        pack_tables(batch, counts, places, block, StepInput::kWindowSlots, StepInput::kWindowTable,
                    [](const SequenceSlice& sequence) {
                        return sequence.window_table.empty() ? sequence.block_table : sequence.window_table;
                    });
    }
    if (max_loras_ > 0) {
        const auto put = [&](StepInput input, const std::vector<int32_t>& numbers, int64_t length) {
            Writer<> writer(block, places, input, length);
            writer.put(numbers);
            writer.pad(-1);
        };
        const int64_t tiles = counts[Dim::kLoraTiles], logit_tiles = counts[Dim::kLogitLoraTiles];
        put(StepInput::kLoraRows, lora.tokens().rows, kLoraTile * tiles);
        put(StepInput::kLoraSlots, lora.tokens().slots, tiles);
        put(StepInput::kLogitLoraRows, lora.logits().rows, kLoraTile * logit_tiles);
        put(StepInput::kLogitLoraSlots, lora.logits().slots, logit_tiles);
    }
    if (has_sampling_) pack_sampling(sampling, counts, places, block);
}

void InputPacker::pack_sequences(const Batch& batch, const Counts& counts, const InputLayout& places,
                                 std::byte* block) const {
    const int64_t tokens = counts[Dim::kTokens];
    const int64_t sequences = counts[Dim::kSequences];
    const auto writer = [&](StepInput input, int64_t length) {
        return Writer<>(block, places, input, length);
    };
    Writer token_ids = writer(StepInput::kTokenIds, tokens);
    Writer positions = writer(StepInput::kPositions, tokens);
    Writer logit_rows = writer(StepInput::kLogitRows, counts[Dim::kRows]);
    Writer query_start = writer(StepInput::kQueryStart, sequences + 1);
    Writer kv_len = writer(StepInput::kKvLen, sequences);
    Writer decode_seq = writer(StepInput::kDecodeSeq, counts[Dim::kDecodes]);
    Writer tile_seq = writer(StepInput::kTileSeq, counts[Dim::kTiles]);
    Writer tile_row = writer(StepInput::kTileRow, counts[Dim::kTiles]);

    if (has_feeding_) {
        Writer token_source = writer(StepInput::kTokenSource, tokens);
        token_source.put(batch.token_sources);
        token_source.pad(-1);
    }
    token_ids.put(batch.token_ids);
    positions.put(batch.positions);
    logit_rows.put(batch.logit_rows);
    query_start.put(0);
    int32_t index = 0;
    for (const SequenceSlice& sequence : batch.sequences) {
        const int length = sequence.start_position + sequence.num_rows;
        query_start.put(sequence.first_row + sequence.num_rows);
        kv_len.put(length);
        if (sequence.num_rows == 1) {
            decode_seq.put(index);
        } else {
            for (int row = 0; row < sequence.num_rows; row += prefill_tile_) {
                tile_seq.put(index);
                tile_row.put(row);
            }
        }
        ++index;
    }
    token_ids.pad(0);
    positions.pad(0);
    logit_rows.pad(0);
    query_start.pad(static_cast<int32_t>(batch.token_ids.size()));
    kv_len.pad(0);
    decode_seq.pad(-1);
    tile_seq.pad(-1);
    tile_row.pad(0);
}

// Where each token goes, and where each sequence's blocks lie, in one of the pools.
template <typename TableOf>
void InputPacker::pack_tables(const Batch& batch, const Counts& counts, const InputLayout& places,
                              std::byte* block, StepInput slots_input, StepInput table_input,
                              TableOf table_of) const {
    Writer<> slots(block, places, slots_input, counts[Dim::kTokens]);
    Writer<> tables(block, places, table_input, counts[Dim::kSequences] * table_width_);
    for (const SequenceSlice& sequence : batch.sequences) {
        std::span<const int32_t> table = table_of(sequence);
        table = table.first(std::min(table.size(), static_cast<size_t>(table_width_)));
        for (int p = sequence.start_position; p < sequence.start_position + sequence.num_rows; ++p) {
            const auto index = static_cast<size_t>(p / kBlockTokens);
            // A model without a cache has no blocks.
            slots.put(index < table.size() ? table[index] * kBlockTokens + p % kBlockTokens : -1);
        }
        tables.put(table);
        tables.pad(0, table_width_ - static_cast<int64_t>(table.size()));
    }
    slots.pad(-1);
    tables.pad(0);
}

void InputPacker::pack_sampling(const SamplingBatch* sampling, const Counts& counts,
                                const InputLayout& places, std::byte* block) const {
    const RowSampling padding;
    const auto rows = sampling != nullptr ? sampling->rows : std::span<const RowSampling>();
    const auto column = [&](StepInput input, auto RowSampling::* field) {
        using T = std::remove_cvref_t<decltype(padding.*field)>;
        Writer<T> writer(block, places, input, counts[Dim::kRows]);
        for (const RowSampling& row : rows) writer.put(row.*field);
        writer.pad(padding.*field);
    };
    column(StepInput::kTemperature, &RowSampling::temperature);
    column(StepInput::kTopK, &RowSampling::top_k);
    column(StepInput::kTopP, &RowSampling::top_p);
    column(StepInput::kMinP, &RowSampling::min_p);
    column(StepInput::kUniform, &RowSampling::uniform);
    column(StepInput::kNumLogprobs, &RowSampling::num_logprobs);
    column(StepInput::kRepetition, &RowSampling::repetition);
    column(StepInput::kFrequency, &RowSampling::frequency);
    column(StepInput::kPresence, &RowSampling::presence);

    const auto edits = sampling != nullptr ? sampling->edits : std::span<const LogitEdit>();
    const auto edit_column = [&](StepInput input, int32_t LogitEdit::* field, int32_t none) {
        Writer<> writer(block, places, input, counts[Dim::kEdits]);
        for (const LogitEdit& edit : edits) writer.put(edit.*field);
        writer.pad(none);
    };
    edit_column(StepInput::kEditRow, &LogitEdit::row, -1);
    edit_column(StepInput::kEditToken, &LogitEdit::token, 0);
    edit_column(StepInput::kEditCount, &LogitEdit::count, 0);
}

}  // namespace castiron::cuda
