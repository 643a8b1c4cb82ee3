"""Grammars at work: compiled by llguidance, kept for the next request, one matcher for each output."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from castiron.errors import EngineError

from .request_errors import ParameterError
from .structured_output import StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

#: Compiled grammars that are kept; a service has a handful of schemas.
CACHE_SIZE = 64
#: The exponential ones end here instead of in minutes of compiling. With this much fuel a hostile regular
#: expression takes 15 MB and 0.2 s (95 MB and 1.8 s with five times as much); 4,096 choices need less.
_LEXER_FUEL, _GRAMMAR_SIZE, _STEP_ITEMS = 200_000, 500_000, 50_000
#: Between the tokens of JSON: blanks as people write them, on one line or on many with indentation. With no
#: bound a small model that is at a loss writes line breaks until its tokens are used up. A schema's own
#: "x-guidance" goes first.
_JSON_BLANKS = r"(\x20{1,2}|\x20?\r?\n[\x20\x09]{0,60})"


class Grammars:
    """Compiles grammars for one tokenizer. Any thread; compiling takes milliseconds to a second.

    Args:
        tokenizer: gives the text of tokenizer.json, at the first grammar. No path: a file may be gone by
            then, or be another engine's.
        vocab_size: columns of the logits.
        eos_token_ids: tokens that may end a text once it is complete.
    """

    def __init__(self, tokenizer: Callable[[], str], vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._source = tokenizer
        self._words = -(-vocab_size // 32)
        self._vocab_size = vocab_size
        self._eos = list(eos_token_ids)
        self._lock = threading.Lock()
        self._ready: LLTokenizer | None = None
        self._cache: OrderedDict[tuple[str, str], _Compiled] = OrderedDict()

    def matcher(self, wanted: StructuredOutput) -> Matcher:
        """A matcher at the beginning of the text.

        Raises:
            ParameterError: the grammar is wrong, unsupported or too complex; the text says where.
        """
        source = wanted.source
        with self._lock:
            found = self._cache.get(source)
            if found is not None:
                self._cache.move_to_end(source)
        if found is None:
            found = self._compiled(*source)
            with self._lock:
                self._cache[source] = found
                while len(self._cache) > CACHE_SIZE:
                    self._cache.popitem(last=False)
        return Matcher(found.matcher.deep_copy(), self._words, self._eos, found.first_mask)

    def _compiled(self, kind: str, text: str) -> _Compiled:
        from llguidance import LLMatcher, LLParserLimits
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            if kind == "json_schema":
                blanks: JsonCompileOptions = {"whitespace_pattern": _JSON_BLANKS}
                grammar = LLMatcher.grammar_from_json_schema(text, defaults=blanks)
            elif kind == "regex":
                grammar = LLMatcher.grammar_from_regex(text)
            else:
                grammar = LLMatcher.grammar_from_lark(any_to_lark(text) if kind == "grammar" else text)
            limits = LLParserLimits(
                initial_lexer_fuel=_LEXER_FUEL, max_grammar_size=_GRAMMAR_SIZE, step_max_items=_STEP_ITEMS
            )
            matcher = LLMatcher(self._tokenizer(), grammar, log_level=0, limits=limits)
        except Exception as e:  # llguidance's parsers raise kinds of their own
            raise ParameterError(
                f"the {_NAMES[kind]} cannot be used: {_first(e)}", param="structured_outputs"
            ) from None
        if matcher.is_error():
            raise ParameterError(
                f"the {_NAMES[kind]} cannot be used: {_first(matcher.get_error())}",
                param="structured_outputs",
            )
        try:
            # Here, on the caller's thread, and on a copy: the first is often the most expensive. It is kept:
            # copies share what bounds the grammar's size, so that it could fail when computed again.
            first_mask = Matcher(matcher.deep_copy(), self._words, self._eos).mask().copy()
            first_mask.setflags(write=False)  # of all requests that follow it
        except RuntimeError as e:
            raise ParameterError(
                f"the {_NAMES[kind]} matches no text, or is too complex: {e}", param="structured_outputs"
            ) from None
        return _Compiled(matcher, first_mask)

    def _tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        with self._lock:
            if self._ready is None:
                try:
                    self._ready = LLTokenizer(
                        self._source(), n_vocab=self._vocab_size, eos_token=self._eos or None
                    )
                except ValueError as e:
                    raise EngineError(
                        f"the engine's tokenizer cannot be used for structured output: {_first(e)}"
                    ) from None
            return self._ready


@dataclass(frozen=True)
class _Compiled:
    """A grammar ready for use; ``first_mask`` is that of the first token."""

    matcher: LLMatcher
    first_mask: npt.NDArray[np.uint32]


class Matcher:
    """Where one output stands in its grammar. One thread at a time.

    Args:
        first_mask: what ``mask`` returns before the first token, where it is known.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        words: int,
        eos_token_ids: Sequence[int],
        first_mask: npt.NDArray[np.uint32] | None = None,
    ) -> None:
        self._matcher = matcher
        self._first_mask = first_mask
        self._mask = np.zeros(words, np.uint32)
        self._ends = np.zeros(words, np.uint32)
        for token in eos_token_ids:
            self._ends[token // 32] |= np.uint32(1 << (token % 32))

    def mask(self) -> npt.NDArray[np.uint32]:
        """Bits of the tokens that may come next (bit t % 32 of word t // 32), valid until the next call.

        Raises:
            RuntimeError: the grammar has become too complex, or holds a token that it should not.
        """
        if self._first_mask is not None:
            return self._first_mask
        if self.ended:
            return self._ends
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        self._check()
        return self._mask

    def masks_along(self, drafts: Sequence[int]) -> npt.NDArray[np.uint32]:
        """Masks [n, words]: the next token's, and that of the token behind each draft, as far as the grammar
        takes the drafts and does not end.

        Raises:
            RuntimeError: as ``mask``, for the next token alone.
        """
        if not drafts:
            return self.mask()[np.newaxis]
        masks = [self.mask().copy()]
        ahead = Matcher(self._matcher.deep_copy(), len(self._mask), ())
        for token in drafts:
            if not _has(masks[-1], token) or _has(self._ends, token):
                break
            try:
                ahead.advance([token])
                masks.append(self._ends if ahead.ended else ahead.mask().copy())
            except RuntimeError:  # whoever gets there will see it
                break
        return np.stack(masks)

    @property
    def ended(self) -> bool:
        """Whether the text is complete and nothing can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def advance(self, tokens: Sequence[int]) -> None:
        """Take tokens that were generated. Raises RuntimeError as ``mask`` does."""
        if tokens:
            self._first_mask = None
        self._matcher.consume_tokens(list(tokens))
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RuntimeError(_first(self._matcher.get_error()))


def _has(mask: npt.NDArray[np.uint32], token: int) -> bool:
    return bool(mask[token // 32] >> np.uint32(token % 32) & np.uint32(1))


_NAMES = {
    "json_schema": "JSON schema",
    "regex": "regular expression",
    "grammar": "grammar",
    "lark": "grammar",
}


def _first(error: Any) -> str:
    """The beginning of a message, which quotes the grammar and the parser's state behind it."""
    return " ".join(str(error).partition("<state>")[0].split())[:300]
