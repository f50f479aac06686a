"""Fills the reference pages from the code while the site is built.

``<!-- commands -->`` becomes every command with its options, as typer writes them, and
``<!-- fields: MODULE:CLASS -->`` the table of a file's fields, read from the model that validates the file;
``<!-- rooms -->`` the rooms of the code and their imports.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

sys.path.insert(0, str(Path(__file__).parent))  # the hook is loaded by its path
import rooms


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the placeholders of a page."""
    if "<!-- commands -->" in markdown:
        markdown = markdown.replace("<!-- commands -->", commands())
    if "<!-- rooms -->" in markdown:
        markdown = markdown.replace("<!-- rooms -->", rooms.markdown())
    return re.sub(r"<!-- fields: ([\w.]+):(\w+) -->", lambda found: fields(found[1], found[2]), markdown)


def commands() -> str:
    """Every command, one heading deeper than typer writes it and without the page's own title."""
    done = subprocess.run(
        [sys.executable, "-m", "typer", "zbsolve.cli", "utils", "docs", "--name", "zbsolve"],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.removeprefix("# `zbsolve`\n")


def fields(module: str, name: str) -> str:
    """The fields of one kind of JSON object: name, type, and what it is when left out."""
    model: type[BaseModel] = getattr(import_module(module), name)
    schema = model.model_json_schema(by_alias=True)
    rows = ["| field | type | when left out |", "|---|---|---|"]
    for field in model.model_fields.values():
        key = field.serialization_alias or field.alias or _name_of(model, field)
        kind = _type(schema["properties"][key])
        if field.is_required():
            left_out = "an error"
        elif field.default is PydanticUndefined or field.default is None:
            left_out = "none"
        else:
            left_out = f"`{field.default}`"
        rows.append(f"| `{key}` | {kind} | {left_out} |")
    return "\n".join(rows)


def _name_of(model: type[BaseModel], wanted: object) -> str:
    return next(name for name, field in model.model_fields.items() if field is wanted)


def _type(schema: dict[str, Any]) -> str:
    """A JSON schema in words."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(part) for part in schema["anyOf"]))
    if "const" in schema:
        return f'"{schema["const"]}"'
    if "enum" in schema:
        return ", ".join(f'"{value}"' for value in schema["enum"])
    if "$ref" in schema:
        return f"object {schema['$ref'].rsplit('/', 1)[-1]}"
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return str(schema.get("type", "value"))
