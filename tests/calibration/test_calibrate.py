"""From a tiny checkpoint to a plan: what is in it, and that it comes out the same by every way."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from castiron.calibration import RECIPES, Calibration, QuantizationOptions, api, calibrate
from castiron.calibration.products import quantize_group
from castiron.calibration.reference import QuantizedModel
from castiron.calibration.sites import InputGroup, Site
from castiron.calibration.store import read_tensor
from castiron.graph import reference
from castiron.graph.checkpoint import Checkpoint
from castiron.graph.reference import SourceModel
from castiron.graph.weights.formats import values
from transformers import AutoModelForCausalLM

from castiron.errors import BuildError

MAX_SEQ_LEN = 96
QUICK: dict[str, Any] = {"calib_size": 4, "calib_seq_len": 48}


def run(
    checkpoint: Checkpoint, progress: Callable[..., None] = lambda *_: None, **options: Any
) -> Calibration:
    chosen = QuantizationOptions(**{**QUICK, **options})
    return calibrate(checkpoint, chosen, max_seq_len=MAX_SEQ_LEN, start=progress, advance=lambda _: None)


@pytest.fixture
def checkpoint(checkpoint_folder: Path) -> Checkpoint:
    return Checkpoint.open(checkpoint_folder)


def dequantized(checkpoint: Checkpoint, found: Calibration) -> dict[str, np.ndarray[Any, Any]]:
    """Weights by stored name from nothing but the plan's tensors, in numpy."""
    result = {}
    for name, plan in found.plan.linears.items():
        assert plan.format is not None
        assert plan.scale is not None
        scale = read_tensor(plan.scale).astype(np.float32)
        weight = checkpoint.read(name).astype(np.float32)
        steps = np.repeat(scale, plan.group or weight.shape[1], 1)[:, : weight.shape[1]]
        if plan.codes is not None:
            result[name] = values(np.asarray(read_tensor(plan.codes)), plan.format) * steps
        else:
            low, high = (-8, 7) if plan.format == "int4" else (-127, 127)
            result[name] = np.clip(np.rint(weight / steps), low, high) * steps
    return result


def codes_of(found: Calibration) -> dict[str, bytes]:
    """The codes of every weight that has some."""
    plans = found.plan.linears.items()
    return {name: bytes(read_tensor(plan.codes)) for name, plan in plans if plan.codes is not None}


@pytest.mark.parametrize("recipe", ["int8-wo", "int4-wo", "int4-awq"])
def test_weight_only_plans_are_what_transformers_computes_with_those_weights(
    checkpoint: Checkpoint, checkpoint_folder: Path, recipe: str
) -> None:
    found = run(checkpoint, recipe=recipe)
    model = AutoModelForCausalLM.from_pretrained(checkpoint_folder, dtype=torch.float32)
    weights = dequantized(checkpoint, found)
    head = weights.pop("model.embed_tokens.weight")
    state = model.state_dict()
    for name, weight in weights.items():
        state[name].copy_(torch.from_numpy(weight))
    ids = torch.arange(40)[None] % 256
    with torch.no_grad():
        hidden = model.model(ids).last_hidden_state[0]
        expected = (hidden @ torch.from_numpy(head).T).numpy()
    source = SourceModel(checkpoint, max_seq_len=MAX_SEQ_LEN)
    quantized = QuantizedModel(source, checkpoint, found.plan).logits(ids[0].numpy(), np.arange(40))
    # float32, two orders of sums
    np.testing.assert_allclose(quantized, expected, atol=2e-5 * np.abs(expected).max())
    plain = source.logits(ids[0].numpy(), np.arange(40))  # and the source is as it was
    assert np.abs(plain - expected).max() > 1e-3


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_every_recipe_covers_every_matrix(checkpoint: Checkpoint, recipe: str) -> None:
    found = run(checkpoint, recipe=recipe)
    projections = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    names = {
        f"model.layers.{i}.{'self_attn' if n[0] in 'qkvo' else 'mlp'}.{n}.weight"
        for i in range(2)
        for n in projections
    }
    assert found.plan.linears.keys() == names | {"model.embed_tokens.weight"}
    scheme = RECIPES[recipe].scheme
    for name in names:
        plan = found.plan.linears[name]
        assert (plan.format, plan.group, plan.x_format) == (scheme.weight, scheme.group, scheme.x_format)
        assert (plan.x_scale > 0) == scheme.x_static
        assert (plan.codes is not None) == (scheme.rounding == "compensated")
    head = found.plan.linears["model.embed_tokens.weight"]
    assert (head.format, head.group, head.x_format) == ("int8", 0, "")
    assert found.errors.keys() == ({n.removesuffix(".weight") for n in names} if scheme.needs_text else set())


def test_the_same_calibration_is_found_again_and_another_is_not(checkpoint: Checkpoint) -> None:
    phases: list[Any] = []
    first = run(checkpoint, lambda *phase: phases.append(phase), recipe="int4-awq")
    again = run(checkpoint, lambda *phase: phases.append(phase), recipe="int4-awq")
    assert (first.resumed, again.resumed) == (False, True)
    assert again.plan == first.plan
    assert again.errors == first.errors
    assert phases == [("calibrate", 2 * 4 + 1)]  # qkv, o, gate and up, down; the head
    assert not run(checkpoint, recipe="int4-awq", calib_size=5).resumed


def test_an_interrupted_calibration_goes_on_and_ends_the_same(checkpoint: Checkpoint) -> None:
    first = run(checkpoint, recipe="int4-awq")
    contents = {
        name: bytes(read_tensor(plan.codes)) for name, plan in first.plan.linears.items() if plan.codes
    }
    folder = next(iter(first.plan.linears.values())).scale.file.parent  # type: ignore[union-attr]
    (folder / "record.json").unlink()
    kept = folder / "group-00001.safetensors"
    before = kept.stat().st_mtime_ns
    for part in folder.glob("group-0000[3-9].safetensors"):
        part.unlink()
    again = run(checkpoint, recipe="int4-awq")
    assert not again.resumed
    assert kept.stat().st_mtime_ns == before
    assert {
        name: bytes(read_tensor(plan.codes)) for name, plan in again.plan.linears.items() if plan.codes
    } == contents


def test_a_streamed_model_is_calibrated_to_the_same_codes(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = run(checkpoint, recipe="int4-awq")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    monkeypatch.setattr(reference, "_SMALL", 1)
    monkeypatch.setattr(api, "SourceModel", partial(SourceModel, whole_model_bytes=0))
    streamed = run(checkpoint, recipe="int4-awq")
    assert codes_of(streamed) == codes_of(whole)


def test_excluded_modules_stay_and_are_named(checkpoint: Checkpoint) -> None:
    found = run(checkpoint, recipe="int8-sq", exclude=("model.layers.1.*", "*.v_proj"))
    assert len(found.excluded) == 8
    kept = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj")
    kept += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    assert found.plan.linears.keys() == {"model.embed_tokens.weight"} | {
        f"model.layers.0.{name}.weight" for name in kept
    }
    # v_proj reads the norm as it is, so q and k cannot have their channel scales in it
    assert found.plan.linears["model.layers.0.self_attn.q_proj.weight"].input_scale is None
    assert found.plan.linears["model.layers.0.mlp.up_proj.weight"].input_scale is not None


def test_a_pattern_without_a_match_is_an_error(checkpoint: Checkpoint) -> None:
    with pytest.raises(BuildError, match=r"'\*\.wo' matches no matrix.*q_proj"):
        run(checkpoint, recipe="int8-wo", exclude=("*.wo",))


def test_the_head_can_stay(checkpoint: Checkpoint) -> None:
    found = run(checkpoint, recipe="int8-wo", quantize_head=False)
    assert "model.embed_tokens.weight" not in found.plan.linears


def test_smoothquant_scales_go_where_a_norm_takes_them_up_and_change_nothing_else(
    checkpoint: Checkpoint,
) -> None:
    plans = run(checkpoint, recipe="int8-sq").plan.linears
    scaled = {name for name, plan in plans.items() if plan.input_scale is not None}
    assert {name.split(".")[-2] for name in scaled} == {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
    one, other = (plans[f"model.layers.0.self_attn.{name}.weight"] for name in ("q_proj", "v_proj"))
    assert one.input_scale == other.input_scale


def test_static_scales_reach_the_largest_activation(checkpoint: Checkpoint, checkpoint_folder: Path) -> None:
    found = run(checkpoint, recipe="nvfp4")
    model = AutoModelForCausalLM.from_pretrained(checkpoint_folder, dtype=torch.float32)
    seen: list[float] = []
    model.model.layers[0].self_attn.q_proj.register_forward_hook(
        lambda _module, inputs, _output: seen.append(float(inputs[0].abs().max()))
    )
    assert found.text is not None
    with torch.no_grad():
        model(torch.from_numpy(found.text.ids))
    scale = found.plan.linears["model.layers.0.self_attn.q_proj.weight"].x_scale
    assert scale == pytest.approx(seen[0] / 448 / 6, rel=1e-5)  # e4m3 scales of e2m1 numbers


@pytest.mark.parametrize(("dtype", "top"), [("fp8", 448.0), ("int8", 127.0)])
def test_cache_scales_are_those_of_the_keys_and_values_that_transformers_caches(
    checkpoint: Checkpoint, checkpoint_folder: Path, dtype: Any, top: float
) -> None:
    found = run(checkpoint, kv_cache=dtype)
    assert found.text is not None
    model = AutoModelForCausalLM.from_pretrained(checkpoint_folder, dtype=torch.float32)
    with torch.no_grad():
        cache = model(torch.from_numpy(found.text.ids), use_cache=True).cache
    assert found.plan.kv_scales.keys() == {0, 1}
    keys = cache.layers[0].keys.abs().amax((0, 2, 3)).numpy() / top
    found_keys = np.asarray(found.plan.kv_scales[0].k)
    # int8 may clip: its scale is one of five fractions of the largest number's
    allowed = (1.0,) if dtype == "fp8" else (1.0, 0.9, 0.8, 0.7, 0.6)
    assert np.isclose(found_keys[:, None] / keys[:, None], allowed, rtol=1e-5).any(1).all()


def test_sequences_longer_than_the_engines_are_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(BuildError, match="--calib-seq-len 96 or less"):
        run(checkpoint, recipe="int4-awq", calib_seq_len=97)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": "int4_awq"}, "did you mean int4-awq"),
        ({"exclude": ("*",)}, "no --quantize"),
        ({"recipe": "fp8", "auto_bits": 6.0}, "has 8 bits"),
        ({"recipe": "int4-awq", "auto_bits": 3.0}, "takes 4.5 bits"),
        ({"recipe": "fp8", "max_kl": 0.1, "eval_tokens": 0}, "accuracy report"),
        ({"max_kl": 0.1}, "--max-kl: given, but the build quantizes nothing"),
        ({"calib_size": 8}, "--calib-size: given, but the build quantizes nothing"),
        ({"eval_data": Path("text"), "calib_data": Path("text")}, "--calib-data and --eval-data: given"),
        ({"recipe": "fp8", "calib_seq_len": 1}, "at least 2"),
        ({"kv_cache": "fp4"}, "expected auto, fp8 or int8"),
    ],
)
def test_options_that_cannot_be_met_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BuildError, match=message):
        QuantizationOptions(**options).check()


def test_mixed_precision_keeps_its_budget_and_costs_less(checkpoint: Checkpoint) -> None:
    four = run(checkpoint, recipe="int4-awq")
    mixed = run(checkpoint, recipe="int4-awq", auto_bits=6.0)
    sizes = {name: np.prod(checkpoint.info(name).shape) for name in mixed.plan.linears}
    del sizes["model.embed_tokens.weight"]
    bits = {name: 8.0 if mixed.plan.linears[name].format == "int8" else 4.5 for name in sizes}
    assert sum(bits[name] * size for name, size in sizes.items()) <= 6.0 * sum(sizes.values())
    assert 4.5 < np.mean(list(bits.values())) < 8
    # products that share an input share a format, so that they can be fused
    for names in (("q", "k", "v"), ("gate", "up")):
        part = "self_attn" if len(names) == 3 else "mlp"
        assert len({bits[f"model.layers.0.{part}.{name}_proj.weight"] for name in names}) == 1
    ids = np.arange(60) % 256
    source = SourceModel(checkpoint, max_seq_len=MAX_SEQ_LEN)
    wanted = source.logits(ids, np.arange(60))
    errors = [
        np.square(QuantizedModel(source, checkpoint, found.plan).logits(ids, np.arange(60)) - wanted).mean()
        for found in (four, mixed)
    ]
    assert errors[1] < errors[0]
    assert run(checkpoint, recipe="int4-awq", auto_bits=6.0).plan == mixed.plan


def test_mixed_precision_of_a_model_that_does_not_fit_is_refused_with_numbers(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("castiron.calibration.sensitivity.available_bytes", lambda: 1000)
    with pytest.raises(BuildError, match=r"needs about .* GB of memory.*--exclude"):
        run(checkpoint, recipe="int4-awq", auto_bits=6.0)


@pytest.mark.parametrize(
    ("large", "smoothed"),
    [
        pytest.param(slice(5, 6), True, id="one input of a group"),
        pytest.param(slice(0, 32), False, id="a whole group, which has a scale of its own"),
    ],
)
def test_smoothquant_stays_where_it_lowers_the_error(
    checkpoint: Checkpoint, large: slice, smoothed: bool
) -> None:
    torch.manual_seed(3)
    module = torch.nn.Linear(64, 48, bias=False)
    site = Site("product", "product.weight", module, False, (48, 64), False, checkpoint)
    x = torch.randn(512, 64)
    x[:, large] *= 100
    arrays = quantize_group(InputGroup((site,), normed=True), RECIPES["int8-sq"].scheme, x)
    assert ("input_scale" in arrays) == smoothed
