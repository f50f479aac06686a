"""Which tasks a step has, how long they take, and what waits for what."""

from __future__ import annotations

import pytest

from zbsolve.model.graph import Edge, Task, TaskGraph, duration, predecessors
from zbsolve.model.instance import equal_stages, make_instance
from zbsolve.model.kinds import BW, B, F, W


def two_stages(t_bw: float | None) -> TaskGraph:
    stages = [
        {"device": 0, "t_f": 1.0, "t_b": 2.0, "t_w": 3.0},
        {"device": 1, "t_f": 4.0, "t_b": 5.0, "t_w": 6.0, "t_bw": t_bw},
    ]
    return TaskGraph(make_instance(num_devices=2, num_microbatches=1, stages=stages, t_comm=0.5))


def test_tasks_and_edges_of_two_stages_by_hand() -> None:
    """F0 -> F1 -> B1 -> B0 with hops between devices, B behind its F, W behind its B."""
    graph = two_stages(None)
    f0, b0, w0, f1, b1, w1 = (Task(kind, s, 0) for s in (0, 1) for kind in (F, B, W))
    assert graph.tasks == (f0, b0, w0, f1, b1, w1)
    assert set(graph.edges) == {
        Edge(f0, f1, 0.5),
        Edge(f0, b0, 0.0),
        Edge(f1, b1, 0.0),
        Edge(b1, b0, 0.5),
        Edge(b0, w0, 0.0),
        Edge(b1, w1, 0.0),
    }
    assert [graph.duration(task) for task in graph.tasks] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert graph.device(b1) == 1


def test_a_fusible_stage_offers_both_backwards() -> None:
    """With t_bw the upstream B waits for whichever of B and BW runs, and BW waits for its own F."""
    graph = two_stages(7.0)
    fused = Task(BW, 1, 0)
    assert fused in graph.tasks
    assert graph.duration(fused) == 7.0
    assert Edge(fused, Task(B, 0, 0), 0.5) in graph.edges
    assert list(predecessors(graph.instance, fused)) == [Edge(Task(F, 1, 0), fused, 0.0)]
    assert graph.kinds(0) == (F, B, W)
    assert graph.kinds(1) == (F, B, W, BW)


def test_a_fused_length_that_was_not_given_is_refused() -> None:
    """Stage 0 has no t_bw: asking for its BW is an error that says so."""
    with pytest.raises(ValueError, match="stage 0 has no t_bw"):
        duration(two_stages(7.0).instance, BW, 0)


def test_the_hop_within_a_device_is_free() -> None:
    """V placement on 2 devices: stages 1 and 2 share device 1, so F2 may follow F1 at once."""
    instance = equal_stages(2, 1, t_comm=0.25, placement="v")
    lags = {edge.after.stage: edge.lag for s in (1, 2, 3) for edge in predecessors(instance, Task(F, s, 0))}
    assert lags == {1: 0.25, 2: 0.0, 3: 0.25}


def test_counts_grow_with_everything() -> None:
    """p = 3, m = 4: 36 tasks; edges 2 F-F and 2 B-B a micro-batch, 3 F-B, 3 B-W: 10 * 4 = 40."""
    graph = TaskGraph(equal_stages(3, 4))
    assert len(graph.tasks) == 36
    assert len(graph.edges) == 40


def test_task_names() -> None:
    """Kind, stage, micro-batch."""
    assert str(Task(BW, 3, 1)) == "BW3.1"
