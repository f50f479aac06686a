"""B and W apart give autograd's gradients, through both mechanisms, on every known trap."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from runtime_cases import First, Masked, Residual, TiedHead
from torch import nn
from torch.utils.checkpoint import checkpoint

from zbsolve.errors import InputError
from zbsolve.runtime.backward.refusals import refuse_graph, refuse_unsupported
from zbsolve.runtime.backward.split import Mechanism, SplitStage
from zbsolve.runtime.execute.transients import LiveTensors
from zbsolve.runtime.models.gpt import GPT
from zbsolve.runtime.models.pipeline_model import StageLayers
from zbsolve.runtime.values import TENSOR, flatten, unflatten

MECHANISMS: tuple[Mechanism, ...] = ("deferred", "generic")
both = pytest.mark.parametrize("mechanism", MECHANISMS)
fuse_or_split = pytest.mark.parametrize("fused", [False, True], ids=["B+W", "BW"])


def pipeline(
    stages: Sequence[nn.Module],
    batches: Sequence[Any],
    loss: Callable[[Any], torch.Tensor],
    mechanism: Mechanism,
    fused: bool = False,
) -> None:
    """All F's, all B's, then all W's, through all stages in one process."""
    split = [SplitStage(stage, s, mechanism) for s, stage in enumerate(stages)]
    last = len(split) - 1
    back: list[list[torch.Tensor | None]] = []
    for j, batch in enumerate(batches):
        tensors, spec = flatten(batch, "input")
        needs = [False] * len(tensors)
        for s, stage in enumerate(split):
            finish = loss if s == last else None
            tensors, spec = stage.forward(j, 1000 * s + j, tensors, needs, spec, finish, fused=fused)
            # Only edges know what needs a gradient; a later stage learns it the same way in a real run.
            needs = [edge is not None for edge in stage._passes[j].edges]
        back.append([torch.ones_like(tensors[0])])
    for s in range(last, -1, -1):
        for j in range(len(batches)):
            edges = split[s]._passes[j].edges
            grads = [g if e is not None else None for g, e in zip(back[j], edges, strict=True)]
            back[j] = (split[s].backward_fused if fused else split[s].backward_input)(j, grads)
    if not fused:
        for stage in split:
            for j in range(len(batches)):
                stage.backward_weight(j)


def reference(
    stages: Sequence[nn.Module], batches: Sequence[Any], loss: Callable[[Any], torch.Tensor]
) -> None:
    """Autograd's own gradients of the unpipelined model, same random states."""
    for j, batch in enumerate(batches):
        value = batch
        for s, stage in enumerate(stages):
            torch.manual_seed(1000 * s + j)
            value = stage(value)
        result = loss(value)
        if result.requires_grad:
            result.backward()


def assert_equal_gradients(
    build: Callable[[], list[nn.Module]],
    batches: Sequence[Any],
    loss: Callable[[Any], torch.Tensor],
    mechanism: Mechanism,
    fused: bool = False,
    exact: bool = True,
) -> None:
    """Run both from the same seed and compare every gradient, None included."""
    torch.manual_seed(0)
    stages = build()
    torch.manual_seed(0)
    expected = build()
    pipeline(stages, batches, loss, mechanism, fused)
    reference(expected, batches, loss)
    names = [f"{s}.{n}" for s, stage in enumerate(stages) for n, _ in stage.named_parameters()]
    ours = [p.grad for stage in stages for p in stage.parameters()]
    theirs = [p.grad for stage in expected for p in stage.parameters()]
    assert any(g is not None for g in theirs) or not any(
        p.requires_grad for stage in expected for p in stage.parameters()
    )
    for name, got, wanted in zip(names, ours, theirs, strict=True):
        if wanted is None or got is None:
            assert wanted is None, f"{name}: no gradient"
            assert got is None, f"{name}: a gradient where the reference has none"
        elif exact:
            assert torch.equal(got, wanted), name
        else:
            torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-7)


def rows(count: int = 3, *shape: int) -> list[torch.Tensor]:
    """Random micro-batches."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(*(shape or (4, 6)), generator=generator) for _ in range(count)]


def square(value: torch.Tensor) -> torch.Tensor:
    """A loss."""
    return value.square().mean()


FROZEN = {"first": (0,), "last": (2,), "middle": (1,), "prefix": (0, 1), "all": (0, 1, 2), "none": ()}


@both
@fuse_or_split
@pytest.mark.parametrize("frozen", FROZEN.values(), ids=FROZEN.keys())
def test_frozen_stages(mechanism: Mechanism, fused: bool, frozen: tuple[int, ...]) -> None:
    """Every trainable gradient equals the reference whichever stages are frozen."""

    def build() -> list[nn.Module]:
        stages: list[nn.Module] = [nn.Sequential(Residual(), Residual()) for _ in range(3)]
        for s in frozen:
            stages[s].requires_grad_(False)
        return stages

    assert_equal_gradients(build, rows(), square, mechanism, fused)


class Lora(nn.Module):
    """A frozen Linear with a trainable low-rank branch."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


@both
@fuse_or_split
def test_lora(mechanism: Mechanism, fused: bool) -> None:
    """Adapters beside frozen weights get their gradients, also behind a frozen first stage."""
    assert_equal_gradients(
        lambda: [nn.Linear(6, 6).requires_grad_(False), Lora(), nn.Sequential(Lora(), Lora())],
        rows(),
        square,
        mechanism,
        fused,
    )


class Twice(nn.Module):
    """(x @ w) @ w."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([[0.4, -0.2], [0.7, 0.3]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w @ self.w


@both
@fuse_or_split
def test_weight_used_twice(mechanism: Mechanism, fused: bool) -> None:
    """(x@w@w).sum(): dW = [[0.17, 1.05], [-0.57, -1.13]], dX = [-0.12, 0.44]."""
    # y = x w = [-0.05, -0.43]; w 1 = [0.2, 1.0]; dW = x^T (w 1)^T + y^T 1^T
    #   = [[.22, 1.1], [-.14, -.7]] + [[-.05, -.05], [-.43, -.43]] = [[.17, 1.05], [-.57, -1.13]].
    # dX = (w w 1)^T = w [0.2, 1.0] = [.08 - .2, .14 + .3] = [-.12, .44].
    stage = SplitStage(Twice(), 0, mechanism)
    (out,), _ = stage.forward(
        0, 0, [torch.tensor([[1.1, -0.7]])], [True], TENSOR, lambda value: value.sum(), fused=fused
    )
    dx = (stage.backward_fused if fused else stage.backward_input)(0, [torch.ones_like(out)])
    if not fused:
        stage.backward_weight(0)
    weight = stage.parameters[0]
    assert weight.grad is not None
    assert dx[0] is not None
    torch.testing.assert_close(weight.grad, torch.tensor([[0.17, 1.05], [-0.57, -1.13]]))
    torch.testing.assert_close(dx[0], torch.tensor([[-0.12, 0.44]]))


class _TwoOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
        ctx.save_for_backward(x, a, b)
        return x * a, x * b

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, a, b = ctx.saved_tensors
        return grads[0] * a + grads[1] * b, grads[0] * x, grads[1] * x


class TwoOutputs(nn.Module):
    """(x w1, x w2) from one custom function, elementwise."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.tensor([3.0, 4.0])), nn.Parameter(torch.tensor([5.0, 6.0]))

    def forward(self, x: torch.Tensor) -> Any:
        return _TwoOutputs.apply(x, self.w1, self.w2)


@both
@fuse_or_split
def test_custom_function_with_two_outputs(mechanism: Mechanism, fused: bool) -> None:
    """Outputs (x w1, x w2), loss (a + 10 b).sum(), x = [1, 2]: dw1 = [1, 2], dw2 = [10, 20]."""
    stage = SplitStage(TwoOutputs(), 0, mechanism)
    (out,), _ = stage.forward(
        0, 0, [torch.tensor([1.0, 2.0])], [True], TENSOR, lambda v: (v[0] + 10 * v[1]).sum(), fused=fused
    )
    dx = (stage.backward_fused if fused else stage.backward_input)(0, [torch.ones_like(out)])
    if not fused:
        stage.backward_weight(0)
    w1, w2 = stage.parameters
    assert w1.grad is not None
    assert w2.grad is not None
    assert w1.grad.tolist() == [1.0, 2.0]
    assert w2.grad.tolist() == [10.0, 20.0]
    assert dx[0] is not None
    assert dx[0].tolist() == [3.0 + 50.0, 4.0 + 60.0]


class Only(nn.Module):
    """Uses one of two custom outputs, so the other's gradient never arrives."""

    def __init__(self) -> None:
        super().__init__()
        self.two = TwoOutputs()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(x)[1]


@both
def test_custom_output_without_gradient(mechanism: Mechanism) -> None:
    """An output that nobody uses gives its weight a zero gradient, as autograd does."""
    assert_equal_gradients(lambda: [nn.Linear(6, 2), Only()], rows(), square, mechanism)


class View(nn.Module):
    """A Linear on [B, S, D] whose output is handed on as a view."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(6, 6), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self.how == "transposed":
            return y.transpose(0, 1)
        return y[:, 1:] if self.how == "sliced" else y


@both
@fuse_or_split
@pytest.mark.parametrize("how", ["linear", "transposed", "sliced"])
def test_stage_ends_in_a_view(mechanism: Mechanism, fused: bool, how: str) -> None:
    """A stage whose output is a view of a Linear's result has the reference's gradients."""
    assert_equal_gradients(
        lambda: [View(how), nn.Sequential(nn.Tanh(), nn.Linear(6, 6))],
        rows(3, 4, 5, 6),
        square,
        mechanism,
        fused,
    )


@both
@fuse_or_split
def test_structured_values_and_tied_weight(mechanism: Mechanism, fused: bool) -> None:
    """Dicts with int masks, bools and floats without gradient pass; a tied weight is summed once a use."""

    def build() -> list[nn.Module]:
        embedding = nn.Embedding(7, 6)
        return [StageLayers([First(embedding), Masked(6), TiedHead(embedding)])]

    ids = [torch.tensor([[0, 1, 2], [3, 4, 6]]), torch.tensor([[5, 5, 1]])]
    assert_equal_gradients(build, ids, square, mechanism, fused, exact=False)

    def two_stages() -> list[nn.Module]:
        return [First(nn.Embedding(7, 6)), StageLayers([Masked(6), TiedHead(nn.Embedding(7, 6))])]

    assert_equal_gradients(two_stages, ids, square, mechanism, fused)


@both
def test_two_accumulated_steps(mechanism: Mechanism) -> None:
    """Two steps without clearing give 1.0, then 2.0."""
    layer = nn.Linear(1, 1, bias=False)
    # loss of each of two micro-batches: mean(w x) / 2 with x = 1, so dw = 1/2 + 1/2 = 1 a step.
    for expected in (1.0, 2.0):
        pipeline([layer], [torch.ones(3, 1)] * 2, lambda v: v.mean() / 2, mechanism)
        assert layer.weight.grad is not None
        assert layer.weight.grad.item() == expected


@both
def test_dropout_follows_its_seed(mechanism: Mechanism) -> None:
    """The mask depends on the seed alone: F in another order draws the same numbers."""
    stage = SplitStage(nn.Dropout(0.5), 0, mechanism)
    x = torch.ones(100)
    drawn = [stage.forward(j, seed, [x], [False], TENSOR)[0][0] for j, seed in enumerate((3, 4, 3))]
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])


class Checkpointed(nn.Module):
    """Recomputes a block with dropout in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Residual()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = checkpoint(self.block, x, use_reentrant=False)
        assert isinstance(result, torch.Tensor)
        return result


@both
@fuse_or_split
def test_checkpointing(mechanism: Mechanism, fused: bool) -> None:
    """Non-reentrant checkpointing with dropout recomputes the same numbers and loses no gradient."""
    assert_equal_gradients(
        lambda: [
            nn.Sequential(nn.Linear(6, 6), Checkpointed()),
            nn.Sequential(Checkpointed(), Checkpointed()),
        ],
        rows(),
        square,
        mechanism,
        fused,
    )


@both
def test_autocast(mechanism: Mechanism) -> None:
    """Under bfloat16 autocast the split gives the same bits as autograd."""

    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.inner(x)

    assert_equal_gradients(lambda: [Cast(), Cast()], rows(), lambda v: v.float().square().mean(), mechanism)


@both
def test_shared_module_on_one_device(mechanism: Mechanism) -> None:
    """Two stages that hold the same Linear sum its gradients."""

    def build() -> list[nn.Module]:
        shared = nn.Linear(6, 6)
        return [nn.Sequential(shared, nn.Tanh()), nn.Sequential(nn.Linear(6, 6), shared)]

    assert_equal_gradients(build, rows(), square, mechanism, exact=False)


@both
def test_normalised_weight_and_attention(mechanism: Mechanism) -> None:
    """Computed weights (weight norm) and multi-head attention's packed projections are right."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
            self.norm = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x + self.attention(x, x, x, need_weights=False)[0])

    assert_equal_gradients(
        lambda: [Attention(), Attention()], rows(3, 2, 4, 6), square, mechanism, exact=False
    )


@both
def test_gpt_blocks_are_bit_equal(mechanism: Mechanism) -> None:
    """The built-in GPT in two stages gives autograd's gradients to the last bit."""

    def build() -> list[nn.Module]:
        layers = GPT(width=32, blocks=2, heads=2, context=16).layers
        return [StageLayers(layers[:2]), StageLayers(layers[2:])]

    model = GPT(width=32, blocks=2, heads=2, context=16)
    batches = [batch.inputs for batch in model.microbatches(0, 3)]
    assert_equal_gradients(build, batches, square, mechanism)


def test_auto_looks_where_the_parameters_are() -> None:
    """Linear and convolution stages defer, others split generically; a frozen one has nothing to choose."""
    assert SplitStage(nn.Linear(4, 4), 0).mechanism == "deferred"
    assert SplitStage(nn.Conv1d(4, 4, 3), 0).mechanism == "deferred"
    assert SplitStage(nn.GRU(4, 4), 0).mechanism == "generic"
    assert SplitStage(nn.GRU(4, 4).requires_grad_(False), 0).mechanism == "deferred"


class Convolutions(nn.Module):
    """Three convolutions that can defer (strided, grouped, dilated) and one that cannot (padding by name)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.second = nn.Conv2d(4, 4, 3, groups=2, dilation=2, padding=2, bias=False)
        self.third = nn.Conv2d(4, 4, 1, padding_mode="reflect")
        self.fourth = nn.Conv2d(4, 3, 3, padding="same")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.fourth(self.third(torch.relu(self.second(self.first(x))))))


@both
@fuse_or_split
def test_convolutions(mechanism: Mechanism, fused: bool) -> None:
    """Strided, grouped, dilated and oddly padded convolutions have autograd's gradients to the last bit."""
    assert_equal_gradients(
        lambda: [Convolutions(), Convolutions()], rows(2, 2, 3, 12, 12), square, mechanism, fused
    )


@both
def test_first_stage_splits_its_backward(mechanism: Mechanism) -> None:
    """Without an input that needs a gradient B still walks the stage, and W has weights left to do."""
    # All of Linear, tanh, Linear is in W under the deferred split; the generic one gives B the deepest
    # parameter (the first weight) to differentiate to, and W the other three.
    stage = SplitStage(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), 0, mechanism)
    (out,), _ = stage.forward(0, 0, [torch.randn(4, 6)], [False], TENSOR)
    stage.backward_input(0, [torch.ones_like(out)])
    record = stage._passes[0]
    assert all(p.grad is None for p in stage.parameters)
    assert not record.again
    left = [i for start, _ in record.recorded for i in start.parameters]
    put_aside = [p for call in record.store.calls for p in call.parameters]
    assert len(left) + len(put_aside) + len(record.held) == 4
    assert len(record.held) == (0 if mechanism == "deferred" else 1)
    stage.backward_weight(0)
    assert all(p.grad is not None for p in stage.parameters)


@both
def test_memory_is_counted_and_freed(mechanism: Mechanism) -> None:
    """Linear(100, 50) on 10 rows holds x after F, x and dy after B, and nothing after W."""
    # float32: x 10 * 100 * 4 = 4000 bytes, dy 10 * 50 * 4 = 2000 bytes.
    stage = SplitStage(nn.Linear(100, 50), 0, mechanism)
    stage.accounting = True
    x = torch.randn(10, 100)
    gone = weakref.ref(x)
    stage.forward(0, 0, [x], [True], TENSOR)
    assert stage.held_bytes(0) == 4000
    dy = torch.randn(10, 50)
    stage.backward_input(0, [dy])
    assert stage.held_bytes(0) == 6000
    del x, dy
    stage.backward_weight(0)
    assert stage.held_bytes(0) == 0
    gc.collect()
    assert gone() is None


PASSING: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "GPT block": (lambda: GPT(width=32, blocks=2, heads=2, context=16).layers[1], (2, 16, 32)),
    "checkpoint": (lambda: nn.Sequential(nn.Linear(6, 6), Checkpointed()), (4, 6)),
    "convolutions": (lambda: Convolutions(), (2, 3, 12, 12)),
    "w twice": (lambda: Twice(), (1, 2)),
    "view": (lambda: View("transposed"), (4, 5, 6)),
}


@both
@fuse_or_split
@pytest.mark.parametrize("accounting", [False, True])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("kind", PASSING)
def test_nothing_is_left_of_a_microbatch(
    mechanism: Mechanism, fused: bool, accounting: bool, first: bool, kind: str
) -> None:
    """Once a micro-batch is through a stage, no tensor of it is alive, without a garbage collection."""
    build, shape = PASSING[kind]
    stage = SplitStage(build(), 0, mechanism)
    stage.accounting = accounting
    watch = LiveTensors()
    x = torch.randn(*shape)
    alive = []
    gc.disable()
    try:
        for _ in range(3):
            with watch.op([]):
                (out,), _ = stage.forward(0, 0, [x], [not first], TENSOR, fused=fused)
                (stage.backward_fused if fused else stage.backward_input)(0, [torch.ones_like(out)])
                if not fused:
                    stage.backward_weight(0)
            del out
            alive.append(watch.alive)
    finally:
        gc.enable()
    # The gradients of the parameters stay, from the first micro-batch on, and what torch keeps for itself.
    assert alive[2] == alive[1] == alive[0]


def test_generic_split_of_a_transformer_block_grows_in_b() -> None:
    """The generic split holds more after B than after F, the deferred one does not grow nearly as much."""
    held = {}
    for mechanism in MECHANISMS:
        model = GPT(width=64, blocks=1, heads=2, context=32)
        stage = SplitStage(model.layers[1], 0, mechanism)
        stage.accounting = True
        (out,), _ = stage.forward(0, 0, [torch.randn(2, 32, 64)], [True], TENSOR)
        after_f = stage.held_bytes(0)
        stage.backward_input(0, [torch.randn_like(out)])
        held[mechanism] = stage.held_bytes(0) / after_f
    assert held["generic"] > 1.3
    assert held["deferred"] < 1.1


def test_refusals_name_the_place() -> None:
    """Hooks, compiled modules and reentrant checkpointing are refused by name before step 1."""
    hooked = nn.Sequential(nn.Linear(2, 2))
    hooked[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(InputError, match=r"layer 3\.0\.weight has a gradient hook"):
        refuse_unsupported(hooked, "layer 3")
    with pytest.raises(InputError, match="layer 0 is compiled"):
        refuse_unsupported(torch.compile(nn.Linear(2, 2)), "layer 0")  # type: ignore[arg-type]
    x = torch.ones(2, requires_grad=True)
    out = checkpoint(torch.tanh, x, use_reentrant=True)
    with pytest.raises(InputError, match="stage 1 uses reentrant checkpointing"):
        refuse_graph([out], "stage 1")  # type: ignore[list-item]


def test_value_of_another_kind_is_refused() -> None:
    """An object of an unknown kind between layers is refused with its place, numbers and words pass."""
    with pytest.raises(InputError, match=r"output\[1\]\['a'\] is a object"):
        flatten((torch.ones(1), {"a": object()}), "output")
    value = (torch.ones(1), True, 0.5, "word", None)
    assert unflatten(*flatten(value, "output")) == value
