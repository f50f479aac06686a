"""The same model under another placement."""

from __future__ import annotations

import pytest

from zbsolve.baselines.dualpipe import bidirectional
from zbsolve.errors import InputError
from zbsolve.model.instance import Instance, equal_stages
from zbsolve.model.recut import recut


def unequal() -> Instance:
    """Three stages of 2, 4, 6; hops 1 and 3; static 10, 20, 30."""
    plain = equal_stages(3, 4)
    stages = [
        stage.model_copy(update={"t_f": 2.0 * (s + 1), "mem_b": 2.0, "peak_b": 1.0})
        for s, stage in enumerate(plain.stages)
    ]
    return plain.with_changes(stages=stages, t_comm=[1.0, 3.0], static_mem=[10.0, 20.0, 30.0])


def test_halves_in_a_v() -> None:
    """Times and held memory halve, transients stay; pieces keep model order; device 0 has both ends."""
    cut = recut(unequal(), "v")
    assert [stage.t_f for stage in cut.stages] == [1, 1, 2, 2, 3, 3]
    assert [stage.device for stage in cut.stages] == [0, 1, 2, 2, 1, 0]
    assert {(stage.mem_b, stage.peak_b) for stage in cut.stages} == {(1.0, 1.0)}
    assert cut.t_comm == (1.0, 1.0, 3.0, 3.0, 3.0)  # inside of a stage the longer hop at its ends
    # Halves of static memory: 5 5 10 10 15 15 in model order; device 0 has the first and the last.
    assert cut.static_mem == (5 + 15, 5 + 15, 10 + 10)
    assert [stage.device for stage in recut(unequal(), "loop").stages] == [0, 1, 2, 0, 1, 2]


def test_halving_and_joining_again_gives_the_instance_back() -> None:
    """Work, held memory and hops are those of the beginning."""
    back = recut(recut(unequal(), "loop"), "linear")
    assert [stage.t_f for stage in back.stages] == [2, 4, 6]
    assert [stage.device for stage in back.stages] == [0, 1, 2]
    assert back.t_comm == (1.0, 3.0)
    assert recut(unequal(), "linear") == unequal()


def test_joining_adds_times_and_keeps_the_highest_transient() -> None:
    """A fused backward only where both have one; recomputation of either counts."""
    halves = recut(unequal(), "v")
    stages = [*halves.stages]
    stages[0] = stages[0].model_copy(update={"t_bw": 2.0, "t_r": 1.0, "peak_b": 3.0})
    joined = recut(halves.with_changes(stages=stages), "linear")
    first = joined.stages[0]
    assert (first.t_bw, first.t_r, first.peak_b) == (None, 1.0, 3.0)
    assert first.mem_r == 1.0  # nothing of the half that recomputes, all of the other one's


def test_of_several_replicas_the_first_is_cut() -> None:
    """It takes the micro-batches of all, on as many devices."""
    plain = equal_stages(2, 4, t_comm=0.5).with_fused_backward()
    assert recut(bidirectional(plain), "linear") == plain
    assert recut(bidirectional(plain), "v") == recut(plain, "v")


def test_what_cannot_be_cut_is_refused() -> None:
    """Replicas that lie on devices of their own, and chunks that do not divide."""
    apart = equal_stages(2, 4).with_changes(replicas=2)
    with pytest.raises(InputError, match="first replica"):
        recut(apart, "linear")
    with pytest.raises(InputError, match="multiple of 2"):
        recut(
            equal_stages(2, 4).with_changes(
                stages=[*equal_stages(2, 4).stages, equal_stages(2, 4).stages[0]]
            ),
            "v",
        )
    with pytest.raises(InputError, match="3 chunks per device cannot be joined"):
        recut(equal_stages(2, 4, placement="loop", chunks=3), "v")
