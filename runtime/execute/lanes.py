"""On which CUDA stream each action is issued, and which others it waits for.

Autograd runs every node of a backward on the stream on which its forward ran. So a micro-batch's pass through
a stage has one lane for all its ops, and the two halves of an F&B pair overlap only if their passes have
different lanes. One lane suffices for everything else; two suffice for pairs: a pass shares its F with one
pair at most and its BW with one, whose F came earlier, so alternating along these links never meets itself.

Beside that, all ops wait for each other as the plan has them, one after the other. Only two things do not:
the halves of a pair, and W's put aside to a lane of their own (low priority), which nothing waits for but
what adds to the same gradients (a BW, a W that is not put aside) and the step's end. What W frees was made
on another lane: the allocator is told, and gives it out again only once W has run.

:func:`arrange` decides, :class:`Lanes` issues; the calls themselves are behind :class:`StreamApi`. The
latter's CUDA side was not run on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Any, NamedTuple, Protocol

import torch

from zbsolve.model.graph import Task, predecessors
from zbsolve.model.instance import Instance
from zbsolve.model.kinds import GRADIENT_KINDS, TaskKind
from zbsolve.model.memory import Pairs
from zbsolve.plan.actions import COMPUTE_OPS, Program

MAIN, BESIDE, ASIDE = range(3)


class Issued(NamedTuple):
    """An action as far as lanes are concerned; ``paired``: an F whose partner is the next compute op."""

    op: str
    stage: int
    microbatch: int
    paired: bool = False


def issued(program: Program, pairs: Pairs) -> list[Issued]:
    """A program as lanes see it."""
    firsts = {forward for forward, _ in pairs}
    return [
        Issued(
            action.op,
            action.stage,
            action.microbatch,
            action.op == "F" and Task(TaskKind.F, action.stage, action.microbatch) in firsts,
        )
        for action in program.actions
    ]


class Launch(NamedTuple):
    """An action's lane, and the places of those whose end it waits for (on its own lane it does anyway)."""

    lane: int
    after: tuple[int, ...]


def arrange(actions: Sequence[Issued], aside: Set[int] = frozenset()) -> list[Launch]:
    """Lanes and waits of a program; ``aside`` are the stages whose W's have their own lane."""
    lanes = _pass_lanes(actions)
    launches: list[Launch] = []
    tail: list[int] = []  # what the next op comes after
    before_pair: list[int] | None = None
    last_aside: int | None = None
    for place, (op, stage, microbatch, paired) in enumerate(actions):
        lane = lanes[stage, microbatch]
        if op not in COMPUTE_OPS:
            launches.append(Launch(lane, ()))  # behind the op that makes what it sends
            continue
        if op == "W" and stage in aside:
            launches.append(Launch(ASIDE, tuple(tail)))
            last_aside = place
            continue
        second = before_pair is not None
        waits = tail if before_pair is None else before_pair
        if op in GRADIENT_KINDS and last_aside is not None:
            waits = [*waits, last_aside]
        launches.append(Launch(lane, tuple(p for p in waits if launches[p].lane != lane)))
        before_pair = list(tail) if paired else None
        tail = [*tail, place] if second else [place]
    return launches


def arrange_devices(
    instance: Instance, actions: Sequence[Issued], tied: Sequence[Sequence[int]] = ()
) -> list[Launch]:
    """Lanes and waits of all devices' ops issued by one process: a lane a device, no messages.

    ``tied`` are groups of stages that share a weight, whose W's and BW's must not add to it at once.
    """
    launches: list[Launch] = []
    made: dict[Task, int] = {}
    added: dict[int, int] = {}  # group -> the op that added to its weight last
    for place, (op, stage, microbatch, _) in enumerate(actions):
        task = Task(TaskKind(op), stage, microbatch)
        waits = [made[edge.before] for edge in predecessors(instance, task) if edge.before in made]
        if op in GRADIENT_KINDS:
            for group, stages in enumerate(tied):
                if stage in stages:
                    waits += [added[group]] if group in added else []
                    added[group] = place
        made[task] = place
        lane = instance.stages[stage].device
        after = sorted({p for p in waits if launches[p].lane != lane})
        launches.append(Launch(lane, tuple(after)))
    return launches


def _pass_lanes(actions: Sequence[Issued]) -> dict[tuple[int, int], int]:
    """A lane for every (stage, micro-batch)."""
    lanes: dict[tuple[int, int], int] = {}
    compute = [action for action in actions if action.op in COMPUTE_OPS]
    for place, (op, stage, microbatch, paired) in enumerate(compute):
        if op == "F":
            partner = compute[place + 1] if paired else None
            lanes[stage, microbatch] = (
                MAIN if partner is None else BESIDE - lanes[partner.stage, partner.microbatch]
            )
    return lanes


class StreamApi(Protocol):
    """What lanes need of CUDA."""

    def home(self) -> Any:
        """The stream of everything outside a step: sums, the optimizer."""
        ...

    def create(self, lane: int) -> Any:
        """A stream for a lane."""
        ...

    def use(self, stream: Any) -> None:
        """Issue what follows on a stream."""
        ...

    def mark(self, stream: Any) -> Any:
        """An event behind everything issued on a stream so far."""
        ...

    def wait(self, stream: Any, event: Any) -> None:
        """Let what follows on a stream wait for an event."""
        ...

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        """Do not give a tensor's memory out again before what was issued on a stream has run."""
        ...


class CudaStreams:
    """Streams of one device. Not run on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def home(self) -> torch.cuda.Stream:
        """As :class:`StreamApi`."""
        return torch.cuda.current_stream(self._device)

    def create(self, lane: int) -> torch.cuda.Stream:
        """Passes go before W's put aside, whose priority, the default one, is the lowest there is."""
        priority = 0 if lane == ASIDE else -1
        return torch.cuda.Stream(self._device, priority=priority)  # type: ignore[no-untyped-call]

    def use(self, stream: torch.cuda.Stream) -> None:
        """As :class:`StreamApi`."""
        torch.cuda.set_stream(stream)

    def mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """As :class:`StreamApi`."""
        event: torch.cuda.Event = stream.record_event()
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """As :class:`StreamApi`."""
        stream.wait_event(event)

    def keep(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """As :class:`StreamApi`."""
        tensor.record_stream(stream)


class Lanes:
    """Issues a program's actions as :func:`arrange` has them, step after step."""

    def __init__(self, launches: Sequence[Launch], api: StreamApi) -> None:
        self._launches, self._api = launches, api
        self._home = api.home()
        self._streams = {lane: api.create(lane) for lane in sorted({launch.lane for launch in launches})}
        self._awaited = {place for launch in launches for place in launch.after}
        self._events: dict[int, Any] = {}

    def begin(self) -> None:
        """No lane starts before what was issued until now, the optimizer's last step, has run."""
        self._events.clear()
        event = self._api.mark(self._home)
        for stream in self._streams.values():
            self._api.wait(stream, event)

    def enter(self, place: int) -> None:
        """Issue the next action on its lane, behind what it waits for."""
        lane, after = self._launches[place]
        stream = self._streams[lane]
        for earlier in after:
            self._api.wait(stream, self._events[earlier])
        self._api.use(stream)

    def adopt(self, place: int, tensors: Iterable[torch.Tensor]) -> None:
        """An action uses tensors that may have been made on another lane."""
        stream = self._streams[self._launches[place].lane]
        for tensor in tensors:
            self._api.keep(tensor, stream)

    def leave(self, place: int) -> None:
        """An action has been issued."""
        if place in self._awaited:
            self._events[place] = self._api.mark(self._streams[self._launches[place].lane])

    def aside(self, place: int) -> bool:
        """Whether an action is a W on its own lane."""
        return self._launches[place].lane == ASIDE

    def end(self) -> None:
        """What follows waits for all lanes."""
        for stream in self._streams.values():
            self._api.wait(self._home, self._api.mark(stream))
        self._api.use(self._home)
