"""The server that most tests of the API share, over a core that answers at once."""

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
