"""What an instance accepts, how it reads, and the one line with which it refuses."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from tests.strategies import small_instances
from zbsolve.errors import InputError
from zbsolve.files.documents import KINDS
from zbsolve.model.instance import (
    Instance,
    equal_stages,
    load_instance,
    make_instance,
    parse_instance,
    place,
)


def document(**changes: Any) -> dict[str, Any]:
    """A valid instance file of two stages on two devices, with changes."""
    data: dict[str, Any] = {
        "schema": "zbsolve.instance/1",
        "num_devices": 2,
        "num_microbatches": 3,
        "stages": [
            {"device": 0, "t_f": 1.0, "t_b": 2.0, "t_w": 0.5},
            {"device": 1, "t_f": 1.5, "t_b": 2, "t_w": 0.0, "t_bw": 2.25},
        ],
        "t_comm": 0.25,
        "memory_cap": [4, 5.5],
    }
    data.update(changes)
    return data


def with_stage(**changes: Any) -> dict[str, Any]:
    """The document with changed fields in stage 1."""
    data = document()
    data["stages"][1].update(changes)
    return data


def refusal(tmp_path: Path, text: str) -> str:
    """The error line for a file of this text, which must name the file."""
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        load_instance(path)
    message = str(caught.value)
    assert caught.value.exit_code == 2
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message.removeprefix(f"{path}: ")


@pytest.mark.parametrize(
    ("data", "field", "says"),
    [
        (document(frobnicate=1), "frobnicate", "unknown field: remove it or correct its spelling"),
        (with_stage(tf=1.0), "stages[1].tf", "unknown field: remove it or correct its spelling"),
        (with_stage(t_f=-1.0), "stages[1].t_f", "greater than or equal to 0 (given -1.0)"),
        (with_stage(t_w="fast"), "stages[1].t_w", "valid number (given 'fast')"),
        (with_stage(mem_b=True), "stages[1].mem_b", "valid number (given True)"),
        (with_stage(device=-1), "stages[1].device", "greater than or equal to 0 (given -1)"),
        (with_stage(device=0.5), "stages[1].device", "valid integer"),
        (with_stage(device=2), "stages[1].device is 2", "use 0 to 1, or raise num_devices"),
        (with_stage(device=0), "device 1 of 2 holds no stage", "give it one or lower num_devices"),
        (document(t_comm=[0.1, 0.2]), "t_comm has 2 entries", "give 1 (one per boundary"),
        (document(t_comm=[-0.1]), "t_comm[0]", "greater than or equal to 0 (given -0.1)"),
        (document(t_comm=-0.1), "t_comm", "greater than or equal to 0 (given -0.1)"),
        (document(memory_cap=[1.0]), "memory_cap has 1 entries", "give 2 (one per device)"),
        (document(static_mem=[1.0, 2.0, 3.0]), "static_mem has 3 entries", "give 2 (one per device)"),
        (document(num_microbatches=0), "num_microbatches", "greater than or equal to 1 (given 0)"),
        (document(num_devices=0), "num_devices", "greater than or equal to 1 (given 0)"),
        (document(stages=[]), "stages", "give at least one"),
        (document(stages=3), "stages", "not a list: give […]"),
        (document(schema="zbsolve.instance/2"), "schema", "zbsolve.instance/1"),
        ({k: v for k, v in document().items() if k != "schema"}, "schema", 'add "schema"'),
        ({k: v for k, v in document().items() if k != "stages"}, "stages", "missing: add it"),
        ({k: v for k, v in document().items() if k != "num_devices"}, "num_devices", "missing: add it"),
        ([1, 2], "", "not a JSON object"),
    ],
)
def test_a_bad_field_is_named_with_the_way_out(tmp_path: Path, data: Any, field: str, says: str) -> None:
    """One line: the file, the field's place, and what to give instead."""
    message = refusal(tmp_path, json.dumps(data))
    assert message.startswith(field)
    assert says in message


@pytest.mark.parametrize("field", ["t_f", "t_b", "t_w"])
def test_a_missing_time_is_named(tmp_path: Path, field: str) -> None:
    """Times have no default: a stage without one is refused by name."""
    data = document()
    del data["stages"][0][field]
    assert refusal(tmp_path, json.dumps(data)) == f"stages[0].{field}: missing: add it"


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_number_that_is_not_finite_is_refused(tmp_path: Path, value: str) -> None:
    """NaN and infinities, which JSON readers let through, name their field."""
    for path, text in (
        ("stages[1].t_w", json.dumps(with_stage(t_w="@"))),
        ("t_comm", json.dumps(document(t_comm="@"))),
        ("memory_cap[1]", json.dumps(document(memory_cap=[1.0, "@"]))),
    ):
        message = refusal(tmp_path, text.replace('"@"', value))
        assert message.startswith(path)


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    """JSON readers keep the last of two keys silently; here it is an error that names the key."""
    text = json.dumps(document()).replace('"t_comm"', '"t_comm": 0.5, "t_comm"')
    assert refusal(tmp_path, text) == "t_comm: given twice: keep one"


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    """Absent, not UTF-8, not JSON: the line says which, and for JSON the line number."""
    assert "not JSON" in refusal(tmp_path, '{\n "schema": \n}')
    assert refusal(tmp_path, '{\n "schema": \n}').startswith("line 3: ")
    with pytest.raises(InputError, match=r"absent\.json: cannot be read"):
        load_instance(tmp_path / "absent.json")
    binary = tmp_path / "x.json"
    binary.write_bytes(b"\xff\xfe{}")
    with pytest.raises(InputError, match="not UTF-8"):
        load_instance(binary)


def test_files_that_no_reader_can_take_are_named(tmp_path: Path) -> None:
    """Nesting and digits beyond what Python reads, lists and other kinds of file: one line, no traceback."""
    assert "nested too deeply" in refusal(tmp_path, "[" * 100_000)
    assert "thousands of digits" in refusal(tmp_path, '{"num_devices": ' + "9" * 5000 + "}")
    assert refusal(tmp_path, "[1]") == "not a JSON object: give an instance"
    assert refusal(tmp_path, '{"schema": "zbsolve.plan/1"}') == (
        "is a plan, not an instance: give an instance"
    )
    assert refusal(tmp_path, '{"traceEvents": []}').startswith("is a Chrome trace, for Perfetto")
    assert refusal(tmp_path, '{"schema": "zbsolve.instance/9"}') == (
        "schema: is 'zbsolve.instance/9', not 'zbsolve.instance/1': give an instance"
    )


def test_every_kind_of_file_has_a_name() -> None:
    """Each schema that the code names is in the table from which errors take what a file holds."""
    root = Path(__file__).parent.parent
    sources = [*root.glob("zbsolve/**/*.py"), *root.glob("runtime/*.py")]
    named = {schema for path in sources for schema in re.findall(r"zbsolve\.\w+/\d+", path.read_text())}
    assert len(named) > 9
    assert named == set(KINDS)


def test_sums_that_leave_the_floats_are_refused(tmp_path: Path) -> None:
    """1e308 is a number, twice it is not; 10**12 micro-batches are nobody's step."""
    assert "choose a larger time_unit" in refusal(tmp_path, json.dumps(with_stage(t_f=1e308)))
    assert "choose a larger memory_unit" in refusal(tmp_path, json.dumps(with_stage(mem_b=1e308)))
    assert refusal(tmp_path, json.dumps(document(num_microbatches=10**12))).startswith("num_microbatches: ")


def test_an_instance_reads_back_as_it_was(tmp_path: Path) -> None:
    """Write, read: the same object; unset optional fields are not written."""
    instance = parse_instance(document(), "here")
    path = tmp_path / "x.json"
    path.write_text(json.dumps(instance.to_json_dict()))
    assert load_instance(path) == instance
    assert "static_mem" not in instance.to_json_dict()
    assert "peak_f" not in instance.to_json_dict()["stages"][0]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(small_instances())
def test_any_instance_survives_json(instance: Instance) -> None:
    """Round trip of random instances through JSON text."""
    assert parse_instance(json.loads(json.dumps(instance.to_json_dict())), "here") == instance


def test_queries_by_hand() -> None:
    """V on 2 devices: stages 0 and 3 on device 0, 1 and 2 on device 1; the hop in the middle is free."""
    instance = equal_stages(2, 3, 1.0, 2.0, 0.5, 0.25, placement="v", memory_cap=7.0)
    assert [stage.device for stage in instance.stages] == [0, 1, 1, 0]
    assert instance.stages_on(0) == (0, 3)
    assert [instance.hop(b) for b in range(3)] == [0.25, 0.0, 0.25]
    assert instance.device_work(0) == 3 * 2 * 3.5
    assert (instance.cap(1), instance.static(1)) == (7.0, 0.0)
    assert instance.fits(0, 7.0)
    assert instance.fits(0, 0.1 + 0.2 + 6.7)
    assert not instance.fits(0, 7.0001)
    assert instance.with_memory_cap(None).cap(0) == math.inf


def test_placements() -> None:
    """Linear, loop and V with two and three chunks."""
    assert place(3, "linear") == [0, 1, 2]
    assert place(2, "loop", 3) == [0, 1, 0, 1, 0, 1]
    assert place(2, "v") == [0, 1, 1, 0]
    assert place(2, "v", 3) == [0, 1, 1, 0, 0, 1]
    with pytest.raises(InputError, match="use loop or v"):
        place(2, "linear", 2)


def test_memory_caps_by_name() -> None:
    """1p is p * mem_b of every chunk plus static memory: 10 + 2 * (1.5 + 1.5) = 16 on device 0."""
    instance = equal_stages(2, 4, mem_b=1.5, placement="v").with_changes(static_mem=[10.0, 20.0])
    assert instance.with_memory_cap("1p").memory_cap == (16.0, 26.0)
    assert instance.with_memory_cap("0.5p").memory_cap == (13.0, 23.0)
    assert instance.with_memory_cap("12.5").memory_cap == 12.5
    assert instance.with_memory_cap(3).memory_cap == 3
    assert instance.with_memory_cap("none").memory_cap is None
    for text in ("p", "-1p", "lots", "nan", "infp"):
        with pytest.raises(InputError, match=f"memory cap '{text}': give a number"):
            instance.with_memory_cap(text)


def test_changes_are_validated() -> None:
    """A changed copy goes through the same checks as a file."""
    instance = equal_stages(2, 2)
    with pytest.raises(InputError, match="t_comm has 2 entries"):
        instance.with_changes(t_comm=[1.0, 2.0])
    assert instance.with_changes(num_microbatches=5).num_microbatches == 5


def test_fused_defaults_by_hand() -> None:
    """peak_bw defaults to the larger half; the least backward is the shorter of split (5) and fused."""
    stage = {"device": 0, "t_f": 1.0, "t_b": 2.0, "t_w": 3.0, "peak_b": 1.0, "peak_w": 4.0}
    first = make_instance(num_devices=1, num_microbatches=1, stages=[{**stage, "t_bw": 4.5}]).stages[0]
    assert (first.peak_fused, first.min_backward, first.growth) == (4.0, 4.5, 0.0)
    other = make_instance(
        num_devices=1,
        num_microbatches=1,
        stages=[{**stage, "t_bw": 6.0, "peak_bw": 0.5, "mem_b": 1.0, "mem_w": 1.75}],
    ).stages[0]
    assert (other.peak_fused, other.min_backward, other.growth) == (0.5, 5.0, 0.75)
