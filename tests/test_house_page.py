"""The page that shows the rooms of the code: drawn from the imports, and every line goes down."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("grimp")


@pytest.fixture(scope="module")
def rooms() -> ModuleType:
    """The script of the documentation."""
    path = Path(__file__).resolve().parent.parent / "docs" / "rooms.py"
    spec = importlib.util.spec_from_file_location("rooms", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_import_between_rooms_goes_down(rooms: ModuleType) -> None:
    """The arrows of the picture, against the rows that it is drawn in."""
    level = {room: number for number, layer in enumerate(rooms.layers()) for room in layer}
    known = rooms.imports()
    assert known["solver"]["bounds"] >= 1
    assert all(level[here] < level[there] for here, others in known.items() for there in others)


def test_every_room_has_a_purpose_and_a_box(rooms: ModuleType) -> None:
    """No row of the table is empty, and each room is in the picture."""
    text = rooms.markdown()
    assert "|  |" not in text
    assert all(f">{room}</text>" in text for room in rooms._in_order())
