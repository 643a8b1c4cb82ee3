"""Every format that is read, by name: what ``quantizers.write`` needs for it."""

from __future__ import annotations

from functools import partial

import quantizers as q
import torch
from quantizers import GROUP, Format

_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
_FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
_FP4 = {"num_bits": 4, "type": "float", "symmetric": True}
_TOKEN = {"num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}
_TENSOR = {"num_bits": 8, "symmetric": True, "strategy": "tensor", "dynamic": False}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
_FILE = "hf_quant_config.json"

FORMATS: dict[str, Format] = {
    "awq": Format(q.awq, {**_AWQ, "modules_to_not_convert": None}),
    "awq without zero points": Format(partial(q.awq, middle=True), {**_AWQ, "zero_point": False}),
    "gptq v1": Format(q.gptq, q.gptq_config()),
    "gptq v1 symmetric": Format(partial(q.gptq, sym=True), q.gptq_config(sym=True)),
    "gptq v2": Format(partial(q.gptq, version=2), q.gptq_config(checkpoint_format="gptq_v2")),
    "gptq desc_act": Format(partial(q.gptq, order="act"), q.gptq_config(desc_act=True)),
    "gptq without g_idx": Format(partial(q.gptq, order="absent"), q.gptq_config()),
    "gptq 8 bits desc_act": Format(
        partial(q.gptq, bits=8, sym=True, order="act"), q.gptq_config(bits=8, sym=True, desc_act=True)
    ),
    "ct w4a16": Format(q.ct_packed, q.ct_config("pack-quantized", _INT4)),
    "ct w4a16 asymmetric": Format(
        partial(q.ct_packed, sym=False), q.ct_config("pack-quantized", {**_INT4, "symmetric": False})
    ),
    "ct w4a16 channel": Format(
        partial(q.ct_packed, group=0),
        q.ct_config("pack-quantized", {**_INT4, "strategy": "channel", "group_size": None}),
    ),
    "ct w4a16 actorder": Format(
        partial(q.ct_packed, order=True), q.ct_config("pack-quantized", {**_INT4, "actorder": "group"})
    ),
    "ct w8a16": Format(
        partial(q.ct_packed, bits=8, sym=False),
        q.ct_config("pack-quantized", {**_INT4, "num_bits": 8, "symmetric": False}),
    ),
    "ct w8a8": Format(q.ct_int8, q.ct_config("int-quantized", _INT8, {**_TOKEN, "type": "int"})),
    "ct w8a8 static": Format(
        partial(q.ct_int8, static=True), q.ct_config("int-quantized", _INT8, {**_TENSOR, "type": "int"})
    ),
    "ct w8a8 asymmetric": Format(
        partial(q.ct_int8, sym=False),
        q.ct_config("int-quantized", {**_INT8, "symmetric": False}, {**_TOKEN, "type": "int"}),
    ),
    "ct fp8 channel": Format(q.ct_fp8, q.ct_config("float-quantized", _FP8, {**_TOKEN, "type": "float"})),
    "ct fp8 tensor static": Format(
        partial(q.ct_fp8, by="tensor", static=True),
        q.ct_config("float-quantized", {**_FP8, "strategy": "tensor"}, {**_TENSOR, "type": "float"}),
    ),
    "ct fp8 block": Format(
        partial(q.fp8_block, suffix="weight_scale"),
        q.ct_config(
            "float-quantized",
            {**_FP8, "strategy": "block", "block_structure": [48, 40]},
            {**_TOKEN, "type": "float", "strategy": "group", "group_size": 40},
        ),
    ),
    "ct nvfp4": Format(
        q.ct_nvfp4,
        q.ct_config(
            "nvfp4-pack-quantized",
            {**_FP4, "strategy": "tensor_group", "group_size": 16},
            {**_FP4, "strategy": "tensor_group", "group_size": 16, "dynamic": "local"},
        ),
    ),
    "ct mxfp4": Format(
        q.ct_mxfp4, q.ct_config("mxfp4-pack-quantized", {**_FP4, "strategy": "group", "group_size": 32})
    ),
    "ct mxfp8": Format(
        q.ct_mxfp8,
        q.ct_config("mxfp8-quantized", {**_FP8, "strategy": "group", "group_size": 32}),
    ),
    "fp8 block": Format(
        q.fp8_block,
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [48, 40],
            "modules_to_not_convert": ["lm_head"],
        },
    ),
    "fp8 tensor": Format(q.mo_fp8, {"quant_method": "fp8", "activation_scheme": "static"}),
    "modelopt fp8": Format(q.mo_fp8, q.mo_config("FP8")),
    "modelopt fp8 rows": Format(q.mo_fp8_rows, q.mo_config("FP8_PER_CHANNEL_PER_TOKEN")),
    "modelopt fp8 blocks": Format(
        partial(q.fp8_block, block=(128, 128), suffix="weight_scale", deep=True), q.mo_config("fp8_pb_wo")
    ),
    "modelopt int8": Format(q.mo_int8, q.mo_config("W8A16")),
    "modelopt int8 smoothed": Format(
        partial(q.mo_int8, smooth=True), q.mo_file("W8A8_SQ_PER_CHANNEL"), _FILE
    ),
    "modelopt int4 awq": Format(q.mo_int4, q.mo_file("W4A16_AWQ", group_size=16), _FILE),
    "modelopt w4a8 awq": Format(partial(q.mo_int4, on_fp8=True), q.mo_config("W4A8_AWQ")),
    "modelopt nvfp4": Format(q.mo_nvfp4, q.mo_file("NVFP4", group_size=16), _FILE),
    "modelopt nvfp4 weights": Format(partial(q.mo_nvfp4, x=""), q.mo_config("W4A16_NVFP4")),
    "modelopt mxfp4": Format(q.mo_mx, q.mo_config("mxfp4")),
    "modelopt mxfp8": Format(partial(q.mo_mx, fp8=True), q.mo_config("MXFP8")),
}

#: Of gpt-oss: the experts of a layer in one tensor of codes and one of scales, all else as it is.
MXFP4_EXPERTS = Format(
    lambda numbers, seed: ({"weight": torch.from_numpy(numbers)}, numbers),
    {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
    encode_stack=q.mxfp4_stack,
)
