"""Checkpoints in pieces: each rank writes its layers, and any split reads them again.

A checkpoint is a folder with a piece per device and a manifest. Every entry is named by the layer's number
in the model and the parameter's name within it, and every piece records its device, stages and layers, so
that a full model, or another split, can be put together. A checkpoint is there when its manifest is: pieces
are written first, under names that no older manifest mentions.
"""

from __future__ import annotations

import io
import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zbsolve.errors import InputError
from zbsolve.files.atomic import write_text_atomically
from zbsolve.runtime.backward.split import SplitStage
from zbsolve.runtime.models.pipeline_model import StageLayers, stage_ranges

SCHEMA = "zbsolve.checkpoint/1"
MANIFEST = "manifest.json"


def _layers(stages: Mapping[int, SplitStage], split: Sequence[int]) -> Iterator[tuple[int, int, nn.Module]]:
    """(stage, layer number, layer) of every layer that a device holds."""
    ranges = stage_ranges(split)
    for s, stage in stages.items():
        assert isinstance(stage.module, StageLayers)
        for number, layer in zip(ranges[s % len(split)], stage.module.layers, strict=True):
            yield s, number, layer


def _named_parameters(
    stages: Mapping[int, SplitStage], split: Sequence[int]
) -> Iterator[tuple[str, nn.Parameter]]:
    for _, number, layer in _layers(stages, split):
        for name, parameter in layer.named_parameters():
            yield f"{number}.{name}", parameter


def save_piece(
    folder: Path,
    device: int,
    stages: Mapping[int, SplitStage],
    split: Sequence[int],
    optimizer: torch.optim.Optimizer | None,
    ties: Mapping[str, str],
) -> None:
    """Write one device's layers and optimizer state, beside whatever checkpoint the folder holds.

    ``ties`` are further names of tied weights -> the name under which the one copy is written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    piece: dict[str, Any] = {"device": device, "layers": [], "weights": {}, "optimizer": {}, "ties": {}}
    for s, number, layer in _layers(stages, split):
        piece["layers"].append({"layer": number, "stage": s, "kind": type(layer).__name__})
        for name, tensor in layer.state_dict().items():
            label = f"{number}.{name}"
            if label in ties:
                piece["ties"][label] = ties[label]
            else:
                piece["weights"][label] = tensor
    if optimizer is not None:
        piece["optimizer"] = {
            name: dict(optimizer.state[p])
            for name, p in _named_parameters(stages, split)
            if p in optimizer.state and name not in ties
        }
    name = f"piece{device}-{uuid.uuid4().hex[:12]}.pt"
    torch.save(piece, folder / name)
    record = {"device": device, "file": name, "layers": piece["layers"]}
    write_text_atomically(folder / f"piece{device}.json", json.dumps(record))


def finish(folder: Path, devices: int) -> None:
    """Make the pieces that all devices have written the folder's checkpoint, and remove older ones."""
    pieces = [json.loads((folder / f"piece{d}.json").read_text(encoding="utf-8")) for d in range(devices)]
    text = json.dumps({"schema": SCHEMA, "pieces": pieces}, indent=1)
    write_text_atomically(folder / MANIFEST, text + "\n")
    kept = {piece["file"] for piece in pieces}
    for path in folder.glob("piece*.pt"):
        if path.name not in kept:
            path.unlink(missing_ok=True)


def read(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
    """The whole model of a checkpoint: weights, and optimizer state, by ``<layer>.<parameter>``.

    A tied weight is there under each of its names.

    Raises
    ------
    InputError
        No checkpoint, or one that is not whole.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{folder}: holds no checkpoint ({MANIFEST} is missing): give another") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{folder / MANIFEST}: cannot be read ({error}): give another") from None
    if manifest.get("schema") != SCHEMA:
        raise InputError(f"{folder / MANIFEST}: schema is {manifest.get('schema')!r}, not {SCHEMA!r}")
    weights: dict[str, torch.Tensor] = {}
    state: dict[str, dict[str, Any]] = {}
    ties: dict[str, str] = {}
    for record in manifest["pieces"]:
        path = folder / record["file"]
        try:
            data = torch.load(io.BytesIO(path.read_bytes()), map_location="cpu", weights_only=True)
        except (OSError, RuntimeError) as error:
            first = str(error).splitlines()[0]
            raise InputError(f"{path}: cannot be read ({first}): save the checkpoint again") from None
        weights |= data["weights"]
        state |= data["optimizer"]
        ties |= data.get("ties", {})  # written since weights may be tied across devices
    for label, first in ties.items():
        weights[label] = weights[first]
        if first in state:
            state[label] = state[first]
    return weights, state


def load(folder: Path, stages: Mapping[int, SplitStage], split: Sequence[int]) -> None:
    """Put a checkpoint's weights into a device's layers, whatever split it was written under."""
    load_layers(folder, ((number, layer) for _, number, layer in _layers(stages, split)))


def load_layers(folder: Path, layers: Iterable[tuple[int, nn.Module]]) -> None:
    """Put a checkpoint's weights into layers given with their numbers.

    Raises
    ------
    InputError
        No checkpoint there, or one of other layers.
    """
    weights, _ = read(folder)
    for number, layer in layers:
        prefix = f"{number}."
        own = {name.removeprefix(prefix): t for name, t in weights.items() if name.startswith(prefix)}
        try:
            layer.load_state_dict(own)
        except RuntimeError as error:
            first = str(error).splitlines()[-1].strip()
            raise InputError(f"{folder}: layer {number} ({type(layer).__name__}): {first}") from None


def load_optimizer(
    folder: Path,
    stages: Mapping[int, SplitStage],
    split: Sequence[int],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Put the optimizer state of a device's parameters back."""
    _, state = read(folder)
    for name, parameter in _named_parameters(stages, split):
        if name in state:
            # Copies: a device may hold a tied weight twice, and each is stepped by itself.
            optimizer.state[parameter] = {
                key: value.to(parameter.device if value.dim() else "cpu", copy=True)
                if torch.is_tensor(value)
                else value
                for key, value in state[name].items()
            }
