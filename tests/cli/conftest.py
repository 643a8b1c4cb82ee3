from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))

from tiny import write_tiny_engine


@pytest.fixture(scope="session")
def tiny_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tiny engine that no test changes."""
    return write_tiny_engine(tmp_path_factory.mktemp("engines") / "tiny")
