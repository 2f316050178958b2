"""The seconds of a training step on many devices, by part; apart from the plan, which has presets and their memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_tricks.advisor.simulate.devices import Device
from lightning_tricks.advisor.simulate.traffic import Links, all_reduce, gather, pipeline_bubble
from lightning_tricks.advisor.simulate.transformer import TransformerShape
from lightning_tricks.core.checks import check_choice, check_count

# Fitted on every second published figure, and checked on the others (docs/scaling.md).
FLOAT8 = 0.5  # the share of the peak in float8 that products reach, conversions included
EAGER, COMPILED = 125.0, 90.0  # bytes that norms, activations and residuals move for a number of the residual stream
SCORES = 13.0  # bytes that attention without a fused kernel moves for each of its scores
LOGITS = 50.0  # bytes that the loss moves for each logit, in the forward and backward pass
OPTIMIZER = 28.0  # bytes that AdamW moves for a weight: four tensors in fp32 are read, three written
UNHIDDEN = 0.1  # the share of overlapped traffic that takes time nevertheless
ASYNC = 0.5  # the share of tensor parallel traffic that is left if products run beside it

RECOMPUTES = {"none": 0.0, "selective": 0.5, "full": 1.0}  # the share of the products that is computed again


@dataclass(frozen=True)
class Spread:
    """How a training is spread over devices: ``devices = data * tensor * pipeline``.

    Args:
        devices: The number of all devices.
        per_node: The devices of a node.
        shards: The parts of weights, gradients and optimizer states: 1 (DDP), as many as there are batches at a time
            (FSDP, ZeRO-3), or between (HSDP).
        tensor: The devices that share each layer, within a node.
        pipeline: The stages of a pipeline.
        chunks: The chunks of layers of a stage (interleaved 1F1B).
        micro_batch: The samples that are computed at a time, of a device or of those that share layers.
        accumulate: The micro-batches of an optimizer step.
        recompute: What is computed again in the backward pass: nothing, every second product, or layers as a whole.
        gather_bytes: Bytes of a weight that is gathered.
        reduce_bytes: Bytes of a gradient that is summed.
        float8: Whether the products of layers are in float8.
        compiled: Whether layers are compiled.
        fused_attention: Whether attention is a fused kernel, whose scores stay on the chip.
        async_tensor: Whether tensor parallel traffic runs beside products.
        overlap: Whether the traffic of weights and gradients runs beside products.

    Raises:
        TypeError: If a number is no integer.
        ValueError: If a value is out of range, or one does not divide the other.
    """

    devices: int
    per_node: int = 8
    shards: int = 1
    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1
    micro_batch: int = 1
    accumulate: int = 1
    recompute: Literal["none", "selective", "full"] = "none"
    gather_bytes: int = 2
    reduce_bytes: int = 4
    float8: bool = False
    compiled: bool = False
    fused_attention: bool = True
    async_tensor: bool = False
    overlap: bool = True

    def __post_init__(self) -> None:
        names = ("devices", "per_node", "shards", "tensor", "pipeline", "chunks", "micro_batch", "accumulate")
        for name in (*names, "gather_bytes", "reduce_bytes"):
            check_count(name, getattr(self, name))
        check_choice("recompute", self.recompute, RECOMPUTES)
        if self.devices % (self.tensor * self.pipeline) or self.data % self.shards:
            raise ValueError(
                f"devices must be a multiple of tensor * pipeline * shards, got devices={self.devices},"
                f" tensor={self.tensor}, pipeline={self.pipeline} and shards={self.shards}."
            )
        if self.per_node % self.tensor:
            raise ValueError(
                f"tensor must divide per_node, got tensor={self.tensor} and per_node={self.per_node}: layers are shared"
                " within a node."
            )

    @property
    def data(self) -> int:
        """The micro-batches that are computed at a time."""
        return self.devices // (self.tensor * self.pipeline)


@dataclass(frozen=True)
class Step:
    """The seconds of an optimizer step, which do not overlap.

    Args:
        compute: Seconds of the layers and the head.
        tensor: Seconds in which devices that share layers wait for sums of activations.
        data: Seconds of the traffic of weights and gradients that no product hides.
        bubble: Seconds in which a stage of a pipeline is idle.
        optimizer: Seconds of the optimizer.
        tokens: The tokens of the step for each of all devices.
        model_flops: The operations of a token, without those that are repeated.
    """

    compute: float
    tensor: float
    data: float
    bubble: float
    optimizer: float
    tokens: float
    model_flops: float

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return self.compute + self.tensor + self.data + self.bubble + self.optimizer

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second of one device."""
        return self.tokens / self.seconds

    def share_of_peak(self, device: Device) -> float:
        """The share of the peak in bf16 that the model's operations are (MFU)."""
        return self.model_flops * self.tokens_per_second / device.peak


def simulate_step(model: TransformerShape, spread: Spread, device: Device, links: Links) -> Step:
    """Simulate an optimizer step.

    A layer takes the sum of its products at the share of the peak that they reach, and of the bytes that everything
    else moves through memory; then come the sums of tensor parallelism, what is left of the traffic of weights and
    gradients, ``max(UNHIDDEN * traffic, traffic - beside)``, the bubble and the optimizer. Sharded weights are sent
    beside all products, gradients of whole copies beside the last backward pass.

    Args:
        model: The transformer.
        spread: How it is spread over devices.
        device: The kind of device.
        links: The links between devices, with what is reached of them.

    Example:
        >>> from lightning_tricks.advisor.simulate.devices import DEVICES, links_of
        >>> llama = TransformerShape(32, 4096, 32, 128256, 8192, key_heads=8, hidden=14336, gated=True)
        >>> h100 = DEVICES["h100-500w"]
        >>> spread = Spread(8, shards=8, micro_batch=2, recompute="selective", compiled=True)
        >>> step = simulate_step(llama, spread, h100, links_of(h100))  # torchtitan: 6,667 tokens a second
        >>> f"{step.tokens_per_second:,.0f} tokens/s, {step.share_of_peak(h100):.0%} of the peak"
        '6,307 tokens/s, 37% of the peak'
    """
    layers = model.layers / spread.pipeline
    passes = spread.accumulate * spread.micro_batch * model.sequence / spread.tensor
    compute = passes * (layers * _layer(model, spread, device) + _head(model, device) / spread.pipeline)
    tensor = layers * spread.accumulate * _sums(model, spread, links)
    traffic = _traffic(model, spread, links)
    beside = compute if spread.shards > 1 else compute * 2 / 3 / spread.accumulate
    return Step(
        compute=compute,
        tensor=tensor,
        data=max(UNHIDDEN * traffic, traffic - beside) if spread.overlap else traffic,
        bubble=pipeline_bubble(spread.pipeline, spread.accumulate, spread.chunks) * (compute + tensor),
        optimizer=OPTIMIZER * _weights(model, spread) / spread.shards / device.bandwidth,
        tokens=passes / spread.pipeline,
        model_flops=model.flops,
    )


def _weights(model: TransformerShape, spread: Spread) -> float:
    """The weights of a device, before they are sharded."""
    return model.parameters / (spread.tensor * spread.pipeline)


def _layer(model: TransformerShape, spread: Spread, device: Device) -> float:
    """Seconds of a token in a layer, forward and backward."""
    again = RECOMPUTES[spread.recompute]
    speed = device.peak_float8 * FLOAT8 if spread.float8 else device.peak * device.products
    products = 2 * model.layer_weights / speed
    # A fused causal kernel leaves out half of the products, and repeats a part of them in the backward pass.
    fused = spread.fused_attention
    attention = (2 if fused else 4) * model.width * model.sequence / (device.peak * device.attention)
    moved = (COMPILED if spread.compiled else EAGER) * model.width
    moved += 0 if fused else SCORES * model.heads * model.sequence
    return (
        (3 + again) * products
        + ((3.5 if fused else 3) + (again == 1)) * attention
        + (3 + (again > 0)) * moved / device.bandwidth
    )


def _head(model: TransformerShape, device: Device) -> float:
    """Seconds of a token in the head and the loss, forward and backward; the stages of a pipeline are even."""
    return 6 * model.head_weights / (device.peak * device.products) + LOGITS * model.vocabulary / device.bandwidth


def _sums(model: TransformerShape, spread: Spread, links: Links) -> float:
    """Seconds of the sums of activations of a layer and a micro-batch: two in each pass, again where it is repeated."""
    size = 2 * spread.micro_batch * model.sequence * model.width
    sums = (6 if spread.recompute == "full" else 4) * all_reduce(size, spread.tensor, 1, links)
    return ASYNC * sums if spread.async_tensor else sums


def _traffic(model: TransformerShape, spread: Spread, links: Links) -> float:
    """Seconds of the traffic of weights and gradients."""
    weights = _weights(model, spread)
    per_node = min(spread.data, spread.per_node // spread.tensor)  # devices of a node that hold the same layers
    if spread.shards == 1:
        return all_reduce(weights * spread.reduce_bytes, per_node, spread.data // per_node, links)
    inside = min(per_node, spread.shards)
    parts = model.layers / spread.pipeline + 1  # each layer by itself, and the embedding with the head
    weight, gradient = (
        parts * gather(size * weights / parts, inside, spread.shards // inside, links)
        for size in (spread.gather_bytes, spread.reduce_bytes)
    )
    passes = spread.accumulate if spread.pipeline == 1 else 1  # a pipeline keeps what it has gathered
    replicas = spread.data // spread.shards
    between = all_reduce(weights / spread.shards * spread.reduce_bytes, 1, replicas, links)
    within = 2 * weight + gradient
    apart = spread.shards <= per_node  # links of a node and network cards then work at once
    return passes * (max(within, between) if apart else within + between)
