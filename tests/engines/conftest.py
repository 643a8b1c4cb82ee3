from __future__ import annotations

from pathlib import Path

import pytest
from tiny import write_tiny_engine


@pytest.fixture(scope="session")
def tiny_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tiny engine that no test changes."""
    return write_tiny_engine(tmp_path_factory.mktemp("engines") / "tiny")
