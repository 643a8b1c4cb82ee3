"""From a checkpoint and options to a quantization plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from castiron.errors import BuildError

from ..graph.checkpoint import Checkpoint
from ..graph.quant_plan import CacheScales, LinearPlan, QuantPlan
from ..graph.reference import SourceModel
from .options import QuantizationOptions
from .products import Quantizer, group_plans, part_name, quantize_plainly, without_excluded
from .recipes import HEAD, Recipe, Scheme, recipe_named
from .running import CacheWatch, attention_by_sequence
from .sensitivity import assign, available_bytes, check_memory
from .sites import InputGroup, Site, find_experts, find_sites, input_groups, replaced
from .store import Store, cache_folder, key_of
from .texts import (
    CALIBRATION_TEXT,
    Windows,
    default_text,
    random_windows,
    read_text,
    spread,
    token_windows,
)

#: Called as (phase, units of work or None) at the start of a phase, and with each unit done.
StartPhase = Callable[[str, int | None], None]


@dataclass(frozen=True)
class Calibration:
    """A plan, and how it came about.

    ``recipe``: None where only the cache is quantized; ``text``: None where no calibration was needed;
    ``errors``: relative output error by module name; ``schemes``: by module name; ``excluded``: module names;
    ``resumed``: taken from an earlier calibration.
    """

    plan: QuantPlan
    recipe: Recipe | None
    schemes: Mapping[str, Scheme]
    excluded: tuple[str, ...]
    errors: Mapping[str, float]
    text: Windows | None
    resumed: bool


def calibrate(
    checkpoint: Checkpoint,
    options: QuantizationOptions,
    *,
    max_seq_len: int,
    start: StartPhase,
    advance: Callable[[int], None],
) -> Calibration:
    """Make the plan for ``checkpoint``, or find it where the same one was made before.

    Raises BuildError for options that do not fit the model or the text.
    """
    options.check()
    recipe = None if options.recipe is None else recipe_named(options.recipe)
    source = _source(checkpoint, options, max_seq_len)
    experts = find_experts(source.model, checkpoint)
    if experts and options.auto_bits is not None:
        raise BuildError(
            f"--auto-quantize does not know what experts cost ({checkpoint.source} has a mixture of them); "
            "leave it out, or keep modules in full precision by --exclude"
        )
    groups = input_groups(source.model, find_sites(source.model, checkpoint), experts)
    groups += [InputGroup((site,), False) for site in experts]
    excluded: list[str] = []
    schemes: dict[InputGroup, Scheme] = {}
    if recipe is None:
        groups = []
    else:
        if not options.quantize_head:
            groups = [group for group in groups if not group.is_head]
        groups, excluded = without_excluded(groups, options.exclude)
        schemes = {group: _scheme(group, recipe) for group in groups}
    needs_text = options.kv_cache != "auto" or options.auto_bits is not None
    needs_text |= any(scheme.needs_text for scheme in schemes.values())
    windows = _windows(checkpoint, options) if needs_text else None
    if windows is not None and windows.ids.shape[1] > max_seq_len:
        raise BuildError(
            f"calib_seq_len is {windows.ids.shape[1]}, and the engine takes {max_seq_len} tokens; "
            f"give --calib-seq-len {max_seq_len} or less"
        )
    facts = {
        "options": {k: v for k, v in asdict(options).items() if k not in _REPORT_OPTIONS},
        "text": None if windows is None else [windows.sha256, windows.ids.shape],
        "max_seq_len": max_seq_len,
    }
    store = Store(cache_folder() / key_of(checkpoint, facts))
    record = store.record()
    resumed = record is not None
    if recipe is not None and options.auto_bits is not None:
        assert windows is not None
        upgraded = None if record is None else set(record["upgraded"])
        if upgraded is None:
            start("find sensitive layers", None)
            mixed = assign(source, [g for g in groups if not g.is_head], recipe, options.auto_bits, windows)
            upgraded = {group.sites[0].name for group, scheme in mixed.items() if scheme is recipe.upgrade}
        assert recipe.upgrade is not None
        for group in groups:
            if group.sites[0].name in upgraded:
                schemes[group] = recipe.upgrade
    if record is None:
        start("calibrate", len(groups) + (1 if options.kv_cache != "auto" else 0))
        record = _run(source, groups, schemes, store, windows, options, advance)
        record["upgraded"] = [g.sites[0].name for g in groups if recipe and schemes[g] is recipe.upgrade]
        store.finish(record)
    return Calibration(
        plan=_plan(store, groups, schemes, record, options),
        recipe=recipe,
        schemes={site.name: schemes[group] for group in groups for site in group.sites},
        excluded=tuple(excluded),
        errors=record["errors"],
        text=windows,
        resumed=resumed,
    )


def _scheme(group: InputGroup, recipe: Recipe) -> Scheme:
    if group.is_head:
        return HEAD
    return recipe.scheme.of_experts() if group.sites[0].experts else recipe.scheme


#: Options that decide about the report and not about the plan.
_REPORT_OPTIONS: Final = frozenset({"eval_data", "eval_tokens", "max_kl", "calib_data"})


def _run(
    source: SourceModel,
    groups: list[InputGroup],
    schemes: Mapping[InputGroup, Scheme],
    store: Store,
    windows: Windows | None,
    options: QuantizationOptions,
    advance: Callable[[int], None],
) -> dict[str, Any]:
    plain = [group for group in groups if not schemes[group].needs_text]
    calibrated = [group for group in groups if schemes[group].needs_text]
    for group in plain:
        for site in group.sites:
            if store.refs(_part(site)) is None:
                store.save(_part(site), quantize_plainly(site, schemes[group]))
        advance(1)
    quantizer = Quantizer(store, calibrated, schemes, lambda: advance(1))
    watch = CacheWatch(options.kv_cache)
    if windows is not None:
        sites = [site for group in calibrated for site in group.sites]
        with replaced(sites, quantizer.product), attention_by_sequence(source.model), torch.no_grad():
            ids = torch.from_numpy(np.ascontiguousarray(windows.ids))
            source.model(input_ids=ids, use_cache=True, cache=watch, logits_to_keep=1)
    if options.kv_cache != "auto":
        advance(1)
    return {
        "errors": quantizer.errors,
        "kv": {str(layer): [one.k, one.v] for layer, one in watch.scales.items()},
        "x_scales": {name: plan.x_scale for name, plan in quantizer.plans.items()},
        "parts": {
            site.name: part_name(index) for index, group in enumerate(calibrated) for site in group.sites
        },
    }


def _part(site: Site) -> str:
    return f"matrix-{site.name}"


def _plan(
    store: Store,
    groups: list[InputGroup],
    schemes: Mapping[InputGroup, Scheme],
    record: Mapping[str, Any],
    options: QuantizationOptions,
) -> QuantPlan:
    linears: dict[str, LinearPlan] = {}
    for group in groups:
        for site in group.sites:
            part = record["parts"].get(site.name, _part(site))
            refs = store.refs(part)
            if refs is None:
                raise BuildError(f"{store.folder}: {part}.safetensors is missing; delete this folder")
            scale = record["x_scales"].get(site.stored, 0.0)
            linears.update(group_plans([site], schemes[group], refs, scale))
    kv = {int(layer): CacheScales(tuple(k), tuple(v)) for layer, (k, v) in record["kv"].items()}
    return QuantPlan(linears, options.kv_cache, kv if options.kv_cache != "auto" else {})


def _source(checkpoint: Checkpoint, options: QuantizationOptions, max_seq_len: int) -> SourceModel:
    if options.auto_bits is None:
        return SourceModel(checkpoint, max_seq_len=max_seq_len)
    source = SourceModel(checkpoint, max_seq_len=max_seq_len, whole_model_bytes=available_bytes() * 2 // 3)
    check_memory(source)
    return source


def _windows(checkpoint: Checkpoint, options: QuantizationOptions) -> Windows:
    length, count = options.calib_seq_len, options.calib_size
    if not (checkpoint.folder / "tokenizer.json").is_file():
        if options.calib_data is not None:
            raise BuildError(
                f"{checkpoint.folder} has no tokenizer.json, so {options.calib_data} cannot become tokens; "
                "add the tokenizer, or leave out --calib-data to calibrate on random tokens"
            )
        return random_windows(int(checkpoint.hf_config.vocab_size), length, count)
    data: Path | None = options.calib_data
    text = default_text(CALIBRATION_TEXT) if data is None else read_text(data)
    return spread(token_windows(checkpoint.folder, text, length), count)
