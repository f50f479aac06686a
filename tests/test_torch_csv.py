"""The torch CSV: exact text out, strict reading in, and agreement with torch's own loader and schedules."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.extended_strategies import programs
from zbsolve.baselines import BASELINES
from zbsolve.errors import InputError
from zbsolve.model.graph import Task
from zbsolve.model.instance import Instance, equal_stages
from zbsolve.model.kinds import BW, B, F, R, W
from zbsolve.model.recompute import unfold
from zbsolve.model.schedule import Schedule
from zbsolve.model.simulator import simulate
from zbsolve.plan.torch_csv import export_torch_csv
from zbsolve.plan.torch_csv_reading import import_torch_csv

# 1F1B of p = 2, m = 2 with split backward: rank 0 warms up with one more F.
TEXT = "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1W0,1F1,1I1,1W1\n"


@pytest.fixture
def two() -> Instance:
    return equal_stages(2, 2)


def test_export_writes_one_row_a_rank_with_torchs_letters() -> None:
    """Our B becomes I, our BW becomes B, and the file ends in one newline."""
    instance = equal_stages(2, 1).with_changes(
        stages=[
            {"device": 0, "t_f": 1.0, "t_b": 1.0, "t_w": 1.0},
            {"device": 1, "t_f": 1.0, "t_b": 1.0, "t_w": 1.0, "t_bw": 1.5},
        ]
    )
    orders = [[Task(F, 0, 0), Task(B, 0, 0), Task(W, 0, 0)], [Task(F, 1, 0), Task(BW, 1, 0)]]
    text = export_torch_csv(instance, simulate(instance, orders)).text
    assert text == "0F0,0I0,0W0\n1F0,1B0\n"
    assert import_torch_csv(text, instance).orders == tuple(map(tuple, orders))


def test_import_then_export_is_the_same_text(two: Instance) -> None:
    """Reading and writing again loses nothing."""
    assert export_torch_csv(two, simulate(two, import_torch_csv(TEXT, two).orders)).text == TEXT


def test_idle_cells_ragged_rows_spaces_and_crlf_are_accepted(two: Instance) -> None:
    """What torch's loader takes for idle time, and files from Windows, mean the same orders."""
    loose = "0F0, 0F1 ,,0I0,0W0,0I1,0W1\r\n,1F0,1I0,1W0,1F1,1I1,1W1,,\r\n"
    assert import_torch_csv(loose, two) == import_torch_csv(TEXT, two)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TEXT.replace("0F1", "0F0"), "t.csv: row 0, cell 2: 0F0 was already in row 0, cell 1: keep one"),
        (TEXT.replace("0F1", "0F7"), "row 0, cell 2: 0F7: no micro-batch 7: the instance has 0 to 1"),
        (TEXT.replace("1F0", "5F0"), "row 1, cell 1: 5F0: no stage 5: the instance has 0 to 1"),
        (TEXT.replace("0F0", "0F0x"), "row 0, cell 1: '0F0x' is not a task"),
        (TEXT.replace("0F0", "00F0"), "row 0, cell 1: '00F0' is not a task"),
        (TEXT.replace("0F0", "\u0660F0"), "is not a task"),
        (TEXT.replace("1I1", "1i1"), "row 1, cell 5: '1i1': lower case: write 1I1"),
        (TEXT.replace("1I1", "1unshard"), "row 1, cell 5: '1unshard': lower case: write 1UNSHARD"),
        (TEXT.replace("1I1", "1UNSHARD3"), "'1UNSHARD3' is not a task"),
        (TEXT.replace("1I1", "0UNSHARD"), "row 1, cell 5: 0UNSHARD: stage 0 is on device 0"),
        (TEXT.replace("1I1", "2REDUCE_GRAD"), "2REDUCE_GRAD: no stage 2"),
        (TEXT.replace("0F1", "(0F1;0I0)OVERLAP_F_Bx"), "'(0F1;0I0)OVERLAP_F_Bx' is not a task"),
        (TEXT.replace("0F1", "(0F1)OVERLAP_F_B"), "(0F1)OVERLAP_F_B: a pair is one F and one B"),
        (TEXT.replace("0F1", "(0F1;0W0)OVERLAP_F_B"), "a pair is one F and one B"),
        (TEXT.replace("0F1", "(0F1;1I0)OVERLAP_F_B"), "row 0, cell 2: 1I0: stage 1 is on device 1"),
        (TEXT.replace("0F1", "(0F1;0F0)OVERLAP_F_B"), "a pair is one F and one B"),
        (TEXT.replace("0F1", "(0F1;0I0)OVERLAP_F_B"), "row 0, cell 3: 0I0 was already in row 0, cell 2"),
        ("".join(reversed(TEXT.splitlines(keepends=True))), "row 0, cell 1: 1F0: stage 1 is on device 1"),
        (TEXT.replace(",0W1", ""), "row 0: stage 0 micro-batch 1: 0W1 missing: add it"),
        (TEXT.replace(",1I0,1W0", ""), "row 1: stage 1 micro-batch 0: 1I0 and 1W0 missing"),
        (TEXT.replace("0I1,0W1", "0B1"), "row 0, cell 5: 0B1: a full backward, and stage 0 has no t_bw"),
        (TEXT + "\n", "3 rows for 2 devices (row 2 is blank: torch counts it as a rank; remove it)"),
        (TEXT.splitlines()[0], "1 rows for 2 devices: give one row per rank"),
        ("rank,action\n" + TEXT, "3 rows for 2 devices: give one row per rank, no header"),
        ("", "1 rows for 2 devices"),
    ],
)
def test_import_refuses(two: Instance, text: str, message: str) -> None:
    """Each fault is one line that names row and cell, among them those that torch accepts silently."""
    with pytest.raises(InputError) as caught:
        import_torch_csv(text, two, "t.csv")
    assert message in str(caught.value)
    assert str(caught.value).startswith("t.csv: ")
    assert "\n" not in str(caught.value)


def test_import_refuses_full_backward_beside_its_half() -> None:
    """A full backward and an input-gradient backward of one micro-batch would count gradients twice."""
    stage = {"device": 0, "t_f": 1.0, "t_b": 1.0, "t_w": 1.0, "t_bw": 2.0}
    one = equal_stages(1, 1).with_changes(stages=[stage])
    with pytest.raises(InputError, match="B beside I or W"):
        import_torch_csv("0F0,0B0,0I0\n", one)


def test_export_refuses_last_stage_out_of_order(two: Instance) -> None:
    """torch would train on wrong gradients without an error, so the file is not written."""
    swapped = TEXT.replace("1F0,1I0,1W0,1F1,1I1,1W1", "1F1,1I1,1W1,1F0,1I0,1W0")
    swapped = swapped.replace("0F0,0F1,0I0,0W0,0I1,0W1", "0F1,0F0,0I1,0W1,0I0,0W0")
    with pytest.raises(InputError, match="last stage"):
        export_torch_csv(two, simulate(two, import_torch_csv(swapped, two).orders))


# TEXT lowered by hand: what torch's passes add, and what a plan has no place for.
LOWERED = (
    "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0I0,0W0,0RECV_B1,0I1,0W1,0REDUCE_GRAD,0RESHARD\n"
    "1UNSHARD,1RECV_F0,1F0,1RECV_F1,1I0,1SEND_B0,1W0,1F1,1I1,1SEND_B1,1W1,1REDUCE_GRAD,1RESHARD\n"
)


def test_a_lowered_file_says_what_was_left_out(two: Instance) -> None:
    """The orders are those of the compute cells; every other cell is counted, in one line."""
    imported = import_torch_csv(LOWERED, two)
    assert imported.orders == import_torch_csv(TEXT, two).orders
    assert imported.notes == (
        "left out: 2 UNSHARD, 2 SEND_F, 2 RECV_B, 2 REDUCE_GRAD, 2 RESHARD, 2 RECV_F, 2 SEND_B",
    )
    assert import_torch_csv(TEXT, two).notes == ()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("1RECV_F1,", "", "row 1: 1RECV_F1 missing: add it, or remove every SEND and RECV"),
        ("0SEND_F1", "0SEND_F0", "0SEND_F0 was already in row 0, cell 3"),
        ("0SEND_F1", "0SEND_B1", "0SEND_B1: there is no stage -1: remove it"),
        ("1RECV_F1", "1RECV_B1", "1RECV_B1: there is no stage 2: remove it"),
        ("0SEND_F1", "0SEND_F2", "no micro-batch 2"),
        (
            "0F1,0SEND_F1",
            "0SEND_F1,0F1",
            "row 0, cell 4: 0SEND_F1 comes before its task",
        ),
        (
            "1RECV_F0,1F0,",
            "1F0,1RECV_F0,",
            "waits in SEND_F0.0 for device 1; device 1 waits in F1.0",
        ),
        # Each device sends before it receives: a transport whose senders wait for their receivers hangs.
        ("1F0,1RECV_F1,1I0,1SEND_B0", "1F0,1I0,1SEND_B0,1RECV_F1", "device 1 waits in SEND_B1.0"),
        # Both receives early, in the other order than the sends: torch would swap the data.
        ("1RECV_F0,1F0,1RECV_F1", "1RECV_F1,1RECV_F0,1F0", "device 1 waits in RECV_F1.1"),
    ],
)
def test_messages_that_do_not_fit_are_refused(two: Instance, old: str, new: str, message: str) -> None:
    """torch's loader takes each of these; some of them train on wrong gradients there."""
    assert old in LOWERED
    with pytest.raises(InputError) as caught:
        import_torch_csv(LOWERED.replace(old, new), two, "t.csv")
    assert message in str(caught.value)
    assert str(caught.value).startswith("t.csv: ")


def test_messages_within_a_device_are_refused() -> None:
    """Two stages of one device hand over without a message."""
    one = equal_stages(1, 1, placement="v")
    with pytest.raises(InputError, match="0SEND_F0: stages 0 and 1 are on one device"):
        import_torch_csv("0F0,0SEND_F0,1F0,1I0,1W0,0I0,0W0\n", one)


def paired(t_fb: float | None = 3.0) -> Instance:
    """Two devices in a V: unit F, B, W; BW takes 2 and a pair 3 of its 3."""
    v = equal_stages(2, 4, placement="v")
    return v.with_changes(stages=[s.model_copy(update={"t_bw": 2.0, "t_fb": t_fb}) for s in v.stages])


def test_pairs_are_torchs_overlap_cells() -> None:
    """DualPipeV's pairs are written as torch writes them, and read with the same cost: 2 of 3 overlapped."""
    instance, schedule = BASELINES["dualpipe-v"].schedule(paired(2.0))
    exported = export_torch_csv(instance, schedule)
    assert exported.text.startswith("0F0,0F1,0F2,3F0,3I0,3W0,3F1,(0F3;3B1)OVERLAP_F_B,")
    assert exported.notes[0] == "torch 2.9 and later read it; --without-pairs writes for 2.6 and later"
    imported = import_torch_csv(exported.text.replace("(0F3;3B1)", "( 3B1; 0F3 )"), instance)
    assert (imported.pairs, imported.orders) == (schedule.pairs, schedule.orders)
    assert simulate(instance, imported.orders, imported.pairs).makespan == schedule.makespan

    plain = export_torch_csv(instance, schedule, with_pairs=False)
    assert "OVERLAP" not in plain.text
    apart = simulate(instance, schedule.orders).makespan
    assert apart > schedule.makespan
    assert plain.notes == (
        "torch 2.6 and later read it",
        f"{len(schedule.pairs)} F&B pairs one half after the other "
        f"(makespan {schedule.makespan:g} becomes {apart:g})",
    )


def test_pairs_that_the_instance_cannot_run_are_taken_apart() -> None:
    """Without t_fb, and with an I in the pair, the halves run as torch runs them: one after the other."""
    text = "0F0,(0F1;0B0)OVERLAP_F_B,0F2,(0I1;0F3)OVERLAP_F_B,0W1,0B2,0B3\n"
    stage = {"device": 0, "t_f": 1.0, "t_b": 1.0, "t_w": 1.0, "t_bw": 2.0}
    one = equal_stages(1, 4).with_changes(stages=[stage])
    imported = import_torch_csv(text, one)
    assert [str(task) for task in imported.orders[0]] == (
        ["F0.0", "F0.1", "BW0.0", "F0.2", "B0.1", "F0.3", "W0.1", "BW0.2", "BW0.3"]
    )
    assert imported.pairs == frozenset()
    assert imported.notes == (
        "taken apart: 1 OVERLAP_F_B, one half after the other (their stages have no t_fb)",
        "taken apart: 1 OVERLAP_F_B, one half after the other (a pair with I is not modelled)",
    )


def test_recomputations_are_left_out_and_put_back() -> None:
    """torch recomputes inside the backward: an early R moves there, and the note says what that costs."""
    stages = [{"device": d, "t_f": 1.0, "t_b": 1.0, "t_w": 1.0, "t_r": 1.0, "mem_r": 0.5} for d in range(2)]
    instance = equal_stages(2, 1).with_changes(stages=stages)
    # F0 [0,1] F1 [1,2] R1 [2,3] B1 [3,4]; R0 [1,2] early or [2,3] all the same: B0 [4,5], W0 [5,6].
    early = [
        [Task(F, 0, 0), Task(R, 0, 0), Task(B, 0, 0), Task(W, 0, 0)],
        [Task(F, 1, 0), Task(R, 1, 0), Task(B, 1, 0), Task(W, 1, 0)],
    ]
    exported = export_torch_csv(instance, simulate(instance, early))
    assert exported.text == "0F0,0I0,0W0\n1F0,1I0,1W0\n"
    assert "left out: 2 R: torch recomputes inside the backward" in exported.notes[-1]
    assert "becomes" not in exported.notes[-1]
    imported = import_torch_csv(exported.text, instance)
    assert imported.orders == tuple(map(tuple, early))
    assert imported.notes == ("added: 2 R, each right before its backward (the format has none)",)

    two = equal_stages(2, 2).with_changes(stages=stages)
    # Stage 1: F F [1,3] R B R B [3,7]. Both R's of device 0 in its gap [2,4]: B [5,6] W B W [6,9]. R0.1 right
    # before its B instead: B [5,6] W [6,7] R [7,8] B W [8,10].
    fast = "1F0,1F1,1I0,1I1,1W0,1W1\n"
    late = import_torch_csv("0F0,0F1,0I0,0W0,0I1,0W1\n" + fast, two).orders
    gap = sorted(late[0], key=lambda task: (F, R).index(task.kind) if task.kind in (F, R) else 2)
    assert export_torch_csv(two, simulate(two, [gap, late[1]])).notes[-1].endswith("(makespan 9 becomes 10)")


def test_replicas_are_refused_both_ways() -> None:
    """torch refuses a stage on two ranks; a file for such an instance cannot exist."""
    instance, schedule = BASELINES["dualpipe"].schedule(equal_stages(4, 8).with_fused_backward())
    with pytest.raises(InputError, match="2 replicas: torch has no stage on two ranks"):
        export_torch_csv(instance, schedule)
    with pytest.raises(InputError, match=r"t\.csv: 2 replicas"):
        import_torch_csv("0F0\n", instance, "t.csv")


@st.composite
def exportable(draw: st.DrawFn) -> tuple[Instance, Schedule]:
    """A random program of every kind of task but several replicas, micro-batches named as torch needs."""
    instance, orders, pairs = draw(programs().filter(lambda program: program[0].replicas == 1))
    last = instance.num_stages - 1
    name = {
        task.microbatch: place
        for place, task in enumerate(t for o in orders for t in o if t.kind is F and t.stage == last)
    }

    def renamed(task: Task) -> Task:
        return task._replace(microbatch=name[task.microbatch])

    schedule = simulate(
        instance,
        tuple(tuple(map(renamed, order)) for order in orders),
        frozenset((renamed(a), renamed(b)) for a, b in pairs),
    )
    return instance, schedule


@given(exportable(), st.booleans())
def test_any_plan_comes_back_the_same(program: tuple[Instance, Schedule], lowered: bool) -> None:
    """Orders, pairs and times of a plan survive both grammars; only R's may come later, as the note says."""
    instance, schedule = program
    exported = export_torch_csv(instance, schedule, grammar="compute_comms" if lowered else "compute_only")
    imported = import_torch_csv(exported.text, instance)
    bare = [[task for task in order if task.kind is not R] for order in schedule.orders]
    assert imported.orders == unfold(instance, bare)
    assert imported.pairs == schedule.pairs
    again = simulate(instance, imported.orders, imported.pairs)
    if imported.orders == schedule.orders:
        assert again == simulate(instance, schedule.orders, schedule.pairs)
        assert not any("becomes" in note for note in exported.notes)
    assert export_torch_csv(instance, again, grammar="compute_only").text == (
        export_torch_csv(instance, schedule, grammar="compute_only").text
    )


# --- against torch itself --------------------------------------------------------------------------

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")


@contextmanager
def torch_schedule(kind: str, instance: Instance) -> Iterator[Any]:
    """One of torch's schedule classes as rank 0 of a group that sends nothing builds it."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, schedules
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=instance.num_devices)
    try:
        value = torch.zeros(1, 2, requires_grad=True)
        known = dict.fromkeys(("input_args", "output_args", "input_grads", "output_grads"), (value,))
        stages = [
            PipelineStage(torch.nn.Identity(), s, instance.num_stages, torch.device("cpu"), **known)  # type: ignore[arg-type]
            for s in instance.stages_on(0)
        ]
        yield getattr(schedules, kind)(stages, instance.num_microbatches, loss_fn=torch.nn.MSELoss())
    finally:
        dist.destroy_process_group()


def fused(instance: Instance, t_fb: float | None = None) -> Instance:
    """Every stage may fuse, and pair where a pair's time is given."""
    return instance.with_changes(
        stages=[s.model_copy(update={"t_bw": 2.0, "t_fb": t_fb}) for s in instance.stages]
    )


TORCHS_OWN = [
    ("ScheduleDualPipeV", fused(equal_stages(3, 8, placement="v"), 2.5)),
    ("ScheduleDualPipeV", fused(equal_stages(2, 6, placement="v"), 2.0)),
    ("ScheduleZBVZeroBubble", fused(equal_stages(3, 8, placement="v"))),
    ("ScheduleInterleaved1F1B", fused(equal_stages(3, 6, placement="loop"))),
    ("ScheduleInterleavedZeroBubble", fused(equal_stages(2, 4, placement="loop"))),
    ("ScheduleLoopedBFS", fused(equal_stages(3, 5, placement="loop"))),
]


@needs_torch
@pytest.mark.parametrize(
    ("kind", "instance"),
    TORCHS_OWN,
    ids=lambda value: getattr(value, "num_devices", value),
)
def test_torchs_own_schedules_are_read(kind: str, instance: Instance, tmp_path: Path) -> None:
    """What torch writes of its own schedules, lowered or not, is read with every task and pair."""
    from torch.distributed.pipelining.schedules import _Action

    files = {}
    with torch_schedule(kind, instance) as schedule:
        for grammar in ("compute_only", "compute_comms"):
            files[grammar] = tmp_path / f"{grammar}.csv"
            schedule._dump_csv(str(files[grammar]), format=grammar)
        torchs = [
            [_Action.from_str(str(action)) for action in schedule.pipeline_order[rank] if action is not None]
            for rank in range(instance.num_devices)
        ]
    plain, lowered = (import_torch_csv(file.read_bytes().decode(), instance) for file in files.values())
    halves = [[half for a in row for half in (a.sub_actions or (a,))] for row in torchs]
    letters = {F: "F", B: "I", W: "W", BW: "B"}
    assert [[f"{t.stage}{letters[t.kind]}{t.microbatch}" for t in order] for order in plain.orders] == [
        [str(half) for half in row] for row in halves
    ]
    assert len(plain.pairs) == sum(a.sub_actions is not None for row in torchs for a in row)
    assert (lowered.orders, lowered.pairs) == (plain.orders, plain.pairs)
    assert plain.notes == ()
    cells = files["compute_comms"].read_text()
    counts = (cells.count(name) for name in ("UNSHARD", "RESHARD", "REDUCE_GRAD", "SEND_F", "RECV_B"))
    for name, count in zip(("UNSHARD", "RESHARD", "REDUCE_GRAD", "SEND_F", "RECV_B"), counts, strict=True):
        assert f"{count} {name}" in lowered.notes[0]
    simulate(instance, plain.orders, plain.pairs)  # raises when the orders deadlock


def uneven() -> tuple[Instance, Schedule]:
    """Two stages on device 0, one on device 1; rows of 12 and 6 cells."""
    chunks = fused(equal_stages(2, 2)).stages
    instance = equal_stages(2, 2).with_changes(stages=[chunks[0], chunks[0], chunks[1]])
    text = "0F0,1F0,0F1,1F1,1I0,0I0,1I1,0I1,0W0,1W0,0W1,1W1\n2F0,2I0,2F1,2B1,2W0\n"
    return instance, simulate(instance, import_torch_csv(text, instance).orders)


@needs_torch
@pytest.mark.parametrize("grammar", ["compute_only", "compute_comms"])
@pytest.mark.parametrize("case", ["uneven", "zb-h1", "dualpipe-v", "zb-v", "interleaved"])
def test_torch_reads_what_is_written(case: str, grammar: Any, tmp_path: Path) -> None:
    """torch's loader takes every exported file, and its dry run ends, with its own messages and with ours."""
    shapes = {
        "zb-h1": equal_stages(3, 5),
        "dualpipe-v": fused(equal_stages(3, 7, placement="v"), 2.5),
        "zb-v": equal_stages(2, 6, placement="v"),
        "interleaved": fused(equal_stages(3, 6, placement="loop")),
    }
    instance, schedule = uneven() if case == "uneven" else BASELINES[case].schedule(shapes[case])
    path = tmp_path / "plan.csv"
    path.write_text(export_torch_csv(instance, schedule, grammar=grammar).text)
    with torch_schedule("_PipelineScheduleRuntime", instance) as runtime:
        runtime._load_csv(str(path), format=grammar)
        assert runtime.stage_index_to_group_rank == dict(enumerate(s.device for s in instance.stages))
        names = [str(action) for row in runtime.pipeline_order_with_comms.values() for action in row]
        # torch scales and reduces gradients in this action only, once a stage.
        assert sorted(n for n in names if "REDUCE" in n) == [
            f"{s}REDUCE_GRAD" for s in range(instance.num_stages)
        ]
        assert sum("OVERLAP" in name for name in names) == len(schedule.pairs)
        # Its dry run knows neither of the sharding actions nor pairs, which the loader just made.
        runtime.pipeline_order_with_comms = {
            rank: [
                half
                for action in row
                if not str(action).endswith(("SHARD", "REDUCE_GRAD"))
                for half in (action.sub_actions or (action,))
            ]
            for rank, row in runtime.pipeline_order_with_comms.items()
        }
        runtime._simulate()  # raises when it does not progress
