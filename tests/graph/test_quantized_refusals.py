"""Quantized checkpoints whose config or tensors are not understood, or contradict each other, are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import quantizers
import torch
from castiron.graph.checkpoint import Checkpoint
from quantized_formats import FORMATS
from safetensors.torch import load_file, save_file

from castiron.errors import CheckpointError

Change = Callable[[dict[str, Any]], Any]
Q = "model.layers.0.self_attn.q_proj"


def broken(folder: Path, form: quantizers.Format, config: Change | None, tensors: Change | None) -> Path:
    """A checkpoint of a format with a change in its quantization config or its tensors."""
    quantizers.write(folder, form)
    path = folder / form.in_file
    values = json.loads(path.read_text())
    if config is not None:
        config(values["quantization_config"] if form.in_file == "config.json" else values["quantization"])
        path.write_text(json.dumps(values))
    if tensors is not None:
        state = load_file(folder / "model.safetensors")
        tensors(state)
        save_file(state, folder / "model.safetensors")
    return folder


def put(**values: Any) -> Change:
    return lambda config: config.update(values)


def without(suffix: str) -> Change:
    return lambda state: state.pop(f"{Q}.{suffix}")


def store(suffix: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def change(state: dict[str, torch.Tensor]) -> None:
        state[f"{Q}.{suffix}"] = make(state[f"{Q}.{suffix}"]).contiguous()

    return change


def group(part: str, **values: Any) -> Change:
    """A change of a compressed-tensors config group."""

    def change(config: dict[str, Any]) -> None:
        found = config["config_groups"]["group_0"]
        (found if part == "" else found[part]).update(values)

    return change


def _far_from_zero(w: Any, seed: int) -> Any:
    """Weights of one sign have the largest zero point, 15."""
    return quantizers.gptq(-abs(w), seed, version=2)


_V1_WITH_ZERO_16 = quantizers.Format(_far_from_zero, quantizers.gptq_config())
_V2_LABEL_ON_V1 = quantizers.Format(
    partial(quantizers.gptq, sym=True), quantizers.gptq_config(sym=True, checkpoint_format="gptq_v2")
)
_DIFFERENT = "Config and weights are of different checkpoints"

CASES: dict[str, tuple[str | quantizers.Format, Change | None, Change | None, str]] = {
    "an unknown method": (
        "awq",
        put(quant_method="bitsandbytes"),
        None,
        "'bitsandbytes'; this version reads",
    ),
    "no method": ("awq", lambda config: config.pop("quant_method"), None, "quant_method is None"),
    "an unknown field": ("awq", put(rotation="hadamard"), None, "unknown field 'rotation'"),
    "another layout of AWQ": ("awq", put(version="gemv"), None, "version is 'gemv'"),
    "other bits": ("gptq v1", put(bits=3), None, "bits is 3; this version reads 4, 8"),
    "bits that are no number": ("gptq v1", put(bits="4"), None, "bits is '4'"),
    "a group that is none": ("awq", put(group_size=0), None, "group_size is 0"),
    "another group than stored": (
        "gptq v1",
        put(group_size=16),
        None,
        r"scales' has shape \[4, 64\]; expected \[7, 64\]",
    ),
    "zero points that are denied": ("awq", put(zero_point=False), None, "zero_point is false, but"),
    "zero points that are not symmetric": ("gptq v1", put(sym=True), None, "sym is true and .*v1"),
    "a v2 checkpoint labelled v1": (_V1_WITH_ZERO_16, None, None, "zero point of 16.*gptq_v2"),
    "a v1 checkpoint labelled v2": (_V2_LABEL_ON_V1, None, None, "zero points 7 to 7 where 8 is expected"),
    "two labels that differ": (
        "gptq v1",
        put(format="gptq_v2"),
        None,
        "checkpoint_format is 'gptq' and format is 'gptq_v2'",
    ),
    "rules by module": ("gptq v1", put(dynamic={r".*\.0\.": {"bits": 8}}), None, "dynamic has the rule"),
    "an order that is denied": ("gptq desc_act", put(desc_act=False), None, "desc_act is false, but"),
    "an order that is missing": ("gptq desc_act", None, without("g_idx"), "g_idx.*is not stored"),
    "groups of unequal size": (
        "gptq desc_act",
        None,
        store("g_idx", torch.zeros_like),
        "does not give each of 2 groups 32 inputs",
    ),
    "missing scales": ("gptq v1", None, without("scales"), rf"{Q}\.scales is not stored"),
    "missing zero points": ("awq", None, without("qzeros"), rf"{Q}\.qzeros is not stored"),
    "codes of another type": (
        "awq",
        None,
        store("qweight", lambda w: w.to(torch.int64)),
        "qweight' is stored as int64; expected int32",
    ),
    "scales of another shape": (
        "awq",
        None,
        store("scales", lambda s: s[:, :-1]),
        r"scales' has shape \[2, 63\]; expected \[2, 64\]",
    ),
    "a module that should not be quantized": (
        "awq",
        put(modules_to_not_convert=["q_proj"]),
        None,
        f"lists 'q_proj' as not quantized, but '{Q}' is stored as codes. {_DIFFERENT}",
    ),
    "no quantized module at all": (
        "awq",
        None,
        lambda state: [state.pop(name) for name in list(state) if name.endswith("qweight")],
        "no module has a qweight",
    ),
    "tensors that nobody reads": (
        "awq",
        None,
        lambda state: state.update({f"{Q}.svd_lora": torch.ones(3)}),
        f"have no place in LlamaForCausalLM: {Q}.svd_lora",
    ),
    "a parameter stored twice": (
        "awq",
        None,
        lambda state: state.update({f"{Q}.weight": torch.ones(64, 64)}),
        f"'{Q}.weight' is stored twice",
    ),
    "an unknown format": ("ct w4a16", put(format="marlin-24"), None, "format is 'marlin-24'"),
    "bits that a format does not hold": (
        "ct w8a8",
        group("weights", num_bits=4),
        None,
        "4-bit int in int-quantized",
    ),
    "an unknown strategy": ("ct w4a16", group("weights", strategy="hexagon"), None, "strategy is 'hexagon'"),
    "weights that are rounded at run time": (
        "ct w4a16",
        group("weights", dynamic=True),
        None,
        "dynamic is True",
    ),
    "rounded outputs": (
        "ct w4a16",
        group("", output_activations={"num_bits": 8}),
        None,
        "output_activations is",
    ),
    "zero points of activations": (
        "ct w8a8",
        group("input_activations", symmetric=False),
        None,
        "symmetric is false; activations with a zero point are not read",
    ),
    "activations of another width": (
        "ct w8a8",
        group("input_activations", num_bits=4),
        None,
        "4-bit int by 'token'",
    ),
    "targets that name no module": (
        "ct w4a16",
        group("", targets=["re:.*fc1"]),
        None,
        "no config group's targets",
    ),
    "rotated weights": ("ct w4a16", put(transform_config={"R1": {}}), None, "transform_config is"),
    "sparse weights": (
        "ct w4a16",
        put(sparsity_config={"format": "sparse-24-bitmask"}),
        None,
        "sparsity_config is",
    ),
    "a zero point in symmetric weights": (
        "ct w8a8",
        None,
        lambda state: state.update({f"{Q}.weight_zero_point": torch.ones(64, 1, dtype=torch.int8)}),
        "symmetric is true, but .*weight_zero_point is not zero",
    ),
    "a width that the codes do not have": (
        "ct w4a16",
        None,
        store("weight_shape", lambda shape: torch.tensor([64, 72])),
        r"weight_packed' has shape \[64, 8\]; expected \[64, 9\]",
    ),
    "a static scale that is missing": (
        "ct w8a8 static",
        None,
        without("input_scale"),
        "input_scale is not stored",
    ),
    "a scale of zero": (
        "ct nvfp4",
        None,
        store("input_global_scale", torch.zeros_like),
        "expected a positive scale",
    ),
    "an unknown cache": (
        "ct w4a16",
        put(kv_cache_scheme={"num_bits": 4, "type": "float"}),
        None,
        "num_bits is 4",
    ),
    "fp8 with another exponent": ("fp8 block", put(fmt="e5m2"), None, "fmt is 'e5m2'"),
    "blocks of another size": (
        "fp8 block",
        put(weight_block_size=[128, 128]),
        None,
        r"scale_inv' has shape \[2, 3\]; expected \[1, 1\]",
    ),
    "blocks under static activations": (
        "fp8 block",
        put(activation_scheme="static"),
        None,
        "with block scales; expected .dynamic",
    ),
    "an unknown algorithm": ("modelopt fp8", put(quant_algo="NVFP4_SVD"), None, "quant_algo is 'NVFP4_SVD'"),
    "another algorithm than stored": (
        "modelopt fp8",
        put(quant_algo="W8A16"),
        None,
        "float8_e4m3fn; expected int8",
    ),
    "zero points in ModelOpt": (
        "modelopt int4 awq",
        put(has_zero_point=True),
        None,
        "has_zero_point is True",
    ),
    "another group than the scales": (
        "modelopt int4 awq",
        put(group_size=32),
        None,
        "group_size is 32, but .*16",
    ),
    "an input scale that is not positive": (
        "modelopt int8 smoothed",
        None,
        store("pre_quant_scale", lambda scale: -scale),
        "not positive",
    ),
    "a cache that is unknown": ("modelopt int4 awq", put(kv_cache_quant_algo="FP6"), None, "'FP6'"),
}


def use(folder: Path) -> None:
    """What a build does with every parameter and every stored tensor."""
    checkpoint = Checkpoint.open(folder)
    parameters = quantizers.zoo.make_model(checkpoint.hf_config).named_parameters()
    checkpoint.account({checkpoint.resolve(parameter).name for parameter, _ in parameters})


@pytest.mark.parametrize("name", CASES)
def test_what_is_not_understood_is_refused_by_name(name: str, tmp_path: Path) -> None:
    form, config, tensors, message = CASES[name]
    found = FORMATS[form] if isinstance(form, str) else form
    folder = broken(tmp_path, found, config, tensors)
    with pytest.raises(CheckpointError, match=message):
        use(folder)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("gptq v1", put(dynamic={"-:lm_head": {}}, quantizer="auto", meta={"tool": 1}, static_groups=True)),
        ("gptq v2", put(checkpoint_format=None, format="gptq_v2")),
        ("awq", put(backend="auto", modules_to_not_convert=["lm_head"], version="GEMM")),
        ("ct w4a16", put(version="0.9", global_compression_ratio=2.1, sparsity_config={"format": "dense"})),
        ("ct w8a8", group("weights", observer="minmax", observer_kwargs={}, actorder="static")),
        ("ct w4a16", group("", targets=["re:.*proj"])),
        ("fp8 block", put(scale_fmt="ue8m0")),
        ("modelopt fp8", put(config_groups={"group_0": {"targets": ["Linear"]}}, ignore=["lm_head*"])),
    ],
)
def test_fields_that_change_no_number_are_accepted(name: str, config: Change, tmp_path: Path) -> None:
    assert Checkpoint.open(broken(tmp_path, FORMATS[name], config, None)).quantization is not None
