"""Engines for the kit: tiny ones with golden outputs, and large ones without their weights."""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from castiron.build import BuildOptions, build
from castiron.build.identity import model_identity, special_tokens
from castiron.build.kernels.compile import compile_kernels
from castiron.build.lower import Lowered, lower
from castiron.build.options import resolve_limits
from castiron.build.source_tokenizer import read_tokenizer
from castiron.engines.container import write_container
from castiron.engines.layout import PROGRAM_FILE
from castiron.engines.manifest import FORMAT_VERSION, FileRecord, Manifest
from castiron.graph import capture
from castiron.graph.checkpoint import Checkpoint
from castiron.graph.passes import PassContext, run_passes
from transformers import AutoConfig, AutoModelForCausalLM

import castiron

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "graph"))
from zoo import CONFIGS, make_checkpoint

#: Manifest of an engine whose weights are still to be written; its ``files`` lacks them.
HOLLOW_MANIFEST = "hollow.json"
#: Fields of its Llama configuration.
MODEL_CONFIG = "model.json"
#: Also built in float16: a plain family, soft caps and windows, learned positions, norms of heads.
FLOAT16 = ("llama", "gemma2", "gpt2", "qwen3")
FAMILIES: tuple[str, ...] = tuple(CONFIGS)


@dataclass(frozen=True)
class Shape:
    """A model of which only the sizes matter: config fields of a Llama and the limits of its engine."""

    name: str
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    config: dict[str, Any] = field(default_factory=dict)


#: The sizes of Llama 3 8B, for speed against the hardware's bounds, and those of SmolLM2 135M, whose steps
#: are so short that the runtime's own time shows.
SHAPES = (
    Shape(
        "8b",
        max_batch_size=256,
        max_num_tokens=8192,
        max_seq_len=8192,
        config={
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "max_position_embeddings": 8192,
            "rope_theta": 500000.0,
        },
    ),
    Shape(
        "135m",
        max_batch_size=64,
        max_num_tokens=4096,
        max_seq_len=4096,
        config={
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "vocab_size": 49152,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
    ),
)


def build_tiny(families: Sequence[str], target: str, folder: Path) -> None:
    """Engines of the zoo's models with golden outputs, ``folder``/FAMILY-DTYPE each."""
    for name in families:
        dtypes: tuple[Literal["bfloat16", "float16"], ...] = ("bfloat16",)
        if name in FLOAT16:
            dtypes += ("float16",)
        with tempfile.TemporaryDirectory() as model:
            make_checkpoint(name, Path(model))
            for dtype in dtypes:
                options = BuildOptions(
                    targets=(target,),
                    dtype=dtype,
                    ptx=False,
                    max_batch_size=8,
                    max_num_tokens=64,
                    max_seq_len=128,
                )
                build(model, folder / f"{name}-{dtype}", options)
                print(f"built {name}-{dtype}", flush=True)


def build_hollow(shape: Shape, target: str, folder: Path) -> None:
    """An engine's program and kernels, and its manifest but for the weights."""
    with tempfile.TemporaryDirectory() as name:
        model_dir = Path(name) / shape.name
        _hollow_checkpoint(shape, model_dir)
        with Checkpoint.open(model_dir) as checkpoint:
            lowered, graph = _lower(checkpoint, shape, target)
            compiled = compile_kernels([lowered], lambda _: None)
            for note in compiled.notes:
                print(f"{shape.name}: {note}", flush=True)
            program = compiled.lowered[0].program
            folder.mkdir(parents=True)
            data = program.model_dump_json(exclude_defaults=True).encode()
            entries = {f"{target}/program.json": data, "graph.onnx": graph, **compiled.images}
            records = write_container(folder / PROGRAM_FILE, entries)
            manifest = Manifest(
                format_version="{}.{}".format(*FORMAT_VERSION),
                castiron_version=castiron.__version__,
                model=model_identity(checkpoint, "bfloat16"),
                targets=[target],
                limits=program.limits,
                memory_plan=[],
                special_tokens=special_tokens(checkpoint, program.vocab_size, read_tokenizer(checkpoint)),
                files={PROGRAM_FILE: _record(folder / PROGRAM_FILE)},
                entries=records,
            )
    (folder / MODEL_CONFIG).write_text(json.dumps(shape.config))
    (folder / HOLLOW_MANIFEST).write_text(manifest.model_dump_json(indent=2))
    print(f"built {shape.name} without weights", flush=True)


def _lower(checkpoint: Checkpoint, shape: Shape, target: str) -> tuple[Lowered, bytes]:
    options = BuildOptions(
        targets=(target,),
        ptx=False,
        max_batch_size=shape.max_batch_size,
        max_num_tokens=shape.max_num_tokens,
        max_seq_len=shape.max_seq_len,
    )
    limits = resolve_limits(options, checkpoint.hf_config)
    captured = capture(checkpoint, max_seq_len=limits.max_seq_len)
    model, _ = run_passes(captured.model, PassContext(limits.max_seq_len))
    return lower(model, target, limits, options.dtype), model.SerializeToString()


def _hollow_checkpoint(shape: Shape, folder: Path) -> None:
    """A checkpoint whose weights file is a header and a hole: it takes no room on the disk."""
    config = AutoConfig.for_model("llama", **shape.config)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.bfloat16
        )
    table: dict[str, Any] = {}
    end = 0
    for name, tensor in model.named_parameters():
        size = 2 * math.prod(tensor.shape)
        table[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [end, end + size]}
        end += size
    header = json.dumps(table).encode()
    header += b" " * (-len(header) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)


def _record(file: Path) -> FileRecord:
    from castiron.engines.files import sha256_file

    return FileRecord(size=file.stat().st_size, sha256=sha256_file(file))
