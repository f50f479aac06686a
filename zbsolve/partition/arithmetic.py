"""A decoder's layer profile by arithmetic, where nothing can be measured yet.

Counts the multiplications of the matrix products and of attention, and the tensors that a mixed-precision
training step keeps with a fused attention kernel. Norms, rotary embeddings and launch times are left out,
and every product runs at one rate: an estimate to plan with, to be replaced by a profile
(``zbsolve profile MODEL --layers``) as soon as there is a device.

Per layer and token, with hidden size h, key and value width k, and feed-forward width f (three matrices):
parameters P = h (h + 2 k) + h h + 3 h f; F 2 P + 4 s h operations for sequences of s tokens, B 2 P + 8 s h,
W 2 P. Parameters, gradients and Adam's states in mixed precision take 16 bytes a parameter.
"""

from __future__ import annotations

from dataclasses import dataclass

from zbsolve.partition.layers import Layer, LayerProfile

MIB = 2.0**20
STATIC_BYTES = 16.0


@dataclass(frozen=True, slots=True)
class Decoder:
    """Sizes of a decoder-only transformer with gated feed-forward layers."""

    name: str
    hidden: int
    feed_forward: int
    key_value: int
    blocks: int
    vocabulary: int


@dataclass(frozen=True, slots=True)
class Machine:
    """The device that the estimate is for: operations a second that products reach, bytes a second."""

    operations: float = 156e12
    bandwidth: float = 1.5e12


def estimate_layers(
    model: Decoder, sequence: int, microbatch_size: int = 1, machine: Machine | None = None
) -> LayerProfile:
    """Layer profile in ms and MiB: embedding, blocks, and the head with its loss."""
    machine = machine or Machine()
    tokens = float(sequence * microbatch_size)
    h, f, k, v = model.hidden, model.feed_forward, model.key_value, model.vocabulary

    def ms(operations: float) -> float:
        return round(operations * tokens / machine.operations * 1e3, 4)

    def mib(bytes_per_token: float) -> float:
        return round(bytes_per_token * tokens / MIB, 3)

    def static(parameters: float) -> float:
        return round(parameters * STATIC_BYTES / MIB, 3)

    parameters = h * (h + 2 * k) + h * h + 3 * h * f
    attention = 4.0 * sequence * h
    lookup = round(4.0 * h * tokens / machine.bandwidth * 1e3, 4)  # read and write h numbers of 2 bytes
    block = Layer(
        name="block",
        t_f=ms(2 * parameters + attention),
        t_b=ms(2 * parameters + 2 * attention),
        t_w=ms(2 * parameters),
        t_bw=ms(4 * parameters + 2 * attention),
        # Inputs of both norms, normed twice, q k v, attention's output; gate, up and their product.
        mem_b=mib(2 * (6 * h + 2 * k) + 6 * f),
        # For W: inputs and output gradients of the seven products.
        mem_w=mib(2 * (6 * h + 2 * k + 3 * f)),
        static_mem=static(parameters),
        mem_out=mib(2 * h),
    )
    embedding = Layer(
        name="embedding",
        t_f=lookup,
        t_b=0.0,
        t_w=lookup,
        t_bw=lookup,
        mem_b=mib(8),
        mem_w=mib(8 + 2 * h),
        static_mem=static(v * h),
        mem_out=mib(2 * h),
    )
    head = Layer(
        name="head",
        t_f=ms(2 * h * v),
        t_b=ms(2 * h * v),
        t_w=ms(2 * h * v),
        t_bw=ms(4 * h * v),
        # Normed input, logits in 2 bytes and their log-softmax in 4.
        mem_b=mib(4 * h + 6 * v),
        mem_w=mib(2 * h + 2 * v),
        static_mem=static(v * h),
    )
    return LayerProfile(
        name=model.name,
        microbatch_size=microbatch_size,
        layers=(embedding, *(block,) * model.blocks, head),
    )


# The models whose estimates ship with the package (instances/model-….json), with their sequence lengths.
SHIPPED: dict[str, tuple[Decoder, int]] = {
    "model-llama-7b": (Decoder("llama-7b", 4096, 11008, 4096, 32, 32_000), 4096),
    "model-llama-8b-128k": (Decoder("llama-8b-128k", 4096, 14336, 1024, 32, 128_256), 4096),
    "model-gemma-2b": (Decoder("gemma-2b", 2048, 16384, 256, 18, 256_000), 4096),
    "model-qwen-14b": (Decoder("qwen-14b", 5120, 13824, 1024, 48, 152_064), 4096),
    "model-small-1b": (Decoder("small-1b", 2048, 5632, 256, 22, 32_000), 2048),
}
