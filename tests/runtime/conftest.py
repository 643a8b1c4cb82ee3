"""What tests share: a server over a core that answers at once, and the tiny engine in the real core."""

from __future__ import annotations

import live_server
import make_tokenizer
import pytest
import tool_answers
from fake_core import FakeCore
from server_calls import says


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tokenizer.byte_level(tmp_path_factory.mktemp("tok"), bos=True)


@pytest.fixture(scope="module")
def server(folder):
    with live_server.serve(tokenizer_dir=folder) as (url, service):
        yield url, service


@pytest.fixture(scope="session")
def tools_folder(tmp_path_factory):
    return make_tokenizer.byte_level(tmp_path_factory.mktemp("tools"), chat_template=tool_answers.TEMPLATE)


@pytest.fixture
def saying(tools_folder):
    """Starts a server whose model says a text and ends: (URL, service, core)."""
    running = []

    def start(text, **options):
        end = tool_answers.END
        core = FakeCore(script=[*says(tools_folder, text), end])
        limits = {"eos_token_ids": (end,), "max_seq_len": 2048}
        running.append(live_server.serve(core, tokenizer_dir=tools_folder, **limits, **options))
        return *running[-1].__enter__(), core

    yield start
    for manager in running:
        manager.__exit__(None, None, None)


@pytest.fixture(scope="session")
def engine_folder(tmp_path_factory):
    """The tiny engine of tests/engines; not to be changed."""
    from core_engine import tiny

    return tiny.write_tiny_engine(tmp_path_factory.mktemp("engine") / "tiny", golden=False)


@pytest.fixture(scope="module")
def engine_server(engine_folder):
    """A server over that engine in the real core."""
    from core_engine import open_tiny

    with live_server.serve_session(open_tiny(engine_folder)) as found:
        yield found


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
