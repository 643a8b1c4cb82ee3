"""Quantized engines of a tiny checkpoint: verified, measured, described, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from castiron.build import BuildOptions, build, builder
from castiron.calibration import RECIPES, QuantizationOptions
from castiron.engines import open_engine
from castiron.engines.quantization import Quantization
from click.testing import CliRunner

from castiron.cli import main
from castiron.errors import BuildError

pytestmark = pytest.mark.skipif(not builder._has_core(), reason="the C++ runtime is not built here")
SIZES: dict[str, Any] = {"max_batch_size": 2, "max_num_tokens": 64, "max_seq_len": 96, "num_threads": 1}
QUICK: dict[str, Any] = {"calib_size": 4, "calib_seq_len": 48, "eval_tokens": 400}


def quantized(folder: Path, output: Path, dtype: Any = "bfloat16", **options: Any) -> Quantization:
    chosen = QuantizationOptions(**{**QUICK, **options})
    build(folder, output, BuildOptions(dtype=dtype, quantization=chosen, **SIZES))
    found = open_engine(output).manifest.quantization
    assert found is not None
    return found


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_an_engine_of_each_recipe_agrees_with_its_reference(
    checkpoint_folder: Path, tmp_path: Path, recipe: str
) -> None:
    # bfloat16: activations are rounded on both sides. build() fails where verify does.
    found = quantized(checkpoint_folder, tmp_path / "engine", recipe=recipe)
    scheme = RECIPES[recipe].scheme
    (share,) = (
        one
        for one in found.weights
        if one.format == scheme.weight
        and one.group == scheme.group
        and one.activations.partition(",")[0] == scheme.x_format
    )
    # 2 layers of 64 wide: fused qkv, o, gate, up, down; int8-wo shares its format with the head
    assert share.elements == 2 * (64 * 128 + 64 * 64 + 3 * 64 * 128) + (
        64 * 256 if recipe == "int8-wo" else 0
    )
    assert found.accuracy is not None
    assert found.accuracy.predictions == 4 * 95
    assert 0 < found.accuracy.mean_kl < 0.1
    assert "host" in found.accuracy.measured


@pytest.mark.parametrize("recipe", ["int4-awq", "nvfp4", "fp8-block"])
def test_a_float32_engine_computes_with_the_very_weights_of_the_plan(
    checkpoint_folder: Path, tmp_path: Path, recipe: str
) -> None:
    quantized(checkpoint_folder, tmp_path / "engine", "float32", recipe=recipe)
    golden = open_engine(tmp_path / "engine").manifest.golden
    assert golden is not None
    assert golden.verification is not None
    assert golden.verification.max_abs_error < 1e-5  # of logits around 3: the order of sums alone


def test_bits_are_those_of_codes_and_scales(checkpoint_folder: Path, tmp_path: Path) -> None:
    found = quantized(checkpoint_folder, tmp_path / "engine", recipe="int4-wo", eval_tokens=0)
    four, eight = found.weights
    assert four.bits_per_weight == pytest.approx(4 + 16 / 32)
    assert eight.bits_per_weight == pytest.approx(8 + 32 / 64)  # rows of the head are 64 long
    total = four.elements + eight.elements
    mean = (four.elements * 4.5 + eight.elements * 8.5) / total
    assert found.bits_per_weight == pytest.approx(mean)
    assert found.accuracy is None


def test_an_engine_that_loses_too_much_is_not_written(checkpoint_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"mean KL.*--max-kl allows 1e-06.*Products that lose most: model\."):
        quantized(checkpoint_folder, tmp_path / "engine", recipe="int4-awq", max_kl=1e-6)
    assert list(tmp_path.iterdir()) == [] or not (tmp_path / "engine").exists()


def test_inspect_shows_what_was_quantized(checkpoint_folder: Path, tmp_path: Path) -> None:
    quantized(checkpoint_folder, tmp_path / "engine", recipe="int4-awq", exclude=("*.down_proj",))
    shown = CliRunner().invoke(main, ["inspect", str(tmp_path / "engine")])
    assert shown.exit_code == 0, shown.output
    for word in ("Quantization: int4-awq", "Excluded", "down_proj", "Calibrated", "Accuracy", "mean KL"):
        assert word in shown.output
