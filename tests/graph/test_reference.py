"""The source model, whole and streamed, against transformers loading the same folder by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from castiron.graph import reference, streamed
from castiron.graph.checkpoint import Checkpoint
from castiron.graph.reference import SourceModel

from castiron.errors import CheckpointError, UnsupportedModelError

IDS = np.random.default_rng(0).integers(3, 200, 30)


@pytest.fixture
def everything_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small parameters are streamed as well, in pieces of a few rows."""
    monkeypatch.setattr(reference, "_SMALL", 1)
    monkeypatch.setattr(streamed, "_PIECE_BYTES", 3000)


def loaded_by_transformers(model: Any, folder: Path) -> Any:
    return type(model).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


# One of each way a weight is used: Linear, tied head, Conv1D, Embedding with scale and with offset, biases,
# experts.
@pytest.mark.usefixtures("everything_streams")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name",
    ["llama", "llama_tied", "gpt2", "gemma3_text", "opt", "bloom", "phi", "mistral", "mixtral", "gpt_oss"],
)
def test_logits_and_decode_equal_transformers(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    folder = tmp_path / "m"
    source = loaded_by_transformers(zoo.make_checkpoint(name, folder, dtype=dtype), folder)
    with torch.no_grad():
        expected = source(input_ids=torch.from_numpy(IDS)[None]).logits[0].numpy()
    rows = [29, 0, 7]
    for limit in (1 << 31, 0):
        model = SourceModel(Checkpoint.open(folder), whole_model_bytes=limit)
        assert model.streamed == (limit == 0)
        # Same operations and precision; products may sum in another order: a few ulp of |logit| ~ 3
        np.testing.assert_allclose(model.logits(IDS, rows), expected[rows], atol=5e-6)
        np.testing.assert_allclose(model.decode(IDS[:20], IDS[20:]), expected[20:], atol=5e-6)
        assert model.logits(IDS, rows).dtype == np.float32


@pytest.mark.usefixtures("everything_streams")
def test_streamed_matrices_hold_no_memory(tmp_path: Path) -> None:
    zoo.make_checkpoint("llama", tmp_path / "m")
    model = SourceModel(Checkpoint.open(tmp_path / "m"), whole_model_bytes=0)
    matrices = [p for p in model.model.parameters() if p.ndim == 2]
    assert len(matrices) == 16
    with torch._C.DisableTorchFunctionSubclass():  # the parameter answers questions about its form only
        assert all(p.untyped_storage().nbytes() == 4 for p in matrices)


@pytest.mark.usefixtures("everything_streams")
def test_an_operation_that_cannot_be_streamed_is_refused_not_computed_on_nothing(
    tmp_path: Path,
) -> None:
    zoo.make_checkpoint("llama", tmp_path / "m")
    checkpoint = Checkpoint.open(tmp_path / "m")
    weight = streamed.StreamedParameter.over(checkpoint, checkpoint.resolve("lm_head.weight"))
    assert (weight.shape, weight.dtype, weight.device.type) == ((256, 64), torch.float32, "cpu")
    for use in (
        lambda: weight + 1,
        lambda: torch.ones(2, 256) @ weight,
        lambda: weight.sum(),
        lambda: weight[:2],
    ):
        with pytest.raises(UnsupportedModelError, match="on a weight that is too large to load"):
            use()


def test_a_config_that_does_not_fit_the_weights_is_refused(tmp_path: Path) -> None:
    zoo.make_checkpoint("llama", tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    path.write_text(path.read_text().replace('"intermediate_size": 128', '"intermediate_size": 96'))
    with pytest.raises(CheckpointError, match=r"_proj\.weight.*128.*96"):
        SourceModel(Checkpoint.open(tmp_path / "m"))
