"""Request bodies in /openapi.json: they are parsed by hand, so that FastAPI does not know them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


def request_schema(body: type[BaseModel]) -> dict[str, Any]:
    """What a route says about its body: ``openapi_extra``."""
    schema = body.model_json_schema()
    definitions = schema.pop("$defs", {})

    def inlined(node: Any) -> Any:
        if isinstance(node, list):
            return [inlined(x) for x in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return inlined(definitions[node["$ref"].rpartition("/")[2]])
        return {k: inlined(v) for k, v in node.items()}

    return {"requestBody": {"required": True, "content": {"application/json": {"schema": inlined(schema)}}}}
