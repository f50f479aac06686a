"""Small models and hand-written orders for the runtime's tests. Ranks import this module too."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zbsolve.model.graph import Task
from zbsolve.model.instance import Instance, make_instance, place
from zbsolve.model.kinds import BW, B, F, W
from zbsolve.model.schedule import Schedule
from zbsolve.model.simulator import simulate
from zbsolve.plan.certificate import Proof, SolverInfo
from zbsolve.plan.make import make_plan
from zbsolve.plan.plan import Plan
from zbsolve.runtime.models.pipeline_model import MicroBatch, cut_rows


def instance(p: int, m: int, placement: str = "linear", *, time: float = 1.0) -> Instance:
    """Equal stages that may fuse their backward."""
    stages = [
        {"device": d, "t_f": time, "t_b": time, "t_w": time, "t_bw": 2 * time}
        for d in place(p, placement)  # type: ignore[arg-type]
    ]
    return make_instance(name="test", num_devices=p, num_microbatches=m, stages=stages)


def zb_orders(p: int, m: int) -> list[list[Task]]:
    """1F1B with W's delayed on later devices: device d leaves d W's for the end."""
    orders = []
    for d in range(p):
        ahead = min(p - d - 1, m)
        order = [Task(F, d, j) for j in range(ahead)]
        done = 0
        for j in range(m):
            if ahead + j < m:
                order.append(Task(F, d, ahead + j))
            order.append(Task(B, d, j))
            if j >= d:
                order.append(Task(W, d, done))
                done += 1
        orders.append(order + [Task(W, d, j) for j in range(done, m)])
    return orders


def all_forward_orders(given: Instance) -> list[list[Task]]:
    """Every F, then every backward, on any placement; odd micro-batches fuse theirs."""
    m, last = given.num_microbatches, given.num_stages - 1
    orders: list[list[Task]] = [[] for _ in range(given.num_devices)]
    for s in range(last + 1):
        orders[given.stages[s].device] += [Task(F, s, j) for j in range(m)]
    for s in range(last, -1, -1):
        order = orders[given.stages[s].device]
        order += [Task(BW if j % 2 else B, s, j) for j in range(m)]
    for s in range(last + 1):
        # W of the even ones last, so that sums are taken in another order than the micro-batches'.
        orders[given.stages[s].device] += [Task(W, s, j) for j in range(0, m, 2)]
    return orders


def plan(given: Instance, orders: Sequence[Sequence[Task]]) -> Plan:
    """A plan with hand-written orders and no bound."""
    return plan_of_schedule(given, simulate(given, orders))


def plan_of_schedule(given: Instance, schedule: Schedule) -> Plan:
    """A plan of a hand-made schedule, without a bound."""
    return make_plan(
        given,
        schedule,
        objective="makespan",
        lower_bound=0.0,
        proof=Proof(method="none", statement="hand-written"),
        solver=SolverInfo(name="hand", version="1"),
    )


def paired_plan() -> Plan:
    """One device, two stages: F, F, then pairs of F and BW of either, some W's split."""
    given = instance(1, 3, "linear")
    stage = given.stages[0].model_copy(update={"t_fb": 2.5})
    given = given.with_changes(stages=[stage, stage])
    order = [
        Task(F, 0, 0), Task(F, 1, 0), Task(F, 0, 1), Task(BW, 1, 0), Task(F, 1, 1), Task(BW, 0, 0),
        Task(F, 0, 2), Task(B, 1, 1), Task(W, 1, 1), Task(F, 1, 2), Task(B, 0, 1), Task(B, 1, 2),
        Task(W, 1, 2), Task(BW, 0, 2), Task(W, 0, 1),
    ]  # fmt: skip
    pairs = frozenset([(Task(F, 0, 1), Task(BW, 1, 0)), (Task(F, 1, 1), Task(BW, 0, 0))])
    return plan_of_schedule(given, simulate(given, [tuple(order)], pairs))


class Model:
    """Layers, a mean squared loss, and random rows."""

    def __init__(self, layers: Sequence[nn.Module], width: int = 6, rows: int = 10) -> None:
        self.layers = layers
        self.width, self.rows = width, rows

    def loss(self, output: Any, targets: torch.Tensor) -> torch.Tensor:
        return (output - targets).square().mean()

    def microbatches(self, step: int, count: int) -> list[MicroBatch]:
        generator = torch.Generator().manual_seed(100 + step)
        x = torch.randn(self.rows, self.width, generator=generator)
        return cut_rows(x, x.flip(0).contiguous(), count)


class Residual(nn.Module):
    """A block with a nonlinearity, dropout and parameters of three kinds."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)
        self.scale = nn.Parameter(torch.ones(width))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


def residual() -> Model:
    """Four blocks with dropout."""
    return Model([Residual() for _ in range(4)])


def eight_blocks() -> Model:
    """Enough for two chunks on each of four ranks."""
    return Model([Residual() for _ in range(8)])


def frozen_prefix() -> Model:
    """Four blocks, the first two frozen."""
    model = residual()
    for layer in model.layers[:2]:
        layer.requires_grad_(False)
    return model


class First(nn.Module):
    """Embeds ids and passes a dict on: activations, an int mask, a float without gradient, a bool."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, ids: torch.Tensor) -> dict[str, Any]:
        return {
            "x": self.embedding(ids),
            "mask": (ids != 0).long(),
            "rest": [torch.full((2,), 0.5), None, (ids > 1)],
        }


class Masked(nn.Module):
    """Uses the mask and the float, checks the bool, passes everything on."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, value: dict[str, Any]) -> dict[str, Any]:
        half, nothing, large = value["rest"]
        assert nothing is None
        assert large.dtype == torch.bool
        x = self.linear(value["x"]) * value["mask"].unsqueeze(-1) + half[0]
        return {**value, "x": torch.where(large.unsqueeze(-1), x, x * 2)}


class TiedHead(nn.Module):
    """Logits with the embedding's own weight."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight

    def forward(self, value: dict[str, Any]) -> torch.Tensor:
        return value["x"] @ self.weight.t()


class Tokens(Model):
    """Next-token model on random ids; step 2 and later have shorter sequences."""

    def loss(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())

    def microbatches(self, step: int, count: int) -> list[MicroBatch]:
        generator = torch.Generator().manual_seed(step)
        length = 5 if step < 2 else 3
        ids = torch.randint(0, 7, (2 * count + 1, length), generator=generator)
        return cut_rows(ids, ids.flip(1).contiguous(), count)


def tied() -> Tokens:
    """Embedding, two masked layers, and a head that shares the embedding's weight."""
    embedding = nn.Embedding(7, 6)
    return Tokens([First(embedding), Masked(6), Masked(6), TiedHead(embedding)])


class Scale(nn.Module):
    """Multiplies by one weight, 1 at the start."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w * x


class SevenRows(Model):
    """loss = mean((w x)^2) over x = 0..6."""

    def __init__(self) -> None:
        super().__init__([Scale(), nn.Identity()])

    def loss(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return output.square().mean()

    def microbatches(self, step: int, count: int) -> list[MicroBatch]:
        x = torch.arange(7.0)
        return cut_rows(x, x, count)


class SevenRows3(SevenRows):
    """The same with three layers."""

    def __init__(self) -> None:
        Model.__init__(self, [Scale(), nn.Identity(), nn.Identity()])


class Poisoned(Model):
    """Step 1 has a NaN among its inputs, and so has step 4."""

    def microbatches(self, step: int, count: int) -> list[MicroBatch]:
        batches = super().microbatches(step, count)
        if step in (1, 4):
            batches[0].inputs[0, 0] = float("nan")
        return batches


def poisoned() -> Poisoned:
    """Two linear layers whose second step is poisoned."""
    return Poisoned([nn.Linear(6, 6), nn.Linear(6, 6)])


class PoisonedBackward(nn.Module):
    """A linear layer whose weight gradient, and nothing else, is NaN when its input's first row is marked."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.bend = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # d sqrt(b)/db at b = 0 is infinite, and 0 * infinity is NaN: only `bend` gets it.
        marked = (x[:1].detach().abs() > 1e3).any().to(x.dtype)
        return self.linear(x) * (1 + torch.sqrt(self.bend * (1 - marked)) * 0)


class Marked(Model):
    """Step 3 has a mark that makes the gradient of the last layer NaN, while the loss stays finite."""

    def microbatches(self, step: int, count: int) -> list[MicroBatch]:
        batches = super().microbatches(step, count)
        if step == 3:
            batches[0].inputs[0, 0] = 1e5
        return batches


def nan_in_last_stage() -> Marked:
    """Stage 1 alone has a NaN in step 3: stage 0's gradients are finite."""
    return Marked([nn.Identity(), PoisonedBackward()])


def trainable() -> Model:
    """Three small layers on eight rows."""
    return Model([nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)], rows=8)


def trainable_two() -> Model:
    """Two small layers on eight rows."""
    return Model([nn.Linear(6, 6), nn.Linear(6, 6)], rows=8)


class Normed(nn.Module):
    """A batch norm with running means, which a step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))


# Names a file that a stage which hangs makes when it does.
HANGING = "ZBSOLVE_TEST_HANGING"


class Trouble(nn.Module):
    """A linear layer that does something bad in its ``n``-th forward in training."""

    def __init__(self, what: str, at: int) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.what, self.at, self.calls = what, at, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.at and self.what == "raise":
            raise ArithmeticError("a layer gave up")
        if self.calls == self.at and self.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.calls == self.at and self.what == "hang":
            if HANGING in os.environ:
                Path(os.environ[HANGING]).touch()
            time.sleep(600)
        if self.calls == 1 and self.what == "slow":
            time.sleep(0.3)
        return self.linear(x)


# The first forward is the walk before step 1; micro-batches 0 and 1 of step 0 are calls 2 and 3.
def raises() -> Model:
    """Raises in F of stage 1, micro-batch 2, of the first step."""
    return Model([nn.Linear(6, 6), Trouble("raise", 4)], rows=12)


def killed() -> Model:
    """The process of stage 1 is killed in F of micro-batch 2 of the first step."""
    return Model([nn.Linear(6, 6), Trouble("kill", 4)], rows=12)


def hangs() -> Model:
    """Stage 1 never returns from F of micro-batch 2 of the first step."""
    return Model([nn.Linear(6, 6), Trouble("hang", 4)], rows=12)


def slow_first_call() -> Model:
    """Sleeps 300 ms in its first forward only."""
    return Model([Trouble("slow", 0), nn.Linear(6, 6)], rows=12)


def tied_across() -> Model:
    """The same Linear first and last."""
    shared = nn.Linear(6, 6)
    return Model([shared, nn.Tanh(), nn.Tanh(), shared])


class Two(nn.Module):
    """Two Linears, one after the other, on top of its input."""

    def __init__(self, first: nn.Linear, second: nn.Linear) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(x)))


def woven() -> Model:
    """Four layers, every two of which share a weight: a-b, c-a, b-d, d-c."""
    a, b, c, d = (nn.Linear(6, 6) for _ in range(4))
    return Model([Two(a, b), Two(c, a), Two(b, d), Two(d, c)], rows=8)


def shared_norm() -> Model:
    """One batch norm, with running means, in the first and the last layer."""
    norm = Normed()
    return Model([norm, nn.Tanh(), norm])


def same_memory() -> Model:
    """Two Linears whose weights share memory without being one parameter."""
    first, last = nn.Linear(6, 6), nn.Linear(6, 6)
    last.weight.data = first.weight.data
    return Model([first, nn.Tanh(), last])


def tied_training() -> Model:
    """The same Linear first and last, on eight rows."""
    shared = nn.Linear(6, 6)
    return Model([shared, nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), shared], rows=8)


class Saves(nn.Module):
    """Keeps its input for the backward, and hands a view of it on beside its result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDE, WIDE, bias=False)

    def forward(self, value: Any) -> Any:
        x = value if isinstance(value, torch.Tensor) else value[0] + value[1].t()
        return torch.tanh(self.linear(x)) * x, x.t()


class Joins(nn.Module):
    """Uses both."""

    def forward(self, value: Any) -> torch.Tensor:
        result: torch.Tensor = value[0] * value[1].t()
        return result


WIDE = 512


def wide() -> Model:
    """Messages of 1 MiB (512 x 512 floats) that stages save, view and pass on."""
    return Model([Saves(), Saves(), Saves(), Joins()], width=WIDE, rows=6 * WIDE)


class Gather(nn.Module):
    """Embeds the ids, shifts by a float of the batch, and passes the mask on."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)

    def forward(self, value: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.embedding(value["ids"]) + value["shift"][:, None, None], value["mask"]


class MaskedMean(nn.Module):
    """The mean over unmasked places."""

    def forward(self, value: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, mask = value
        weights = mask.to(x.dtype).unsqueeze(-1)
        return (x * weights).sum(1) / weights.sum(1)


class Keep(nn.Module):
    """A linear layer on the activation, the mask beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, value: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(self.linear(value[0])), value[1]


class ManyInputs(Model):
    """Micro-batches of a dict of inputs and a tuple of targets."""

    def __init__(self) -> None:
        super().__init__([Gather(), Keep(), MaskedMean()])

    def loss(self, output: torch.Tensor, targets: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        wanted, weights = targets
        return ((output - wanted).square() * weights.unsqueeze(-1)).mean()

    def microbatches(self, step: int, count: int) -> list[MicroBatch]:
        generator = torch.Generator().manual_seed(step)
        result = []
        for _ in range(count):
            ids = torch.randint(0, 7, (2, 5), generator=generator)
            mask = torch.arange(5) < torch.randint(1, 6, (2, 1), generator=generator)
            inputs = {"ids": ids, "mask": mask, "shift": torch.rand(2, generator=generator)}
            targets = torch.rand(2, 6, generator=generator), torch.rand(2, generator=generator)
            result.append(MicroBatch(inputs, targets, 1 / count))
        return result


def many_inputs() -> ManyInputs:
    """Three layers, several inputs a micro-batch."""
    return ManyInputs()


def eight_linear() -> Model:
    """Eight layers without randomness, rows that divide by four."""
    return Model([layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.Tanh())], rows=8)


# With embedding and head an odd number of layers, and at least two blocks on each of three devices.
BLOCKS = 7


def llama_of_transformers() -> Any:
    """transformers' own Llama of seven blocks, with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=BLOCKS,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def mixtral_of_transformers(**settings: Any) -> Any:
    """transformers' own Mixtral of seven blocks with four experts each, with random weights."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=BLOCKS,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        num_local_experts=4,
        tie_word_embeddings=False,
        **settings,
    )
    return MixtralForCausalLM(config)


def gpt2_of_transformers(tied: bool) -> Any:
    """transformers' own GPT-2 of seven blocks, with random weights, its head tied to the embedding or not."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=40,
        n_embd=16,
        n_layer=BLOCKS,
        n_head=2,
        n_positions=16,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=tied,
    )
    return GPT2LMHeadModel(config)


def tied_gpt2() -> Any:
    """That GPT-2 as a pipeline model, head and embedding one weight."""
    from zbsolve.runtime.models.adapters import causal_lm

    return causal_lm(gpt2_of_transformers(True), _rows_of_ids)


def _rows_of_ids(step: int) -> torch.Tensor:
    return torch.randint(0, 40, (6, 8), generator=torch.Generator().manual_seed(step))


def small_llama() -> Any:
    """That Llama as a pipeline model."""
    from zbsolve.runtime.models.adapters import causal_lm

    return causal_lm(llama_of_transformers(), _rows_of_ids)


def small_mixtral() -> Any:
    """That Mixtral as a pipeline model."""
    from zbsolve.runtime.models.adapters import causal_lm

    return causal_lm(mixtral_of_transformers(), _rows_of_ids)


def small_sequential() -> Any:
    """An nn.Sequential of nine layers as a pipeline model."""
    from zbsolve.runtime.models.adapters import sequential

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(step)
        return torch.randn(6, 4, generator=generator), torch.randn(6, 4, generator=generator)

    layers = [layer for _ in range(4) for layer in (nn.Linear(4, 4), nn.Tanh())]
    return sequential(nn.Sequential(*layers, nn.Linear(4, 4)), nn.functional.mse_loss, batch)


def padded_llama() -> Any:
    """That Llama on rows with up to 3 tokens of padding, on the right."""
    from zbsolve.runtime.models.adapters import causal_lm

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.randint(0, 40, (6, 8), generator=torch.Generator().manual_seed(step))
        lengths = 8 - torch.arange(6) % 4
        return ids, torch.arange(8) < lengths[:, None]

    return causal_lm(llama_of_transformers(), batch)
