from __future__ import annotations

from pathlib import Path

import pytest

onnx = pytest.importorskip("onnx", reason="needs castiron[build]")
from castiron.commands.capture import refer_relative_to  # noqa: E402


def model_with(locations: list[str]) -> onnx.ModelProto:
    tensors = []
    for location in locations:
        tensor = onnx.TensorProto(name=location, data_type=onnx.TensorProto.FLOAT, dims=[2])
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (("location", location), ("offset", "64"), ("length", "8")):
            tensor.external_data.add(key=key, value=value)
        tensors.append(tensor)
    return onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [], tensors))


def test_weights_below_the_output_folder_load_by_their_relative_path(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    file = tmp_path / "model" / "w.safetensors"
    file.write_bytes(bytes(64) + b"\0\0\x80\x3f\0\0\0\x40")  # 1.0, 2.0
    model = model_with([str(file)])
    refer_relative_to(model, tmp_path)
    assert model.graph.initializer[0].external_data[0].value == "model/w.safetensors"
    onnx.save(model, tmp_path / "graph.onnx")
    loaded = onnx.load(tmp_path / "graph.onnx")
    assert onnx.numpy_helper.to_array(loaded.graph.initializer[0]).tolist() == [1.0, 2.0]


def test_weights_elsewhere_are_reached_by_climbing_and_relative_ones_stay(tmp_path: Path) -> None:
    model = model_with([str(tmp_path / "w.safetensors"), "here.safetensors"])
    refer_relative_to(model, tmp_path / "out")
    locations = [tensor.external_data[0].value for tensor in model.graph.initializer]
    assert locations == ["../w.safetensors", "here.safetensors"]
