"""One loaded core and the thread that routes its events; ModelRunner and AsyncEngine stand on it."""

from __future__ import annotations

import atexit
import hashlib
import os
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from castiron.errors import EngineError, RequestError

from .core_api import Core, CoreEvent, CoreTypes, EngineInfo
from .core_params import core_params
from .logits_processors import ProcessorThreads
from .mask_thread import MaskThread
from .outputs import Update
from .request import Request, Sink
from .request_check import check_prompt, check_request
from .request_errors import ParameterError, QueueFullError
from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from .grammar import Grammars, Matcher
    from .lora import Adapters, AdapterUse
    from .tokenizer import Tokenizer
    from .tokenizer_preload import TokenizerPreload

#: The poll's upper bound in seconds; only how fast ``close`` is noticed depends on it.
_POLL_SECONDS = 0.1


class Session:
    """Checks and submits requests, turns events into updates on one thread of its own.

    Args:
        core: the engine.
        info: its limits, EOS tokens and tokenizer folder.
        types: the core's parameter and error types.
        max_queue_size: requests that may wait beyond ``max_batch_size`` running ones; None = no bound.
        preload: a tokenizer that is being loaded already; None = load it at first use.
        adapters: LoRA adapters that requests may name; None = the engine was started without.
    """

    def __init__(
        self,
        core: Core,
        info: EngineInfo,
        types: CoreTypes,
        *,
        max_queue_size: int | None = None,
        preload: TokenizerPreload | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self.core = core
        self.adapters = adapters
        self.info = info
        self._types = types
        self._capacity = None if max_queue_size is None else info.max_batch_size + max_queue_size
        self._eos = frozenset(info.eos_token_ids)
        self._requests: dict[int, Request] = {}
        # Guards _requests, _closed and _failure. Submitting and entering the table are one step under it: the
        # core may answer before submit returns.
        self._wake = threading.Condition()
        self._closed = False
        self._failure: str | None = None
        self._after_batch: list[Callable[[], None]] = []
        self._tokenizer_lock = threading.Lock()
        self._grammars: Grammars | None = None
        self._masks = MaskThread(core)
        self._processors = ProcessorThreads(core)
        self._preload = preload
        self._progress = time.monotonic()
        self._thread = threading.Thread(target=self._dispatch, name="castiron-events", daemon=True)
        self._thread.start()
        self._process = os.getpid()
        # At exit Python kills daemon threads where they wait for the GIL, here inside the core's poll: the
        # unwinding of its C++ frames would abort the process.
        atexit.register(self.close)

    @cached_property
    def _loaded_tokenizer(self) -> Tokenizer | None:
        if self.info.tokenizer_dir is None:
            return None
        if self._preload is not None:
            return self._preload.result()
        from .tokenizer import Tokenizer

        return Tokenizer(self.info.tokenizer_dir)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The engine's tokenizer, loaded at first use; None when the engine has none."""
        with self._tokenizer_lock:
            return self._loaded_tokenizer

    def need_tokenizer(self) -> Tokenizer:
        """The tokenizer; raises RequestError when the engine has none."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise RequestError(
                "this engine was built without a tokenizer, so it takes token ids only; give input_ids, "
                "or put tokenizer.json into the checkpoint and build again"
            )
        return tokenizer

    @property
    def failure(self) -> str | None:
        """Why the session cannot serve any more; None while it can."""
        return self._failure

    @property
    def unfinished(self) -> int:
        """Requests that run or wait."""
        return len(self._requests)

    @property
    def capacity(self) -> int | None:
        """Requests that may run and wait together; None = no bound."""
        return self._capacity

    @property
    def seconds_since_progress(self) -> float:
        """Seconds since the engine last did something for a request; 0 while there is nothing to do."""
        return time.monotonic() - self._progress if self._requests else 0.0

    def on_batch(self, hook: Callable[[], None]) -> None:
        """Call ``hook`` on the session's thread after the updates of each poll."""
        self._after_batch.append(hook)

    def token_ids(self, prompt: Any) -> list[int]:
        """A prompt as a list of ids of the vocabulary, at least one; ParameterError for anything else."""
        return check_prompt(prompt, self.info.vocab_size)

    def check(
        self, prompt_ids: Any, params: SamplingParams, default_max_tokens: int | None = None
    ) -> tuple[list[int], SamplingParams]:
        """See ``check_request``, for this engine."""
        return check_request(prompt_ids, params, self.info, default_max_tokens)

    def submit(self, prompt_ids: Any, params: SamplingParams, sink: Sink) -> Request:
        """Queue one request (``params.n`` is the caller's business); its updates go to ``sink``.

        Args:
            prompt_ids: token ids: a list, a numpy array [n], or anything with ``tolist``.

        Raises:
            RequestError: the request is wrong, or the queue is full (QueueFullError).
            EngineError: the engine has failed or is closed.
        """
        ids, params = self.check(prompt_ids, params)
        make = None if self.info.tokenizer_dir is None else lambda: self._detokenizer(ids, params)
        request = Request(ids, params, self._eos, make, sink)
        core = core_params(params, self._types.make_params, self.info, self.need_tokenizer)
        prompt = array("i", ids)
        salt = b"" if params.cache_salt is None else _digest(params.cache_salt)
        matcher = self._matcher(params)
        if matcher is not None:
            core.first_mask = matcher.mask()
        if os.getpid() != self._process:
            raise EngineError(
                "this process was forked from the one that loaded the engine, and an engine's threads do not "
                "survive that; load it in the child"
            )
        adapter = None if params.lora is None else self.need_adapters().acquire(params.lora)
        try:
            with self._wake:
                self._check_alive()
                if self._capacity is not None and len(self._requests) >= self._capacity:
                    raise self._full()
                request.id = self._submit(prompt, core, params, salt, adapter, matcher)
                request.adapter, adapter = adapter, None
                if not self._requests:
                    self._progress = time.monotonic()
                self._requests[request.id] = request
                if params.logits_processors:
                    self._processors.start(request.id, ids, params.logits_processors)
                self._wake.notify()
        finally:
            if adapter is not None:
                self.need_adapters().release(adapter)
        return request

    def _submit(
        self,
        prompt: array[int],
        core: Any,
        params: SamplingParams,
        salt: bytes,
        adapter: AdapterUse | None,
        matcher: Matcher | None,
    ) -> int:
        """The core's id of the request, with the core's refusals as ours."""
        adapter_id = 0 if adapter is None else adapter.id
        try:
            return self._queue(
                lambda: self.core.submit(prompt, core, params.priority, salt, adapter_id), matcher
            )
        except ValueError as e:
            raise RequestError(str(e)) from None
        except self._types.queue_full as e:
            raise QueueFullError(f"{e}; try again later", retry_after=1) from None
        except self._types.dead as e:
            self._failure = str(e)
            raise EngineError(f"the engine stopped working: {e}; restart it") from None

    def need_adapters(self) -> Adapters:
        """The adapters; raises ParameterError when the engine was started without."""
        if self.adapters is None:
            raise ParameterError(
                "this engine was started without LoRA adapters; start it with --enable-lora "
                "(enable_lora=True in Python)",
                param="lora",
            )
        return self.adapters

    def prepare(self, params: SamplingParams) -> AdapterUse | None:
        """Do what can be done before ``submit``, which is quick then: the grammar is compiled and kept, the
        adapter is brought into memory, where it stays until it is given back to ``need_adapters().release``.

        Raises:
            RequestError: the grammar is wrong, or this engine cannot follow one; the adapter is unknown.
        """
        self._matcher(params)
        return None if params.lora is None else self.need_adapters().acquire(params.lora)

    def _matcher(self, params: SamplingParams) -> Matcher | None:
        """Where the output starts in its grammar; compiled now, unless it was before."""
        if params.structured_output is None:
            return None
        if not self.info.eos_token_ids:
            raise ParameterError(
                "structured output needs an end-of-sequence token, and this engine's checkpoint names none",
                param="structured_outputs",
            )
        with self._tokenizer_lock:
            if self._grammars is None:
                self._grammars = self._make_grammars()
        return self._grammars.matcher(params.structured_output)

    def _make_grammars(self) -> Grammars:
        from .grammar import Grammars

        tokenizer = self._loaded_tokenizer
        if tokenizer is None:
            raise ParameterError(
                "structured output needs a tokenizer, and this engine has none", param="structured_outputs"
            )
        return Grammars(tokenizer.backend.to_str, self.info.vocab_size, self.info.eos_token_ids)

    def _queue(self, submit: Callable[[], int], matcher: Matcher | None) -> int:
        return submit() if matcher is None else self._masks.submit(matcher, submit)

    def cancel(self, request: Request) -> None:
        """End a request early; its sink still gets a last update (``cancelled``) unless it is done."""
        if not request.done:
            self.core.cancel(request.id)

    def close(self) -> None:
        """Stop the engine; requests that still run end with an error. May be called twice."""
        if os.getpid() != self._process:
            return  # a forked child has neither of the threads that would be waited for
        with self._wake:
            if self._closed:
                return
            self._closed = True
            self._wake.notify()
        self._thread.join()
        self.core.shutdown()
        self._masks.close()
        self._processors.close()
        atexit.unregister(self.close)

    def _detokenizer(self, ids: list[int], params: SamplingParams) -> Any:
        tokenizer = self.need_tokenizer()
        return tokenizer.detokenizer(ids, params.skip_special_tokens, params.shown_special_tokens)

    def _full(self) -> QueueFullError:
        return QueueFullError(
            f"{len(self._requests)} requests are running or waiting, as many as this engine accepts; try "
            "again later",
            retry_after=1,
        )

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineError(f"the engine stopped working: {self._failure}; restart it")
        if self._closed:
            raise EngineError("the engine is closed; open it again with from_dir")

    def _dispatch(self) -> None:
        try:
            while True:
                with self._wake:
                    while not self._requests and not self._closed:
                        self._wake.wait()
                    if self._closed:
                        break
                self._route(self.core.poll(_POLL_SECONDS))
            self._end_all("the engine was closed while this request was running")
        except BaseException as e:  # nobody else would notice: the thread is the only one that polls
            self._failure = f"{type(e).__name__}: {e}"
            self._end_all(f"the engine stopped working: {self._failure}")

    def _route(self, events: Sequence[CoreEvent]) -> None:
        with self._wake:
            requests = [self._requests.get(event.request_id) for event in events]
        for event, request in zip(events, requests, strict=True):
            if event.finished:
                self._end(event, request)
            if request is None or request.done:
                continue
            update: Update | None
            try:
                update = request.accept(event)
            except Exception as e:  # one request's text must not take the others down
                request.done = True
                update = Update(finish_reason="error", error=f"the output cannot be decoded: {e}")
            if request.complete and not event.finished:
                self.core.cancel(request.id)
            if update is not None:
                request.sink(update)
        if events:
            self._progress = time.monotonic()
            for hook in self._after_batch:
                hook()

    def _end(self, event: CoreEvent, request: Request | None) -> None:
        """The engine is done with a request."""
        if self._failure is None and event.finish_reason == "error":
            self._failure = self.core.stats().get("dead") or None
        if request is None:
            return
        request.first_token_seconds, request.seconds = event.first_token_seconds, event.seconds
        with self._wake:
            del self._requests[event.request_id]
            self._masks.drop(event.request_id)
        if request.adapter is not None:
            self.need_adapters().release(request.adapter)

    def _end_all(self, why: str) -> None:
        with self._wake:
            requests, self._requests = list(self._requests.values()), {}
        for request in requests:
            if not request.done:
                request.done = True
                request.sink(Update(finish_reason="error", error=why))
        for hook in self._after_batch:
            hook()


def _digest(salt: str) -> bytes:
    """16 bytes that nobody finds a second salt for."""
    return hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16).digest()
