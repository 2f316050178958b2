"""estimate_memory of layers that are split among processes, beside the bytes that real ones take."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

import lightning_tricks as lt
from lightning_tricks.advisor import Hardware, estimate_memory, suggest_strategy
from lightning_tricks.advisor.memory.activations import Regime, measure
from lightning_tricks.advisor.memory.parameters import parameters_of
from lightning_tricks.advisor.memory.parts import parts_of
from lightning_tricks.strategies.fsdp2.plan import planned_layers
from tests.nets import build, fit
from tests.ranks import run_ranks
from tests.strategies.sharded import local_bytes

TOKENS, SAMPLES = 32, 8
WIDTH = 96  # of no batch


class Llama(L.LightningModule):
    """Large enough for its activations to be seen beside what a Trainer allocates."""

    def __init__(self) -> None:
        import transformers

        super().__init__()
        config = transformers.LlamaConfig(
            vocab_size=512, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, max_position_embeddings=TOKENS,
        )  # fmt: skip
        self.model = transformers.LlamaForCausalLM(config)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch, labels=batch, use_cache=False).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class Meter(Callback):
    """Bytes of the second step: what lasts, and the peaks before and in the optimizer's step."""

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Tensor, number: int) -> None:
        states = [t for state in trainer.optimizers[0].state.values() for t in state.values() if t.ndim]
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        self.found = {
            "weights": local_bytes(module.parameters()),
            "gradients": local_bytes(gradients),
            "optimizer": local_bytes(states),
        }
        if number == 1:
            self.profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self.profiler.start()

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
        if trainer.global_step == 1:
            self.profiler.stop()
            recorded: Any = self.profiler.profiler
            events = [e for e in recorded.kineto_results.events() if e.name() == "[memory]"]
            now = peak = 0
            for event in sorted(events, key=lambda e: e.start_ns()):
                now += event.nbytes()
                peak = max(peak, now)
            self.peak = peak


def tokens(samples: int) -> Tensor:
    return torch.arange(samples * TOKENS).reshape(samples, TOKENS) % 512


def measured(preset: str) -> dict[str, int]:
    meter, devices = Meter(), int(os.environ["LOCAL_WORLD_SIZE"])
    fit(
        build(Llama),
        train=DataLoader([*tokens(2 * SAMPLES)], SAMPLES),
        callbacks=[meter],
        devices=devices,
        num_nodes=int(os.environ["WORLD_SIZE"]) // devices,
        max_epochs=1,
        limit_val_batches=0,
        use_distributed_sampler=False,
        **lt.preset(preset),
    )
    return {**meter.found, "total": meter.found["weights"] + meter.found["optimizer"] + meter.peak}


def all_measured() -> dict[str, dict[str, int]]:
    return {preset: measured(preset) for preset in ("fsdp2_bf16", "tp_bf16")}


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_process_takes_what_was_estimated(nodes: int) -> None:
    module = build(Llama)
    for rank in run_ranks(all_measured, nprocs=2 * nodes, nodes=nodes):
        for preset, found in rank.items():
            estimate = estimate_memory(
                module, strategy=preset, devices=2, nodes=nodes, batch=tokens(2), batch_size=SAMPLES, device="cpu"
            )
            steps = 4 * sum(1 for _ in module.parameters())
            assert (estimate.weights, estimate.gradients) == (found["weights"], found["gradients"])
            assert estimate.optimizer == pytest.approx(found["optimizer"], abs=steps)
            # Gathered weights, their copies and the gradients of a block are not at their peaks at one time.
            assert 0.98 * found["total"] <= estimate.total <= 1.2 * found["total"]


class Heavy(L.LightningModule):
    """Five blocks with many weights; counts the 16-bit copies of weights that autograd keeps for the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(5)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda kept: kept):
            loss = self.blocks(batch.requires_grad_()).float().square().mean()
        whole = [t for t in kept if t.dtype == torch.bfloat16 and t.numel() == WIDTH**2]
        self.copies = sum(t.untyped_storage().nbytes() for t in whole)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def kept_copies(recompute: bool) -> int:
    module = build(Heavy)
    strategy = lt.preset("fsdp2_bf16", activation_checkpointing=recompute)
    fit(module, train=DataLoader(torch.randn(4, WIDTH), 2), devices=2, max_steps=1, limit_val_batches=0, **strategy)
    return module.copies


def test_fsdp2_keeps_copies_of_all_weights_unless_blocks_are_recomputed() -> None:
    estimate = estimate_memory(build(Heavy), strategy="fsdp2_bf16", devices=2)
    assert estimate.casts == 5 * 2 * WIDTH**2
    assert run_ranks(kept_copies, False) == [estimate.casts] * 2
    assert run_ranks(kept_copies, True) == [0] * 2


@pytest.mark.slow
def test_layers_are_split_where_one_sample_is_too_long() -> None:
    module, batch = build(Llama), tokens(2)
    per_preset = {
        name: estimate_memory(module, strategy=name, devices=2, batch=batch).with_batch(1).total
        for name in ("fsdp2_bf16", "tp_bf16")
    }
    between = Hardware(sum(per_preset.values()) / 2 / 0.9, devices=2)
    suggestion = suggest_strategy(module, hardware=between, batch=batch, batch_size=6)
    assert suggestion.preset == "tp_bf16"
    assert (suggestion.micro_batch_size, suggestion.accumulate_grad_batches) == (1, 6)
    assert suggestion.effective_batch_size == 6, "both devices compute each sample"
    assert "fsdp2_bf16 needs" in str(suggestion)
    with pytest.raises(ValueError, match="Nothing fits"):
        suggest_strategy(module, hardware=Hardware(between.device_memory, devices=2, links="slow"), batch=batch)


def narrow(layer: nn.Module, change: Callable[[Tensor], Tensor]) -> nn.Module:
    """Changes what goes into a layer."""
    layer.register_forward_pre_hook(lambda _, x: change(x[0]))
    return layer


def twice(dim: int) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.cat([x, x], dim)


Layers = tuple[nn.Module, ...]
BY_HAND: dict[str, tuple[Layers, dict[str, str], Layers]] = {  # layers, a plan, and what a process has by it
    "mlp": (
        (nn.Linear(16, 128), nn.Sigmoid(), nn.Linear(128, 32)),
        {"0": "colwise", "2": "rowwise"},
        (nn.Linear(16, 64), nn.Sigmoid(), nn.Linear(64, 32)),
    ),
    "gathered": (
        (nn.Linear(16, 128), nn.Sigmoid()),
        {"0": "colwise_gather_output"},
        (nn.Linear(16, 64), narrow(nn.Sigmoid(), twice(-1))),
    ),
    "split": (
        (nn.Linear(16, 128),),
        {"0": "rowwise_split_input"},
        (narrow(nn.Linear(8, 128), lambda x: x[..., :8]),),
    ),
    "tokens": (
        (nn.LayerNorm(16), nn.Linear(16, 128), nn.Sigmoid(), nn.Linear(128, 16), nn.Sigmoid()),
        {"0": "sequence_parallel", "1": "sequence_colwise", "3": "rowwise_sequence"},
        (
            nn.LayerNorm(16),
            narrow(nn.Linear(16, 64), twice(1)),
            nn.Sigmoid(),
            nn.Linear(64, 16),
            narrow(nn.Sigmoid(), lambda x: x[:, : x.shape[1] // 2]),
        ),
    ),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_a_part_takes_what_layers_of_its_size_do(case: str) -> None:
    layers, plan, parts = BY_HAND[case]
    whole, by_hand = nn.Sequential(*layers), nn.Sequential(*parts)
    found = parts_of(planned_layers(whole, plan, 2), 2)
    assert parameters_of(whole, shapes=found.shapes) == parameters_of(by_hand)
    regime = partial(Regime, dtype=torch.bfloat16, autocast=torch.bfloat16, keeps_gradients=True, cuda=True)
    batch = torch.zeros(4, 6, 16)
    taken, expected = measure(whole, batch, 4, regime(parts=found)), measure(by_hand, batch, 4, regime())
    assert [taken.at(samples) for samples in (1, 4, 16)] == [expected.at(samples) for samples in (1, 4, 16)]


@pytest.mark.parametrize(
    ("model", "arguments", "error", "message"),
    [
        (nn.Linear(2, 2), {}, MisconfigurationException, "neither plan= nor a transformers model"),
        (10**6, {"lora": lt.LoRA(".")}, ValueError, "'tp_bf16' splits no layer with an adapter"),
    ],
)
def test_what_cannot_be_split_is_said(model: Any, arguments: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        estimate_memory(model, strategy="tp_bf16", devices=2, **arguments)
