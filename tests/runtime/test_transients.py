"""What an op needs only while it runs: seen on CPU tensor by tensor, and written down where it matters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from zbsolve.runtime.backward.split import Mechanism, SplitStage
from zbsolve.runtime.execute.transients import LiveTensors, measure_rise
from zbsolve.runtime.measure.profiler import peaks
from zbsolve.runtime.values import TENSOR

CPU = torch.device("cpu")


def rises(module: nn.Module, x: torch.Tensor, mechanism: Mechanism) -> dict[str, int]:
    """Bytes that F, B, W and BW go above what was held before, with mem_b and mem_w beside them."""
    stage = SplitStage(module, 0, mechanism)
    for parameter in stage.parameters:
        parameter.grad = torch.zeros_like(parameter)  # static memory
    stage.accounting = True
    watch = LiveTensors()
    found: dict[str, int] = {}

    def back(op: str, run: Callable[[int, list[torch.Tensor]], object], dy: torch.Tensor) -> None:
        _, found[op] = measure_rise(stage, 0, [dy], watch, lambda: run(0, [dy]))

    def forward(fused: bool) -> torch.Tensor:
        (outputs, _), found["F"] = measure_rise(
            stage, 0, [x], watch, lambda: stage.forward(0, 0, [x], [True], TENSOR, fused=fused)
        )
        return torch.ones_like(outputs[0])

    back("BW", stage.backward_fused, forward(True))
    dy = forward(False)
    found["mem_b"] = stage.held_bytes(0)
    back("B", stage.backward_input, dy)
    found["mem_w"] = stage.held_bytes(0)
    _, found["W"] = measure_rise(stage, 0, [], watch, lambda: stage.backward_weight(0))
    return found


def test_a_linear_by_hand() -> None:
    """Linear(100, 50) on 10 rows: outputs and gradients that no level between ops has."""
    # float32: x and dx 4000 bytes, y and dy 2000, dW 20000, db 200. F takes x over and makes y. B takes dy
    # and makes dx. W makes dW and db. BW takes dy and makes dx, dW and db.
    found = rises(nn.Linear(100, 50), torch.randn(10, 100), "deferred")
    assert found == {
        "mem_b": 4000, "F": 6000, "mem_w": 6000, "B": 6000, "W": 20200, "BW": 26200,
    }  # fmt: skip
    # Beyond the levels: F acquires mem_b, B what mem_w is more than it.
    ops = {op: found[op] for op in ("F", "B", "W", "BW")}
    assert peaks(4000, 6000, ops) == {"F": 2000, "B": 4000, "W": 20200, "BW": 26200}


def test_what_is_freed_on_the_way_makes_room() -> None:
    """A chain of tanh frees what it saved as its backward goes down: two gradients at most beside that."""
    # Ten tanh on 1000 floats: x, and ten outputs saved of 4000 bytes each. In BW each step makes a gradient
    # while the one before it and its own saved output are still there, and both go when it is done. So
    # above the level before BW: dy and the first gradient, 8000, and never more.
    found = rises(nn.Sequential(*(nn.Tanh() for _ in range(10))), torch.randn(1000), "deferred")
    assert found["mem_b"] == 44000
    assert found["BW"] == 8000
    assert found["F"] == 44000  # the last output is saved: nothing beside what stays


@pytest.mark.parametrize("mechanism", ["deferred", "generic"])
def test_in_place_and_views_make_nothing(mechanism: Mechanism) -> None:
    """An op in place and a view add no memory, and parameters are nobody's transient."""

    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).mul_(2.0).t()

    found = rises(InPlace(), torch.randn(10, 8), mechanism)
    # x and y are 320 bytes each.
    assert (found["mem_b"], found["F"]) == (320, 640)


def test_a_floor_keeps_small_transients_out() -> None:
    """2 % of what a micro-batch holds is the floor; BW has its own figure once B or W has one."""
    assert peaks(1000, 500, {"F": 1020, "B": 20, "W": 20, "BW": 20}) == {}
    assert peaks(1000, 500, {"F": 1021, "B": 20, "W": 20, "BW": 20}) == {"F": 21}
    assert peaks(1000, 500, {"F": 0, "B": 100, "W": 0, "BW": 10}) == {"B": 100, "BW": 10}
    # A model that takes 1500 bytes from B's growth on has only the rest of it as a transient.
    assert peaks(1000, 2500, {"F": 1000, "B": 1600, "W": 0, "BW": 0}) == {"B": 100, "BW": 0}
