"""Names of the files in an engine folder."""

from __future__ import annotations

MANIFEST = "config.json"
PROGRAM_FILE = "rank0.engine"
WEIGHTS_FILE = "rank0.safetensors"
#: Copied from the checkpoint where present: {name there: name in the engine}.
COPIED = {
    "tokenizer.json": "tokenizer.json",
    "tokenizer_config.json": "tokenizer_config.json",
    "special_tokens_map.json": "special_tokens_map.json",
    "chat_template.jinja": "chat_template.jinja",
    "chat_template.json": "chat_template.json",
    "generation_config.json": "generation_config.json",
    "config.json": "hf_config.json",
}
