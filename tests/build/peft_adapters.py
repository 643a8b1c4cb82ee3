"""Random LoRA adapters in PEFT's form, and what merging one does to a model: W += scale * B A."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "auto_mapping": None,
    "base_model_name_or_path": "tiny",
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_dropout": 0.1,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "task_type": "CAUSAL_LM",
    "use_dora": False,
    "use_rslora": False,
}


def module_sizes(model: torch.nn.Module) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of every linear module by its path, GPT-2's Conv1D among them."""
    sizes = {}
    for path, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, torch.nn.Linear):
            sizes[path] = (weight.shape[1], weight.shape[0])
        elif type(module).__name__ == "Conv1D":
            sizes[path] = (weight.shape[0], weight.shape[1])
    return sizes


def write_adapter(
    folder: Path,
    sizes: Mapping[str, tuple[int, int]],
    *,
    rank: int = 8,
    seed: int = 0,
    size: float = 0.1,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Write adapter_config.json and adapter_model.safetensors; returns A and B by module."""
    generator = torch.Generator().manual_seed(seed)
    pairs, tensors = {}, {}
    for module, (inputs, outputs) in sizes.items():
        a = (torch.randn(rank, inputs, generator=generator) * size).to(dtype)
        b = (torch.randn(outputs, rank, generator=generator) * size).to(dtype)
        pairs[module] = (a.float(), b.float())
        tensors[f"base_model.model.{module}.lora_A.weight"] = a
        tensors[f"base_model.model.{module}.lora_B.weight"] = b
    folder.mkdir(parents=True, exist_ok=True)
    given = {**CONFIG, "r": rank, "lora_alpha": 2 * rank, "target_modules": sorted(sizes), **config}
    (folder / "adapter_config.json").write_text(json.dumps(given))
    save_file(tensors, folder / "adapter_model.safetensors")
    return pairs


def merge(
    model: torch.nn.Module, pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]], scale: float
) -> None:
    """Add an adapter to the weights of a model, in place; a tied output projection is untied first."""
    modules = dict(model.named_modules())
    with torch.no_grad():
        for path, (a, b) in pairs.items():
            module = modules[path]
            delta = scale * (b.double() @ a.double())
            if type(module).__name__ == "Conv1D":
                delta = delta.T
            merged = (module.weight.double() + delta).to(module.weight.dtype)
            module.weight = torch.nn.Parameter(merged)  # another parameter: the embedding keeps its own
