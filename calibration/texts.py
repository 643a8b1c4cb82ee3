"""Texts as token windows: what a model is calibrated on and what its accuracy is measured on.

A text becomes token ids without special tokens, all of it, and is cut into windows of one length that do not
overlap. Where the tokenizer begins texts with a token of its own (BOS), each window begins with it too.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from castiron.errors import BuildError

Ids = npt.NDArray[np.int64]

#: Files that are read in a folder; others are left alone.
_SUFFIXES: Final = (".txt", ".md", ".jsonl")
#: Package data: prose, dialogue, code; see default_texts/README.md for where it comes from.
CALIBRATION_TEXT: Final = "calibration.txt"
HELD_OUT_TEXT: Final = "held_out.txt"
#: More of a text than this is not read: a calibration uses some hundred thousand tokens at most.
_MOST_BYTES: Final = 64 << 20


@dataclass(frozen=True)
class Text:
    """A text and who it is: ``name`` for people, ``sha256`` of its UTF-8 bytes."""

    name: str
    content: str

    @property
    def sha256(self) -> str:
        """Identity of the content."""
        return hashlib.sha256(self.content.encode()).hexdigest()


def default_text(name: str) -> Text:
    """A text that ships with castiron: ``CALIBRATION_TEXT`` or ``HELD_OUT_TEXT``."""
    content = files("castiron.calibration").joinpath("default_texts", name).read_text("utf-8")
    return Text(f"castiron {name}", content)


def read_text(path: Path) -> Text:
    """A file, or every .txt, .md and .jsonl file of a folder in the order of their names.

    A .jsonl file has an object with a string ``text`` in each line. Raises BuildError for anything else.
    """
    if path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES and file.is_file())
        if not found:
            raise BuildError(f"{path}: no {', '.join(_SUFFIXES)} file in this folder; expected some text")
    elif path.is_file():
        found = [path]
    else:
        raise BuildError(f"{path}: no such file or folder; expected a text file or a folder of text files")
    parts, size = [], 0
    for file in found:
        if size >= _MOST_BYTES:
            break
        part = _read_file(file)
        parts.append(part)
        size += len(part)
    content = "\n\n".join(parts)
    if not content.strip():
        raise BuildError(f"{path}: holds no text")
    return Text(path.name, content)


def _read_file(file: Path) -> str:
    with file.open("rb") as stream:
        raw = stream.read(_MOST_BYTES)
    try:
        # A cut may fall inside a character: what is left of it goes.
        content = raw.decode("utf-8", "ignore" if len(raw) == _MOST_BYTES else "strict")
    except UnicodeDecodeError as error:
        raise BuildError(f"{file}: is not UTF-8 text ({error.reason} at byte {error.start})") from None
    return _json_lines(file, content) if file.suffix == ".jsonl" else content


def _json_lines(file: Path, content: str) -> str:
    texts = []
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record: Any = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or not isinstance(record.get("text"), str):
            raise BuildError(f'{file}, line {number}: expected a JSON object with a string "text"')
        texts.append(record["text"])
    return "\n\n".join(texts)


@dataclass(frozen=True)
class Windows:
    """Token ids [count, length]; ``begun``: the first token of each is the tokenizer's own."""

    ids: Ids
    begun: bool
    data: str
    sha256: str

    @property
    def predictions(self) -> int:
        """Tokens that a model predicts from those before them: all but the first of each window."""
        return int(self.ids.shape[0] * (self.ids.shape[1] - 1))


def token_windows(folder: Path, text: Text, length: int, count: int | None = None) -> Windows:
    """Windows of ``length`` tokens: the first ``count``, or with None all; the tokenizer is ``folder``'s.

    Raises BuildError where the text has not a single window of tokens.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    begin = _begin(tokenizer)
    body = length - len(begin)
    ids = np.asarray(tokenizer.encode(text.content, add_special_tokens=False).ids, np.int64)
    if len(ids) < body:
        raise BuildError(
            f"{text.name}: has {len(ids)} tokens, and a window is {length}; give more text or shorter windows"
        )
    bodies = ids[: len(ids) // body * body].reshape(-1, body)
    if count is not None:
        bodies = bodies[:count]
    starts = np.broadcast_to(np.asarray(begin, np.int64), (len(bodies), len(begin)))
    return Windows(np.concatenate([starts, bodies], 1), bool(begin), text.name, text.sha256)


def spread(windows: Windows, count: int) -> Windows:
    """``count`` of the windows, at even distances over the text; all where there are not more."""
    have = len(windows.ids)
    if have <= count:
        return windows
    chosen = np.arange(count) * have // count
    return Windows(windows.ids[chosen], windows.begun, windows.data, windows.sha256)


def random_windows(vocabulary: int, length: int, count: int, seed: int = 0) -> Windows:
    """Windows of random ids, for a checkpoint without a tokenizer."""
    ids = np.random.default_rng(seed).integers(0, vocabulary, (count, length))
    digest = hashlib.sha256(ids.tobytes()).hexdigest()
    return Windows(ids.astype(np.int64), False, "random token ids", digest)


def _begin(tokenizer: Any) -> list[int]:
    """Special tokens that the tokenizer puts before a text."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a", add_special_tokens=True).ids
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return list(whole[:start])
    return []
