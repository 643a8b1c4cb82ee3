"""What tests share: a server over a core that answers at once, and the tiny engine in the real core."""

from __future__ import annotations

import live_server
import make_tokenizer
import pytest


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tokenizer.byte_level(tmp_path_factory.mktemp("tok"), bos=True)


@pytest.fixture(scope="module")
def server(folder):
    with live_server.serve(tokenizer_dir=folder) as (url, service):
        yield url, service


@pytest.fixture(scope="session")
def engine_folder(tmp_path_factory):
    """The tiny engine of tests/engines; not to be changed."""
    from core_engine import tiny

    return tiny.write_tiny_engine(tmp_path_factory.mktemp("engine") / "tiny", golden=False)


@pytest.fixture
def start(engine_folder):
    """Starts the core on that engine, with options; shuts down all that were started."""
    from castiron.runtime import _core
    from core_engine import arguments

    started = []

    def make(**options):
        given = arguments(engine_folder)
        started.append(_core.Engine(**{**given, "options": {**given["options"], **options}}))
        return started[-1]

    yield make
    for core in started:
        core.shutdown()
