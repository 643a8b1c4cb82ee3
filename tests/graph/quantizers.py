"""Quantized checkpoints of every format, written independently of the code that reads them.

Each encoder makes the stored tensors of one module from its weight [N, K], and says which numbers they stand
for. Layouts follow the tools' own sources; arithmetic is plain numpy and torch, packing goes bit by bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import zoo
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

Array = npt.NDArray[Any]
Tensors = dict[str, torch.Tensor]
#: The weight's numbers and a seed of the module's own -> stored tensors by suffix, dequantized weight.
Encoder = Callable[[Array, int], tuple[Tensors, Array]]
GROUP = 32
#: 112 inputs of down_proj: the last group of 32 is half one.
SIZES = {"num_hidden_layers": 1, "intermediate_size": 112}
#: e2m1 by code (OCP Microscaling Formats 1.0, table 5).
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@dataclass(frozen=True)
class Format:
    """One way of storing a checkpoint: its config and the encoder of its modules."""

    encode: Encoder
    config: Mapping[str, Any]
    in_file: str = "config.json"
    extra: Mapping[str, torch.Tensor] = field(default_factory=dict)
    #: Of all experts of a layer at once, where they are not stored one by one.
    encode_stack: Callable[[Array], tuple[Tensors, Array]] | None = None


def write(folder: Path, form: Format, name: str = "llama", **overrides: Any) -> PreTrainedModel:
    """Write a tiny checkpoint with every projection quantized; returns the dequantized float32 model."""
    sizes = SIZES if name.startswith("llama") else {}
    model = zoo.make_model(zoo.make_config(name, **{**sizes, **overrides}))
    state = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        for seed, (module, child) in enumerate(model.named_modules()):
            if not isinstance(child, (torch.nn.Linear, Conv1D)) or module == "lm_head":
                continue
            numbers = child.weight.T if isinstance(child, Conv1D) else child.weight
            stored, weight = form.encode(numbers.numpy().copy(), seed)
            del state[f"{module}.weight"]
            state |= {f"{module}.{suffix}": value for suffix, value in stored.items()}
            numbers.copy_(torch.from_numpy(np.asarray(weight, np.float32)))
        for name, experts in model.named_parameters():
            if experts.ndim == 3:
                del state[name]
                state |= _experts(name, experts, form)
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    state |= form.extra
    save_file({key: value.contiguous() for key, value in state.items()}, folder / "model.safetensors")
    if form.in_file == "config.json":
        edit_config(folder, quantization_config=dict(form.config))
    else:
        (folder / form.in_file).write_text(json.dumps(form.config))
    return model


def _experts(name: str, experts: torch.nn.Parameter, form: Format) -> Tensors:
    """What is stored of a layer's experts [E, N, K], whose numbers become those that are stored."""
    path, _, kind = name.rpartition(".")
    if form.encode_stack is not None:
        stored, numbers = form.encode_stack(experts.detach().numpy().copy())
        experts.copy_(torch.from_numpy(numbers))
        return {f"{name}_{suffix}": value for suffix, value in stored.items()}
    names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    tensors: Tensors = {}
    for index, expert in enumerate(experts):
        for projection, part in zip(names, expert.chunk(len(names)), strict=True):
            # Small numbers, which every format rounds at once, would hide an exchanged expert.
            stored, weight = form.encode(part.numpy() * np.float32(1 + index / 4), 100 + index)
            part.copy_(torch.from_numpy(np.asarray(weight, np.float32)))
            tensors |= {f"{path}.{index}.{projection}.{key}": value for key, value in stored.items()}
    return tensors


def mxfp4_stack(experts: Array) -> tuple[Tensors, Array]:
    """gpt-oss: experts [E, K, N] as e2m1 blocks of 32 inputs [E, N, K / 32, 16], a scale 2^(byte - 127)."""
    columns = experts.transpose(0, 2, 1)
    count, outputs, inputs = columns.shape
    groups = columns.reshape(count, outputs, inputs // 32, 32)
    exponents = np.floor(np.log2(np.abs(groups).max(-1))) - 2
    codes = np.abs(groups[..., None] / 2.0 ** exponents[..., None, None] - E2M1).argmin(-1).astype(np.uint8)
    numbers = E2M1[codes] * np.float32(2.0) ** exponents[..., None].astype(np.float32)
    stored = {
        "blocks": torch.from_numpy(codes[..., 0::2] | codes[..., 1::2] << 4),
        "scales": torch.from_numpy((exponents + 127).astype(np.uint8)),
    }
    return stored, numbers.reshape(columns.shape).transpose(0, 2, 1).astype(np.float32)


def edit_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


# -- packing -------------------------------------------------------------------------------------------------


def words(codes: Array, bits: int, axis: int, order: list[int] | None = None) -> torch.Tensor:
    """Unsigned codes in int32 words along ``axis``, padded with zeros; ``order[i]`` lies in place i."""
    count = 32 // bits
    moved = np.moveaxis(codes.astype(np.uint64), axis, -1)
    padded = np.zeros((*moved.shape[:-1], -(-moved.shape[-1] // count) * count), np.uint64)
    padded[..., : moved.shape[-1]] = moved
    grouped = padded.reshape(*padded.shape[:-1], -1, count)
    packed = sum(
        grouped[..., code] << np.uint64(bits * place) for place, code in enumerate(order or range(count))
    )
    packed = np.moveaxis(np.asarray(packed).astype(np.uint32), -1, axis)
    return torch.from_numpy(np.ascontiguousarray(packed).view(np.int32))


def groups_of(inputs: int, group: int) -> Array:
    """The group of each input; the last may be shorter."""
    return np.arange(inputs) // (group or inputs)


def largest(w: Array, groups: Array) -> Array:
    """amax [N, G]."""
    return np.stack([np.abs(w[:, groups == g]).max(1) for g in range(groups.max() + 1)], 1)


def asymmetric(w: Array, groups: Array, bits: int, dtype: Any = np.float16) -> tuple[Array, Array, Array]:
    """Codes [N, K] that count from 0, zero points and scales [N, G]."""
    top = (1 << bits) - 1
    low = np.stack([np.minimum(w[:, groups == g].min(1), 0) for g in range(groups.max() + 1)], 1)
    high = np.stack([np.maximum(w[:, groups == g].max(1), 0) for g in range(groups.max() + 1)], 1)
    scale = ((high - low) / top).astype(dtype).astype(np.float32)
    zero = np.clip(np.rint(-low / scale), 1, top)  # 0 has no form in GPTQ's first version
    codes = np.clip(np.rint(w / scale[:, groups]) + zero[:, groups], 0, top)
    return codes.astype(np.int64), zero.astype(np.int64), scale


def symmetric(w: Array, groups: Array, bits: int, dtype: Any = np.float16) -> tuple[Array, Array]:
    """Signed codes [N, K] and scales [N, G]."""
    top = (1 << (bits - 1)) - 1
    scale = (largest(w, groups) / top).astype(dtype).astype(np.float32)
    return np.clip(np.rint(w / scale[:, groups]), -top - 1, top).astype(np.int64), scale


def half(scale: Array) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(scale)).to(torch.float16)


def bf16(scale: Array) -> Array:
    return torch.from_numpy(scale).to(torch.bfloat16).float().numpy()


def scalar(value: float, shape: tuple[int, ...] = ()) -> torch.Tensor:
    return torch.full(shape, value, dtype=torch.float32)


def e4m3(w: Array) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(w)).clamp(-448, 448).to(torch.float8_e4m3fn)


def e2m1(w: Array) -> Array:
    """Nearest codes [N, K]."""
    return np.abs(w[..., None] - E2M1).argmin(-1).astype(np.uint8)


def pairs(codes: Array) -> torch.Tensor:
    return torch.from_numpy((codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8))


# -- AWQ, GPTQ -----------------------------------------------------------------------------------------------


def awq(w: Array, seed: int, middle: bool = False) -> tuple[Tensors, Array]:
    groups = groups_of(w.shape[1], GROUP)
    if middle:
        signed, scale = symmetric(w, groups, 4)
        codes, zero = signed + 8, np.full(scale.shape, 8)
    else:
        codes, zero, scale = asymmetric(w, groups, 4)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    stored = {
        "qweight": words(codes.T, 4, 1, order),
        "qzeros": words(zero.T, 4, 1, order),
        "scales": half(scale.T),
    }
    return stored, (codes - zero[:, groups]) * scale[:, groups]


def gptq(
    w: Array, seed: int, bits: int = 4, sym: bool = False, version: int = 1, order: str = "none"
) -> tuple[Tensors, Array]:
    groups = groups_of(w.shape[1], GROUP)
    if order == "act":  # projections of one input have one order: it follows from the input alone
        groups = np.random.default_rng(w.shape[1]).permutation(groups)
    if sym:
        signed, scale = symmetric(w, groups, bits)
        codes, zero = signed + (1 << (bits - 1)), np.full(scale.shape, 1 << (bits - 1))
    else:
        codes, zero, scale = asymmetric(w, groups, bits)
    stored = {
        "qweight": words(codes.T, bits, 0),
        "qzeros": words(zero.T - (version == 1), bits, 1),
        "scales": half(scale.T),
    }
    if order != "absent":
        stored["g_idx"] = torch.from_numpy(groups.astype(np.int32))
    return stored, (codes - zero[:, groups]) * scale[:, groups]


def gptq_config(**values: Any) -> dict[str, Any]:
    base = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False}
    return {**base, "damp_percent": 0.1, "true_sequential": True, "checkpoint_format": "gptq", **values}


# -- compressed-tensors --------------------------------------------------------------------------------------


def ct_packed(
    w: Array, seed: int, bits: int = 4, group: int = GROUP, sym: bool = True, order: bool = False
) -> tuple[Tensors, Array]:
    groups = groups_of(w.shape[1], group)
    if order:
        groups = np.random.default_rng(w.shape[1]).permutation(groups)
    middle = 1 << (bits - 1)
    stored: Tensors = {"weight_shape": torch.tensor(w.shape)}
    if sym:
        signed, scale = symmetric(w, groups, bits)
        codes, zero = signed + middle, np.full(scale.shape, middle)
    else:
        codes, zero, scale = asymmetric(w, groups, bits)
        stored["weight_zero_point"] = (
            words(zero, bits, 0) if bits < 8 else torch.from_numpy((zero - middle).astype(np.int8))
        )
    if order:
        stored["weight_g_idx"] = torch.from_numpy(groups.astype(np.int32))
    stored |= {"weight_packed": words(codes, bits, 1), "weight_scale": half(scale)}
    return stored, (codes - zero[:, groups]) * scale[:, groups]


def ct_int8(w: Array, seed: int, static: bool = False, sym: bool = True) -> tuple[Tensors, Array]:
    groups = groups_of(w.shape[1], 0)
    stored: Tensors = {"input_scale": scalar(0.05, (1,))} if static else {}
    if sym:
        codes, scale = symmetric(w, groups, 8)
        zero = np.zeros(scale.shape, np.int64)
    else:
        codes, zero, scale = asymmetric(w, groups, 8)
        codes, zero = codes - 128, zero - 128
        stored["weight_zero_point"] = torch.from_numpy(zero.astype(np.int8))
    stored |= {"weight": torch.from_numpy(codes.astype(np.int8)), "weight_scale": half(scale)}
    return stored, (codes - zero[:, groups]) * scale[:, groups]


def ct_fp8(w: Array, seed: int, by: str = "channel", static: bool = False) -> tuple[Tensors, Array]:
    amax = np.abs(w).max(1, keepdims=True) if by == "channel" else np.abs(w).max().reshape(1)
    scale = bf16((amax / 448).astype(np.float32))
    codes = e4m3(w / scale)
    stored = {"weight": codes, "weight_scale": torch.from_numpy(scale).to(torch.bfloat16)}
    if static:
        stored["input_scale"] = scalar(0.02, (1,))
    return stored, codes.float().numpy() * scale


def nvfp4_parts(w: Array, over: float) -> tuple[Array, torch.Tensor, Array]:
    """Codes, e4m3 scales and the dequantized weight under a global scale."""
    groups = groups_of(w.shape[1], 16)
    scale = e4m3(largest(w, groups) / 6 / over)
    by_group = scale.float().numpy() * np.float32(over)
    codes = e2m1(w / by_group[:, groups])
    return codes, scale, E2M1[codes] * by_group[:, groups]


def ct_nvfp4(w: Array, seed: int) -> tuple[Tensors, Array]:
    inverse = np.float32(448 * 6 / np.abs(w).max())
    codes, scale, weight = nvfp4_parts(w, float(1 / inverse))
    stored = {"weight_packed": pairs(codes), "weight_scale": scale}
    scales = {"weight_global_scale": scalar(float(inverse), (1,)), "input_global_scale": scalar(900.0, (1,))}
    return {**stored, **scales}, weight


def mx(w: Array, fp8: bool = False) -> tuple[Array, torch.Tensor, Array]:
    """Codes (fp8: their bytes), e8m0 scales and the dequantized weight."""
    groups = groups_of(w.shape[1], 32)
    exponent = np.floor(np.log2(largest(w, groups))) - (8 if fp8 else 2)
    by_group = np.exp2(exponent)[:, groups]
    scale = torch.from_numpy((exponent + 127).astype(np.uint8))
    if fp8:
        codes = e4m3((w / by_group).astype(np.float32))
        return codes.view(torch.uint8).numpy(), scale, codes.float().numpy() * by_group
    small = e2m1(w / by_group)
    return small, scale, E2M1[small] * by_group


def ct_mxfp4(w: Array, seed: int) -> tuple[Tensors, Array]:
    codes, scale, weight = mx(w)
    return {"weight_packed": pairs(codes), "weight_scale": scale}, weight


def ct_mxfp8(w: Array, seed: int) -> tuple[Tensors, Array]:
    codes, scale, weight = mx(w, fp8=True)
    return {"weight": torch.from_numpy(codes).view(torch.float8_e4m3fn), "weight_scale": scale}, weight


def ct_config(format: str, weights: dict[str, Any], x: dict[str, Any] | None = None, **more: Any) -> Any:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": x, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
        **more,
    }


# -- FP8 in blocks, ModelOpt ---------------------------------------------------------------------------------


def fp8_block(w: Array, seed: int, block: tuple[int, int] = (48, 40), suffix: str = "weight_scale_inv",
              deep: bool = False) -> tuple[Tensors, Array]:  # fmt: skip
    rows, columns = np.arange(w.shape[0]) // block[0], np.arange(w.shape[1]) // block[1]
    scale = np.zeros((rows.max() + 1, columns.max() + 1), np.float32)
    for i, j in np.ndindex(scale.shape):
        scale[i, j] = np.abs(w[np.ix_(rows == i, columns == j)]).max() / 448
    spread = scale[np.ix_(rows, columns)]
    codes = e4m3(w / spread)
    shape = (scale.shape[0], 1, scale.shape[1], 1) if deep else scale.shape
    return {"weight": codes, suffix: torch.from_numpy(scale.reshape(shape))}, codes.float().numpy() * spread


def mo_fp8(w: Array, seed: int) -> tuple[Tensors, Array]:
    scale = np.float32(np.abs(w).max() / 448)
    codes = e4m3(w / scale)
    stored = {"weight": codes, "weight_scale": scalar(float(scale)), "input_scale": scalar(0.01)}
    return stored, codes.float().numpy() * scale


def mo_fp8_rows(w: Array, seed: int) -> tuple[Tensors, Array]:
    scale = (np.abs(w).max(1) / 448).astype(np.float32)
    codes = e4m3(w / scale[:, None])
    return {"weight": codes, "weight_scale": torch.from_numpy(scale)}, codes.float().numpy() * scale[:, None]


def smoothing(inputs: int) -> Array:
    """A scale for each input, the same for all modules that read it."""
    return np.random.default_rng(inputs).uniform(0.5, 2, inputs).astype(np.float32)


def mo_int8(w: Array, seed: int, smooth: bool = False) -> tuple[Tensors, Array]:
    by_input = smoothing(w.shape[1]) if smooth else np.ones(w.shape[1], np.float32)
    codes, scale = symmetric(w / by_input, groups_of(w.shape[1], 0), 8, np.float32)
    stored: Tensors = {"weight": torch.from_numpy(codes.astype(np.int8))}
    stored["weight_scale"] = torch.from_numpy(np.ascontiguousarray(scale[:, 0]))
    if smooth:
        stored |= {"input_scale": scalar(0.03), "pre_quant_scale": torch.from_numpy(by_input)}
    return stored, codes * scale * by_input


def mo_int4(w: Array, seed: int, on_fp8: bool = False) -> tuple[Tensors, Array]:
    groups = groups_of(w.shape[1], 16)
    # ModelOpt folds the scales of inputs that a norm makes; the others stay beside the weight
    by_input = smoothing(w.shape[1]) if seed % 2 else np.ones(w.shape[1], np.float32)
    codes, scale = symmetric(w / by_input, groups, 4, np.float32)
    packed = (codes[::2] & 15) | (codes[1::2] & 15) << 4
    stored = {"weight": torch.from_numpy(packed.astype(np.uint8)), "weight_scale": torch.from_numpy(scale)}
    if seed % 2:
        stored["pre_quant_scale"] = torch.from_numpy(by_input)
    if on_fp8:
        stored |= {"weight_scale_2": scalar(0.004), "input_scale": scalar(0.02)}
    return stored, codes * scale[:, groups] * by_input


def mo_nvfp4(w: Array, seed: int, x: str = "input_scale") -> tuple[Tensors, Array]:
    over = float(np.float32(np.abs(w).max() / (448 * 6)))
    codes, scale, weight = nvfp4_parts(w, over)
    stored = {"weight": pairs(codes), "weight_scale": scale, "weight_scale_2": scalar(over)}
    return {**stored, **({x: scalar(0.002)} if x else {})}, weight


def mo_mx(w: Array, seed: int, fp8: bool = False) -> tuple[Tensors, Array]:
    codes, scale, weight = mx(w, fp8)
    stored = torch.from_numpy(codes).view(torch.float8_e4m3fn) if fp8 else pairs(codes)
    return {"weight": stored, "weight_scale": scale}, weight


def mo_config(algorithm: str, **more: Any) -> dict[str, Any]:
    """The form of config.json."""
    base = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]}
    return {**base, "producer": {"name": "modelopt", "version": "0.47.0"}, **more}


def mo_file(algorithm: str | None, **more: Any) -> dict[str, Any]:
    """The form of hf_quant_config.json."""
    inner = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"], **more}
    return {"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": inner}
