"""ModelOpt's calibration of one product: largest activations, SmoothQuant's and AWQ's channel scales.

ModelOpt (nvidia-modelopt) calibrates torch modules. It is given one linear layer at a time, made of all
weights that share an input, so that they get one set of channel scales, and the activations that the layer
sees in the model as it is quantized so far. So a model of any size is calibrated with one layer in memory.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn

from .recipes import Scheme

#: Rows of activations that the search over AWQ's exponents multiplies, eleven times.
_AWQ_ROWS: Final = 512
_NUM_BITS: Final[Mapping[str, Any]] = {"int8": 8, "int4": 4, "fp8": (4, 3)}
_ALGORITHMS: Final[Mapping[str, Any]] = {
    "": "max",
    # Half way, as its authors recommend: ModelOpt's default of 1 leaves all differences to the weights.
    "smoothquant": {"method": "smoothquant", "alpha": 0.5},
    "awq_lite": {"method": "awq_lite", "alpha_step": 0.1},
}


@dataclass(frozen=True)
class Ranges:
    """What ModelOpt found: the largest magnitude of the (scaled) input, and the scales of its channels.

    ``input_scale`` [K]: x is multiplied by it, and the weight's columns are divided by it.
    """

    input_amax: float
    input_scale: Tensor | None


class _One(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.product = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        self.product.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.product(x)
        return result


def calibrate_product(weight: Tensor, x: Tensor, scheme: Scheme) -> Ranges:
    """Calibrate one product. ``weight`` [N, K] is not changed; ``x`` [T, K]: all calibration activations."""
    with _quiet():
        import modelopt.torch.quantization as mtq

        model = _One(weight.clone() if scheme.prescale else weight)
        rows = x[:: max(1, len(x) // _AWQ_ROWS)][:_AWQ_ROWS] if scheme.prescale == "awq_lite" else x
        mtq.quantize(model, _config(scheme), lambda quantized: quantized(rows[None]))
        quantizer: Any = model.product.input_quantizer
        scale = quantizer.pre_quant_scale
        amax = quantizer.amax
    scaled = x if scale is None else x * scale
    largest = float(scaled.abs().max()) if amax is None or scale is not None else float(amax)
    return Ranges(largest, None if scale is None else scale.detach().float().clone())


def _config(scheme: Scheme) -> dict[str, Any]:
    quantizers: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
    if scheme.weight in _NUM_BITS:
        weight: dict[str, Any] = {"num_bits": _NUM_BITS[scheme.weight]}
        if scheme.group:
            weight["block_sizes"] = {-1: scheme.group, "type": "static"}
        else:
            weight["axis"] = 0
        quantizers.append({"quantizer_name": "*weight_quantizer", "cfg": weight, "enable": True})
    if scheme.x_format:
        # The largest magnitude does not depend on the format, and ModelOpt's FP4 needs a GPU.
        inputs = {"num_bits": _NUM_BITS.get(scheme.x_format, 8), "axis": None}
        quantizers.append({"quantizer_name": "*input_quantizer", "cfg": inputs, "enable": True})
    return {"quant_cfg": quantizers, "algorithm": _ALGORITHMS[scheme.prescale]}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """ModelOpt prints to stdout, where a --json run prints its object."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
