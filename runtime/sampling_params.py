"""SamplingParams: how one request is decoded, checked at the edge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from .logits_processors import LogitsProcessor
from .param_values import (
    as_functions,
    as_integer,
    as_logit_bias,
    as_number,
    as_strings,
    as_token_ids,
    refuse,
)
from .structured_output import StructuredOutput

MAX_SEED = 2**64 - 1
#: More alternatives than anybody plots; keeps one request from making the engine copy the vocabulary each
#: step.
MAX_LOGPROBS = 100
MAX_STOP_STRINGS = 64
MAX_STOP_TOKENS = 1024
MAX_N = 128
MAX_SALT_CHARS = 1024
MAX_BAD_WORDS = 256
MAX_SPECULATIVE_TOKENS = 64

_SWITCHES = (
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "detokenize",
    "return_context_logits",
    "return_generation_logits",
    "use_beam_search",
)


@dataclass(frozen=True)
class SamplingParams:
    """How to decode one request.

    Args:
        max_tokens: new tokens at most (0 = only process the prompt); None means as many as fit into the
            engine's ``max_seq_len``.
        min_tokens: EOS and stop tokens cannot be chosen before this many new tokens (0 = off).
        temperature: divides the logits; 0 = greedy (the most likely token, no randomness).
        top_k: keep the k most likely tokens (0 or -1 = off).
        top_p: keep the smallest set of tokens whose probabilities reach top_p (1 = off).
        top_p_decay: each token makes top_p so many times what it was (1 = off), as in TensorRT-LLM.
        top_p_min: what it does not get below.
        top_p_reset_ids: tokens that make it what it was in the beginning.
        min_p: drop tokens less likely than min_p times the most likely one (0 = off).
        typical_p: keep the smallest set of tokens whose probabilities reach typical_p, nearest to the
            expected surprise first (Meister et al., 2022; 1 = off).
        seed: 64-bit seed of this request's random numbers; None draws one.
        repetition_penalty: > 1 makes tokens of prompt and output less likely (Keskar et al., 2019; 1 = off).
        presence_penalty: subtracted from the logit of every token already generated (0 = off).
        frequency_penalty: the same, times the number of occurrences (0 = off).
        stop: strings that end the text; matched across token borders.
        reasoning_markers: what opens and closes reasoning at the beginning of the output, in which stop
            strings are not looked for; an empty opening: the prompt has opened it (None = no reasoning).
        stop_token_ids: tokens that end the output besides the model's EOS tokens.
        ignore_eos: go on after the model's EOS tokens.
        logit_bias: {token id: number added to its logit}, before penalties and temperature; -100 and 100 all
            but forbid and force a token.
        allowed_token_ids: the only tokens that may be chosen (empty = all). Name the end-of-sequence token
            too if the output is to end by itself.
        bad_words: strings that the text may not contain, matched as the tokens they are made of, at the
            beginning of a word and inside one.
        no_repeat_ngram_size: no run of so many tokens may appear twice in prompt and output (0 = off).
        structured_output: the form that the text must have; the output ends when it is complete.
        logits_processors: functions that change the logits before each choice, one after the other; each is
            called with the tokens so far (prompt and output, a list) and the logits of the next one (float32
            [vocab]) and returns logits. They come before everything else here, run on a thread of the
            request's own, and have some seconds for a token.
        logprobs: return the log-probability of each token and of this many alternatives (None = none).
            They are the raw log-softmax of the logits, before penalties and temperature.
        prompt_logprobs: the same of every token of the prompt but the first, which nothing predicts (None =
            none). Such a request takes nothing from the prefix cache.
        return_context_logits: the raw logits of every prompt position; float32 rows of the whole vocabulary,
            so for short prompts.
        return_generation_logits: the raw logits that each new token was chosen from.
        truncate_prompt_tokens: keep so many of the prompt's last tokens; -1 = as many as fit into the
            engine's context beside ``max_tokens`` (None = all).
        n: outputs for each prompt; output k uses ``seed + k``. What is wanted of the prompt comes once.
        best_of: make so many outputs and return the ``n`` whose tokens' log-probabilities have the largest
            sum, best first; with ``use_beam_search`` the number of beams (None = ``n``).
        use_beam_search: search for the likeliest texts, as transformers' ``generate(num_beams=best_of)``
            does. Nothing is random, and the texts come when all are found.
        length_penalty: of a beam search: texts are ranked by their sum of log-probabilities divided by
            length ** length_penalty (0 = off).
        early_stopping: of a beam search, once it has as many finished texts as beams: True ends it, False
            when no beam would be better with its present length, "never" when none can become better.
        skip_special_tokens: leave special tokens out of the text.
        shown_special_tokens: but not these.
        include_stop_str_in_output: keep the stop string, or the text of the stop token, in the text.
        detokenize: False leaves ``text`` empty and saves the work; not possible with ``stop``.
        priority: smaller numbers are served first, and their cached prefixes kept longest; other than 0 only
            on an engine started with ``scheduling_policy="priority"``.
        cache_salt: cached prefixes are shared only by requests of the same salt: give each tenant one that
            the others cannot guess (None = shared by all requests without one).
        num_speculative_tokens: guesses of the next tokens in one step at most, where the engine was started
            with ``speculative_decoding`` (0 = none, None = as many as the engine says). Changes the speed,
            never the output.
        lora: name of the LoRA adapter to run with (None = the model as it is).

    Raises:
        ParameterError: (a RequestError) a value of the wrong type or out of range; the text says what is
        allowed.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    top_p_decay: float = 1.0
    top_p_min: float = 1e-6
    top_p_reset_ids: tuple[int, ...] = ()
    min_p: float = 0.0
    typical_p: float = 1.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    reasoning_markers: tuple[str, str] | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    no_repeat_ngram_size: int = 0
    structured_output: StructuredOutput | None = None
    logits_processors: tuple[LogitsProcessor, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_context_logits: bool = False
    return_generation_logits: bool = False
    truncate_prompt_tokens: int | None = None
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    skip_special_tokens: bool = True
    shown_special_tokens: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    priority: int = 0
    cache_salt: str | None = None
    num_speculative_tokens: int | None = None
    lora: str | None = None

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)  # frozen for everybody else

        if self.max_tokens is not None:
            put("max_tokens", as_integer("max_tokens", self.max_tokens, 0, 2**31 - 1))
        put("min_tokens", as_integer("min_tokens", self.min_tokens, 0, 2**31 - 1))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            refuse("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        put("temperature", as_number("temperature", self.temperature, 0.0, 1000.0))
        put("top_k", max(0, as_integer("top_k", self.top_k, -1, 2**31 - 1)))
        put("top_p", as_number("top_p", self.top_p, 0.0, 1.0))
        if self.top_p == 0.0:
            refuse("top_p", 0, "a number in (0, 1]; use temperature=0 for greedy decoding")
        put("min_p", as_number("min_p", self.min_p, 0.0, 1.0))
        for name in ("top_p_decay", "top_p_min", "typical_p"):
            put(name, as_number(name, getattr(self, name), 0.0, 1.0))
            if getattr(self, name) == 0.0:
                refuse(name, 0, "a number in (0, 1]")
        resets = self.top_p_reset_ids
        resets = (resets,) if isinstance(resets, int) and not isinstance(resets, bool) else resets
        put("top_p_reset_ids", as_token_ids("top_p_reset_ids", resets, MAX_STOP_TOKENS))
        if self.seed is not None:
            # Clients send signed 64-bit seeds; both halves of the range name a distinct stream.
            put("seed", as_integer("seed", self.seed, -(2**63), MAX_SEED) & MAX_SEED)
        put("repetition_penalty", as_number("repetition_penalty", self.repetition_penalty, 0.0, 100.0))
        if self.repetition_penalty == 0.0:
            refuse("repetition_penalty", 0, "a number greater than 0 (1 switches it off)")
        put("presence_penalty", as_number("presence_penalty", self.presence_penalty, -100.0, 100.0))
        put("frequency_penalty", as_number("frequency_penalty", self.frequency_penalty, -100.0, 100.0))
        put("stop", as_strings("stop", self.stop, MAX_STOP_STRINGS))
        if self.reasoning_markers is not None and not _are_markers(self.reasoning_markers):
            refuse("reasoning_markers", self.reasoning_markers, "two strings, the second not empty")
        put("stop_token_ids", as_token_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKENS))
        put("logit_bias", as_logit_bias(self.logit_bias))
        allowed = as_token_ids("allowed_token_ids", self.allowed_token_ids, None)
        if isinstance(self.allowed_token_ids, list) and not allowed:
            refuse("allowed_token_ids", [], "at least one token id, or nothing at all for no restriction")
        put("allowed_token_ids", tuple(sorted(set(allowed))))
        put("bad_words", as_strings("bad_words", self.bad_words, MAX_BAD_WORDS))
        put(
            "no_repeat_ngram_size",
            as_integer("no_repeat_ngram_size", self.no_repeat_ngram_size, 0, 2**31 - 1),
        )
        if self.structured_output is not None:
            if not isinstance(self.structured_output, StructuredOutput):
                refuse("structured_output", self.structured_output, "a StructuredOutput")
            if self.min_tokens:
                refuse(
                    "min_tokens", self.min_tokens, "0 with structured output, which says when it is complete"
                )
        put("logits_processors", as_functions("logits_processors", self.logits_processors))
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                put(name, as_integer(name, count, 0, MAX_LOGPROBS))
        if self.truncate_prompt_tokens is not None:
            kept = as_integer("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, 2**31 - 1)
            if kept == 0:
                refuse("truncate_prompt_tokens", 0, "1 or more, or -1 for as many as fit")
            put("truncate_prompt_tokens", kept)
        put(
            "shown_special_tokens",
            as_token_ids("shown_special_tokens", self.shown_special_tokens, MAX_STOP_TOKENS),
        )
        put("n", as_integer("n", self.n, 1, MAX_N))
        if self.best_of is not None:
            put("best_of", as_integer("best_of", self.best_of, 1, MAX_N))
            if self.best_of < self.n:
                refuse("best_of", self.best_of, f"n ({self.n}) or more")
        put("length_penalty", as_number("length_penalty", self.length_penalty, -100.0, 100.0))
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            refuse("early_stopping", self.early_stopping, 'true, false or "never"')
        put("priority", as_integer("priority", self.priority, -(2**31), 2**31 - 1))
        if self.num_speculative_tokens is not None:
            most = MAX_SPECULATIVE_TOKENS
            put(
                "num_speculative_tokens",
                as_integer("num_speculative_tokens", self.num_speculative_tokens, 0, most),
            )
        if self.lora is not None and not (isinstance(self.lora, str) and self.lora):
            refuse("lora", self.lora, "the name of an adapter")
        salt = self.cache_salt
        if salt is not None and not (isinstance(salt, str) and 1 <= len(salt) <= MAX_SALT_CHARS):
            refuse("cache_salt", salt, f"a string of 1 to {MAX_SALT_CHARS} characters")
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                refuse(name, getattr(self, name), "true or false")
        if self.stop and not self.detokenize:
            refuse("detokenize", False, "true when stop strings are given: they are matched on the text")
        if self.use_beam_search:
            self._check_beams()
        elif self.length_penalty != 1.0 or self.early_stopping is not False:
            name = "early_stopping" if self.length_penalty == 1.0 else "length_penalty"
            refuse(name, getattr(self, name), "nothing without use_beam_search")
        elif self.num_requests > self.n and self.temperature == 0.0:
            refuse("best_of", self.best_of, f"n ({self.n}) at temperature 0, which makes equal outputs")

    def _check_beams(self) -> None:
        plain = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
        for name, off in plain.items():
            if getattr(self, name) != off:
                refuse(name, getattr(self, name), f"{off:g} with use_beam_search, which draws nothing")
        if self.max_tokens == 0:
            refuse("max_tokens", 0, "at least 1 with use_beam_search")
        if self.stop:
            refuse("stop", self.stop, "stop_token_ids with use_beam_search: beams have no text yet")
        if self.structured_output is not None:
            refuse("structured_output", self.structured_output, "none with use_beam_search")
        if self.logprobs:
            refuse("logprobs", self.logprobs, "0 with use_beam_search: there are no alternatives")
        if self.logits_processors:
            refuse("logits_processors", self.logits_processors, "none with use_beam_search")
        if self.return_generation_logits:
            refuse("return_generation_logits", True, "false with use_beam_search")

    @property
    def num_requests(self) -> int:
        """Requests of the engine that the outputs of one prompt are made of."""
        return 1 if self.use_beam_search else self.best_of or self.n

    def for_request(self, j: int) -> SamplingParams:
        """These parameters for request ``j`` of ``num_requests``.

        A fixed seed must not give equal outputs, and the first request brings what is wanted of the prompt.
        Requests that are to be ranked need log-probabilities.
        """
        made = self
        if self.num_requests > self.n and self.logprobs is None:
            made = replace(made, logprobs=0)
        if j == 0:
            return made
        seed = None if self.seed is None else (self.seed + j) & MAX_SEED
        return replace(made, seed=seed, prompt_logprobs=None, return_context_logits=False)


def _are_markers(value: object) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) == 2
        and all(isinstance(x, str) for x in value)
        and bool(value[1])
    )
