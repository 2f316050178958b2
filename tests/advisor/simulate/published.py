"""Published throughput of training on 8 to 6,144 devices, each with its source.

Facts of a source that it does not state are assumed alike in all of its rows, and named at its rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lightning_tricks.advisor.simulate.devices import DEVICES, links_of
from lightning_tricks.advisor.simulate.step import Spread, simulate_step
from lightning_tricks.advisor.simulate.transformer import TransformerShape


@dataclass(frozen=True)
class Published:
    """A row of a table: tokens a second of a device, or 10^12 operations a second of it.

    Args:
        source: The key of ``SOURCES``.
        what: The row's name.
        kind: The kind of device.
        model: The shape of the model.
        spread: How it was spread.
        value: The published figure.
        unit: "tokens", "model" (operations without those that are repeated) or "all" (with those of layers).
    """

    source: str
    what: str
    kind: str
    model: TransformerShape
    spread: Spread
    value: float
    unit: str = "tokens"

    def simulated(self) -> float:
        """The same figure by the simulator."""
        device = DEVICES[self.kind]
        step = simulate_step(self.model, self.spread, device, links_of(device))
        if self.unit == "tokens":
            return step.tokens_per_second
        again = 2 * self.model.layers * (self.model.layer_weights + 2 * self.model.width * self.model.sequence)
        return step.tokens_per_second * (self.model.flops + (again if self.unit == "all" else 0)) / 1e12

    def error(self) -> float:
        """How much more the simulator says, as a share."""
        return self.simulated() / self.value - 1


TITAN = "https://github.com/pytorch/torchtitan/blob/"
SOURCES = {
    "torchtitan, H100": f"{TITAN}main/benchmarks/llama3_h100_202412_torchtitan.md",
    "torchtitan, async TP": f"{TITAN}main/benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md",
    "torchtitan, H200": f"{TITAN}main/benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md",
    "torchtitan, 405B and A100": f"{TITAN}9515a140b/docs/performance.md",
    "llm-foundry": "https://github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md",
    "Megatron-LM, A100": "https://arxiv.org/abs/2104.04473",
    "Megatron-LM, H100": "https://github.com/NVIDIA/Megatron-LM#performance-benchmarking",
    "ZeRO-3 of 2021": "https://arxiv.org/abs/2104.04473",
}


def llama(layers: int, width: int, hidden: int, *, keys: int = 8, words: int = 128256, length: int = 8192) -> Any:
    return TransformerShape(layers, width, width // 128, words, length, key_heads=keys, hidden=hidden, gated=True)


L8, L70, L405 = llama(32, 4096, 14336), llama(80, 8192, 28672), llama(126, 16384, 53248)
L13 = llama(40, 5120, 13824, keys=40, words=32000, length=4096)
L70_2 = llama(80, 8192, 28672, words=32000, length=4096)


def torchtitan() -> Iterator[Published]:
    """Weights are gathered in 2 bytes and gradients summed in 4; a pipeline has as many micro-batches as stages."""
    half: Any = {"micro_batch": 2, "recompute": "selective"}
    for devices, *values in [(8, 5762, 6667, 8532), (128, 5605, 6514, 8380)]:
        for value, added in zip(values, [{}, {"compiled": True}, {"compiled": True, "float8": True}], strict=True):
            what = f"Llama 3.1 8B, {devices} devices, FSDP, {', '.join(added) or 'eager'}"
            yield Published(
                "torchtitan, H100", what, "h100-500w", L8, Spread(devices, shards=devices, **half, **added), value
            )
    for devices, value in [(32, 10938), (64, 10753)]:
        spread = Spread(devices, shards=devices, compiled=True, float8=True, **half)
        yield Published("torchtitan, H200", f"Llama 3.1 8B, {devices} devices, FSDP, float8", "h200", L8, spread, value)
    eight: Any = {"tensor": 8, "recompute": "full", "compiled": True}
    for source, model, devices, settings, values in [
        ("async TP", "70B", 256, {**eight, "shards": 32, "micro_batch": 16}, (597.3, 652.4, 809.8, 942.4)),
        ("async TP", "8B", 64, {**eight, **half, "shards": 8, "micro_batch": 12}, (4378, 4809.4, 5078.1, 5570.1)),
        ("H100", "70B", 256, {**eight, "shards": 32, "micro_batch": 16}, (None, None, 829, 876)),
    ]:
        for number, value in enumerate(values):
            if value is not None:
                spread = Spread(devices, float8=number > 1, async_tensor=number % 2 == 1, **settings)
                names = "float8, " * (number > 1) + ("async TP" if number % 2 else "TP")
                what = f"Llama 3.1 {model}, {devices} devices, FSDP, {names}"
                shape = L8 if model == "8B" else L70
                yield Published(f"torchtitan, {source}", what, "h100-500w", shape, spread, value)
    stages: Any = {**eight, "shards": 8, "pipeline": 8, "micro_batch": 4, "accumulate": 8}
    for name, chunks, value in [("1F1B", 1, 100), ("interleaved 1F1B", 2, 128)]:
        spread = Spread(512, chunks=chunks, float8=True, async_tensor=True, **stages)
        what = f"Llama 3.1 405B, 512 devices, FSDP, float8, async TP, {name}"
        yield Published("torchtitan, H100", what, "h100-500w", L405, spread, value)
    older = "torchtitan, 405B and A100"
    for name, value, added in [
        ("TP", 118, {"compiled": False}),
        ("float8, TP", 177, {"float8": True}),
        ("float8, async TP", 185, {"float8": True, "async_tensor": True}),
    ]:
        spread = Spread(128, **{**eight, "shards": 16, "micro_batch": 2, **added})
        yield Published(older, f"Llama 3.1 405B, 128 devices, FSDP, {name}", "h100-500w", L405, spread, value)
    for name, model, samples, recompute, value in [
        ("Llama 3 8B", L8, 1, "selective", 2973),
        ("Llama 3 70B", L70, 1, "full", 331),
        ("Llama 2 13B", L13, 2, "none", 2162),
        ("Llama 2 13B", L13, 2, "selective", 1904),
        ("Llama 2 70B", L70_2, 2, "full", 353),
    ]:
        spread = Spread(64, shards=64, micro_batch=samples, recompute=recompute)
        what = f"{name}, 64 devices, FSDP, {recompute} checkpointing"
        yield Published(older, what, "a100", model, spread, value)


MPT = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
# Model, tokens of a sample, devices, samples at a time, accumulation, checkpointing, tokens a second of a device.
MPT_ROWS = {
    "h100": [
        *[
            ("70b", 2048, 64, 8, 4, True, 1039),
            ("70b", 2048, 32, 2, 16, True, 882),
            ("30b", 2048, 32, 14, 3, True, 2308),
        ],
        *[
            ("30b", 2048, 8, 3, 21, True, 2002),
            ("30b", 8192, 8, 1, 21, True, 1384),
            ("13b", 2048, 64, 2, 1, False, 4800),
        ],
        *[
            ("13b", 2048, 8, 2, 1, False, 4792),
            ("13b", 4096, 8, 10, 3, True, 4717),
            ("7b", 2048, 8, 6, 1, False, 10643),
        ],
        *[
            ("7b", 8192, 8, 8, 2, True, 6935),
            ("3b", 2048, 64, 6, 3, False, 22525),
            ("3b", 2048, 16, 10, 3, False, 24142),
        ],
        *[
            ("3b", 8192, 8, 3, 6, False, 16578),
            ("1b", 2048, 64, 20, 1, False, 44402),
            ("1b", 2048, 8, 14, 1, False, 45455),
        ],
        ("760m", 2048, 32, 24, 1, False, 67971),
    ],
    "a100": [
        *[("70b", 2048, 64, 8, 4, True, 410), ("70b", 2048, 32, 2, 16, True, 373), ("30b", 2048, 8, 3, 21, True, 916)],
        *[("13b", 2048, 8, 2, 3, False, 2262), ("13b", 4096, 8, 10, 3, True, 2060), ("7b", 2048, 8, 6, 2, False, 4641)],
        *[
            ("7b", 8192, 8, 8, 2, True, 3206),
            ("3b", 2048, 8, 10, 2, False, 10811),
            ("1b", 2048, 8, 14, 4, False, 20513),
        ],
        *[("760m", 2048, 8, 24, 2, False, 32434), ("350m", 2048, 8, 32, 2, False, 58782)],
        ("125m", 2048, 8, 32, 2, False, 141737),
    ],
    "a100-40gb": [
        *[("70b", 2048, 128, 4, 1, True, 376), ("70b", 2048, 64, 2, 1, True, 276), ("30b", 2048, 128, 6, 1, True, 865)],
        *[
            ("30b", 2048, 32, 4, 1, True, 857),
            ("13b", 2048, 128, 16, 1, True, 1972),
            ("13b", 2048, 16, 10, 1, True, 1993),
        ],
        *[
            ("13b", 2048, 8, 4, 16, True, 1668),
            ("7b", 2048, 128, 18, 1, True, 3623),
            ("7b", 2048, 8, 12, 4, True, 3679),
        ],
        *[("3b", 2048, 128, 6, 1, False, 9538), ("3b", 2048, 16, 5, 1, False, 9750)],
        *[("1b", 2048, 128, 10, 1, False, 18647), ("760m", 2048, 128, 12, 1, False, 28940)],
        *[("350m", 2048, 128, 18, 1, False, 51934), ("125m", 2048, 128, 26, 1, False, 123936)],
    ],
}


def llm_foundry() -> Iterator[Published]:
    """Of the rows of one machine and few tokens, a selection over sizes, lengths and devices.

    Gradients are summed in 4 bytes, but in 2 where the mode is PURE: with 40 GB, and 70b.
    """
    for kind, rows in MPT_ROWS.items():
        for name, length, devices, samples, accumulate, checkpointing, value in rows:
            layers, width, heads = MPT[name]
            pure = kind == "a100-40gb" or (kind == "a100" and name == "70b")
            spread = Spread(
                devices,
                shards=devices,
                micro_batch=samples,
                accumulate=accumulate,
                recompute="full" if checkpointing else "none",
                reduce_bytes=2 if pure else 4,
            )
            model = TransformerShape(layers, width, heads, 50368, length, tied=True)
            what = f"MPT {name}, {devices} {kind}, {length} tokens, {samples} samples at a time"
            yield Published("llm-foundry", what, kind, model, spread, value)


def chunks_of(layers: int) -> int:
    """The fewest chunks that a stage's layers can be cut into."""
    return next((chunks for chunks in range(2, layers + 1) if layers % chunks == 0), 1)


# Layers, width, heads, tensor, pipeline, devices, samples of a step, operations; samples at a time, chunks of a stage.
A100 = {
    "1.7B": (24, 2304, 24, 1, 1, 32, 512, 137, 16, 1),
    "3.6B": (30, 3072, 32, 2, 1, 64, 512, 138, 16, 1),
    "7.5B": (36, 4096, 32, 4, 1, 128, 512, 142, 16, 1),
    "18.4B": (40, 6144, 48, 8, 1, 256, 1024, 135, 8, 1),
    "39.1B": (48, 8192, 64, 8, 2, 512, 1536, 138, 4, 1),
    "76.1B": (60, 10240, 80, 8, 4, 1024, 1792, 140, 2, 3),
    "145.6B": (80, 12288, 96, 8, 8, 1536, 2304, 148, 2, 2),
    "310.1B": (96, 16384, 128, 8, 16, 1920, 2160, 155, 1, 2),
    "529.6B": (105, 20480, 128, 8, 35, 2520, 2520, 163, 1, 3),
    "1008B": (128, 25600, 160, 8, 64, 3072, 3072, 163, 1, 1),
}
H100 = {
    "1.7B": (24, 2048, 16, 1, 1, 48, 192, 408.8),
    "7.1B": (30, 4096, 32, 2, 1, 96, 192, 465.9),
    "16B": (32, 6144, 48, 4, 1, 192, 192, 489.1),
    "32B": (48, 7168, 56, 8, 1, 384, 192, 459.6),
    "70B": (84, 8192, 64, 8, 2, 768, 384, 419.7),
    "119B": (92, 10240, 80, 8, 4, 1536, 768, 420.5),
    "177B": (96, 12288, 96, 8, 6, 2304, 1152, 432.8),
    "314B": (96, 16384, 128, 8, 8, 3072, 1536, 474.4),
    "462B": (112, 18432, 144, 8, 16, 6144, 3072, 459.9),
}


def megatron() -> Iterator[Published]:
    """Its own operations count what is computed again on A100, and do not on H100.

    On A100 all is as in Megatron-LM's scripts of the table, ``examples/academic_paper_scripts/sc21/run_table_1.sh``:
    layers are computed again, and gradients, of 2 bytes, are summed after the backward pass; no kernel of attention was
    fused then. On H100 traffic runs beside products, 4 bytes of a gradient to the shard of the optimizer and 2 of a
    weight back. Not stated there: one sample at a time in a pipeline, which is interleaved with the fewest chunks,
    otherwise all.
    """
    old: Any = {"recompute": "full", "fused_attention": False, "overlap": False, "compiled": True, "reduce_bytes": 2}
    new: Any = {"async_tensor": True, "compiled": True, "reduce_bytes": 3}
    for kind, rows, words, length, settings, unit in [
        ("a100", A100, 51200, 2048, old, "all"),
        ("h100", H100, 131072, 4096, new, "model"),
    ]:
        for name, (layers, width, heads, tensor, pipeline, devices, samples, value, *stated) in rows.items():
            share = samples * tensor * pipeline // devices
            assumed = (1, chunks_of(layers // pipeline)) if pipeline > 1 else (share, 1)
            micro_batch, chunks = stated or assumed
            parts = {"micro_batch": micro_batch, "accumulate": share // micro_batch, "chunks": chunks}
            spread = Spread(devices, tensor=tensor, pipeline=pipeline, **parts, **settings)
            model = TransformerShape(layers, width, heads, words, length, tied=True)
            source = f"Megatron-LM, {kind.upper()}"
            yield Published(source, f"GPT {name}, {devices} devices", kind, model, spread, value, unit)
    gpt3 = TransformerShape(96, 12288, 96, 51200, 2048, tied=True)
    for devices, value in [(384, 144), (1536, 44)]:  # of a step of 1,536 samples
        spread = Spread(
            devices,
            shards=devices,
            micro_batch=1536 // devices,
            recompute="full",
            fused_attention=False,
            reduce_bytes=2,
        )
        yield Published("ZeRO-3 of 2021", f"GPT-3 175B, {devices} devices", "a100", gpt3, spread, value, "all")


ROWS = [*torchtitan(), *llm_foundry(), *megatron()]
