"""Limits follow from the options and the model; what cannot work is refused with both numbers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from castiron.build import BuildOptions
from castiron.build.options import resolve_limits

from castiron.errors import BuildError

MODEL = SimpleNamespace(max_position_embeddings=4096)


def test_defaults_come_from_the_model() -> None:
    limits = resolve_limits(BuildOptions(), MODEL)
    assert (limits.max_batch_size, limits.max_seq_len) == (64, 4096)
    assert (limits.max_num_tokens, limits.max_logit_rows) == (1024, 64)


def test_the_default_context_is_bounded_even_where_the_model_is_not() -> None:
    assert (
        resolve_limits(BuildOptions(), SimpleNamespace(max_position_embeddings=1 << 20)).max_seq_len == 8192
    )
    assert resolve_limits(BuildOptions(), SimpleNamespace()).max_seq_len == 8192


def test_small_engines_do_not_reserve_tokens_they_cannot_have() -> None:
    limits = resolve_limits(BuildOptions(max_batch_size=1, max_seq_len=128), MODEL)
    assert (limits.max_num_tokens, limits.max_logit_rows) == (128, 64)


def test_large_batches_raise_the_token_budget() -> None:
    limits = resolve_limits(BuildOptions(max_batch_size=2000), MODEL)
    assert (limits.max_num_tokens, limits.max_logit_rows) == (2000, 2000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (BuildOptions(max_seq_len=5000), "5000, but the model's config allows 4096"),
        (BuildOptions(max_batch_size=64, max_num_tokens=32), "max_num_tokens is 32 and max_batch_size is 64"),
        (BuildOptions(max_logit_rows=8), "max_logit_rows is 8 and max_batch_size is 64"),
        (BuildOptions(max_num_tokens=100, max_logit_rows=200), "max_logit_rows is 200, more than the 100"),
        (BuildOptions(max_batch_size=0), "max_batch_size is 0; expected an integer of at least 1"),
        (
            BuildOptions(max_batch_size=100_000, max_num_tokens=100_000),
            r"out of range: max_batch_size is 100000: [^\n]*65536$",
        ),
        (BuildOptions(targets=("sm90",)), r"unknown target 'sm90'.*sm_80, .*did you mean sm_90\?"),
        (BuildOptions(targets=("tpu",)), r"unknown target 'tpu'.*host, .*auto$"),
        (BuildOptions(targets=("sm_90", "host"), dtype="float16"), "sm_90, host.*float16.*bfloat16"),
        (BuildOptions(targets=("host",), dtype="float16"), "float16, which host does not"),
        (BuildOptions(targets=("sm_80",), dtype="float32"), "float32, which the matrix units of sm_80"),
        (BuildOptions(targets=("host",), max_lora_rank=8), "max_lora_rank is 8.*host takes adapters of any"),
        (BuildOptions(targets=("sm_80",), max_lora_rank=513), "max_lora_rank is 513; expected at most 512"),
        (BuildOptions(targets=("sm_80",), max_lora_rank=0), "max_lora_rank is 0; expected an integer"),
        (BuildOptions(targets=()), "no target given"),
        (BuildOptions(dtype="int8"), "unknown dtype 'int8'"),  # type: ignore[arg-type]
        (BuildOptions(verify="maybe"), "expected auto, always or never"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_work_is_refused(options: BuildOptions, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        resolve_limits(options, MODEL)


def test_ptx_for_later_architectures_rides_along_with_any_gpu() -> None:
    def of(*targets: str, ptx: bool = True) -> tuple[str, ...]:
        return BuildOptions(targets=targets, ptx=ptx).resolved_targets()

    assert of("sm_90", "host") == ("sm_90", "host", "compute_80")
    assert of("sm_90", "sm_80", "sm_90", ptx=False) == ("sm_90", "sm_80")
    assert of("compute_80", "sm_90") == ("compute_80", "sm_90")
    assert of("host") == ("host",)


def test_auto_is_host_and_the_gpus_that_the_driver_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("castiron.build.options.present_gpus", tuple)
    assert BuildOptions(targets=("auto",)).resolved_targets() == ("host",)
    monkeypatch.setattr("castiron.build.options.present_gpus", lambda: ("sm_90",))
    assert BuildOptions(targets=("auto",)).resolved_targets() == ("host", "sm_90", "compute_80")
