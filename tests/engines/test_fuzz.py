from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzz_reader import FILES, Fuzzer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


@pytest.fixture(scope="module")
def fuzzer() -> Iterator[Fuzzer]:
    with tempfile.TemporaryDirectory() as folder:
        yield Fuzzer(Path(folder), seed=0)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_the_reader_survives_a_thousand_damaged_engines(fuzzer: Fuzzer) -> None:
    # 100,000 and more by hand: python tests/engines/fuzz_reader.py
    for _ in range(1000):
        fuzzer.run_one()
    assert sum(fuzzer.outcomes.values()) == 1000


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(FILES), content=st.binary(max_size=300), keep=st.integers(0, 3000))
def test_the_reader_survives_any_bytes(fuzzer: Fuzzer, name: str, content: bytes, keep: int) -> None:
    original = fuzzer.original[name]
    (fuzzer.folder / name).write_bytes(original[:keep] + content + original[keep + len(content) :])
    try:
        assert fuzzer.use() in ("refused", "opened")
    finally:
        (fuzzer.folder / name).write_bytes(original)
