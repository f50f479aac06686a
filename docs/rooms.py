"""The rooms of the code: from the layers in pyproject.toml, with arrows from the imports themselves."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from html import escape
from importlib import import_module
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parent.parent
WIDTH, ROW, BOX = 860, 58, 124


def layers(contract: str = "rooms") -> list[list[str]]:
    """The rooms, top layer first; those of one layer do not know each other."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    chosen = next(each for each in contracts if each["id"] == contract)
    return [[name.strip() for name in layer.split("|")] for layer in chosen["layers"]]


def imports() -> dict[str, dict[str, int]]:
    """How many modules of one room import from another, types alone left out."""
    graph = grimp.build_graph("zbsolve", exclude_type_checking_imports=True, cache_dir=None)
    found: dict[str, dict[str, int]] = {}
    for importer in graph.modules:
        for imported in graph.find_modules_directly_imported_by(importer):
            here, there = _room(importer), _room(imported)
            if here != there and "zbsolve" not in (here, there):
                found.setdefault(here, {}).setdefault(there, 0)
                found[here][there] += 1
    return found


def _room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def markdown() -> str:
    """The diagram, and a row a room: what it is for and which rooms it knows."""
    known = imports()
    rows = ["| room | what it is for | knows |", "|---|---|---|"]
    for room in _in_order():
        purpose = (import_module(f"zbsolve.{room}").__doc__ or "").strip().splitlines()[0]
        rows.append(f"| `{room}` | {purpose} | {', '.join(sorted(known.get(room, {}))) or 'none'} |")
    return f"{diagram(known)}\n\n" + "\n".join(rows)


def _in_order() -> Iterator[str]:
    """Every room, top first, without the entry point and bare data."""
    return (room for layer in layers() for room in layer if room not in ("__main__", "instances"))


def diagram(known: dict[str, dict[str, int]]) -> str:
    """Layers as rows of boxes, imports as lines that only ever go down: thicker where more modules import."""
    rows = [[room for room in layer if room not in ("__main__", "instances")] for layer in layers()]
    rows = [row for row in rows if row]
    places: dict[str, tuple[float, float]] = {}
    for number, row in enumerate(rows):
        # Rooms alone in their layer step to and fro, so that lines to farther layers can be told apart.
        shift = 0 if len(row) > 1 else (-150, 0, 150, 0)[number % 4]
        for place, room in enumerate(row):
            x = WIDTH / 2 + shift + (place - (len(row) - 1) / 2) * (BOX + 40)
            places[room] = (x, 30 + number * ROW)
    lines, boxes = [], []
    for here, others in known.items():
        for there, count in others.items():
            if here not in places or there not in places:
                continue
            (x1, y1), (x2, y2) = places[here], places[there]
            bend = (y2 - y1) / 2
            path = (
                f"M{x1:.0f} {y1 + 17:.0f} C{x1:.0f} {y1 + bend:.0f} "
                f"{x2:.0f} {y2 - bend:.0f} {x2:.0f} {y2 - 17:.0f}"
            )
            lines.append(
                f'<path d="{path}" fill="none" stroke="currentColor" stroke-opacity="0.25" '
                f'stroke-width="{min(4.0, 0.6 + count / 8):.1f}"><title>{here} imports {there} '
                f"({count} imports)</title></path>"
            )
    for room, (x, y) in places.items():
        boxes.append(
            f'<rect x="{x - BOX / 2:.0f}" y="{y - 17:.0f}" width="{BOX}" height="34" rx="6" '
            'fill="var(--md-default-bg-color, white)" stroke="currentColor"/>'
            f'<text x="{x:.0f}" y="{y + 5:.0f}" text-anchor="middle" fill="currentColor">'
            f"{escape(room)}</text>"
        )
    height = 60 + (len(rows) - 1) * ROW
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" '
        'aria-label="Rooms and imports: every line goes down" '
        'xmlns="http://www.w3.org/2000/svg" font-size="14" font-family="sans-serif">'
        + "".join(lines)
        + "".join(boxes)
        + "</svg>"
    )
