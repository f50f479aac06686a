"""Planning arithmetic: from a transformer's shape and a device's figures to an instance, before anything
is measured.

Per layer and micro-batch, with s tokens a sequence, b sequences, hidden size h, a heads:

* FLOPs (2 per multiply-add): F ``s b h (24 h + 4 s)``, B ``s b h (24 h + 8 s)``, W ``24 s b h^2`` for a
dense layer
  with an MLP of 4 h; in general ``2 s b`` times the layer's matrix parameters for each pass, and attention's
  ``4 s^2 b h`` in F and twice that in B (arXiv 2104.04473, appendix; arXiv 2401.10241, table 2).
* Activations from F to B (M_B): ``s b (34 h + 5 a s)`` bytes in 16 bit, ``34 s b h`` with flash attention
(arXiv
  2205.05198, section 4), here taken apart so that grouped queries, gated MLPs and experts count.
* Activations from B to W (M_W): inputs and output gradients of the matrices, ``32 s b h`` (arXiv 2401.10241).
* States: 16 bytes a parameter for mixed-precision Adam: 2 weights, 2 gradients, 12 optimizer (arXiv
1910.02054). * A boundary sends ``2 s b h`` bytes forward and as much back.

:data:`LEFT_OUT` says what is not counted. A profile of the real model is better wherever there is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zbsolve.errors import InputError
from zbsolve.model.instance import Instance, Placement, make_instance, place

MIB = 2**20

LEFT_OUT = (
    "tensor-parallel, data-parallel and expert all-to-all communication; time of the optimizer step",
    "norms, biases, rotary embeddings and the router's FLOPs; causal attention counts as full attention",
    "one efficiency for every pass: small matrices and attention reach less of the peak than large ones",
    "memory of the framework, fragmentation, communication buffers; gradients are held in 16 bit",
)


@dataclass(frozen=True, slots=True)
class Shape:
    """A transformer's shape, and how a micro-batch runs through it.

    Attributes
    ----------
    layers, hidden, heads, vocabulary : int
        As in the model's configuration.
    sequence, microbatch : int
        Tokens a sequence (s) and sequences a micro-batch (b).
    kv_heads : int, optional
        Heads of keys and values (grouped queries); as many as ``heads`` if not given.
    ffn : int, optional
        Hidden size of the MLP, of each expert with ``experts``; 4 h if not given.
    gated : bool
        Gated MLP (SwiGLU): three matrices instead of two.
    experts, experts_per_token : int
        Mixture of experts; 1 and 1 is a dense MLP.
    tied : bool
        Embedding and head share their parameters (each end of the pipeline holds a copy).
    flash : bool
        Attention scores are recomputed, not kept.
    tensor_parallel : int
        Devices that share each matrix (t); ``sequence_parallel`` shares the rest as well.
    recompute : bool
        Every layer keeps only its input and runs F again before its backward.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    microbatch: int = 1
    kv_heads: int | None = None
    ffn: int | None = None
    gated: bool = False
    experts: int = 1
    experts_per_token: int = 1
    tied: bool = False
    flash: bool = True
    tensor_parallel: int = 1
    sequence_parallel: bool = True
    recompute: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "vocabulary", "sequence", "microbatch", "tensor_parallel"):
            if getattr(self, name) < 1:
                raise InputError(f"{name.replace('_', '-')} is {getattr(self, name)}: give at least 1")
        if self.hidden % self.heads:
            raise InputError(f"hidden is {self.hidden}: give a multiple of the {self.heads} heads")
        if self.heads % self.keys:
            raise InputError(f"kv-heads is {self.keys}: give a divisor of the {self.heads} heads")
        if not 1 <= self.experts_per_token <= self.experts:
            raise InputError(
                f"experts-per-token is {self.experts_per_token}: give 1 to the {self.experts} experts"
            )
        if self.heads % self.tensor_parallel:
            raise InputError(
                f"tensor-parallel is {self.tensor_parallel}: give a divisor of the {self.heads} heads"
            )

    @property
    def keys(self) -> int:
        """Heads of keys and values."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def mlp(self) -> int:
        """Hidden size of the MLP."""
        return 4 * self.hidden if self.ffn is None else self.ffn

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch, s b."""
        return self.sequence * self.microbatch

    # --- parameters ----------------------------------------------------------------------------

    @property
    def attention_parameters(self) -> int:
        """Matrices of one layer's attention: queries, output, keys and values."""
        return 2 * self.hidden**2 + 2 * self.hidden**2 * self.keys // self.heads

    @property
    def mlp_parameters(self) -> int:
        """Matrices of one MLP, or of one expert."""
        return (3 if self.gated else 2) * self.hidden * self.mlp

    @property
    def layer_parameters(self) -> int:
        """Matrices of one layer, all experts."""
        return self.attention_parameters + self.experts * self.mlp_parameters

    @property
    def active_parameters(self) -> int:
        """Matrices of one layer that a token passes through."""
        return self.attention_parameters + self.experts_per_token * self.mlp_parameters

    @property
    def embedding_parameters(self) -> int:
        """One table of the vocabulary."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """Of the whole model; a tied table counts once."""
        return self.layers * self.layer_parameters + (1 if self.tied else 2) * self.embedding_parameters

    # --- one layer, one micro-batch ------------------------------------------------------------

    @property
    def attention_flops(self) -> float:
        """Scores and their product with the values, forward."""
        return 4.0 * self.sequence * self.tokens * self.hidden

    @property
    def layer_flops(self) -> tuple[float, float, float]:
        """F, B, W of one layer."""
        matrices = 2.0 * self.tokens * self.active_parameters
        return matrices + self.attention_flops, matrices + 2 * self.attention_flops, matrices

    @property
    def head_flops(self) -> float:
        """Each of F, B and W of the LM head."""
        return 2.0 * self.tokens * self.embedding_parameters

    def _shared(self, split: float, whole: float) -> float:
        """Bytes per token on one of t devices: ``whole`` is shared with sequence parallel only."""
        t = self.tensor_parallel
        return split / t + (whole / t if self.sequence_parallel else whole)

    @property
    def layer_mem_b(self) -> float:
        """Bytes that one layer keeps of a micro-batch from F to B: ``s b (34 h + 5 a s)`` when dense."""
        h, grouped, k = self.hidden, self.keys / self.heads, self.experts_per_token
        # Queries 2 h, keys and values 2 h each, input of the output matrix 2 h; activations of the MLP.
        split = (2 + 4 * grouped + 2) * h + k * (6 if self.gated else 4) * self.mlp
        # Inputs of both norms 4 h, of the first matrices 2 h each, dropout masks h each.
        whole = 4 * h + 2 * h + 2 * k * h + 2 * h
        scores = 0 if self.flash else 5 * self.heads * self.sequence
        return self.tokens * self._shared(split + scores, whole)

    @property
    def layer_mem_w(self) -> float:
        """Bytes that one layer keeps from B to W: ``32 s b h`` when dense."""
        h, grouped, k = self.hidden, self.keys / self.heads, self.experts_per_token
        inputs_split, inputs_whole = 2 * h + 2 * k * self.mlp, 2 * h + 2 * k * h
        gradients_split = (2 + 4 * grouped) * h + k * (4 if self.gated else 2) * self.mlp
        return self.tokens * self._shared(inputs_split + gradients_split, inputs_whole + 2 * h + 2 * k * h)

    @property
    def head_mem(self) -> tuple[float, float]:
        """Bytes that the LM head keeps from F to B, and from B to W.

        Input of norm and head 4 h, logits in 32 bit; from B to W the head's input and its output gradient.
        """
        kept, pending = 4 * self.hidden + 4 * self.vocabulary, 2 * self.hidden + 2 * self.vocabulary
        return self.tokens * kept / self.tensor_parallel, self.tokens * pending / self.tensor_parallel

    @property
    def boundary_bytes(self) -> float:
        """What one hop sends, one way: ``2 s b h`` (and as much back: 4 s b h a boundary and micro-batch)."""
        return self.tokens * self._shared(0, 2 * self.hidden)


@dataclass(frozen=True, slots=True)
class Machine:
    """Figures of one device and of the links between devices.

    Attributes
    ----------
    peak : float
        FLOP per second of the data sheet; ``efficiency`` is the share of it that passes reach.
    memory : float
        Bytes.
    bandwidth, latency : float
        Bytes per second and seconds of one hop.
    """

    peak: float
    memory: float
    bandwidth: float
    efficiency: float = 0.5
    latency: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("peak", "memory", "bandwidth"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} is {getattr(self, name):g}: give a positive number")
        if not 0 < self.efficiency <= 1:
            raise InputError(f"efficiency is {self.efficiency:g}: give a share of the peak, above 0 to 1")


# Data-sheet figures: dense bf16 FLOP/s and memory; bandwidth is that of one network port of 400 Gbit/s.
MACHINES = {
    "a100-80g": Machine(312e12, 80e9, 50e9),
    "h100-80g": Machine(989e12, 80e9, 50e9),
    "h200-141g": Machine(989e12, 141e9, 50e9),
}


def state_bytes(parameters: float, zero: int = 0, data_parallel: int = 1) -> float:
    """Weights, gradients and optimizer states of mixed-precision Adam on one of d devices, in bytes.

    16 bytes a parameter; ZeRO 1 shares the 12 of the optimizer, 2 also the 2 of the gradients, 3 also the
    2 of the weights (arXiv 1910.02054).
    """
    if zero not in (0, 1, 2, 3):
        raise InputError(f"zero is {zero}: give stage 0, 1, 2 or 3")
    if data_parallel < 1:
        raise InputError(f"data-parallel is {data_parallel}: give at least 1")
    shared = (0, 12, 14, 16)[zero]
    return parameters * (16 - shared + shared / data_parallel)


def communication_share(shape: Shape, machine: Machine, layers: float) -> float:
    """t_comm / t_comp of a stage at the data-sheet peak, about F / (12 h l BW) (l layers, F FLOP/s)."""
    forward = layers * shape.layer_flops[0] / shape.tensor_parallel / machine.peak
    return shape.boundary_bytes / machine.bandwidth / forward


@dataclass(frozen=True, slots=True)
class Estimate:
    """An instance (times in ms, memory in MiB), and the layers of each of its stages."""

    instance: Instance
    layers: tuple[int, ...]
    parameters: int
    communication_share: float


def estimate(
    shape: Shape,
    machine: Machine,
    *,
    devices: int,
    microbatches: int,
    placement: Placement = "linear",
    chunks: int | None = None,
    zero: int = 0,
    data_parallel: int = 1,
    contended: bool = False,
    name: str = "estimate",
) -> Estimate:
    """Stages of as equal numbers of layers as possible, embedding on the first, LM head on the last.

    Surplus layers go to the stages after the first (the ends often have enough to do). ``contended``
    gives the bandwidth's share of a hop as ``t_transfer``, so that transfers occupy their link.
    """
    homes = place(devices, placement, chunks)
    count = len(homes)
    base, rest = divmod(shape.layers, count)
    if base == 0:
        raise InputError(f"{shape.layers} layers for {count} stages: give at least one a stage")
    numbers = [base + (1 <= s <= rest) for s in range(count)]
    rate = machine.peak * machine.efficiency * shape.tensor_parallel
    stages = [
        _stage(shape, rate, numbers[s], homes[s], first=s == 0, last=s == count - 1) for s in range(count)
    ]
    static = [0.0] * devices
    for s, home in enumerate(homes):
        parameters = numbers[s] * shape.layer_parameters
        parameters += ((s == 0) + (s == count - 1)) * shape.embedding_parameters
        if count == 1 and shape.tied:
            parameters -= shape.embedding_parameters
        static[home] += state_bytes(parameters / shape.tensor_parallel, zero, data_parallel) / MIB
    latency, transfer = machine.latency * 1e3, shape.boundary_bytes / machine.bandwidth * 1e3
    instance = make_instance(
        name=name,
        num_devices=devices,
        num_microbatches=microbatches,
        stages=stages,
        t_comm=latency if contended else latency + transfer,
        t_transfer=transfer if contended else None,
        static_mem=static,
        memory_cap=machine.memory / MIB,
    )
    share = communication_share(shape, machine, shape.layers / count)
    return Estimate(instance, tuple(numbers), shape.parameters, share)


def _stage(shape: Shape, rate: float, layers: int, device: int, *, first: bool, last: bool) -> dict[str, Any]:
    """One stage's times in ms and memory in MiB per micro-batch."""
    flops = [layers * each + (shape.head_flops if last else 0.0) for each in shape.layer_flops]
    t_f, t_b, t_w = (each / rate * 1e3 for each in flops)
    mem_b, mem_w = layers * shape.layer_mem_b, layers * shape.layer_mem_w
    if first:
        mem_b += shape.tokens * shape.hidden / shape.tensor_parallel  # the embedding's dropout mask
    logits = mem_logits = 0.0
    if last:
        logits, mem_logits = shape.head_mem
    stage: dict[str, Any] = {
        "device": device,
        "name": f"{layers} layers" + (", embedding" if first else "") + (", head" if last else ""),
        "t_f": t_f,
        "t_b": t_b,
        "t_w": t_w,
        "t_bw": t_b + t_w,
        "mem_b": (mem_b + logits) / MIB,
        "mem_w": (mem_w + mem_logits) / MIB,
    }
    if shape.recompute:
        # Each layer's input stays; the backward recomputes layer by layer, one layer's activations at a time.
        kept = layers * shape.boundary_bytes
        stage |= {
            "t_r": layers * shape.layer_flops[0] / rate * 1e3,
            "mem_r": kept / MIB,
            "mem_b": (kept + shape.layer_mem_b + logits) / MIB,
        }
    return stage
