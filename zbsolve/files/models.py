"""What all file models share: strict fields, no unknown ones, and JSON's arrays for tuples."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict

T = TypeVar("T")


def _array_as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


# Strict mode takes only tuples for tuples, and JSON has only arrays. ``Field(strict=False)`` would take sets
# and generators as well.
JsonTuple = Annotated[tuple[T, ...], BeforeValidator(_array_as_tuple)]


class FileModel(BaseModel):
    """A frozen object of a file: unknown fields are errors, and no value is taken for another type's."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, populate_by_name=True)
