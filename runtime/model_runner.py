"""ModelRunner: the runner that TensorRT-LLM users know, over an engine in this process."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, overload

from castiron.errors import RequestError

from .batch import Batch
from .generate_arguments import merged_params, params_of_prompts, prompt_rows
from .loading import open_session
from .lora import LoRARequest
from .options import RuntimeOptions
from .outputs import RequestOutput
from .request_errors import ParameterError
from .sampling_params import SamplingParams
from .step_trace import chrome_trace

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from .chat_template import Message
    from .devices import DeviceChoice
    from .session import Session
    from .tokenizer import Tokenizer

#: A call that says nothing about length should come back soon.
_DEFAULT_MAX_TOKENS = 128


class ModelRunner:
    """Runs prompts on an engine. Thread-safe; all calls share one in-flight batch. Close it, or use ``with``.

    Args:
        session: a loaded engine; ``ModelRunner.from_dir`` makes one.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    @classmethod
    def from_dir(
        cls,
        engine_dir: str | os.PathLike[str],
        rank: int = 0,
        *,
        device: str = "auto",
        trust_plugins: bool = False,
        cuda_graphs: bool | None = None,
        num_threads: int | None = None,
        max_batch_size: int | None = None,
        max_num_tokens: int | None = None,
        kv_cache_blocks: int | None = None,
        kv_cache_memory: int | str | None = None,
        kv_cache_fraction: float | None = None,
        kv_cache_host_tier: int | str | None = None,
        kv_cache_disk_tier: int | str | None = None,
        kv_cache_disk_folder: str | None = None,
        enable_prefix_caching: bool = True,
        scheduling_policy: str = "fcfs",
        capacity_scheduler_policy: str = "guaranteed_no_evict",
        enable_lora: bool = False,
        lora_modules: Mapping[str, str] | None = None,
        max_loras: int | None = None,
        max_lora_rank: int | None = None,
        max_cpu_loras: int | None = None,
        watchdog_timeout: float = 600.0,
        speculative_decoding: str = "none",
        num_speculative_tokens: int | None = None,
        draft_engine: str | os.PathLike[str] | None = None,
    ) -> ModelRunner:
        """Load an engine that ``castiron build`` wrote.

        Args:
            engine_dir: its folder.
            rank: which part of a model split over several devices; 0 for an engine of one.
            device: "auto" (a GPU that the engine has a program for, else the CPU), "host", "cuda", "cuda:1".
            trust_plugins: run machine code for the CPU that a plugin put into the engine.
            cuda_graphs: record decode steps at start and replay them; None = yes, on a GPU.
            num_threads: compute threads of the CPU; default: the CPUs this process may use.
            max_batch_size, max_num_tokens: less than the engine's limits.
            kv_cache_blocks: size of the KV cache in blocks of 32 tokens.
            kv_cache_memory: the same in bytes, or as text such as ``"2GiB"``.
            kv_cache_fraction: the same as a part of the GPU's memory left by weights and activations.
            kv_cache_host_tier: memory of this machine for what the prefix cache has no room for.
            kv_cache_disk_tier, kv_cache_disk_folder: room on its disk for what that has no room for.
            enable_prefix_caching: use the keys and values of earlier prompts that begin alike.
            enable_lora, lora_modules, max_loras, max_lora_rank, max_cpu_loras: LoRA adapters, see
                ``RuntimeOptions``.
            scheduling_policy, capacity_scheduler_policy, watchdog_timeout: see ``RuntimeOptions``.
            speculative_decoding: "none", "ngram", "suffix" or "draft": guess tokens and check several in one
                step, for the same output sooner.
            num_speculative_tokens: guesses for one request in one step at most; default 8.
            draft_engine: folder of the engine that guesses, with the same tokenizer, for "draft".

        Raises:
            EngineError: no engine, a damaged one, or one for another version or device; an option over its
            limits.
            RequestError: one of ``lora_modules`` cannot be loaded.
        """
        options = RuntimeOptions(
            device=device,
            trust_plugins=trust_plugins,
            cuda_graphs=cuda_graphs,
            num_threads=num_threads,
            max_batch_size=max_batch_size,
            max_num_tokens=max_num_tokens,
            kv_cache_blocks=kv_cache_blocks,
            kv_cache_memory=kv_cache_memory,
            kv_cache_fraction=kv_cache_fraction,
            kv_cache_host_tier=kv_cache_host_tier,
            kv_cache_disk_tier=kv_cache_disk_tier,
            kv_cache_disk_folder=kv_cache_disk_folder,
            enable_prefix_caching=enable_prefix_caching,
            scheduling_policy=scheduling_policy,
            capacity_scheduler_policy=capacity_scheduler_policy,
            enable_lora=enable_lora,
            lora_modules=lora_modules or {},
            max_loras=max_loras,
            max_lora_rank=max_lora_rank,
            max_cpu_loras=max_cpu_loras,
            watchdog_timeout=watchdog_timeout,
            speculative_decoding=speculative_decoding,
            num_speculative_tokens=num_speculative_tokens,
            draft_engine=draft_engine,
        )
        return cls(open_session(engine_dir, rank, options))

    @overload
    def generate(
        self,
        input_ids: Any = None,
        prompts: str | Sequence[str] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        streaming: Literal[False] = False,
        **options: Any,
    ) -> list[RequestOutput]: ...

    @overload
    def generate(
        self,
        input_ids: Any = None,
        prompts: str | Sequence[str] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        streaming: Literal[True],
        **options: Any,
    ) -> Iterator[RequestOutput]: ...

    def generate(
        self,
        input_ids: Any = None,
        prompts: str | Sequence[str] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        streaming: bool = False,
        **options: Any,
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        """Generate for one prompt or several; a prompt that cannot be served gets an ``error``, the others
        go on.

        Args:
            input_ids: ``[1, 2, 3]``, ``[[1, 2], [3]]``, or numpy arrays / tensors of the same shapes.
            prompts: a text or several, instead of ``input_ids``; BOS is added as the checkpoint says.
            sampling_params: how to decode all prompts, or a list with one for each; without it greedy, and
                128 new tokens or as many as fit.
            streaming: give an iterator of partial results instead: each is the whole result of one prompt so
                far, with what is new in ``outputs[k].text_diff`` and ``token_ids_diff``.
            options: any field of SamplingParams, which then overrides ``sampling_params``; also
                TensorRT-LLM's ``num_beams`` (more than 1: a beam search), ``max_new_tokens``,
                ``random_seed``, ``num_return_sequences``, and ``end_id`` (this token instead of the model's
                EOS tokens; -1 = never stop). Without ``temperature``, decoding is greedy unless ``top_k``
                (other than 1) or ``top_p`` asks for sampling, as in TensorRT-LLM. ``lora`` names an
                adapter; ``lora_request`` is a LoRARequest instead, whose adapter is loaded if it is not yet.

        Returns:
            One result for each prompt, in order.

        Raises:
            RequestError: parameters that no prompt could be served with.
            EngineError: the runner is closed or its engine has failed.
        """
        ids, texts = prompt_rows(input_ids, prompts)
        params = params_of_prompts(sampling_params, self._named_adapter(options), len(ids))
        cap = None if sampling_params is not None else _DEFAULT_MAX_TOKENS
        batch = Batch(self._session, ids, texts, params, cap)
        return batch.stream() if streaming else batch.run()

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        template_options: dict[str, Any] | None = None,
        streaming: bool = False,
        **options: Any,
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        """Answer a conversation (``[{"role": "user", "content": "..."}]``) by the engine's chat template."""
        ids = self.tokenizer.encode_chat(messages, **(template_options or {}))
        params = merged_params(sampling_params, self._named_adapter(options))
        batch = Batch(self._session, [ids], [None], [params])
        return batch.stream() if streaming else batch.run()

    def load_lora(self, name: str, path: str | os.PathLike[str]) -> None:
        """Load a LoRA adapter; requests name it by ``lora=name``.

        Args:
            path: folder with PEFT's adapter_config.json and adapter_model.safetensors.

        Raises:
            RequestError: the adapter cannot be used, or the runner was started without ``enable_lora``.
        """
        self._session.need_adapters().load(name, path)

    def unload_lora(self, name: str) -> None:
        """Forget an adapter; requests that use it go on, and its memory goes with the last of them.

        Raises:
            RequestError: there is none of this name.
        """
        self._session.need_adapters().unload(name)

    def _named_adapter(self, options: dict[str, Any]) -> dict[str, Any]:
        """``options`` with the adapter of a ``lora_request`` loaded and named."""
        request = options.pop("lora_request", None)
        if request is None:
            return options
        if not isinstance(request, LoRARequest):
            raise ParameterError(
                f"lora_request is of type {type(request).__name__}; expected LoRARequest",
                param="lora_request",
            )
        adapters = self._session.need_adapters()
        if request.lora_path and request.lora_name not in adapters.paths:
            adapters.load(request.lora_name, request.lora_path)
        return {**options, "lora": request.lora_name}

    def context_logits(self, token_ids: Any, *, lora: str | None = None) -> npt.NDArray[np.float32]:
        """Logits of every position of a prompt, float32 [len(token_ids), vocab].

        Args:
            token_ids: at most ``max_seq_len`` ids.
            lora: name of the adapter to run with.

        Raises:
            RequestError: ids outside the vocabulary, or too many.
        """
        params = SamplingParams(max_tokens=0, detokenize=False, return_context_logits=True, lora=lora)
        (result,) = Batch(self._session, [token_ids], [None], [params]).run()
        if result.context_logits is None:
            raise RequestError(result.error or "the engine gave no logits")
        return result.context_logits

    @property
    def tokenizer(self) -> Tokenizer:
        """The engine's tokenizer; raises RequestError when it was built without one."""
        return self._session.need_tokenizer()

    @property
    def session(self) -> Session:
        """The loaded engine, with its limits in ``session.info``."""
        return self._session

    @property
    def device(self) -> DeviceChoice | None:
        """Which of the engine's programs runs, where, and why."""
        return self._session.info.device

    def stats(self) -> dict[str, Any]:
        """Counters and gauges of the runtime: requests, KV blocks, tokens, times of the last step."""
        return self._session.core.stats()

    def chrome_trace(self, steps: int = 1024) -> dict[str, Any]:
        """The last steps, at most 1,024, as a Chrome trace (JSON for https://ui.perfetto.dev)."""
        return chrome_trace(self._session.core.stats(steps).get("recent_steps", []))

    def close(self) -> None:
        """Stop the engine and free its memory."""
        self._session.close()

    def __enter__(self) -> ModelRunner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
