"""OpenAI's Responses API, on top of the same turn of the assistant as chat completions."""
