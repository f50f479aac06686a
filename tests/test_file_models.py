"""Every model of a file takes JSON's arrays for tuples, and nothing else for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel, ValidationError

from zbsolve.benchmark.known import Known
from zbsolve.files.models import FileModel, JsonTuple
from zbsolve.model.instance import Instance
from zbsolve.partition.cluster import Cluster
from zbsolve.partition.layers import LayerProfile
from zbsolve.plan.plan import Plan
from zbsolve.trace.trace import Trace

MARK = get_args(JsonTuple[int])[1]


def models_of(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """A model and those that its fields hold, at any depth."""
    yield model
    for field in model.model_fields.values():
        for part in parts_of(field.annotation):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from models_of(part)


def parts_of(annotation: Any) -> Iterator[Any]:
    """An annotation and all that it is made of."""
    yield annotation
    for part in get_args(annotation):
        yield from parts_of(part)


def bare_tuples(annotation: Any, marked: bool) -> Iterator[Any]:
    """Tuples of any length in an annotation that are not marked as arrays."""
    if get_origin(annotation) is tuple and not marked:
        yield annotation
    inner = get_args(annotation)
    for part in inner:
        yield from bare_tuples(part, MARK in inner)


ROOTS = (Instance, Plan, Trace, Cluster, LayerProfile, Known)
MODELS = sorted({m for root in ROOTS for m in models_of(root)}, key=lambda model: model.__name__)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_each_tuple_of_a_file_takes_an_array(model: type[BaseModel]) -> None:
    """A tuple that is not marked could not be read from JSON: strict mode refuses lists for it."""
    assert model.model_config.get("strict")
    assert model.model_config.get("extra") == "forbid"
    for name, field in model.model_fields.items():
        # pydantic keeps the outermost annotations apart from the type.
        assert not list(bare_tuples(field.annotation, MARK in field.metadata)), name


class Rows(FileModel):
    """Nested and in a union, the two ways in which files hold arrays."""

    rows: JsonTuple[JsonTuple[float]]
    one_or_all: float | JsonTuple[float] | None = None


def test_arrays_become_tuples_at_any_depth() -> None:
    """Lists, tuples and a mixture of both are one value."""
    wanted = Rows(rows=((1.0,), (2.0, 3.0)), one_or_all=(1.0,))
    assert Rows.model_validate({"rows": [[1.0], (2.0, 3.0)], "one_or_all": [1.0]}) == wanted
    assert wanted.rows == ((1.0,), (2.0, 3.0))


@pytest.mark.parametrize(
    "make",
    [set, frozenset, iter, deque, dict.fromkeys, lambda v: (x for x in v), lambda v: dict.fromkeys(v).keys()],
    ids=["set", "frozenset", "iterator", "deque", "dict", "generator", "keys"],
)
def test_nothing_but_an_array_is_taken_for_one(make: Callable[[list[float]], Any]) -> None:
    """What has no order, or can be read only once, is refused in each place."""
    for data in ({"rows": make([1.0])}, {"rows": [make([1.0])]}, {"rows": [], "one_or_all": make([1.0])}):
        with pytest.raises(ValidationError, match="valid tuple"):
            Rows.model_validate(data)


def test_an_item_of_an_array_is_still_strict() -> None:
    """ "1" is no number in an array either."""
    with pytest.raises(ValidationError, match="valid number"):
        Rows.model_validate({"rows": [["1"]]})
