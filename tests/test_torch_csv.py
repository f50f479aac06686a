"""The torch CSV: exact text out, strict reading in, and agreement with torch's own loader."""

from __future__ import annotations

import importlib.util

import pytest

from zbsolve.errors import InputError
from zbsolve.graph import BW, B, F, Task, W
from zbsolve.instance import Instance, equal_stages
from zbsolve.torch_csv import export_torch_csv, import_torch_csv

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
    text = export_torch_csv(instance, orders)
    assert text == "0F0,0I0,0W0\n1F0,1B0\n"
    assert import_torch_csv(text, instance) == tuple(map(tuple, orders))


def test_import_then_export_is_the_same_text(two: Instance) -> None:
    """Reading and writing again loses nothing."""
    assert export_torch_csv(two, import_torch_csv(TEXT, two)) == TEXT


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
        (TEXT.replace("1I1", "1SEND_B1"), "row 1, cell 5: '1SEND_B1': SEND_B is not supported"),
        (TEXT.replace("1I1", "(1F1;1B0)OVERLAP_F_B"), "OVERLAP_F_B is not supported"),
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
    with pytest.raises(InputError, match="last stage"):
        export_torch_csv(two, import_torch_csv(swapped, two))


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_torch_reads_the_same_schedule() -> None:
    """torch's own parser and validator take an exported V placement and lower it without a deadlock."""
    from torch.distributed.pipelining import schedules

    from zbsolve.simulator import simulate

    v = equal_stages(2, 2, placement="v")  # stages 0, 3 on device 0; 1, 2 on device 1
    text = (
        "0F0,0F1,3F0,3I0,3W0,3F1,3I1,3W1,0I0,0W0,0I1,0W1\n1F0,2F0,1F1,2F1,2I0,2W0,1I0,1W0,2I1,2W1,1I1,1W1\n"
    )
    orders = import_torch_csv(text, v)
    simulate(v, orders)  # raises when the orders deadlock
    exported = export_torch_csv(v, orders)
    actions = {
        rank: [schedules._Action.from_str(cell) for cell in row.split(",")]
        for rank, row in enumerate(exported.splitlines())
    }
    schedules._validate_schedule(actions, pp_group_size=2, num_stages=4, num_microbatches=2)
    device_of_stage = {stage: data.device for stage, data in enumerate(v.stages)}
    lowered = schedules._add_send_recv(actions, lambda stage: device_of_stage[stage], 4)
    names = [str(action) for action in lowered[0]]
    assert [name for name in names if "SEND" not in name and "RECV" not in name] == text.split("\n")[0].split(
        ","
    )
