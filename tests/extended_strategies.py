"""Random instances with recomputation, F&B pairs, replicas, contended links, and random orders for them.

Also their earliest ends by brute force: a fixpoint over the definitions, no code of the simulator.
"""

from __future__ import annotations

from hypothesis import strategies as st

from zbsolve.model.graph import Task
from zbsolve.model.instance import Instance, make_instance
from zbsolve.model.kinds import BW, B, F, R, W

TIMES = st.sampled_from([0.0, 0.5, 1.0, 2.0])
AMOUNTS = st.sampled_from([0.0, 0.5, 1.0])
PLACEMENTS = (((0, 1), 1), ((0, 1, 1, 0), 1), ((0, 1, 0), 1), ((0, 1, 1, 0), 2), ((0, 0), 2), ((0, 1, 2), 1))

Pair = tuple[Task, Task]


@st.composite
def extended_instances(draw: st.DrawFn) -> Instance:
    """Every option present or not, stage by stage."""
    devices, replicas = draw(st.sampled_from(PLACEMENTS))
    chain = len(devices) // replicas
    stages = []
    for device in devices:
        stage: dict[str, object] = {"device": device, "mem_b": draw(AMOUNTS) + 0.5, "mem_w": draw(AMOUNTS)}
        stage |= {name: draw(TIMES) for name in ("t_f", "t_b", "t_w")}
        stage |= {name: draw(AMOUNTS) for name in ("peak_f", "peak_b", "peak_w")}
        option = draw(st.sampled_from(["none", "recompute", "fused", "pair"]))
        if option == "recompute":
            stage |= {"t_r": draw(TIMES), "mem_r": 0.5 * draw(st.integers(0, 1))}
        if option != "none":
            stage["t_bw"] = draw(TIMES)
        if option == "pair":
            f, bw = stage["t_f"], stage["t_bw"]
            assert isinstance(f, float)
            assert isinstance(bw, float)
            stage["t_fb"] = draw(st.sampled_from([max(f, bw), (max(f, bw) + f + bw) / 2]))
        stages.append(stage)

    def hops() -> list[float]:
        return [draw(TIMES) if (b + 1) % chain else 0.0 for b in range(len(devices) - 1)]

    return make_instance(
        name="extended",
        num_devices=max(devices) + 1,
        num_microbatches=draw(st.integers(1, 3)),
        replicas=replicas,
        stages=stages,
        t_comm=hops(),
        t_transfer=draw(st.sampled_from([None, "yes"])) and hops(),
        static_mem=[draw(AMOUNTS) for _ in range(max(devices) + 1)],
    )


def inputs(instance: Instance, task: Task, present: set[Task]) -> list[Task]:
    """Tasks whose end a task waits for."""
    kind, s, j = task
    chain = instance.num_stages // instance.replicas
    if kind is F:
        return [] if s % chain == 0 else [Task(F, s - 1, j)]
    if kind is R:
        return [Task(F, s, j)]
    if kind is W:
        return [Task(B, s, j)]
    own = Task(R, s, j) if Task(R, s, j) in present else Task(F, s, j)
    later = [Task(k, s + 1, j) for k in (B, BW) if Task(k, s + 1, j) in present and (s + 1) % chain]
    return [own, *later]


@st.composite
def programs(draw: st.DrawFn) -> tuple[Instance, tuple[tuple[Task, ...], ...], frozenset[Pair]]:
    """An instance, orders that can run, and some of their neighbours as pairs that can run, too."""
    instance = draw(extended_instances())
    tasks = []
    for s, stage in enumerate(instance.stages):
        for j in range(instance.num_microbatches):
            tasks += [Task(F, s, j)] + ([Task(R, s, j)] if stage.t_r is not None else [])
            fuse = stage.t_bw is not None and (stage.t_fb is not None or draw(st.booleans()))
            tasks += [Task(BW, s, j)] if fuse else [Task(B, s, j), Task(W, s, j)]
    present = set(tasks)
    done: set[Task] = set()
    sequence: list[list[Task]] = []  # groups of one or two: what is in a group runs together
    while len(done) < len(tasks):
        ready = [t for t in tasks if t not in done and done.issuperset(inputs(instance, t, present))]
        task = draw(st.sampled_from(ready))
        group = [task]
        if task.kind is F and instance.stages[task.stage].t_fb is not None:
            partners = [
                t
                for t in ready
                if t.kind is BW
                and instance.stages[t.stage].t_fb is not None
                and instance.stages[t.stage].device == instance.stages[task.stage].device
            ]
            if partners and draw(st.booleans()):
                group.append(draw(st.sampled_from(partners)))
        sequence.append(group)
        done.update(group)
    orders: list[list[Task]] = [[] for _ in range(instance.num_devices)]
    for group in sequence:
        orders[instance.stages[group[0].stage].device] += group
    pairs = frozenset((g[0], g[1]) for g in sequence if len(g) == 2)
    return instance, tuple(map(tuple, orders)), pairs


def earliest_ends(
    instance: Instance, orders: tuple[tuple[Task, ...], ...], pairs: frozenset[Pair]
) -> dict[Task, float]:
    """End of every task when all start as early as they can: the least fixpoint, by repetition."""
    chain = instance.num_stages // instance.replicas
    present = {task for order in orders for task in order}
    together = {}
    for f, bw in pairs:
        a, b = instance.stages[f.stage], instance.stages[bw.stage]
        saved = min(x.t_f + (x.t_bw or 0.0) - (x.t_fb or 0.0) for x in (a, b))
        together[f] = together[bw] = a.t_f + (b.t_bw or 0.0) - saved

    def length(task: Task) -> float:
        stage = instance.stages[task.stage]
        alone = {F: stage.t_f, R: stage.t_r, B: stage.t_b, W: stage.t_w, BW: stage.t_bw}[task.kind]
        return together.get(task, alone or 0.0)

    def number(value: float | tuple[float, ...] | None, boundary: int) -> float:
        return value[boundary] if isinstance(value, tuple) else value or 0.0

    starts = dict.fromkeys(present, 0.0)
    while True:
        ends = {task: starts[task] + length(task) for task in present}
        arrivals = dict(ends)
        for device, order in enumerate(orders):
            free: dict[int, float] = {}
            for task in order:
                step = 1 if task.kind is F else -1 if task.kind in (B, BW) else 0
                if step == 0 or not 0 <= task.stage % chain + step < chain:
                    continue
                target = instance.stages[task.stage + step].device
                if target != device:
                    boundary = min(task.stage, task.stage + step)
                    if instance.t_transfer is None:
                        leaves = ends[task]
                    else:
                        leaves = max(ends[task], free.get(target, 0.0))
                        free[target] = leaves + number(instance.t_transfer, boundary)
                    arrivals[task] = (
                        leaves + number(instance.t_transfer, boundary) + number(instance.t_comm, boundary)
                    )
        new = {}
        partner = {t: o for pair in pairs for t, o in (pair, pair[::-1])}
        for order in orders:
            for task in order:
                group = [task, partner[task]] if task in partner else [task]
                first = min(order.index(t) for t in group)
                start = ends[order[first - 1]] if first else 0.0
                for each in group:
                    for before in inputs(instance, each, present):
                        remote = before.stage != each.stage
                        start = max(start, arrivals[before] if remote else ends[before])
                new[task] = start
        if new == starts:
            return ends
        starts = new
