"""Nested values: flattened and put together again, told apart, and cut along each tensor's own axis."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trap_models import Pair, Registered, Unregistered

from zbsolve.errors import InputError
from zbsolve.runtime.execute.boundary import Boundary, memory_of
from zbsolve.runtime.execute.transport import solid_of
from zbsolve.runtime.models.pipeline_model import cut_rows
from zbsolve.runtime.values import TENSOR, Spec, flatten, unflatten

tensors = st.integers(0, 3).map(lambda n: torch.arange(float(n)))
constants = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3))
values = st.recursive(
    tensors | constants,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.dictionaries(st.integers(), inner, max_size=3).map(OrderedDict),
        st.tuples(inner, inner).map(lambda both: Pair(*both)),
        st.tuples(inner, inner).map(lambda both: Registered(*both)),
    ),
    max_leaves=8,
)


def alike(one: Any, other: Any) -> bool:
    """Equal in types, keys, tensors and constants."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, Registered):
        return alike(one.x, other.x) and alike(one.y, other.y)
    return repr(one) == repr(other)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(value=values)
def test_values_come_back(value: Any) -> None:
    """Any nesting of known containers comes back, on another rank as well, under an equal spec."""
    found, spec = flatten(value, "value")
    there = Spec.from_text(spec.to_text())
    assert there == spec
    assert alike(unflatten(found, there), value)


@settings(derandomize=True, deadline=None, max_examples=80)
@given(one=constants, other=constants)
def test_constants_tell_values_apart(one: Any, other: Any) -> None:
    """Specs are equal just when constants are, in type as well: 1 is not True, and a NaN is a NaN."""
    same = type(one) is type(other) and repr(one) == repr(other)
    assert (flatten((one,), "value")[1] == flatten((other,), "value")[1]) == same


def test_what_cannot_travel_is_refused() -> None:
    """A dataclass that nobody registered, and a type that no other rank can import, with place and remedy."""
    with pytest.raises(InputError, match=r"out\['a'\]\[1\] is a Unregistered: .*register_dataclass"):
        flatten({"a": (None, Unregistered(torch.ones(1), torch.ones(1)))}, "out")

    class Local(tuple):
        """A container only known here."""

    torch.utils._pytree.register_pytree_node(
        Local, lambda value: (list(value), None), lambda parts, _: Local(parts)
    )
    found, spec = flatten(Local((torch.ones(1),)), "out")
    with pytest.raises(
        InputError, match=r"out has a type that other ranks cannot import .*: define it at the top"
    ):
        Boundary(spec, (), (), memory_of(found)).to_text("out")


def test_conjugates_and_negatives_travel_as_they_are() -> None:
    """Bytes on the wire are those of the value: torch keeps a conjugate and its imaginary part by a mark."""
    conjugate = torch.tensor([1 + 2j, 3 - 4j]).conj()
    # The numbers in memory, two to an entry.
    assert solid_of(conjugate).view(torch.float32).tolist() == [1, -2, 3, 4]
    negative = conjugate.imag
    assert negative.is_neg()
    assert not solid_of(negative).is_neg()
    assert solid_of(negative).tolist() == [-2, 4]


def test_rows_are_cut_along_each_tensors_axis() -> None:
    """5 rows in 2: 3 and 2, position ids along axis 1, a table whole, weights 3/5 and 2/5."""
    inputs = {
        "ids": torch.arange(10).reshape(5, 2),
        "places": torch.arange(30).reshape(3, 5, 2),
        "table": torch.arange(7),
        "rate": 0.5,
    }
    axes = {"ids": 0, "places": 1, "table": None, "rate": None}
    first, second = cut_rows(inputs, (torch.arange(5), "mean"), 2, input_axes=axes)
    assert (first.weight, second.weight) == (0.6, 0.4)
    for batch, rows in ((first, slice(0, 3)), (second, slice(3, 5))):
        assert torch.equal(batch.inputs["ids"], inputs["ids"][rows])
        assert torch.equal(batch.inputs["places"], inputs["places"][:, rows])
        assert torch.equal(batch.inputs["table"], inputs["table"])
        assert batch.inputs["rate"] == 0.5
        assert batch.targets[1] == "mean"
        assert torch.equal(batch.targets[0], torch.arange(5)[rows])
        # A part of its own: nothing keeps the batch alive.
        assert batch.inputs["places"].untyped_storage().nbytes() == batch.inputs["places"].nbytes


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 9),
    count=st.integers(1, 9),
    axes=st.lists(st.integers(0, 2), min_size=1, max_size=4),
)
def test_cut_rows_put_together(rows: int, count: int, axes: list[int]) -> None:
    """Micro-batches joined along each tensor's axis are the batch; none is empty; weights sum to 1."""
    batch = [torch.randn(*(rows if place == axis else 2 for place in range(3))) for axis in axes]
    if rows < count:
        with pytest.raises(InputError, match=f"{rows} rows cannot fill {count} micro-batches"):
            cut_rows(batch, batch[0], count, input_axes=axes, target_axes=axes[0])
        return
    cut = cut_rows(batch, batch[0], count, input_axes=axes, target_axes=axes[0])
    assert sum(part.weight for part in cut) == pytest.approx(1.0)
    for place, axis in enumerate(axes):
        assert torch.equal(torch.cat([part.inputs[place] for part in cut], axis), batch[place])
        assert all(part.inputs[place].shape[axis] for part in cut)


@pytest.mark.parametrize(
    ("inputs", "axes", "words"),
    [
        (
            (torch.ones(4, 2), torch.ones(3, 4)),
            0,
            r"shape \(3, 4\) has 3 rows along axis 0 where another has 4",
        ),
        (torch.ones(4), 1, r"shape \(4,\) has no axis 1: name its rows' axis"),
        ((torch.ones(4), torch.ones(4)), (0, 0, 0), "input_axes is nested in another way"),
        (0.5, None, "no tensor has rows to cut"),
    ],
)
def test_rows_that_do_not_fit_are_refused(inputs: Any, axes: Any, words: str) -> None:
    """Unequal rows, a missing axis, axes nested unlike the value, and nothing to cut, in one line each."""
    targets = None if isinstance(inputs, float) else torch.ones(4)
    with pytest.raises(InputError, match=words):
        cut_rows(inputs, targets, 2, input_axes=axes)


def test_one_tensor_is_its_own_spec() -> None:
    """What most boundaries carry needs no tree."""
    x = torch.ones(2)
    assert flatten(x, "x") == ([x], TENSOR)
    assert unflatten([x], Spec.from_text(TENSOR.to_text())) is x
