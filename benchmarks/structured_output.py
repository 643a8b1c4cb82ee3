"""JSON by schema: is every answer valid, and what does it cost? Needs `pip install jsonschema`.

    python benchmarks/structured_output.py ENGINE [--schemas 104] [--batch 8]

Varied schemas (nested objects, enum, $ref, anyOf, patterns, ranges of numbers) are answered; every answer is
parsed and checked by jsonschema. Speed: tokens/s of batches of equal length, answers bound by a schema (an
array of integers that cannot end early) and free ones, in turn.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema

from castiron import ModelRunner, SamplingParams, StructuredOutput

Schema = dict[str, Any]


def random_schema(rng: random.Random, depth: int = 2) -> Schema:
    """One that bounds its answers, so that they end."""
    leaves: list[Schema] = [
        {"type": "integer", "minimum": -rng.randrange(50), "maximum": rng.randrange(1, 5000)},
        {"type": "number", "minimum": 0, "exclusiveMaximum": rng.randrange(1, 90)},
        {"type": "string", "maxLength": rng.randrange(1, 24)},
        {
            "type": "string",
            "pattern": rng.choice([r"^[A-Z]{2}-\d{3}$", r"^(red|green) \w{1,8}$", r"^\d{4}$"]),
        },
        {"type": "string", "format": "date"},
        {"enum": [rng.choice(["a", "bc", 'quote"', "Zürich"]), rng.randrange(100), None, True]},
        {"const": {"fixed": [1, "two"]}},
        {"type": "boolean"},
        {"type": "null"},
        {"$ref": "#/$defs/point"},
    ]
    if depth == 0:
        return rng.choice(leaves)

    def inner() -> Schema:
        return random_schema(rng, depth - 1)

    kind = rng.randrange(5)
    if kind <= 1:
        names = rng.sample(["id", "name", "tags", "size", "über", "with space", "owner"], rng.randrange(1, 4))
        required = [name for name in names if rng.random() < 0.8]
        return {
            "type": "object",
            "properties": {name: inner() for name in names},
            "required": required,
            "additionalProperties": False,
        }
    if kind == 2:
        return {"type": "array", "items": inner(), "minItems": 1, "maxItems": rng.randrange(1, 4)}
    return {"anyOf": [inner(), inner()]} if kind == 3 else rng.choice(leaves)


def whole_schema(rng: random.Random) -> Schema:
    point: Schema = {
        "type": "object",
        "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "y": {"type": "boolean"}},
        "required": ["x", "y"],
        "additionalProperties": False,
    }
    return {"$defs": {"point": point}, **random_schema(rng)}


def answer(runner: ModelRunner, schema: Schema, seed: int) -> str:
    """What is wrong with the answer to a schema; empty when it is valid."""
    result = runner.generate(
        prompts=f"Give an example of this JSON schema: {json.dumps(schema)}\n",
        sampling_params=SamplingParams(
            max_tokens=700, temperature=0.8, seed=seed, structured_output=StructuredOutput(json=schema)
        ),
    )[0]
    text = result.outputs[0].text
    try:
        if result.error:
            return f"{json.dumps(schema)}: {result.error}"
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{json.dumps(schema)}: {text[:200]!r}: {str(error)[:200]}"
    return ""


def speeds(runner: ModelRunner, batch: int, tokens: int, rounds: int) -> tuple[float, float]:
    """Medians of tokens/s, bound by a schema and free."""
    numbers = {"type": "array", "items": {"type": "integer"}, "minItems": tokens}
    bound = SamplingParams(
        max_tokens=tokens, temperature=0.0, ignore_eos=True, structured_output=StructuredOutput(json=numbers)
    )
    free = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    rates: dict[str, list[float]] = {"bound": [], "free": []}
    for turn in range(rounds + 1):
        for name, params in (("bound", bound), ("free", free)):
            prompts = [f"{turn} {name} {i}: a list of numbers:" for i in range(batch)]
            began = time.perf_counter()
            results = runner.generate(prompts=prompts, sampling_params=params)
            made = sum(len(result.outputs[0].token_ids) for result in results)
            if turn > 0:  # the first compiles the grammar
                rates[name].append(made / (time.perf_counter() - began))
    return statistics.median(rates["bound"]), statistics.median(rates["free"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine")
    parser.add_argument("--schemas", type=int, default=104)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    a = parser.parse_args()
    rng = random.Random(0)
    with ModelRunner.from_dir(a.engine) as runner:
        schemas = [whole_schema(rng) for _ in range(a.schemas)]
        with ThreadPoolExecutor(a.batch) as threads:  # calls from several threads share one batch
            found = list(threads.map(lambda i: answer(runner, schemas[i], i), range(a.schemas)))
        bound, free = speeds(runner, a.batch, a.tokens, a.rounds)
    wrong = [line for line in found if line]
    for line in wrong:
        print("not valid:", line)
    print(f"{a.schemas - len(wrong)} of {a.schemas} answers are valid")
    print(f"batch {a.batch}: {bound:.0f} tokens/s by a schema, {free:.0f} free ({bound / free:.3f})")


if __name__ == "__main__":
    main()
