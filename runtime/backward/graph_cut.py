"""Where W may begin in any autograd graph: the generic way to split a backward.

B differentiates to the stage's inputs only (:func:`deepest` stands in where they need no gradient), keeps
the graph, and records the gradients that arrive at the nodes where a branch leaves for parameters alone. W
starts from those nodes, so it repeats no input gradient. A parameter that several such nodes reach along one
path (``x @ w @ w``) has no such start: its gradient is taken from the stage's outputs again, which is right
and slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


class Start(NamedTuple):
    """Where W may begin: a node, and the parameters that its own branches alone lead to."""

    node: Node
    parameters: tuple[int, ...]


@dataclass
class Cut:
    """How a graph splits: nodes to record in B, output edges that lead to parameters only, and the rest."""

    starts: list[Start]
    loose_roots: list[tuple[int, tuple[int, ...]]]
    entangled: tuple[int, ...]


def cut_graph(
    roots: Sequence[GradientEdge], inputs: Sequence[torch.Tensor], parameters: Sequence[nn.Parameter]
) -> Cut:
    """Find the starts of W in the graph below ``roots``.

    ``inputs`` are what B differentiates to. With R the nodes that lead to one of them, a start is a node
    in R with a branch outside R that leads to parameters. Parameters that a start reaches both by such a
    branch and through R are entangled: starting there would count the paths through R as well.
    """
    sources = {get_gradient_edge(tensor).node for tensor in inputs}
    bit = {get_gradient_edge(parameter).node: 1 << i for i, parameter in enumerate(parameters)}
    order = children_first([edge.node for edge in roots])
    leads: dict[Node, int] = {}  # parameters that a node reaches, as a bit mask
    in_r: set[Node] = set()
    own_bits: dict[Node, int] = {}
    entangled = 0
    for node in order:
        mask, through_r, own = bit.get(node, 0), 0, 0
        reaches = node in sources
        for child, _ in node.next_functions:
            if child is None:
                continue
            mask |= leads[child]
            if child in in_r:
                reaches = True
                through_r |= leads[child]
            else:
                own |= leads[child]
        leads[node] = mask
        if reaches:
            in_r.add(node)
            if own:
                own_bits[node] = own
                entangled |= own & through_r
    starts = [Start(node, free) for node, own in own_bits.items() if (free := _bits(own & ~entangled))]
    loose = [
        (index, free)
        for index, edge in enumerate(roots)
        if edge.node not in in_r and (free := _bits(leads[edge.node] & ~entangled))
    ]
    return Cut(starts, loose, _bits(entangled))


def deepest(roots: Sequence[GradientEdge], parameters: Sequence[nn.Parameter]) -> int | None:
    """The parameter farthest below ``roots`` (longest path), None when none is reached.

    A stage whose inputs need no gradient (the first) has nothing that B could differentiate to. With this
    parameter in the inputs' place B walks the same way as on any other stage, and W has the rest.
    """
    order = children_first([edge.node for edge in roots])
    depth = dict.fromkeys(order, 0)
    for node in reversed(order):
        for child, _ in node.next_functions:
            if child is not None:
                depth[child] = max(depth[child], depth[node] + 1)
    nodes = [get_gradient_edge(parameter).node for parameter in parameters]
    reached = [i for i, node in enumerate(nodes) if node in depth]
    return max(reached, key=lambda i: depth[nodes[i]], default=None)


def children_first(roots: Sequence[Node]) -> list[Node]:
    done: set[Node] = set()
    order: list[Node] = []
    stack: list[tuple[Node, bool]] = [(node, False) for node in roots]
    while stack:
        node, expanded = stack.pop()
        if expanded:
            order.append(node)
        elif node not in done:
            done.add(node)
            stack.append((node, True))
            stack += [(child, False) for child, _ in node.next_functions if child is not None]
    return order


def _bits(mask: int) -> tuple[int, ...]:
    return tuple(i for i in range(mask.bit_length()) if mask >> i & 1)


class Recorder:
    """Keeps the gradients that arrive at a node."""

    def __init__(self, node: Node) -> None:
        self.gradients: tuple[torch.Tensor | None, ...] = ()
        self._handle = node.register_prehook(self._record)

    def _record(self, gradients: tuple[torch.Tensor, ...]) -> None:
        self.gradients = tuple(None if g is None else g.detach() for g in gradients)

    def close(self) -> None:
        self._handle.remove()
