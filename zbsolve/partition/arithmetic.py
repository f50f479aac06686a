"""A layer profile by planning arithmetic (:mod:`zbsolve.partition.estimate`), where nothing can be measured
yet.

The embedding reads and writes one row a token, at ``LOOKUP`` bytes a second; its W adds as much. A profile
(``zbsolve profile MODEL --layers``) replaces the estimate as soon as there is a device.
"""

from __future__ import annotations

from zbsolve.partition.estimate import MIB, Shape, state_bytes
from zbsolve.partition.layers import Layer, LayerProfile

# Half of the data-sheet peak of the device that the shipped estimates are for, and its memory's bandwidth.
RATE = 156e12
LOOKUP = 1.5e12


def estimate_layers(shape: Shape, name: str, rate: float = RATE) -> LayerProfile:
    """Layer profile in ms and MiB: embedding, layers, and the head with its loss.

    Parameters
    ----------
    rate : float
        FLOP per second that every pass reaches, all tensor-parallel devices together.
    """

    def ms(flops: float) -> float:
        return round(flops / rate * 1e3, 4)

    def mib(size: float) -> float:
        return round(size / MIB, 3)

    share = shape.tensor_parallel
    boundary = mib(shape.boundary_bytes)
    t_f, t_b, t_w = (ms(flops) for flops in shape.layer_flops)
    layer = Layer(
        name="layer",
        t_f=t_f,
        t_b=t_b,
        t_w=t_w,
        t_bw=round(t_b + t_w, 4),
        mem_b=mib(shape.layer_mem_b),
        mem_w=mib(shape.layer_mem_w),
        static_mem=mib(state_bytes(shape.layer_parameters / share)),
        mem_out=boundary,
    )
    table = mib(state_bytes(shape.embedding_parameters / share))
    lookup = round(4.0 * shape.hidden * shape.tokens / LOOKUP * 1e3, 4)
    embedding = Layer(
        name="embedding",
        t_f=lookup,
        t_b=0.0,
        t_w=lookup,
        t_bw=lookup,
        mem_b=mib(8.0 * shape.tokens),  # the token ids
        mem_w=mib(8.0 * shape.tokens) + boundary,
        static_mem=table,
        mem_out=boundary,
    )
    kept, pending = shape.head_mem
    t_head = ms(shape.head_flops)
    head = Layer(
        name="head",
        t_f=t_head,
        t_b=t_head,
        t_w=t_head,
        t_bw=2 * t_head,
        mem_b=mib(kept),
        mem_w=mib(pending),
        static_mem=table,
    )
    size = shape.microbatch
    return LayerProfile(name=name, microbatch_size=size, layers=(embedding, *(layer,) * shape.layers, head))


def _decoder(
    hidden: int, ffn: int, heads: int, kv_heads: int, layers: int, vocabulary: int, sequence: int
) -> Shape:
    return Shape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        gated=True,
        vocabulary=vocabulary,
        sequence=sequence,
    )


# The models whose estimates ship with the package as instances/model-….json.
SHIPPED: dict[str, Shape] = {
    "llama-7b": _decoder(4096, 11008, 32, 32, 32, 32_000, 4096),
    "llama-8b-128k": _decoder(4096, 14336, 32, 8, 32, 128_256, 4096),
    "gemma-2b": _decoder(2048, 16384, 8, 1, 18, 256_000, 4096),
    "qwen-14b": _decoder(5120, 13824, 40, 8, 48, 152_064, 4096),
    "small-1b": _decoder(2048, 5632, 32, 4, 22, 32_000, 2048),
}
