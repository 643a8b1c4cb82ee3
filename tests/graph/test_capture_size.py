"""Capture of a model that would not fit in memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROGRAM = """
import resource
from transformers import AutoConfig
from castiron.graph import capture_config

config = AutoConfig.for_model(
    "llama", hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
    num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072,
)
captured = capture_config(config)
assert len(captured.layers) == 80
assert captured.report.max_error is not None
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, captured.model.ByteSize())
"""


@pytest.mark.slow
def test_a_70b_configuration_is_captured_in_less_than_1500_megabytes() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    peak_kib, graph_bytes = map(int, done.stdout.split())
    assert peak_kib < 1_500_000
    assert graph_bytes < 10_000_000
