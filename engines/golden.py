"""Golden outputs: what the source model answers to a few token sequences, kept in the engine for ``castiron
verify``.

One sequence serves many prompt lengths: attention is causal, so row i of a long pass is also the last row of
a prompt of i + 1 tokens. A pass of the source model may stream all its weights from disk, so passes are what
is saved here: one per sequence, plus one per decode step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from castiron.errors import BuildError, EngineError

from .program import Limits
from .weights_file import parse_header

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

MAX_BYTES = 1 << 30
#: Decode starts one token before a KV block is full (blocks of 32), so that it also opens the next block.
_DECODE_PREFIX = 31
_DECODE_STEPS = 4
#: Longer than one attention segment (256 keys) and than the small sliding windows; cheap enough for any
#: model.
_LONG = 320
_SHORT = 40
_LOGIT_BYTES = 32 << 20


class SourceModel(Protocol):
    """The model that the engine must agree with."""

    def logits(self, token_ids: Sequence[int], rows: Sequence[int]) -> Floats:
        """Return float32 [len(rows), vocab]: logits at ``rows`` of one pass over ``token_ids``."""


@dataclass(frozen=True)
class GoldenSequence:
    """``logits`` [len(rows), V] belong to ``rows`` of ``tokens``.

    ``continuation`` is what the source model says greedily after the first ``prefix`` tokens; row k of
    ``decode_logits`` [len(continuation) - 1, V] follows continuation[k]. Both are empty where nothing was
    decoded.
    """

    tokens: Ints
    rows: Ints
    logits: Floats
    prefix: int
    continuation: Ints
    decode_logits: Floats


def make_golden(
    source: SourceModel,
    vocab_size: int,
    limits: Limits,
    tokenizer_ids: Sequence[int] | None = None,
    seed: int = 0,
    long_prompt: int = _LONG,
) -> dict[str, np.ndarray[Any, Any]]:
    """Ask ``source`` for golden outputs.

    vocab_size: token ids drawn at random stay below it (give the ids that the tokenizer knows).
    limits: sequences fit into ``max_seq_len``.
    tokenizer_ids: a natural text; it makes the main sequence, and what follows a second one (random ids where
    it is too short: some of them are switches that flip by a rounding, which text has not). Without it:
    random ids only.
    long_prompt: tokens of the main sequence at most, before limits.

    Returns the arrays of golden.safetensors; ``read_golden`` is the inverse of storing them.
    """
    rng = np.random.default_rng(seed)
    longest = max(1, min(long_prompt, limits.max_seq_len))
    given = np.asarray([] if tokenizer_ids is None else tokenizer_ids, np.int32)
    text, rest = given[:longest], given[longest:]
    main = np.concatenate([text, rng.integers(0, vocab_size, longest - len(text), dtype=np.int32)])
    steps = min(_DECODE_STEPS, limits.max_seq_len - min(_DECODE_PREFIX, len(main)))
    arrays = _sequence(source, main, vocab_size, steps)
    named: dict[str, np.ndarray[Any, Any]] = {f"0.{name}": array for name, array in arrays.items()}
    if len(text):
        length = min(_SHORT, longest)
        fits = len(rest) >= length
        short = rest[:length] if fits else rng.integers(0, vocab_size, length, dtype=np.int32)
        named.update({f"1.{name}": array for name, array in _sequence(source, short, vocab_size, 0).items()})
    return named


def golden_bytes(vocab_size: int, limits: Limits) -> int:
    """Size of what ``make_golden`` returns for a model with a tokenizer, nearly all of it logits."""
    longest = min(_LONG, limits.max_seq_len)
    lengths = (longest, min(_SHORT, longest))
    rows = sum(len(_rows(length, min(_DECODE_PREFIX, length), vocab_size)) for length in lengths)
    return (rows + _DECODE_STEPS) * vocab_size * 4


def _sequence(source: SourceModel, tokens: Ints, vocab: int, steps: int) -> dict[str, np.ndarray[Any, Any]]:
    length = len(tokens)
    prefix = min(_DECODE_PREFIX, length)
    rows = _rows(length, prefix, vocab)
    logits = _finite(source.logits(tokens.tolist(), rows))
    continuation: list[int] = []
    decoded: list[Floats] = []
    if steps > 0:
        # Over `vocab` columns only: ids that the tokenizer lacks are never sampled.
        continuation.append(int(logits[rows.index(prefix - 1), :vocab].argmax()))
        for _ in range(steps - 1):
            so_far = tokens[:prefix].tolist() + continuation
            decoded.append(_finite(source.logits(so_far, [len(so_far) - 1]))[0])
            continuation.append(int(decoded[-1][:vocab].argmax()))
    return {
        "tokens": tokens,
        "rows": np.asarray(rows, np.int32),
        "logits": logits,
        "prefix": np.asarray([prefix], np.int32),
        "continuation": np.asarray(continuation, np.int32),
        "decode_logits": np.stack(decoded) if decoded else np.zeros((0, logits.shape[1]), np.float32),
    }


def _finite(logits: Any) -> Floats:
    found = np.asarray(logits, np.float32)
    if not np.isfinite(found).all():
        raise BuildError(
            "the source model itself computes logits that are infinite or NaN in float32: its weights or "
            "scales are damaged, or it overflows. Run it in transformers, or download the checkpoint again."
        )
    return found


def _rows(length: int, prefix: int, vocab: int) -> list[int]:
    """Choose rows: the ends of prompts of several lengths, both sides of every border, and an even spread."""
    borders = (0, 6, prefix - 1, 31, 32, 39, 63, 64, 127, 128, 255, 256, length - 1)
    rows = {row for row in borders if 0 <= row < length}
    budget = max(len(rows), min(96, _LOGIT_BYTES // (4 * vocab)))
    spread = np.linspace(0, length - 1, max(2, min(length, budget - len(rows)))).astype(int).tolist()
    for row in spread:
        if len(rows) < budget:
            rows.add(row)
    return sorted(rows)


def pack_arrays(arrays: Mapping[str, np.ndarray[Any, Any]]) -> bytes:
    """Store float32 and int32 arrays as safetensors bytes."""
    table: dict[str, Any] = {}
    offset = 0
    for name, array in arrays.items():
        code = {"float32": "F32", "int32": "I32"}[array.dtype.name]
        table[name] = {
            "dtype": code,
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return (
        len(text).to_bytes(8, "little")
        + text
        + b"".join(np.ascontiguousarray(a).tobytes() for a in arrays.values())
    )


def unpack_arrays(data: bytes, where: str) -> dict[str, np.ndarray[Any, Any]]:
    """Inverse of ``pack_arrays``; raises EngineError on anything else."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > len(data) - 8:
        raise EngineError(f"{where} is truncated.")
    entries = parse_header(data[8 : 8 + length], 8 + length, len(data), where, align=4)
    arrays = {}
    for name, entry in entries.items():
        if entry.dtype == "BF16":
            raise EngineError(f"{where}: {name[:80]!r} must be float32 or int32.")
        kind = np.float32 if entry.dtype == "F32" else np.int32
        flat = np.frombuffer(data, kind, entry.nbytes // 4, entry.offset)
        arrays[name] = flat.reshape(entry.shape)
    return arrays


def read_golden(arrays: Mapping[str, np.ndarray[Any, Any]], vocab_size: int) -> list[GoldenSequence]:
    """Group the arrays of golden.safetensors by sequence; raises EngineError where they do not fit."""
    sequences = []
    for index in range(len({name.partition(".")[0] for name in arrays})):
        try:
            tokens, rows, logits, prefix, continuation, decode_logits = (
                arrays[f"{index}.{name}"]
                for name in ("tokens", "rows", "logits", "prefix", "continuation", "decode_logits")
            )
        except KeyError as error:
            raise EngineError(f"golden.safetensors lacks {error.args[0]!r}. Rebuild the engine.") from None
        ints = all(
            array.dtype == np.int32 and array.ndim == 1 for array in (tokens, rows, prefix, continuation)
        )
        shapes = (len(rows), vocab_size), (max(len(continuation) - 1, 0), vocab_size)
        if not ints or (logits.shape, decode_logits.shape) != shapes or len(prefix) != 1 or not len(tokens):
            raise EngineError(f"golden.safetensors: the arrays of sequence {index} do not fit together.")
        if (
            not _within(tokens, vocab_size)
            or not _within(continuation, vocab_size)
            or not _within(rows, len(tokens))
            or not 1 <= int(prefix[0]) <= len(tokens)
            or not len(rows)
            or (len(continuation) and int(prefix[0]) - 1 not in rows)
            or logits.dtype != np.float32
            or decode_logits.dtype != np.float32
            or not (np.isfinite(logits).all() and np.isfinite(decode_logits).all())
        ):
            raise EngineError(f"golden.safetensors: sequence {index} holds values out of range.")
        sequences.append(GoldenSequence(tokens, rows, logits, int(prefix[0]), continuation, decode_logits))
    return sequences


def _within(values: Ints, end: int) -> bool:
    return not len(values) or (int(values.min()) >= 0 and int(values.max()) < end)


def count_rows(sequences: Sequence[GoldenSequence]) -> tuple[int, int]:
    """Return (rows of prefill, rows of decode) over all sequences."""
    return sum(len(s.rows) for s in sequences), sum(math.prod(s.decode_logits.shape[:1]) for s in sequences)
