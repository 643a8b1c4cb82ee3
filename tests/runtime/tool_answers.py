"""A model that answers with calls: its chat template, what it says, and the tools it is told of."""

from __future__ import annotations

from castiron.runtime.tokenizer import Tokenizer
from server_calls import USER

END = 1
#: In the manner of Hermes, small: tools in the system's message, calls and results between markers.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ c.function.name }} {{ c.function.arguments.city }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if reasoning_effort %}{{ reasoning_effort }}"
    "{% endif %}{% endif %}"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
OTHER = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
ASK = {"messages": USER, "tools": [TOOL], "max_tokens": 200}


def prompt_of(core, folder):
    """The text of the last request's prompt."""
    return Tokenizer(folder).decode(core.submitted[-1][0], False)
