"""Random tiny instances as plain JSON data, mix by mix, and how to make one that fails smaller."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

from tests.exhaustive.problem import Data

EVERY_PLAIN = ("growth", "transients", "fused", "contention", "zeros", "placement")

# The options of each mix: the first for sure, each other in half of the instances.
MIXES: dict[str, tuple[str, ...]] = {
    "plain": (),
    "growth": ("growth",),
    "transients": ("transients",),
    "fused": ("fused",),
    "recompute": ("recompute",),
    "recompute and fused": ("recompute", "fused", "growth", "transients", "placement"),
    "pairs": ("pairs",),
    "pairs and transients": ("pairs", "transients", "replicas", "placement"),
    "replicas": ("replicas",),
    "contention": ("contention", "zeros", "replicas"),
    "zero lengths": ("zeros",),
    "placement": ("placement",),
    "irregular": ("irregular",),
    "scales": ("scales",),
    "plain options": EVERY_PLAIN,
    "all options": (*EVERY_PLAIN, "recompute", "pairs", "replicas"),
}
# (stage, micro-batch) pairs that the search does in some milliseconds.
MOST_PASSES = dict.fromkeys(MIXES, 6)
MOST_PASSES |= dict.fromkeys(("plain", "growth", "transients", "fused", "zero lengths", "placement"), 8)
MOST_PASSES |= {"irregular": 8, "scales": 8, "all options": 5}

LINEAR = ((0,), (0, 1), (0, 1), (0, 1, 2), (0, 1, 1, 0), (0, 1, 0, 1))
BIDIRECTIONAL = ((0, 0), (0, 1, 1, 0), (0, 1, 1, 0), (0, 1, 0, 1), (0, 1))


def case(mix: str, number: int, most_passes: int | None = None) -> Data:
    """The instance of a mix with this number."""
    draw = random.Random(f"{mix}/{number}")
    options = MIXES[mix]
    has = {option: draw.random() < 0.5 or option == options[0] for option in options}

    def use(option: str, chance: float = 1.0) -> bool:
        return has.get(option, False) and draw.random() < chance

    replicas = 2 if use("replicas") else 1
    devices = draw.choice(BIDIRECTIONAL if replicas == 2 else LINEAR)
    if use("placement"):
        devices = tuple(
            draw.randrange(3) for _ in range(draw.choice((2, 2, 4) if replicas == 2 else (2, 3, 3, 4)))
        )
        names = sorted(set(devices))
        devices = tuple(names.index(d) for d in devices)
    most = max(1, (most_passes or MOST_PASSES[mix]) // len(devices))
    m = max(draw.randint(1, most), draw.randint(1, most))
    times = [0.0, 0.0, 0.5, 1.0, 2.0] if has.get("zeros") else [0.5, 1.0, 1.0, 2.0, 3.0]
    amounts = [0.0, 0.5, 1.0, 1.0, 2.0]
    if has.get("irregular"):
        times = [round(draw.uniform(0.1, 9.0), 3) for _ in range(6)]
        amounts = [round(draw.uniform(0.1, 9.0), 4) for _ in range(6)]

    def stage(device: int) -> Data:
        result: Data = {"device": device} | {name: draw.choice(times) for name in ("t_f", "t_b", "t_w")}
        result["mem_b"] = draw.choice(amounts)
        smaller = [amount for amount in amounts if amount <= result["mem_b"]]
        result["mem_w"] = draw.choice(amounts if use("growth") else smaller)
        if use("transients", 0.7):
            result |= {
                name: draw.choice(amounts) for name in ("peak_f", "peak_b", "peak_w") if draw.random() < 0.7
            }
        pair = use("pairs", 0.7)
        if pair or use("fused", 0.7):
            both = result["t_b"] + result["t_w"]
            result["t_bw"] = draw.choice([both, both, max(0.0, both - 0.5), both + 0.5, *times])
            result["t_bw"] = round(result["t_bw"], 6)
            if has.get("transients") and draw.random() < 0.4:
                result["peak_bw"] = draw.choice(amounts)
        if pair:
            f, bw = result["t_f"], result["t_bw"]
            result["t_fb"] = round(draw.choice([max(f, bw), (max(f, bw) + f + bw) / 2, f + bw]), 6)
        elif use("recompute", 0.6):
            result["t_r"] = draw.choice(times)
            result["mem_r"] = draw.choice([0.0, *smaller])
        return result

    data: Data = {
        "schema": "zbsolve.instance/1",
        "name": "tiny",
        "num_devices": max(devices) + 1,
        "num_microbatches": m,
        "stages": [stage(device) for device in devices],
    }
    chain = len(devices) // replicas
    if replicas > 1:
        data["replicas"] = replicas

    def hops(values: list[float]) -> list[float]:
        return [draw.choice(values) if (b + 1) % chain else 0.0 for b in range(len(devices) - 1)]

    if draw.random() < 0.6:
        data["t_comm"] = hops([0.0, 0.5, 1.0])
    if use("contention"):
        data["t_transfer"] = hops([0.0, 1.0, 2.0, 4.0])
    if draw.random() < 0.3:
        data["static_mem"] = [draw.choice(amounts) for _ in range(data["num_devices"])]
    if draw.random() < 0.75:
        data["memory_cap"] = [_cap(data, device, draw) for device in range(data["num_devices"])]
    if use("scales"):
        data = _scaled(data, draw.choice([-12, -9, -6, 6, 9]), draw.choice([-12, -9, -6, 6, 9]))
    return data


def _scaled(data: Data, times: int, memory: int) -> Data:
    """The instance in other units: powers of ten of the present ones."""

    def scaled(value: Any, exponent: int) -> Any:
        return (
            [float(f"{v!r}e{exponent}") for v in value]
            if isinstance(value, list)
            else float(f"{value!r}e{exponent}")
        )

    def fields(part: Data) -> Data:
        exponents = {"t": times, "mem": memory, "peak": memory, "memory": memory, "static": memory}
        return {
            k: scaled(v, exponents[k.split("_")[0]]) if "_" in k and k.split("_")[0] in exponents else v
            for k, v in part.items()
        }

    return fields(data) | {"stages": [fields(stage) for stage in data["stages"]]}


def _cap(data: Data, device: int, draw: random.Random) -> float:
    """About what one to m micro-batches need: sums of the device's amounts, often exactly at the edge."""
    held = [stage for stage in data["stages"] if stage["device"] == device]
    one = sum(stage["mem_b"] for stage in held)
    highest = max(
        max(0.0, stage["mem_w"] - stage["mem_b"])
        + max(stage.get(f"peak_{kind}", 0.0) for kind in ("f", "b", "w", "bw"))
        for stage in held
    )
    static = data.get("static_mem", [0.0] * data["num_devices"])[device]
    extra = draw.choice([0.0, 0.0, 0.5 * one, one, held[0]["mem_b"], held[-1]["mem_w"], 1.5 * one])
    cut = draw.choice([0.0, 0.0, 0.0, 0.5, 1.0]) if draw.random() < 0.4 else 0.0
    return max(0.0, round(static + one + highest + extra - cut, 6))


# --- making a failing instance smaller -------------------------------------------------------------


def shrunk(data: Data, fails: Callable[[Data], bool], most_steps: int = 2_000) -> Data:
    """The instance with micro-batches, stages, options and values taken away while it still fails."""
    smaller = True
    while smaller:
        smaller = False
        for candidate in _simpler(data):
            most_steps -= 1
            if most_steps < 0:
                return data
            if fails(candidate):
                data, smaller = candidate, True
                break
    return data


def _simpler(data: Data) -> Iterator[Data]:
    if data["num_microbatches"] > 1:
        yield data | {"num_microbatches": data["num_microbatches"] - 1}
    if data.get("replicas", 1) > 1:
        chain = len(data["stages"]) // data["replicas"]
        yield from (
            _without(data | {"replicas": 1}, range(k * chain, (k + 1) * chain))
            for k in range(data["replicas"])
        )
    elif len(data["stages"]) > 1:
        yield from (_without(data, range(s, s + 1)) for s in range(len(data["stages"])))
    for field in ("memory_cap", "static_mem", "t_transfer", "t_comm"):
        if data.get(field) is not None:
            yield {k: v for k, v in data.items() if k != field}
    for s, stage in enumerate(data["stages"]):
        for field in ("t_fb", "t_r", "mem_r", "t_bw", "peak_bw", "peak_f", "peak_b", "peak_w"):
            if field in stage:
                yield _with_stage(data, s, {k: v for k, v in stage.items() if k != field})
    for field in ("t_comm", "t_transfer", "static_mem", "memory_cap"):
        for place, value in enumerate(data.get(field) or ()):
            for other in _simpler_values(value):
                values = list(data[field])
                values[place] = other
                yield data | {field: values}
    for s, stage in enumerate(data["stages"]):
        for field, value in stage.items():
            if field != "device":
                yield from (_with_stage(data, s, stage | {field: other}) for other in _simpler_values(value))


def _simpler_values(value: float) -> Iterator[float]:
    yield from (other for other in (0.0, 1.0) if other < value)
    if value != round(value):
        yield float(round(value))
    if value > 1 and value == round(value):
        yield value - 1.0


def _with_stage(data: Data, s: int, stage: Data) -> Data:
    return data | {"stages": [stage if q == s else other for q, other in enumerate(data["stages"])]}


def _without(data: Data, removed: range) -> Data:
    """The instance without some stages; devices that hold none any more go, too."""
    data = deepcopy(data)
    keep = [s for s in range(len(data["stages"])) if s not in removed]
    stages = [data["stages"][s] for s in keep]
    used = sorted({stage["device"] for stage in stages})
    for stage in stages:
        stage["device"] = used.index(stage["device"])
    result: dict[str, Any] = data | {"stages": stages, "num_devices": len(used)}
    for field in ("t_comm", "t_transfer"):
        if isinstance(data.get(field), list):
            result[field] = [data[field][s] for s in keep[:-1]]
    for field in ("memory_cap", "static_mem"):
        if isinstance(data.get(field), list):
            result[field] = [data[field][device] for device in used]
    return result
