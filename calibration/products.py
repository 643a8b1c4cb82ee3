"""Quantizing the products of a model while it runs.

Calibration is one pass of the source model over a text; each product is quantized when it is reached. Every
product of the model is replaced by one that first quantizes itself: at that moment it has the
activations of the whole calibration text before it, made by products that are quantized already. So one pass
does for a model of any size what a pass per layer would do, with one weight in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from castiron.errors import BuildError

from ..graph.quant_plan import LinearPlan, TensorRef
from .activations import round_activations
from .grids import GRIDS
from .modelopt import calibrate_product
from .recipes import Scheme
from .rounding import Rounded, compensate, fit_scales, inverse_factor, nearest, second_moments
from .scales import weight_scales
from .sites import InputGroup, Site
from .store import Arrays, Store, read_tensor

#: Rows of activations on which the error of each product is measured.
_ERROR_ROWS: Final = 256


@dataclass
class Quantizer:
    """Quantizes products as the model comes to them; ``product`` takes the place of a site's own.

    ``done``: called after each group.
    """

    store: Store
    groups: list[InputGroup]
    schemes: Mapping[InputGroup, Scheme]
    done: Callable[[], None] = lambda: None
    plans: dict[str, LinearPlan] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    _input: Tensor | None = None
    _rounded_input: Tensor | None = None
    _weights: dict[Site, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._group_of = {site: index for index, group in enumerate(self.groups) for site in group.sites}

    def product(self, site: Site, x: Tensor) -> Tensor:
        """The quantized product of one site."""
        index = self._group_of[site]
        if self._input is not x:
            self._input, self._weights = x, {}
            self._rounded_input, self._weights = self._quantize(index, x)
            self.done()
        assert self._rounded_input is not None
        return functional.linear(self._rounded_input, self._weights[site], site.bias())

    def _quantize(self, index: int, x: Tensor) -> tuple[Tensor, dict[Site, Tensor]]:
        part = part_name(index)
        group = self.groups[index]
        sites, scheme = group.sites, self.schemes[group]
        flat = x.reshape(-1, x.shape[-1])
        refs = self.store.refs(part)
        if refs is None:
            refs = self.store.save(part, quantize_group(group, scheme, flat))
        facts = read_tensor(refs["facts"])
        plans = group_plans(sites, scheme, refs, float(facts[0]))
        self.plans.update(plans)
        self.errors.update({site.name: float(error) for site, error in zip(sites, facts[1:], strict=True)})
        rounded = rounded_input(x, plans[sites[0].stored])
        return rounded, {site: plan_weight(plans[site.stored], site) for site in sites}


def part_name(index: int) -> str:
    """The part of the store that holds a group."""
    return f"group-{index:05d}"


def quantize_group(group: InputGroup, scheme: Scheme, x: Tensor) -> Arrays:
    """Quantize the weights of sites that share the input ``x`` [T, K]; the arrays that a plan refers to.

    ``facts``: the static scale of the input (0: none), then the error of each site.
    """
    sizes = [site.shape[0] for site in group.sites]
    weight = torch.cat([site.weight() for site in group.sites])
    if not group.normed:
        scheme = replace(scheme, prescale="")  # a scale that no norm takes up would cost a step at run time
    trials = [_try(weight, x, scheme, sizes)]
    if scheme.prescale:
        trials.append(_try(weight, x, replace(scheme, prescale=""), sizes))
    best = min(trials, key=lambda trial: sum(error * error for error in trial.errors))
    arrays: dict[str, Any] = {"facts": torch.tensor([best.static, *best.errors]).numpy()}
    if best.input_scale is not None:
        arrays["input_scale"] = best.input_scale.numpy()
    arrays.update(_weight_arrays(group.sites, best.rounded, scheme, codes=scheme.rounding == "compensated"))
    return arrays


@dataclass(frozen=True)
class _Trial:
    """What one way to scale a group's inputs leads to; ``errors``: of each site's output."""

    rounded: Rounded
    input_scale: Tensor | None
    static: float
    errors: list[float]


def _try(weight: Tensor, x: Tensor, scheme: Scheme, sizes: list[int]) -> _Trial:
    found = calibrate_product(weight, x, scheme) if scheme.x_static or scheme.prescale else None
    input_scale = None if found is None else found.input_scale
    static = 0.0
    if found is not None and scheme.x_static:
        static = _static_scale(found.input_amax)
    scaled = x if input_scale is None else x * input_scale
    target = weight if input_scale is None else weight / input_scale
    inputs = round_activations(scaled, scheme.x_format, scheme.x_group, static)
    rounded = round_weight(target, inputs, scheme)
    return _Trial(rounded, input_scale, static, _errors(weight, rounded.weight(), x, inputs, sizes))


def round_weight(weight: Tensor, inputs: Tensor, scheme: Scheme) -> Rounded:
    """The codes and scales of a weight [N, K] for inputs [T, K] as the product will see them."""
    scales = weight_scales(weight, GRIDS[scheme.weight], scheme.group, scheme.scales)
    if scheme.rounding == "nearest":
        return nearest(weight, scales.start(weight), scales)
    moments = second_moments(inputs)
    upper, order = inverse_factor(moments)
    rounded = compensate(weight, upper, order, scales.search(weight, moments.diagonal()), scales)
    if scales.adjustable:
        rounded = compensate(weight, upper, order, fit_scales(weight, moments, rounded), scales)
    return rounded


def quantize_plainly(site: Site, scheme: Scheme) -> Arrays:
    """Scales of a weight by its own numbers, for codes that packing makes."""
    weight = site.weight()
    scales = weight_scales(weight, GRIDS[scheme.weight], scheme.group, scheme.scales)
    rounded = nearest(weight, scales.start(weight), scales)
    return _weight_arrays((site,), rounded, scheme, codes=False)


def group_plans(
    sites: Sequence[Site], scheme: Scheme, refs: Mapping[str, TensorRef], x_scale: float = 0.0
) -> dict[str, LinearPlan]:
    """The plans of a group's sites, by the stored names of their weights."""
    return {
        site.stored: LinearPlan(
            format=scheme.weight,
            group=scheme.group,
            scale=refs[f"{site.stored}.scale"],
            codes=refs.get(f"{site.stored}.codes"),
            input_scale=refs.get("input_scale"),
            x_format=scheme.x_format,
            x_group=scheme.x_group if scheme.x_format in ("int8", "fp8") else 0,
            x_scale=x_scale,
        )
        for site in sites
    }


def rounded_input(x: Tensor, plan: LinearPlan) -> Tensor:
    """``x`` as the product of ``plan`` reads it."""
    if plan.input_scale is not None and not plan.input_is_scaled:
        x = x * torch.from_numpy(read_tensor(plan.input_scale).copy())
    return round_activations(x, plan.x_format, plan.x_group, plan.x_scale)


def plan_weight(plan: LinearPlan, site: Site) -> Tensor:
    """The weight [N, K] that an engine computes with, float32; the site's own where it stays."""
    if plan.format is None or plan.scale is None:
        return site.weight()
    scale = torch.from_numpy(read_tensor(plan.scale)[site.rows].astype("float32"))
    width = site.shape[1]
    columns = scale.repeat_interleave(plan.group, 1)[:, :width] if plan.group else scale
    if plan.codes is not None:
        return _numbers(torch.from_numpy(read_tensor(plan.codes)[site.rows].copy()), plan.format) * columns
    weight = site.weight()
    if plan.input_scale is not None:
        weight = weight / torch.from_numpy(read_tensor(plan.input_scale).copy())
    return GRIDS[plan.format].round(weight / columns) * columns


def without_excluded(groups: list[InputGroup], exclude: Sequence[str]) -> tuple[list[InputGroup], list[str]]:
    """Groups without the sites that a pattern names, and the names left out.

    Raises BuildError for a pattern that matches nothing.
    """
    names = [site.name for group in groups for site in group.sites]
    for pattern in exclude:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise BuildError(
                f"--exclude {pattern!r} matches no matrix of the model; names are like "
                f"{names[0]!r}, {names[-1]!r}"
            )
    excluded = {name for name in names if any(fnmatchcase(name, pattern) for pattern in exclude)}
    kept = []
    for group in groups:
        sites = tuple(site for site in group.sites if site.name not in excluded)
        if sites:
            # What is left out reads the norm's own output, which then must stay as it is.
            kept.append(InputGroup(sites, group.normed and len(sites) == len(group.sites)))
    return kept, [name for name in names if name in excluded]


def _static_scale(amax: float) -> float:
    """NVFP4's scale of a tensor whose largest magnitude is ``amax``."""
    return max(amax, 1e-12) / (GRIDS["fp8"].high * GRIDS["fp4"].high)


def _errors(weight: Tensor, changed: Tensor, x: Tensor, inputs: Tensor, sizes: list[int]) -> list[float]:
    """Relative output error of each part of the rows, on some of the activations."""
    step = max(1, len(x) // _ERROR_ROWS)
    wanted = x[::step] @ weight.T
    change = inputs[::step] @ changed.T - wanted
    return [
        float(delta.norm() / part.norm().clamp(min=1e-30))
        for delta, part in zip(torch.split(change, sizes, 1), torch.split(wanted, sizes, 1), strict=True)
    ]


def _weight_arrays(sites: Sequence[Site], rounded: Rounded, scheme: Scheme, *, codes: bool) -> dict[str, Any]:
    sizes = [site.shape[0] for site in sites]
    scale = rounded.scale.half() if scheme.scales == "float16" else rounded.scale
    arrays: dict[str, Any] = {}
    for site, part, numbers in zip(
        sites, torch.split(scale, sizes), torch.split(rounded.numbers, sizes), strict=True
    ):
        arrays[f"{site.stored}.scale"] = part.contiguous().numpy()
        if codes:
            arrays[f"{site.stored}.codes"] = rounded.scales.grid.codes(numbers).contiguous().numpy()
    return arrays


def _numbers(codes: Tensor, weight_format: str) -> Tensor:
    """The numbers behind codes, float32."""
    if weight_format == "fp8":
        return codes.view(torch.float8_e4m3fn).float()
    if weight_format == "fp4":
        magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        return torch.cat([magnitudes, -magnitudes])[codes.long()]
    return codes.float()
