"""LoRA adapters in Python: PEFT's files, names, memory, the server's routes; over the twin of the core."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import live_server
import ml_dtypes
import numpy as np
import pytest
from castiron.engines import open_engine
from castiron.engines.golden import pack_arrays
from castiron.runtime.async_engine import AsyncEngine
from castiron.runtime.lora import Adapters
from castiron.runtime.lora.peft_files import read_adapter
from castiron.runtime.options import RuntimeOptions
from castiron.runtime.request_errors import AdapterError, AdapterNotFoundError, QueueFullError
from castiron.runtime.sampling_params import SamplingParams
from castiron.runtime.server.service import ServerConfig, Service
from fake_core import FakeCore, make_session

from castiron import ModelRunner
from castiron.errors import EngineError, RequestError

#: (inputs, outputs)
SIZES = {"model.layers.0.q_proj": (6, 8), "model.layers.0.mlp.up": (6, 4)}
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "bias": "none", "target_modules": ["q_proj", "up"]}


def arrays(rank: int = 2) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    return {
        f"base_model.model.{module}.lora_{which}.weight": rng.standard_normal(shape).astype(np.float32)
        for module, (inputs, outputs) in SIZES.items()
        for which, shape in (("A", (rank, inputs)), ("B", (outputs, rank)))
    }


def write(folder: Path, tensors: dict[str, np.ndarray] | None = None, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    (folder / "adapter_model.safetensors").write_bytes(pack_arrays(arrays() if tensors is None else tensors))
    return folder


def test_matrices_and_scales_are_those_of_the_files(tmp_path):
    given = arrays()
    found = read_adapter(write(tmp_path / "a"), SIZES, 4)
    assert found.keys() == SIZES.keys()
    for module, one in found.items():
        np.testing.assert_array_equal(one.a, given[f"base_model.model.{module}.lora_A.weight"])
        np.testing.assert_array_equal(one.b, given[f"base_model.model.{module}.lora_B.weight"])
        assert one.scale == 6 / 2


def test_ranks_and_alphas_of_single_modules_and_rank_stabilised_scales(tmp_path):
    tensors = arrays()
    tensors |= {name: value for name, value in arrays(rank=3).items() if ".up." in name}
    patterns = {"rank_pattern": {"mlp.up": 3}, "alpha_pattern": {r"layers\.\d+\.q_proj": 5, "p": 9}}
    found = read_adapter(write(tmp_path / "a", tensors, **patterns), SIZES, 4)
    assert [one.scale for one in found.values()] == [5 / 2, 6 / 3]
    found = read_adapter(write(tmp_path / "b", tensors, use_rslora=True, **patterns), SIZES, 4)
    assert [one.scale for one in found.values()] == pytest.approx([5 / 2**0.5, 6 / 3**0.5])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_types_are_read(tmp_path, dtype):
    folder = write(tmp_path / "a")
    table, data = {}, b""
    for name, value in arrays().items():
        raw = value.astype(dtype).tobytes()
        code = "F16" if dtype is np.float16 else "BF16"
        table[name] = {
            "dtype": code,
            "shape": list(value.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(table).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    for module, one in read_adapter(folder, SIZES, 4).items():
        wanted = arrays()[f"base_model.model.{module}.lora_A.weight"].astype(dtype).astype(np.float32)
        np.testing.assert_array_equal(one.a, wanted)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "use_dora = True"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"something_new": 3}, "something_new = 3"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"r": 0}, "rank of 'model.layers.0.q_proj' is 0"),
        ({"r": True}, "is True"),
        ({"r": 3}, r"has shape \[2, 6\]; expected \[3, 6\]"),
        ({"r": 100000}, "at most 4; raise --max-lora-rank"),
        ({"lora_alpha": None}, "lora_alpha .* is None"),
        ({"lora_alpha": float("nan")}, "lora_alpha .* is nan"),
        ({"lora_alpha": 10**400}, "lora_alpha .* at most 1e\\+06"),
        ({"alpha_pattern": {"(": 1}}, "no regular expression"),
        ({"alpha_pattern": {"a{99999999999}": 1}}, "no regular expression"),
        ({"rank_pattern": {"(\\w+\\.?)+#": 2}}, "too complex.*none of them of a group"),
        ({"rank_pattern": {".*.*.*.*.*#": 2}}, "too complex.* 4 repetitions"),
        ({"rank_pattern": {"q" * 600: 2}}, "too complex.* 512 characters"),
        ({"rank_pattern": {"(.|.)" * 21 + "#": 2}}, "too complex.* ways through its alternatives"),
    ],
)
def test_a_config_that_changes_the_result_unseen_is_refused_by_name(tmp_path, config, message):
    with pytest.raises(AdapterError, match=message):
        read_adapter(write(tmp_path / "a", **config), SIZES, 4)


def test_fields_that_change_nothing_are_no_reason_to_refuse(tmp_path):
    neutral = {
        "lora_dropout": 0.1,
        "megatron_core": "megatron.core",
        "use_dora": False,
        "layer_replication": None,
    }
    assert read_adapter(write(tmp_path / "a", **neutral, init_lora_weights="gaussian"), SIZES, 4)


def damaged(change: str) -> dict[str, np.ndarray]:
    tensors = arrays()
    first = next(iter(tensors))
    if change == "missing":
        del tensors[first]
    elif change == "shape":
        tensors[first] = np.zeros((2, 7), np.float32)
    elif change == "nan":
        tensors[first][1, 1] = np.nan
    elif change == "unknown":
        tensors["base_model.model.model.layers.9.q_proj.lora_A.weight"] = tensors[first]
    elif change == "embedding":
        tensors["base_model.model.model.embed.lora_embedding_A"] = tensors[first]
    elif change == "integers":
        tensors[first] = np.zeros((2, 6), np.int32)
    return tensors if change != "empty" else {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", r"q_proj\.lora_A\.weight is missing"),
        ("shape", r"has shape \[2, 7\]; expected \[2, 6\]"),
        ("nan", "NaN or infinity"),
        ("unknown", r"adapts 'model\.layers\.9\.q_proj'.*q_proj, up"),
        ("embedding", "lora_embedding_A.*merge the adapter"),
        ("integers", "is of I32"),
        ("empty", "holds no tensors"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path, change, message):
    with pytest.raises(AdapterError, match=message):
        read_adapter(write(tmp_path / "a", damaged(change)), SIZES, 4)


def test_damaged_files_are_refused(tmp_path):
    folder = write(tmp_path / "a")
    weights = folder / "adapter_model.safetensors"
    whole = weights.read_bytes()
    for content in (b"", whole[:7], whole[:100], whole[:-1], b"\xff" * 64, whole + b"x"):
        weights.write_bytes(content)
        with pytest.raises(AdapterError, match=r"cannot be (read|used)"):
            read_adapter(folder, SIZES, 4)
    weights.unlink()
    (folder / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(AdapterError, match="a pickle"):
        read_adapter(folder, SIZES, 4)
    (folder / "adapter_config.json").write_text("[")
    with pytest.raises(AdapterError, match="not a JSON object"):
        read_adapter(folder, SIZES, 4)
    for none in (tmp_path / "none", "a\0b", "x" * 5000):
        with pytest.raises(AdapterError, match="no such folder"):
            read_adapter(none, SIZES, 4)


@pytest.fixture
def adapters(tmp_path):
    made = Adapters(FakeCore(), SIZES, max_rank=4, max_in_memory=2)
    for name in "abc":
        made.load(name, write(tmp_path / name))
    return made


def test_the_least_recently_used_adapter_leaves_memory_and_comes_back(adapters):
    core = adapters._core
    assert (len(core.adapters), core.removed, adapters.in_memory) == (3, [1], 2)  # a had to go for c
    b = adapters.acquire("b")
    a = adapters.acquire("a")  # c goes, which is older now
    assert (core.removed, (a.id, b.id)) == ([1, 3], (4, 2))
    with pytest.raises(QueueFullError, match=r"all 2 adapters.*--max-cpu-loras"):
        adapters.acquire("c")
    adapters.release(b)
    assert adapters.acquire("c").id == 5
    assert core.removed == [1, 3, 2]


def test_an_adapter_in_use_is_unloaded_when_its_last_request_ends(adapters):
    use = adapters.acquire("b")
    adapters.unload("b")
    with pytest.raises(AdapterNotFoundError, match="loaded are: a, c"):
        adapters.acquire("b")
    assert adapters.in_memory == 2  # c, and b until its request ends
    adapters.release(use)
    assert adapters.in_memory == 1
    with pytest.raises(AdapterNotFoundError):
        adapters.unload("b")


def test_what_is_in_memory_or_unknown_does_not_wait_for_files(adapters):
    held = adapters.acquire("b")
    with adapters._loading:  # somebody reads an adapter from a slow disk
        assert adapters.acquire("b") is held
        with pytest.raises(AdapterNotFoundError):
            adapters.acquire("z")


def test_a_prepared_adapter_stays_until_the_request_has_it(adapters):
    async def run() -> None:
        session = make_session(adapters._core)
        session.adapters = adapters
        async with AsyncEngine(session) as engine:
            params = SamplingParams(max_tokens=1, lora="b")
            async with engine.prepared(params):
                adapters.acquire("a")
                with pytest.raises(QueueFullError):  # b cannot be dropped for it
                    adapters.acquire("c")
            async with engine.prepared(SamplingParams()):
                await asyncio.sleep(0)
            c = adapters.acquire("c")
            given_back = asyncio.Event()
            adapters.release = lambda adapter: (Adapters.release(adapters, adapter), given_back.set())
            with adapters._lock:  # the client goes while its adapter is being looked for
                preparing = asyncio.ensure_future(engine.prepared(replace(params, lora="c")).__aenter__())
                await asyncio.sleep(0.01)
                preparing.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await preparing
            await asyncio.wait_for(given_back.wait(), 20)
            assert c.users == 1

    asyncio.run(run())


def test_a_name_means_one_adapter(adapters, tmp_path):
    with pytest.raises(AdapterError, match="is 5; expected a path"):
        adapters.load("d", 5)
    for name in ("", "d\r\nX-Injected: 1", "d\n", "d\x1b[2J", "\ud800", "d" * 257):
        with pytest.raises(AdapterError, match="expected 1 to 256 printable characters"):
            adapters.load(name, tmp_path / "a")
    with pytest.raises(AdapterError, match="loaded already"):
        adapters.load("a", tmp_path / "b")
    adapters.unload("a")
    adapters.load("a", tmp_path / "b")
    assert adapters.paths["a"] == str(tmp_path / "b")


def test_files_that_changed_for_the_worse_fail_the_request_that_needs_them(adapters, tmp_path):
    write(tmp_path / "a", damaged("nan"))  # dropped from memory before
    with pytest.raises(AdapterError, match="NaN"):
        adapters.acquire("a")
    assert adapters.acquire("b").users == 1


def test_a_runner_loads_names_and_unloads(tmp_path):
    core = FakeCore()
    session = make_session(core)
    with ModelRunner(session) as runner, pytest.raises(RequestError, match="--enable-lora"):
        runner.load_lora("a", tmp_path)
    session = make_session(core := FakeCore())
    session.adapters = Adapters(core, SIZES, max_rank=4, max_in_memory=2)
    with ModelRunner(session) as runner:
        runner.load_lora("a", write(tmp_path / "a"))
        (good,) = runner.generate(input_ids=[1, 2], max_new_tokens=3, lora="a")
        (plain,) = runner.generate(input_ids=[1, 2], max_new_tokens=3)
        (bad,) = runner.generate(input_ids=[1, 2], max_new_tokens=3, lora="z")
        assert (good.error, plain.error) == (None, None)
        assert "there is no adapter 'z'" in bad.error
        assert core.adapter_of == [1, 0]
        runner.unload_lora("a")
        assert core.removed == [1]
        assert runner.generate(input_ids=[1], lora="a")[0].error


@pytest.fixture
def server(tmp_path):
    core = FakeCore()
    config = {"model_names": ("base",), "lora_updating": True}
    with live_server.serve(core, config=config) as (url, service):
        service.engine.session.adapters = Adapters(core, SIZES, max_rank=4, max_in_memory=2)
        yield url, service, core


def post(url: str, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}{path}", json=body, timeout=30)


def test_the_server_loads_lists_serves_and_unloads_adapters(server, tmp_path):
    url, _, core = server
    answer = post(url, "/v1/load_lora_adapter", lora_name="sql", lora_path=str(write(tmp_path / "a")))
    assert (answer.status_code, "added successfully" in answer.text) == (200, True)
    listed = httpx.get(f"{url}/v1/models").json()["data"]
    assert [(m["id"], m["parent"]) for m in listed] == [("base", None), ("sql", "base")]
    assert listed[1]["root"] == str(tmp_path / "a")
    assert httpx.get(f"{url}/v1/models/sql").json()["parent"] == "base"
    for model, adapter in (("sql", 1), ("base", 0)):
        answer = post(url, "/v1/completions", model=model, prompt=[1, 2], max_tokens=2).json()
        assert (answer["model"], core.adapter_of[-1]) == (model, adapter)
    again = post(url, "/v1/load_lora_adapter", lora_name="sql", lora_path=str(tmp_path / "a"))
    assert (again.status_code, "loaded already" in again.json()["error"]["message"]) == (400, True)
    assert post(url, "/v1/unload_lora_adapter", lora_name="sql").status_code == 200
    for answer in (
        post(url, "/v1/unload_lora_adapter", lora_name="sql"),
        post(url, "/v1/completions", model="sql", prompt=[1, 2]),
    ):
        assert (answer.status_code, answer.json()["error"]["type"]) == (404, "NotFoundError")


def test_the_models_name_is_not_an_adapters_too(adapters):
    session = make_session(adapters._core)
    session.adapters = adapters
    with pytest.raises(EngineError, match="'b' names both the model and a LoRA adapter"):
        Service(AsyncEngine(session), ServerConfig(("base", "b")))
    session.close()


def test_adapters_that_cannot_be_loaded_are_refused_with_the_reason(server, tmp_path):
    url, _, _ = server
    answer = post(url, "/v1/load_lora_adapter", lora_name="x", lora_path=str(write(tmp_path / "a", r=9)))
    assert answer.status_code == 400
    assert "--max-lora-rank" in answer.json()["error"]["message"]
    assert post(url, "/v1/load_lora_adapter", lora_name="base", lora_path="/x").status_code == 400
    assert post(url, "/v1/load_lora_adapter", lora_name="x").json()["error"]["param"] == "lora_path"


@pytest.mark.parametrize("name", ["max_loras", "max_lora_rank", "max_cpu_loras"])
def test_limits_of_adapters_are_refused_where_there_are_to_be_none(engine_folder, name):
    engine = open_engine(engine_folder)
    with pytest.raises(EngineError, match=rf"{name} is 8, and the engine is to take no LoRA adapters"):
        RuntimeOptions(**{name: 8}).check(engine)
    RuntimeOptions(**{name: 8}, enable_lora=True).check(engine)
    RuntimeOptions(enable_lora=True).check(engine)


@pytest.mark.parametrize(
    ("name", "value"),
    [("enable_lora", "no"), ("trust_plugins", "no"), ("trust_plugins", 1), ("cuda_graphs", "off")],
)
def test_a_switch_is_true_or_false_and_no_text_that_counts_as_true(engine_folder, name, value):
    with pytest.raises(EngineError, match=rf"{name} is {value!r}; expected True"):
        RuntimeOptions(**{name: value}).check(open_engine(engine_folder))


def test_clients_change_adapters_only_where_the_server_allows_it(tmp_path):
    with live_server.serve() as (url, _):
        answer = post(url, "/v1/load_lora_adapter", lora_name="a", lora_path=str(tmp_path))
        assert answer.status_code == 403
        assert "--allow-runtime-lora-updating" in answer.json()["error"]["message"]
