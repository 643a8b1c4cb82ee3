"""From an engine folder to a running session."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from castiron.errors import EngineError

from ..engines import open_engine
from ..engines.kernel_paths import kernel_paths
from ..engines.precision import precision
from ..engines.program import module_sizes
from .core_api import Core, CoreTypes, EngineInfo
from .devices import DeviceChoice, choose_device
from .options import RuntimeOptions
from .phases import Phases
from .session import Session
from .tokenizer_preload import TokenizerPreload

if TYPE_CHECKING:
    from ..engines import Engine, Program
    from .lora import Adapters

_NO_PROBE: dict[str, Any] = {"devices": [], "driver": 0, "error": ""}
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


@dataclass(frozen=True)
class LoadedCore:
    """A started core, the module it comes from, the program it runs, and why that one."""

    core: Core
    module: Any
    program: Program
    choice: DeviceChoice


def load_core(engine: Engine, options: RuntimeOptions, **core_options: Any) -> LoadedCore:
    """Start the core on the device that ``options`` ask for.

    core_options: of ``_core.Engine``, beyond those that follow from ``options``; None means its default.

    Raises EngineError when no program of the engine runs here, or when it cannot be loaded.
    """
    module = import_core()
    # Looking for GPUs loads the driver, which takes a while: not for an engine that has no use for one.
    asks = options.device != "auto" or engine.targets != ["host"]
    probe = module.cuda_probe() if asks and options.device != "host" else _NO_PROBE
    choice = choose_device(engine, options.device, probe)
    program = engine.program(choice.target)
    if options.wants_lora:
        check_takes_adapters(engine, program, choice)
        core_options |= {
            "max_loras": options.lora_limits.in_step,
            "max_lora_rank": lora_rank(program, options),
        }
    if choice.gpu is None and program.kernels and not options.trust_plugins:
        raise EngineError(
            f"{engine.path} brings machine code of plugins for the CPU ({len(program.kernels)} kernels), "
            "which could do anything that you can; if you trust whoever built it, allow it with "
            "--trust-plugins (trust_plugins=True in Python)"
        )
    given: dict[str, Any] = {
        "num_threads": options.num_threads,
        "max_batch_size": options.max_batch_size,
        "max_num_tokens": options.max_num_tokens,
        "kv_cache_blocks": options.kv_cache_blocks,
        "kv_cache_bytes": _size("kv_cache_memory", options.kv_cache_memory),
        "max_queued_tokens": options.max_queued_tokens,
        "host_tier_bytes": _size("kv_cache_host_tier", options.kv_cache_host_tier),
        "disk_tier_bytes": _size("kv_cache_disk_tier", options.kv_cache_disk_tier),
        "disk_tier_folder": options.kv_cache_disk_folder,
        "prefix_caching": options.enable_prefix_caching,
        "scheduling_policy": options.scheduling_policy,
        "capacity_scheduler_policy": options.capacity_scheduler_policy,
        "watchdog_timeout": float(options.watchdog_timeout),
        # The engine of a draft is an argument of its own.
        "speculative_decoding": None if options.draft_engine is not None else options.speculative_decoding,
        "num_speculative_tokens": options.num_speculative_tokens,
    }
    if program.kernels:
        given["kernel_images"] = engine.kernel_images(choice.target)
    if choice.gpu is None and options.cuda_graphs is not None:
        raise EngineError(
            f"cuda_graphs is {options.cuda_graphs}, and this engine runs on the CPU ({choice.why}), which "
            "has none; leave it out"
        )
    if choice.gpu is None and options.kv_cache_fraction is not None:
        raise EngineError(
            f"kv_cache_fraction is {options.kv_cache_fraction}, a part of a GPU's memory, and this engine "
            "runs on the CPU; give kv_cache_memory or kv_cache_blocks"
        )
    if choice.gpu is not None:
        given |= {
            "device_index": choice.gpu.index,
            "cuda_graphs": options.cuda_graphs,
            "kv_cache_fraction": options.kv_cache_fraction,
        }
    given |= core_options
    try:
        core = module.Engine(
            program.model_dump(),
            str(engine.weights_path),
            engine.tensors,
            {name: value for name, value in given.items() if value is not None},
            None if options.draft_engine is None else _draft(options.draft_engine, engine),
        )
    except (ValueError, RuntimeError, MemoryError, OSError) as e:
        raise EngineError(f"{engine.path} cannot be loaded: {e}") from None
    return LoadedCore(core, module, program, choice)


def _draft(folder: str | os.PathLike[str], engine: Engine) -> dict[str, Any]:
    """The engine that guesses tokens for ``engine``, as the core takes it."""
    draft = open_engine(folder, every_program=False)
    if "host" not in draft.targets:
        raise EngineError(
            f"the draft engine {draft.path} has programs for {', '.join(draft.targets)}; it runs on the CPU: "
            "build it with --target host"
        )
    used = [e.manifest.special_tokens.vocab_size_used for e in (engine, draft)]
    if used[0] != used[1] or not _same_tokenizer(engine, draft):
        raise EngineError(
            f"the draft engine {draft.path} has another tokenizer ({used[1]} tokens) than {engine.path} "
            f"({used[0]}); a draft needs the same one"
        )
    program = draft.program("host")
    return {
        "program": program.model_dump(),
        "weights_path": str(draft.weights_path),
        "tensors": draft.tensors,
    }


def _same_tokenizer(engine: Engine, draft: Engine) -> bool:
    if engine.tokenizer_dir is None or draft.tokenizer_dir is None:
        return True  # nobody can tell
    folders = (engine.tokenizer_dir, draft.tokenizer_dir)
    texts = [(Path(folder) / "tokenizer.json").read_text("utf-8") for folder in folders]
    if texts[0] == texts[1]:
        return True
    models = [json.loads(text)["model"] for text in texts]
    return bool(models[0].get("vocab") == models[1].get("vocab"))


def open_session(
    engine_dir: str | os.PathLike[str],
    rank: int = 0,
    options: RuntimeOptions | None = None,
    phases: Phases | None = None,
) -> Session:
    """Load an engine on this machine's best device and start its thread.

    Args:
        phases: gets the seconds of each part.

    Raises:
        EngineError: the folder is no engine, damaged, or made for another version or device; an option is
        wrong.
    """
    options = options or RuntimeOptions()
    if rank != 0:
        raise EngineError(f"rank is {rank!r}; this engine has rank 0 alone")
    phases = phases or Phases()
    with phases("engine"):
        engine = open_engine(engine_dir, every_program=False)
        options.check(engine)
    limits = engine.manifest.limits
    tokens = engine.manifest.special_tokens
    preload = None if engine.tokenizer_dir is None else TokenizerPreload(engine.tokenizer_dir)
    # The session bounds the queue; a runner's batch may have any number of prompts.
    with phases("weights"):
        loaded = load_core(engine, options, max_queue_size=1 << 20, vocab_limit=tokens.vocab_size_used)
    info = EngineInfo(
        name=engine.name,
        device=loaded.choice,
        kernels=kernel_paths(loaded.program),
        vocab_size=loaded.program.vocab_size,
        max_seq_len=limits.max_seq_len,
        max_batch_size=options.max_batch_size or limits.max_batch_size,
        max_num_tokens=options.max_num_tokens or limits.max_num_tokens,
        eos_token_ids=tuple(tokens.eos_token_ids),
        tokenizer_dir=engine.tokenizer_dir,
        generation_config=dict(engine.generation_config),
        architecture=engine.manifest.model.architecture,
        parameters=engine.manifest.model.parameters,
        dtype=precision(engine.manifest.model.dtype, engine.manifest.recipe, [loaded.program]),
    )
    module = loaded.module
    types = CoreTypes(module.SamplingParams, module.QueueFullError, module.EngineDeadError)
    adapters = None
    try:
        if options.wants_lora:
            with phases("adapters"):
                adapters = make_adapters(loaded.core, loaded.program, options)
    except BaseException:
        loaded.core.shutdown()
        raise
    return Session(
        loaded.core,
        info,
        types,
        max_queue_size=options.max_queue_size,
        preload=preload,
        adapters=adapters,
    )


def check_takes_adapters(engine: Engine, program: Program, choice: DeviceChoice) -> None:
    """Raise EngineError where adapters cannot run."""
    if choice.gpu is not None and program.adapters is None:
        raise EngineError(
            f"{engine.path} was built without LoRA adapters for GPUs, and would run on {choice}; build it "
            f"for them: {engine.rebuild_command} --max-lora-rank 16, or start it with --device host"
        )
    if not any(step.modules for step in program.steps):
        raise EngineError(
            f"{engine.path} names no modules that LoRA adapters could add to: it was built by an older "
            f"castiron, or all of its products are of plugins; build it again: {engine.rebuild_command}"
        )


def lora_rank(program: Program, options: RuntimeOptions) -> int:
    """The largest rank of an adapter; raises EngineError where it is more than a GPU's program can take."""
    built = program.adapters
    if built is None:
        return options.lora_limits.rank
    wanted = options.max_lora_rank or built.rank
    if wanted > built.rank:
        raise EngineError(
            f"max_lora_rank is {wanted}, and the engine was built for ranks up to {built.rank}; choose "
            f"less, or build it with --max-lora-rank {wanted}"
        )
    return wanted


def make_adapters(core: Core, program: Program, options: RuntimeOptions) -> Adapters:
    """The adapters of a core, those of ``lora_modules`` loaded; raises RequestError where one cannot be."""
    from .lora import Adapters

    adapters = Adapters(
        core,
        module_sizes(program),
        max_rank=lora_rank(program, options),
        max_in_memory=options.lora_limits.in_memory,
    )
    for name, path in options.lora_modules.items():
        adapters.load(name, path)
    return adapters


def parse_bytes(name: str, text: int | str) -> int:
    """Bytes from a number or a text such as ``2GiB``, ``500MB``, ``1.5g`` (decimal unless with an i).

    ``name``: of the option, for the EngineError that says what was expected.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", str(text), re.IGNORECASE)
    if match is None:
        raise EngineError(
            f"{name} is {text!r}; expected bytes, or a number with a unit such as 500MB or 2GiB"
        )
    return math.floor(float(match[1]) * _UNITS[(match[2] or "").lower()])


def _size(name: str, text: int | str | None) -> int | None:
    if text is None:
        return None
    size = parse_bytes(name, text)
    if size <= 0:
        raise EngineError(f"{name} is {size} bytes; expected at least a block, or leave it out")
    return size


def import_core() -> Any:
    """Return the C++ module; raises EngineError when it was not built."""
    try:
        return import_module("._core", __package__)
    except ImportError as e:
        raise EngineError(
            f"castiron's C++ runtime cannot be imported ({e}); install the package (pip install .) so "
            "that it is built"
        ) from None
