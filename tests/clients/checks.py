"""What popular clients do with the server, one function for each; runs in the clients' own environment.

    python checks.py URL MODEL CONTEXT TEXTS.json

``CONTEXT``: the engine's longest request in tokens. ``TEXTS.json``: ``{"texts": [...], "perplexity": number
or null}``, documents and their word perplexity by a direct computation.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

# Data sets and models are local files; nothing is looked up on a hub.
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
URL, MODEL, CONTEXT = sys.argv[1], sys.argv[2], int(sys.argv[3])
GIVEN: dict[str, Any] = json.loads(Path(sys.argv[4]).read_text("utf-8"))
ASK: list[Any] = [{"role": "user", "content": "What is the weather in Paris, in celsius?"}]


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome"]
    unit: Literal["celsius", "fahrenheit"]


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "Weather",
        "description": "The weather of a city",
        "parameters": Weather.model_json_schema(),
    },
}


def openai_client() -> None:
    """Chat, streams, parsed answers, tools, responses, completions."""
    import openai

    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    chat = client.chat.completions
    whole = chat.create(model=MODEL, messages=ASK, temperature=0, max_completion_tokens=20)
    stream = chat.create(
        model=MODEL,
        messages=ASK,
        temperature=0,
        max_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    parsed = chat.parse(model=MODEL, messages=ASK, response_format=Weather, temperature=0, max_tokens=60)
    assert parsed.choices[0].message.parsed.city == "Paris"
    called = chat.create(
        model=MODEL, messages=ASK, tools=[TOOL], tool_choice="required", parallel_tool_calls=False
    )
    Weather.model_validate_json(called.choices[0].message.tool_calls[0].function.arguments)
    with chat.stream(
        model=MODEL, messages=ASK, tools=[TOOL], tool_choice="required", parallel_tool_calls=False
    ) as events:
        Weather.model_validate_json(
            events.get_final_completion().choices[0].message.tool_calls[0].function.arguments
        )
    answer = client.responses.parse(model=MODEL, input="The weather in Rome?", text_format=Weather)
    assert answer.output_parsed is not None
    with client.responses.stream(model=MODEL, input="Rome?", text_format=Weather) as events:
        assert events.get_final_response().output_parsed is not None
    scored = client.completions.create(model=MODEL, prompt="Paris is", max_tokens=0, echo=True, logprobs=1)
    assert scored.choices[0].logprobs.token_logprobs[0] is None


def anthropic_client() -> None:
    """Messages, streams, tools, counting."""
    import anthropic

    client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
    ask: dict[str, Any] = {"model": MODEL, "max_tokens": 60, "messages": ASK, "system": "Be brief."}
    message = client.messages.create(**ask)
    assert message.content[0].text
    counted = client.messages.count_tokens(**{k: v for k, v in ask.items() if k != "max_tokens"})
    assert counted.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
    tool = {"name": "Weather", "input_schema": Weather.model_json_schema()}
    once = {"type": "any", "disable_parallel_tool_use": True}
    with client.messages.stream(**ask, tools=[tool], tool_choice=once) as stream:
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use"
    Weather.model_validate(final.content[-1].input)


def langchain() -> None:
    """ChatOpenAI: invoke, stream with usage, tools and their results, structured output, async."""
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def weather(city: Literal["Paris", "Rome"]) -> str:
        """The weather of a city."""
        return f"It is sunny in {city}."

    models = []
    for responses in (False, True):
        model = ChatOpenAI(
            base_url=f"{URL}/v1", api_key="none", model=MODEL, temperature=0, max_retries=0, max_tokens=40,
            stream_usage=True, use_responses_api=responses,
        )  # fmt: skip
        whole = model.invoke("Hello")
        pieces = list(model.stream("Hello"))
        total = pieces[0]
        for piece in pieces[1:]:
            total += piece
        assert total.text == whole.text, (total.text, whole.text)
        assert total.usage_metadata["total_tokens"] == whole.usage_metadata["total_tokens"]
        bound = model.bind_tools([weather], tool_choice="required", parallel_tool_calls=False)
        question = HumanMessage("What is the weather in Paris?")
        call = bound.invoke([question])
        streamed = None
        for piece in bound.stream([question]):
            streamed = piece if streamed is None else streamed + piece
        assert streamed.tool_calls[0]["args"] == call.tool_calls[0]["args"]
        result = ToolMessage(
            weather.invoke(call.tool_calls[0]["args"]), tool_call_id=call.tool_calls[0]["id"]
        )
        assert model.bind_tools([weather]).invoke([question, call, result]).text
        for method in ("json_schema", "function_calling"):
            assert isinstance(model.with_structured_output(Weather, method=method).invoke("Rome?"), Weather)
        models.append(model)

    async def batches() -> list[Any]:
        # In one event loop: LangChain keeps its connections.
        return [answer for model in models for answer in await model.abatch(["One", "Two", "Three"])]

    assert all(answer.text for answer in asyncio.run(batches()))


def instructor() -> None:
    """Typed answers by tools and JSON schemas."""
    import instructor as library
    import openai

    modes = library.Mode
    for mode in (modes.TOOLS, modes.TOOLS_STRICT, modes.JSON_SCHEMA):
        plain = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
        made = library.from_openai(plain, mode=mode).chat.completions.create(
            model=MODEL, messages=ASK, response_model=Weather, max_retries=0, max_tokens=100
        )
        assert isinstance(made, Weather)


def litellm() -> None:
    """As an OpenAI server and as vLLM's: whole, streamed, tools, an error of the right kind."""
    import litellm as library

    library.telemetry = False
    for provider in ("openai", "hosted_vllm"):
        ask: dict[str, Any] = {
            "model": f"{provider}/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none", "messages": ASK,
            "max_tokens": 40, "temperature": 0, "num_retries": 0,
        }  # fmt: skip
        whole = library.completion(**ask)
        chunks = library.completion(**ask, stream=True)
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == whole.choices[0].message.content
        called = library.completion(**ask, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
        Weather.model_validate_json(called.choices[0].message.tool_calls[0].function.arguments)
        try:
            library.completion(**{**ask, "messages": [{"role": "user", "content": "x " * 2 * CONTEXT}]})
        except library.ContextWindowExceededError:
            continue
        raise AssertionError("a prompt over the context was accepted")


def lm_eval() -> None:
    """local-completions by way of /tokenizer_info and /tokenize: perplexity and choices; chat completions."""
    from lm_eval import evaluator
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import get_model
    from lm_eval.tasks import TaskManager

    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "texts.jsonl"
        data.write_text("".join(json.dumps({"text": text}) + "\n" for text in GIVEN["texts"]), "utf-8")
        task = {
            "task": "local_texts",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "output_type": "loglikelihood_rolling",
            "test_split": "test",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}],
        }
        arguments = (
            f"model={MODEL},base_url={URL}/v1/completions,tokenizer_backend=remote,tokenized_requests=True,"
            f"max_length={CONTEXT - 1},num_concurrent=2,max_retries=1"
        )
        found = evaluator.simple_evaluate(
            model="local-completions",
            model_args=arguments,
            tasks=[task],
            task_manager=TaskManager(include_defaults=False),
            bootstrap_iters=0,
        )
    perplexity = found["results"]["local_texts"]["word_perplexity,none"]
    expected = GIVEN["perplexity"]
    print(
        f"  word perplexity {perplexity:.4f}, directly {expected if expected is None else round(expected, 4)}"
    )
    assert math.isfinite(perplexity)
    assert expected is None or abs(perplexity / expected - 1) < 1e-3
    model = get_model("local-completions").create_from_arg_string(arguments)
    pairs = [("The capital of France is", " Paris"), ("The capital of France is", " banana")]
    likely, odd = model.loglikelihood(
        [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    )
    assert likely[0] > odd[0]
    chat = get_model("local-chat-completions").create_from_arg_string(
        f"model={MODEL},base_url={URL}/v1/chat/completions,max_retries=1"
    )
    request = ([{"role": "user", "content": "Count to ten."}], {"until": ["ten"], "max_gen_toks": 20})
    prompt = (chat.apply_chat_template(request[0]), request[1])
    (text,) = chat.generate_until([Instance("generate_until", {}, prompt, 0)])
    assert text


CHECKS: tuple[Callable[[], None], ...] = (
    *(openai_client, anthropic_client, langchain, instructor, litellm, lm_eval),
)


def main() -> int:
    """Run all, or those named by the environment variable CHECKS."""
    wanted = os.environ.get("CHECKS", "").split()
    failed = []
    for check in CHECKS:
        if wanted and check.__name__ not in wanted:
            continue
        began = time.perf_counter()
        try:
            check()
        except Exception:
            failed.append(check.__name__)
            traceback.print_exc()
        state = "FAILED" if check.__name__ in failed else "ok"
        print(f"{check.__name__:<18} {state:<8} {time.perf_counter() - began:6.1f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
