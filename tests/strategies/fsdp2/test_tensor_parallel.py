"""Layers that are split among processes, and sharded among the others, against one process on all of their batches."""

from __future__ import annotations

import os
import random
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lightning_tricks as lt
from lightning_tricks.checkpoints.consolidate import consolidate
from tests.few import few
from tests.nets import PlainNet, SaveAt, assert_close, assert_equal, build, data, loader, trainer, weights
from tests.ranks import Cases, run_cases, run_ranks
from tests.strategies.fsdp2.split_nets import (
    ATTENTION,
    HAND,
    OWN,
    OWN_SEQUENCE,
    SEQUENCE,
    Attention,
    Gemma,
    Own,
    OwnCounted,
    OwnPositions,
    Pretrained,
    Qwen,
    Tied,
    Words,
    alone,
    batches,
    together,
)
from tests.strategies.sharded import local_bytes, whole

CLIPPED: dict[str, Any] = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 3}
PLANNED = {"plan": HAND}


class SAMWords(lt.SAMMixin, Words):
    sam = lt.SAM(0.05)


class SAMOwn(lt.SAMMixin, Own):
    sam = lt.SAM(0.05)


class ManualWords(Words):
    """Clips by hand between two steps."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        optimizer = self.optimizers()
        for sign in (1, -1):
            self.manual_backward(F.cross_entropy(self(sign * x), y))
            if batch_idx % 2:
                self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
                optimizer.step()
                optimizer.zero_grad()


class Pairs(Words):
    """Compares the samples of all processes."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        z = self(batch[0])
        return lt.functional.info_nce(z, z.roll(1, 1) + batch[1][:, None])


class Experts(Words):
    """Counts how often a router chooses each of three experts."""

    def __init__(self, lr: float = 0.01) -> None:
        super().__init__(lr)
        self.register_buffer("expert_bias", torch.zeros(3))
        self.register_buffer("tokens_per_expert", torch.zeros(3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.tokens_per_expert += (3 * batch[0].sigmoid()).long().clamp(max=2).flatten().bincount(minlength=3)
        return super().training_step(batch, batch_idx)


def tricks(*make: Callable[[], Callback]) -> Callable[[], dict[str, Any]]:
    return lambda: {"callbacks": [one() for one in make]}


Case = tuple[type[PlainNet], dict[str, Any], Callable[[], dict[str, Any]]]
CASES: dict[str, Case] = {  # module, of the preset, of the Trainer
    "clipped": (Words, PLANNED, lambda: CLIPPED),
    "sequence": (Words, {"plan": SEQUENCE}, dict),
    "tied": (Tied, PLANNED, lambda: CLIPPED),
    "llama": (Pretrained, {}, dict),
    "qwen": (Qwen, {}, dict),
    "gemma": (Gemma, {}, dict),
    "bf16": (Words, {**PLANNED, "precision": "bf16-mixed"}, lambda: CLIPPED),
    "bf16 sequence": (Words, {"plan": SEQUENCE, "precision": "bf16-mixed"}, dict),
    "attention alone": (Words, {"plan": ATTENTION}, lambda: CLIPPED),
    "offload": (Words, {**PLANNED, "offload": True}, lambda: CLIPPED),
    "other groups": (Words, {**PLANNED, "modules": ["Attention", "^head"]}, dict),
    "recomputed": (Words, {**PLANNED, "activation_checkpointing": True}, dict),
    "recomputed sequence": (Words, {"plan": SEQUENCE, "activation_checkpointing": True}, dict),
    "manual": (ManualWords, PLANNED, dict),
    "sam": (SAMWords, PLANNED, lambda: CLIPPED),
    "SAMCallback": (Words, PLANNED, tricks(lambda: lt.SAMCallback(0.05))),
    "ActivationCheckpointing": (Words, PLANNED, tricks(lt.ActivationCheckpointing)),
    "AutoClip": (Words, PLANNED, tricks(lambda: lt.AutoClip(10))),
    "Compile": (Words, PLANNED, tricks(lambda: lt.Compile("Block", backend="aot_eager"))),
    "EMA": (Words, PLANNED, tricks(lambda: lt.EMA(0.9))),
    "Float8": (Words, PLANNED, tricks(lambda: lt.Float8(emulate=True))),
    "sequence, clipped": (Words, {"plan": SEQUENCE}, lambda: {**CLIPPED, "accumulate_grad_batches": 2}),
    "HardExampleFilter": (Words, PLANNED, tricks(lambda: lt.HardExampleFilter(mode="loss", across_ranks=True))),
    "MoEBalance": (Experts, PLANNED, tricks(lambda: lt.MoEBalance(0.1))),
    "RewindOnSpike": (Words, PLANNED, tricks(lt.RewindOnSpike)),
    "SWA": (Words, PLANNED, tricks(lambda: lt.SWA(0.5))),
    "SkipNonFinite": (Words, PLANNED, tricks(lt.SkipNonFinite)),
    "info_nce": (Pairs, PLANNED, dict),
    "own layers": (Own, {"plan": OWN}, lambda: CLIPPED),
    "own layers, sequence": (Own, {"plan": OWN_SEQUENCE}, lambda: CLIPPED),
    "own layers, sam": (SAMOwn, {"plan": OWN}, tricks(lambda: lt.EMA(0.9))),
    "own layers, AutoClip": (Own, {"plan": OWN}, tricks(lambda: lt.AutoClip(10), lambda: lt.EMA(0.9))),
    "own layers, bf16": (Own, {"plan": OWN, "precision": "bf16-mixed"}, lambda: CLIPPED),
}
QUICK = ("clipped", "sequence", "own layers", "own layers, sequence")


def ended(case: str) -> dict[str, Any]:
    kind, arguments, settings = CASES[case]
    module, run = together(kind, arguments, **settings())
    states = [t for state in run.optimizers[0].state.values() for t in state.values() if t.ndim]
    return {"weights": whole(module), "bytes": [local_bytes(tensors) for tensors in (module.parameters(), states)]}


# -- what is refused ---------------------------------------------------------------------------------------------------


class Seven(Words):
    """Has seven tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, :7])


class Odd(Words):
    """Has a layer of three outputs."""

    def __init__(self, lr: float = 0.01) -> None:
        super().__init__(lr)
        self.odd = nn.Linear(8, 3)


class Counted(Attention):
    """Knows how many heads there are, and makes as many of what a process has."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (4, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Packed(Attention):
    """Computes queries, keys and values by one layer."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.q = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        parts = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in self.q(x).chunk(3, -1))
        return self.o(F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))


class CountedWords(Words):
    attention: type[Attention] = Counted

    def __init__(self, lr: float = 0.01) -> None:
        super().__init__(lr)
        for block in self.blocks:
            block.attention = self.attention(16)


class PackedWords(CountedWords):
    attention = Packed


class Around(nn.Module):
    """Calls the layers of a module, and not the module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return type(self.inner).forward(self.inner, x)


class AroundWords(Words):
    def __init__(self, lr: float = 0.01) -> None:
        super().__init__(lr)
        for block in self.blocks:
            block.attention = Around(block.attention)


class Lamb(Words):
    def configure_optimizers(self) -> Any:
        return lt.optimizer("lamb", self, lr=0.01)


def without(name: str, plan: dict[str, str] = HAND) -> dict[str, Any]:
    return {"plan": {pattern: style for pattern, style in plan.items() if not pattern.startswith(name)}}


def every_rank() -> Any:
    return {"train": batches(1)}


REFUSED: dict[str, tuple[type[PlainNet], dict[str, Any], Callable[[], dict[str, Any]], str]] = {  # and the message
    "no gather": (Words, {"plan": {**HAND, "head": "colwise"}}, dict, "plan leaves the loss different"),
    "norm of heads": (Words, without("q_norm"), dict, "blocks.0.attention.q_norm.weight, blocks.0.attention.q_norm"),
    "norm of tokens": (Words, without("^norm", SEQUENCE), dict, "plan leaves .*blocks.0.norm.weight"),
    "size": (Odd, {"plan": {**HAND, "odd": "colwise"}}, dict, "'odd', which has 3 outputs, which 2 does not"),
    "nothing": (Words, {"plan": {"nowhere": "colwise"}}, dict, "'nowhere' is neither"),
    "counted heads": (CountedWords, PLANNED, dict, "layers of 'blocks.0.attention' .Counted., .* it counts heads"),
    "packed heads": (
        PackedWords,
        PLANNED,
        dict,
        "layers of 'blocks.0.attention' .Packed., .* cuts one layer's outputs",
    ),
    "own heads": (
        OwnCounted,
        {"plan": {pattern: style for pattern, style in OWN.items() if pattern != "q_norm"}},
        dict,
        "layers of OwnCounted, whose training step computes something else with parts of them .first seen in 'o'",
    ),
    "own positions": (
        OwnPositions,
        {"plan": OWN_SEQUENCE},
        dict,
        "layers of OwnPositions, whose training step computes something else .* in 'head'.*: it counts",
    ),
    "batches": (Words, PLANNED, every_rank, "computes one batch on several processes, got different ones"),
    "tokens": (Seven, {"plan": SEQUENCE}, dict, "got 7 tokens in dimension 1 of the output of Embedding"),
    "three": (Words, {**PLANNED, "tensor_parallel": 3}, dict, "tensor_parallel=3 for 2 processes"),
    "lamb": (Lamb, PLANNED, dict, "'lamb'.* does not train right on .* tensor parallelism"),
    "QAT": (
        Words,
        PLANNED,
        tricks(lt.QAT),
        "QAT.* and FSDP2Preset.tensor_parallel=2.*: weights and inputs are rounded",
    ),
    "AdaptiveClip": (Words, PLANNED, tricks(lt.AdaptiveClip), "AdaptiveClip.* and FSDP2Preset.tensor_parallel=2"),
    "NEFTune": (Words, PLANNED, tricks(lt.NEFTune), "NEFTune.* and FSDP2Preset.tensor_parallel=2"),
    "Distill": (
        Words,
        PLANNED,
        tricks(lambda: lt.Distill(lt.Teacher(0.9))),
        "Distill.* and FSDP2Preset.tensor_parallel=2.*: outputs may be in shards",
    ),
    "LoRA": (
        Words,
        PLANNED,
        tricks(lambda: lt.LoRA("[qv]$")),
        "cannot split 'blocks.0.attention.q', which has an adapter of LoRA",
    ),
    "Compile": (Words, PLANNED, tricks(lambda: lt.Compile(backend="aot_eager")), "Compile: embedding has an nn.Embed"),
}


def refused(case: str) -> str:
    kind, arguments, settings, _ = REFUSED[case]
    try:
        run = together(kind, arguments, **settings())[1]
    except (MisconfigurationException, ValueError) as error:
        return str(error)
    return f"trained {run.global_step} steps"


# -- random numbers, collectives and checkpoints ---------------------------------------------------------------------


class Drops(Words):
    """Drops entries, draws from Python and NumPy, and logs a sum over all samples."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.3) * random.uniform(0.9, 1.1) * float(np.random.uniform(0.9, 1.1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("samples", float(len(batch[0])), sync_dist=True, reduce_fx="sum", on_step=False, on_epoch=True)
        self.gathered = self.all_gather(batch[1]).numel()
        self.agreed = self.trainer.strategy.reduce_boolean_decision(True)
        return super().training_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        if self.global_rank == 0:
            torch.rand(1)  # as for a picture, which the next epoch must not notice


class Noise(Dataset[tuple[Tensor, ...]]):
    """Samples with noise of the process that reads them."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, number: int) -> tuple[Tensor, ...]:
        x, y = data(48)[number]
        return x + torch.randn(8), y


def unseeded(num_workers: int = 0) -> dict[str, Any]:
    """A fit whose processes have seeds of their own, from which those of a group must not differ."""
    module = build(Drops)
    preset = lt.preset("tp_bf16", tensor_parallel=2, precision="32-true", **PLANNED)
    devices = int(os.environ["LOCAL_WORLD_SIZE"])
    run = trainer(devices=devices, use_distributed_sampler=False, **preset)
    L.seed_everything(100 + int(os.environ["RANK"]), workers=True, verbose=False)
    try:
        run.fit(module, DataLoader(Noise(), 8, num_workers=num_workers), loader(24))
    finally:
        del os.environ["PL_SEED_WORKERS"]
    seen = {"logged": float(run.callback_metrics["samples"]), "gathered": module.gathered, "agreed": module.agreed}
    return {**seen, "weights": whole(module), "own": torch.rand(1).item()}


def saved(folder: str) -> dict[str, Tensor]:
    first, _ = together(Words, PLANNED, callbacks=[SaveAt(f"{folder}/first", epoch=0)], max_epochs=2)
    again, _ = together(Words, PLANNED, ckpt_path=f"{folder}/first", max_epochs=2)
    assert_equal(whole(again), whole(first))
    return whole(first)


LATE = ("lamb", "LoRA", "Compile")  # need libraries that take long to import


def warned() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        together(AroundWords, PLANNED, max_steps=1)
    return [str(each.message) for each in caught]


def quick(folder: str, cases: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {case: ended(case) for case in cases}
    return {
        **found,
        "refused": {case: refused(case) for case in REFUSED if case not in LATE},
        "unseeded": unseeded(),
        "warned": warned(),
        "saved": saved(folder),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def two(folder: Path, selected: Callable[..., list[Any]]) -> list[dict[str, Any]]:
    return run_ranks(quick, str(folder), [case for case in selected("case") if case in QUICK])


FOUR = [case for case in CASES if case != "Float8"]  # whose scale is that of a process's own samples


@pytest.mark.slow
def test_float8_computes_with_parts_of_layers_as_with_all() -> None:
    kind, _, settings = CASES["Float8"]
    module, _ = alone(kind, **settings())
    for rank in run_cases(ended, ["Float8"])["Float8"]:
        assert_close(rank["weights"], weights(module), 1e-5)


@pytest.fixture(scope="module")
def four() -> Cases:
    return run_cases(ended, FOUR, nprocs=4, timeout=900)


@pytest.mark.parametrize("case", few(QUICK, 1))
def test_two_processes_train_what_one_does(two: list[dict[str, Any]], case: str) -> None:
    kind, _, settings = CASES[case]
    module, _ = alone(kind, **settings())
    for rank in two:
        assert_close(rank[case]["weights"], weights(module), 1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's compiler
@pytest.mark.parametrize("case", FOUR)
def test_four_processes_train_what_one_does(four: Cases, case: str) -> None:
    kind, arguments, settings = CASES[case]
    precision = arguments.get("precision", "32-true")
    module, _ = alone(kind, precision=precision, **settings())
    for rank in four[case]:
        assert_close(rank["weights"], weights(module), 1e-5 if precision == "32-true" else 5e-3)


@pytest.mark.parametrize("case", [case for case in REFUSED if case not in LATE])
def test_what_cannot_be_right_is_refused_by_name(two: list[dict[str, Any]], case: str) -> None:
    for rank in two:
        assert re.search(REFUSED[case][-1], rank["refused"][case]), rank["refused"][case]


def test_layers_that_run_outside_of_their_module_are_not_compared_which_is_said(two: list[dict[str, Any]]) -> None:
    first, _ = (rank["warned"] for rank in two)
    told = "plan splits layers of 'blocks.0.attention.inner', which run outside of its forward pass"
    assert [text.startswith(told) for text in first].count(True) == 1


@pytest.mark.slow
def test_what_libraries_do_wrong_is_refused_by_name() -> None:
    told = run_cases(refused, LATE)
    for case in LATE:
        for message in told[case]:
            assert re.search(REFUSED[case][-1], message), message


def test_random_numbers_of_a_group_are_the_same(two: list[dict[str, Any]]) -> None:
    first, second = (rank["unseeded"] for rank in two)
    assert_equal(first["weights"], second["weights"])


@pytest.mark.slow
def test_random_numbers_of_loader_workers_are_the_same() -> None:
    first, second = run_ranks(unseeded, 1)
    assert_equal(first["weights"], second["weights"])


def test_sums_and_gathers_count_a_batch_once(two: list[dict[str, Any]]) -> None:
    for rank in two:
        assert (rank["unseeded"]["logged"], rank["unseeded"]["gathered"], rank["unseeded"]["agreed"]) == (16, 8, True)


def test_a_resumed_fit_is_exact_and_a_folder_becomes_one_file(two: list[dict[str, Any]], folder: Path) -> None:
    module, _ = alone(Words)
    assert_close(two[0]["saved"], weights(module), 1e-5)
    consolidate(folder / "first", folder / "one.pt")
    first, _ = alone(Words, max_epochs=1)
    assert_close(torch.load(folder / "one.pt"), weights(first), 1e-5)


def test_a_process_holds_its_part(two: list[dict[str, Any]]) -> None:
    module = build(Words)
    parts = (".q.", ".k.", ".v.", "o.weight", "up", "down.weight", "embedding", "head")
    split = sum(p.nbytes for name, p in module.named_parameters() if any(part in name for part in parts))
    held, trained = (sum(p.nbytes for p in module.parameters() if p.requires_grad >= flag) for flag in (False, True))
    for rank in two:
        of_states = 2 * (trained - split // 2)  # AdamW has two states a weight
        assert rank["clipped"]["bytes"] == [held - split // 2, of_states]
