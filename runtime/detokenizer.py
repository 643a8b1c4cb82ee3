"""Token ids to text, one token at a time, so that the pieces joined are the text of the whole."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Container, Sequence
from typing import Protocol

#: Tokens of the prompt that the output's first piece is decoded with: decoders look one word back at most.
_PRIME_TOKENS = 6
#: A character has at most four bytes, so more undecodable tokens than this are not its beginning.
_MAX_PENDING = 8
_REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """Turns a request's tokens into text piece by piece."""

    def push(self, token: int) -> str:
        """Add a token; returns the text that is now certain, maybe empty."""

    def flush(self) -> str:
        """No more tokens: returns what is left, with U+FFFD for bytes that are not UTF-8."""


class ByteLevelDetokenizer:
    """For byte-level BPE (GPT-2, Llama 3, Qwen, ...): tokens are bytes, so UTF-8 decoding is all there is to
    do.

    Args:
        bytes_of: the bytes of a token id; empty for tokens that are left out.
    """

    __slots__ = ("_bytes_of", "_decode")

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def push(self, token: int) -> str:
        """Add a token; bytes that do not complete a character wait for the next token."""
        return self._decode(self._bytes_of(token))

    def flush(self) -> str:
        """End the text; an unfinished character becomes U+FFFD."""
        return self._decode(b"", True)


class WindowDetokenizer:
    """For any decoder: decodes a window of recent tokens with and without the new ones and gives the
    difference.

    The window starts where an earlier piece of text started, never inside a character: decoders that fall
    back
    to bytes turn a whole run of byte tokens into U+FFFD when it is cut inside a character.

    Args:
        decode: text of a list of ids, with special tokens.
        prompt_ids: the text continues these, which decides about a leading space.
        skip: ids that are left out of the text.
    """

    __slots__ = ("_context", "_decode", "_pending", "_shown", "_skip")

    def __init__(
        self, decode: Callable[[Sequence[int]], str], prompt_ids: Sequence[int], skip: Container[int]
    ) -> None:
        self._decode = decode
        self._skip = skip
        self._context = [t for t in prompt_ids[-_PRIME_TOKENS:] if t not in skip]
        while self._context and self._text(self._context).startswith(_REPLACEMENT):
            del self._context[0]
        self._shown = self._text(self._context)
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """Add a token; text that ends inside a character waits for the next token."""
        if token in self._skip:
            return ""
        self._pending.append(token)
        text = self._text(self._context + self._pending)
        undecided = len(text) <= len(self._shown) or text.endswith(_REPLACEMENT)
        if undecided and len(self._pending) < _MAX_PENDING:
            return ""
        return self._advance(text)

    def flush(self) -> str:
        """End the text with whatever the waiting tokens decode to."""
        return self._advance(self._text(self._context + self._pending)) if self._pending else ""

    def _advance(self, text: str) -> str:
        piece = text[_common_prefix(text, self._shown) :]
        if piece:  # else the tokens that were shown stay: to begin behind none would be to begin a text
            self._context = self._pending
            self._shown = self._text(self._context)
        self._pending = []
        return piece

    def _text(self, ids: list[int]) -> str:
        return self._decode(ids) if ids else ""


def _common_prefix(a: str, b: str) -> int:
    if a.startswith(b):
        return len(b)
    return next(i for i, (x, y) in enumerate(zip(a + "\0", b, strict=False)) if x != y)
