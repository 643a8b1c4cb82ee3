"""What capture refuses, and that it says which module and why."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from castiron.graph import capture, capture_config
from castiron.graph.capturing import api, attention, gates, numeric
from castiron.graph.capturing.source_hash import body_hash, check_body
from castiron.graph.checkpoint import Checkpoint
from castiron.graph.checkpoint.config_values import check_values
from transformers import AutoConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from castiron.errors import CheckpointError, UnsupportedModelError

_SIZES = zoo.CONFIGS["llama"][1]


def _config(model_type: str, **fields: Any) -> Any:
    return AutoConfig.for_model(model_type, **{**_SIZES, **fields})


@pytest.mark.parametrize(
    ("config", "module", "reason"),
    [
        (_config("jetmoe", num_local_experts=4, num_experts_per_tok=2), "model.layers.0", "experts"),
        (_config("phimoe", num_local_experts=4, num_experts_per_tok=2), "model/layers.0/mlp/router", "max"),
        (
            AutoConfig.for_model("mamba", hidden_size=64, num_hidden_layers=2, vocab_size=256),
            "layer 0",
            "linear_attention",
        ),
        (_config("lfm2", layer_types=["conv", "full_attention"], block_ff_dim=128), "layer 0", "conv"),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "model_type", None),
)
def test_layers_without_an_op_are_refused_by_name(config: Any, module: str, reason: str) -> None:
    with pytest.raises(UnsupportedModelError) as refusal:
        capture_config(config)
    assert module in str(refusal.value)
    assert reason in str(refusal.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"num_experts_per_tok": 0},
            "num_experts_per_tok is 0; expected an integer from 1 to n_routed_experts",
        ),
        (
            {"num_experts_per_tok": 9},
            "num_experts_per_tok is 9; expected an integer from 1 to n_routed_experts",
        ),
        ({"n_group": 3}, "n_group is 3; expected a divisor of n_routed_experts, 8"),
        ({"topk_group": 5}, "topk_group is 5; expected an integer from 1 to n_group, which is 4"),
        ({"num_experts_per_tok": 3}, "num_experts_per_tok is 3; expected .* the experts of 1 of 4 groups"),
    ],
)
def test_a_mixture_that_cannot_route_is_refused(fields: dict[str, Any], message: str) -> None:
    sizes = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 1}
    with pytest.raises(CheckpointError, match=message):
        capture_config(_config("glm4_moe", head_dim=16, **{**sizes, **fields}))


@pytest.mark.parametrize("field", ["q_lora_rank", "kv_lora_rank", "qk_rope_head_dim"])
def test_latent_attention_without_width_is_refused(field: str) -> None:
    sizes = {**zoo.CONFIGS["deepseek_v3"][1], field: 0}
    with pytest.raises(CheckpointError, match=f"{field} is 0; expected an integer from 1"):
        capture_config(AutoConfig.for_model("deepseek_v3", **sizes))


def test_dynamic_ntk_rope_is_refused_with_the_reason() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    with pytest.raises(UnsupportedModelError, match=r"model\.rotary_emb.*dynamic.*cache"):
        capture_config(zoo.make_config("llama", rope_parameters=rope))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"rope_parameters": {"rope_type": "foo", "rope_theta": 10000.0}},
            "rope_parameters.rope_type to 'foo', which transformers does not know",
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": -5.0}}, "rope_theta is -5.0; expected"),
        ({"hidden_act": "bar"}, "hidden_act to 'bar', which transformers does not know"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1; expected an integer from 1"),
        ({"hidden_size": 0}, "hidden_size is 0; expected an integer from 1"),
        ({"hidden_size": 2**31 - 4, "head_dim": 16}, "cannot build a causal language model"),
    ],
)
def test_a_value_that_no_model_has_is_refused_by_its_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=re.escape(message)):
        capture_config(zoo.make_config("llama", **fields))


def test_a_window_of_nothing_is_refused_where_the_model_has_windows() -> None:
    with pytest.raises(CheckpointError, match="sliding_window to 0, and 'mistral' has a window"):
        capture_config(zoo.make_config("mistral", sliding_window=0))
    assert capture_config(zoo.make_config("qwen2", sliding_window=0)).layers[0].window == 0


@pytest.mark.parametrize("field", ["attn_logit_softcapping", "sliding_window", "residual_multiplier"])
def test_a_field_of_another_architecture_that_changes_the_logits_is_refused(field: str) -> None:
    config = zoo.make_config("llama")
    with pytest.raises(UnsupportedModelError, match=f"sets {field} to 30, which 'llama' models do not have"):
        gates.check_fields({field: 30}, config)
    gates.check_fields({field: None, "rope_interleaved": False, "is_llama_config": True}, config)


@pytest.mark.parametrize("name", zoo.CONFIGS)
def test_the_configuration_of_every_supported_model_passes_the_field_check(name: str) -> None:
    config = zoo.make_config(name)
    gates.check_fields(config.to_dict(), config)
    check_values(json.loads(config.to_json_string()), "config.json")


def test_a_model_with_absolute_positions_from_a_buffer_is_refused_without_a_traceback() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model("bert", **sizes, vocab_size=256, is_decoder=True)
    with pytest.raises(UnsupportedModelError, match="captured graph of 'bert' cannot be computed"):
        capture_config(config)


def test_falcon_with_alibi_is_refused_with_the_reason() -> None:
    config = zoo.make_config("falcon", alibi=True, multi_query=False, bias=True)
    with pytest.raises(UnsupportedModelError, match=r"self_attention.*bfloat16"):
        capture_config(config)


def test_composite_models_are_refused_by_the_names_of_both() -> None:
    config = AutoConfig.for_model("gemma3", text_config=zoo.make_config("gemma3_text").to_dict())
    with pytest.raises(UnsupportedModelError, match=r"'gemma3'.*'gemma3_text'"):
        capture_config(config)


def test_quantized_checkpoints_are_refused_with_their_method() -> None:
    config = zoo.make_config("llama")
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    with pytest.raises(UnsupportedModelError, match="gptq"):
        capture_config(config)


@pytest.mark.parametrize("version", ["5.23.1", "5.25.0", "4.57.0"])
def test_other_transformers_versions_are_refused_with_the_command(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gates.metadata, "version", lambda _: version)
    with pytest.raises(UnsupportedModelError, match=re.escape(version) + ".*pip install"):
        gates.check_version()


def _attend(**kwargs: Any) -> Any:
    module = torch.nn.Module()
    module.layer_idx = 3
    q = torch.zeros(1, 2, 4, 8)
    return attention.attention_forward(module, q, q, q, kwargs.pop("mask", attention.MaskSpec()), **kwargs)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"position_bias": torch.zeros(1)}, "layer 3.*position_bias"),
        ({"is_causal": False}, "bidirectional"),
        ({"dropout": 0.1}, "dropout"),
        ({"mask": torch.zeros(1, 1, 4, 4)}, "own attention mask"),
        ({"mask": None}, "own attention mask"),
        ({"mask": attention.MaskSpec(window=8), "sliding_window": 9}, "window 8.*sliding_window=9"),
        ({"sliding_window": 8}, "window 0.*sliding_window=8"),
    ],
)
def test_attention_arguments_that_the_op_does_not_carry_are_refused(
    kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        _attend(**kwargs)


def test_mask_factories_refuse_overlays_and_bidirectional_configurations() -> None:
    config = zoo.make_config("llama")
    make = attention.MASK_FACTORIES["create_causal_mask"]
    assert (
        make(config=config, inputs_embeds=torch.zeros(1), attention_mask=None, cache=None)
        == attention.MaskSpec()
    )
    with pytest.raises(UnsupportedModelError, match="or_mask_function"):
        make(config=config, or_mask_function=lambda *_: True)
    with pytest.raises(UnsupportedModelError, match="attention_mask"):
        make(config, torch.zeros(1), torch.zeros(1, 1, 4, 4))
    config.is_causal = False
    with pytest.raises(UnsupportedModelError, match="bidirectional"):
        make(config=config)


def _known_function(x: int) -> int:
    """A docstring."""
    return x + 1


def test_body_hash_sees_code_and_not_words() -> None:
    def _known_function(x):  # another comment
        return x + 1

    def changed(x: int) -> int:
        return x + 2

    assert body_hash(_known_function) == body_hash(globals()["_known_function"])
    assert body_hash(changed) != body_hash(_known_function)
    with pytest.raises(UnsupportedModelError, match=r"changed.*does not know.*transformers"):
        check_body(changed)


def test_changed_mask_factory_body_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    def create_causal_mask(config: Any, **_: Any) -> None:
        return None

    monkeypatch.setattr(modeling_llama, "create_causal_mask", create_causal_mask)
    with pytest.raises(UnsupportedModelError, match="create_causal_mask has a body"):
        capture_config(zoo.make_config("llama"))


def test_census_notices_a_layer_whose_attention_is_not_an_op() -> None:
    config = zoo.make_config("llama")
    layers = capture_config(config).layers
    with pytest.raises(UnsupportedModelError, match=r"announces 2 layers.*\[0\]"):
        gates.census(config, layers[:1])
    config.layer_types = ["sliding_attention", "full_attention"]
    config.sliding_window = 8
    with pytest.raises(UnsupportedModelError, match=r"layer 0.*'sliding_attention'"):
        gates.census(config, layers)


@pytest.mark.parametrize(
    ("name", "op", "attribute", "value"),
    [
        ("mistral", "Attention", "window", 9),
        ("llama", "Attention", "scale", 0.3),
        ("gemma2", "Attention", "softcap", 0.0),
        ("llama", "RMSNorm", "one_plus", 1),
        ("llama", "RMSNorm", "eps", 0.1),
        ("llama", "Rope", "style", "interleaved"),
        ("llama", "Activation", "fn", "gelu_erf"),
    ],
)
def test_numeric_check_notices_one_wrong_attribute(name: str, op: str, attribute: str, value: Any) -> None:
    config = zoo.make_config(name)
    model = capture_config(config).model
    node = next(node for node in model.graph.node if node.op_type == op)
    field = next(a for a in node.attribute if a.name == attribute)
    node.attribute.remove(field)
    node.attribute.append(numeric.onnx.helper.make_attribute(attribute, value))
    names = {t.name: t.name for t in model.graph.initializer}
    with pytest.raises(UnsupportedModelError, match="differs from the source model"):
        numeric.compare(config, model, names)


def test_registries_and_modules_are_as_before_even_after_a_refusal() -> None:
    from torch.nn import functional
    from transformers.models.llama import modeling_llama

    watched = (
        lambda: dict(type(ALL_ATTENTION_FUNCTIONS)._global_mapping),
        lambda: dict(vars(modeling_llama)),
        lambda: functional.linear,
        lambda: torch.nn.Module.register_parameter,
    )
    before = [read() for read in watched]
    with pytest.raises(UnsupportedModelError):
        capture_config(zoo.make_config("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0}))
    capture_config(zoo.make_config("llama"))
    assert [read() for read in watched] == before


def test_large_models_are_checked_on_a_twin_of_the_same_make() -> None:
    config = zoo.make_config("gemma2", num_hidden_layers=13, vocab_size=4000, sliding_window=300)
    report = capture_config(config).report
    assert report.checked_on.startswith("a twin with 2 layers")
    assert report.max_error is not None
    assert report.max_error < 1e-5


def test_weights_stored_in_bfloat16_do_not_keep_a_large_model_from_its_twin(tmp_path: Path) -> None:
    # The embedding's rows are widened in the graph, which a twin in float32 has no need of
    config = {"num_hidden_layers": 13, "vocab_size": 4000}
    zoo.make_checkpoint("llama", tmp_path, dtype=torch.bfloat16, **config)
    report = capture(Checkpoint.open(tmp_path)).report
    assert report.checked_on.startswith("a twin with 2 layers")


def test_missing_and_misshapen_tensors_are_named() -> None:
    config = zoo.make_config("llama")

    def missing(name: str) -> Any:
        raise CheckpointError(f"no tensor for {name}")

    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight"):
        capture_config(config, missing)
    wrong = api._declared_parameters(torch.nn.ModuleDict({"model": torch.nn.Embedding(3, 5)}))
    with pytest.raises(CheckpointError, match=r"\[3, 5\].*\[256, 64\]"):
        capture_config(config, lambda name: wrong("model.weight"))
