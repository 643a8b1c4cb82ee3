"""The options of quantization reach the builder as one object."""

from __future__ import annotations

from dataclasses import fields

import pytest

from castiron.commands import quantization

calibration = pytest.importorskip("castiron.calibration")


def test_the_command_line_knows_every_recipe_and_every_option() -> None:
    # The names stand in the command's module so that --help imports neither numpy nor recipes.
    assert set(quantization._RECIPES) == set(calibration.RECIPES)
    assert set(quantization._FIELDS.values()) == {
        field.name for field in fields(calibration.QuantizationOptions)
    }


def test_defaults_of_the_command_line_are_those_of_the_options() -> None:
    import click

    @click.command()
    @quantization.quantization_options
    def command(**options: object) -> None:
        found.append(quantization.take_options(options))

    found: list[object] = []
    command.main([], standalone_mode=False)
    assert found == [calibration.QuantizationOptions()]
