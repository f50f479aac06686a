"""Text tables of a joint decision."""

from __future__ import annotations

from itertools import groupby
from statistics import median

from rich.markup import escape
from rich.table import Table

from zbsolve.baselines.comparison import gain_text
from zbsolve.model.instance import place
from zbsolve.partition.layers import Keep, LayerProfile
from zbsolve.partition.search import JointResult
from zbsolve.plan.plan import Plan
from zbsolve.words import time_text


def decision_table(result: JointResult) -> Table:
    """Rank by rank: which device, which layers, what it works, and its memory."""
    problem, decision, plan = result.problem, result.decision, result.plan
    instance = plan.instance
    unit, memory = escape(instance.time_unit), escape(instance.memory_unit)
    table = Table("rank", "device", "layers", f"work ({unit})", f"peak memory ({memory})", "of")
    for column in table.columns[3:]:
        column.justify = "right"
    places = place(problem.num_devices, decision.placement)
    for rank, index in enumerate(decision.devices):
        device = problem.cluster.each[index]
        chunks = [
            (instance.stages[s].name or "").split(":")[0].removeprefix("layers ")
            + (f" ({decision.keep[s].value})" if decision.keep[s] is not Keep.plain else "")
            for s, r in enumerate(places)
            if r == rank
        ]
        table.add_row(
            str(rank),
            escape(device.name),
            ", ".join(chunks),
            time_text(instance.device_work(rank)),
            time_text(plan.peak_memory[rank]),
            "no limit" if device.memory == float("inf") else time_text(device.memory),
        )
    return table


def layer_table(profile: LayerProfile) -> Table:
    """Times and memory of each layer; a run of layers of one kind as their median."""
    unit, memory = escape(profile.time_unit), escape(profile.memory_unit)
    table = Table("layers", "kind", *(f"{name} ({unit})" for name in ("T_F", "T_B", "T_W", "T_BW")))
    for heading in ("M_B", "M_W", "static", "output"):
        table.add_column(f"{heading} ({memory})")
    for column in table.columns[2:]:
        column.justify = "right"
    first = 0
    for name, run in groupby(profile.layers, key=lambda layer: layer.name):
        layers = list(run)
        end = first + len(layers) - 1
        values = [
            median(getattr(layer, field) or 0.0 for layer in layers)
            for field in ("t_f", "t_b", "t_w", "t_bw", "mem_b", "mem_w", "static_mem", "mem_out")
        ]
        place = str(first) if end == first else f"{first}-{end}"
        table.add_row(place, escape(name or "-"), *map(time_text, values))
        first = end + 1
    return table


def joint_lines(result: JointResult, even: Plan | None) -> list[str]:
    """The certificate on the whole decision, and the gain over the even split."""
    plan, problem = result.plan, result.problem
    unit = plan.instance.time_unit
    split = ",".join(map(str, result.decision.split))
    lines = [
        f"placement    {result.decision.placement}, layers per stage {split}",
        f"{plan.objective:<12} {time_text(plan.cost)} {unit} (found by {plan.solver.name})",
        f"joint bound  {time_text(result.lower_bound)} {unit}: no split, device order, placement, choice of "
        "activations or order of passes that was allowed costs less",
        f"gap          {result.gap:.3%} ({result.status})",
        f"proof        {result.statement}",
        f"considered   {result.decisions:,} decisions in {result.seconds:.1f} s",
    ]
    if even is None:
        lines.append("even split   does not fit in memory")
    else:
        gain = (even.cost - plan.cost) / even.cost if even.cost else 0.0
        lines.append(
            f"even split   {time_text(even.cost)} {unit} ({even.status}, gap {even.gap:.2%}); "
            f"the joint plan against it: {gain_text(gain)}"
        )
    if Keep.recompute in problem.keeps:
        lines.append("recompute    per stage; the joint bound holds wherever between its F and B each R runs")
    if problem.split is not None:
        lines.append("the split was given: only the rest was decided")
    return lines
