"""Reading JSON documents of ours: which kind a file is, and every complaint in one line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

from zbsolve.errors import InputError


def raise_first(error: ValidationError, where: str) -> NoReturn:
    """Turn pydantic's report into one line: file, field, what to give instead."""
    # A union reports every branch it tried; the branch that got furthest tells the user most.
    first = max(error.errors(), key=lambda item: (item["type"] == "extra_forbidden", len(item["loc"])))
    path = ""
    for part in first["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part in _UNION_BRANCHES or part.startswith(_UNION_PARTS):
            continue
        else:
            path += f".{part}" if path else str(part)
    kind, message = first["type"], first["msg"]
    given = first.get("input")
    if kind == "extra_forbidden":
        message = "unknown field: remove it or correct its spelling"
    elif kind == "missing":
        message = "missing: add it"
    elif kind == "value_error":
        message = message.removeprefix("Value error, ")
    elif kind in _OWN_WORDS:
        message = _OWN_WORDS[kind]
    else:
        shown = repr(given) if len(repr(given)) <= 40 else type(given).__name__
        message = f"{message} (given {shown})"
    raise InputError(f"{where}: {path + ': ' if path else ''}{message}")


# Where pydantic speaks of Python's types, not of JSON's.
_OWN_WORDS = {
    "model_type": "not a JSON object: give {…} with named fields",
    "tuple_type": "not a list: give […]",
    "too_short": "empty: give at least one",
}
_UNION_BRANCHES = {"float", "int", "str", "none", "nullable"}
_UNION_PARTS = ("constrained", "float", "function-before[", "tuple[")


def read_text(path: str | Path, kind: str) -> str:
    """Text of a file, or of standard input for ``-``; ``kind`` (such as "a CSV") is for the error."""
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else Path(path).read_bytes()
        return data.decode("utf-8-sig")  # some editors begin a file with a mark
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InputError(f"{path}: cannot be read ({reason}): give {kind} file") from None


def read_json(path: str | Path) -> Any:
    """JSON data of a file; duplicate keys, NaN and bad syntax are errors that name the place."""
    text = read_text(path, "a JSON")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise InputError(f"{path}: {key}: given twice: keep one")
            seen[key] = value
        return seen

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise InputError(f"{path}: line {error.lineno}: not JSON ({error.msg}): correct it") from None
    except ValueError:
        raise InputError(f"{path}: holds a number of thousands of digits: correct it") from None
    except RecursionError:
        raise InputError(f"{path}: is nested too deeply for a file of zbsolve: give another") from None


# What the files of this package hold, by their schema: for the error about one in another's place.
KINDS = {
    "zbsolve.instance/1": "an instance",
    "zbsolve.plan/1": "a plan",
    "zbsolve.trace/1": "a trace",
    "zbsolve.layers/1": "a layer profile",
    "zbsolve.cluster/1": "a cluster",
    "zbsolve.decision/1": "a decision",
    "zbsolve.comparison/1": "a comparison",
    "zbsolve.advice/1": "an advice",
    "zbsolve.bench/1": "a benchmark's result",
    "zbsolve.checkpoint/1": "a part of a checkpoint",
    "zbsolve.known/1": "known figures",
}


def require_schema(data: Any, where: str, *schemas: str) -> str:
    """The schema of JSON data, one of ``schemas``; the error says what the data are instead."""
    names = [KINDS[schema] for schema in schemas]
    wanted = " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    if not isinstance(data, dict):
        raise InputError(f"{where}: not a JSON object: give {wanted}")
    found = data.get("schema")
    if found in schemas:
        return str(found)
    if "traceEvents" in data:
        raise InputError(
            f"{where}: is a Chrome trace, for Perfetto or chrome://tracing to open: give {wanted}"
        )
    if isinstance(found, str) and found in KINDS:
        raise InputError(f"{where}: is {KINDS[found]}, not {wanted}: give {wanted}")
    if "schema" not in data:
        raise InputError(f'{where}: schema: missing: add "schema": "{schemas[0]}"')
    known = " or ".join(map(repr, schemas))
    raise InputError(f"{where}: schema: is {found!r}, not {known}: give {wanted}")


def read_document(path: str | Path, schema: str) -> Any:
    """JSON data of a file that says it has ``schema``."""
    data = read_json(path)
    require_schema(data, str(path), schema)
    return data
