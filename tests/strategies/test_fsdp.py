"""FSDP2 of modules that know nothing of it, in two real processes, against one process on their batches together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import lightning_tricks as lt
from tests.nets import PlainNet, assert_close, assert_equal, build, fit, loader, rank_loader, trainer, weights
from tests.ranks import run_ranks
from tests.strategies.sharded import CNN, Block, Manual, Save, Stateless, Transformer, local_bytes, whole


class SAMTransformer(lt.SAMMixin, Transformer):
    sam = lt.SAM(0.05)


class Compiled(Transformer):
    """The blocks run compiled."""

    def setup(self, stage: str) -> None:
        for number, block in enumerate(self.blocks):
            self.blocks[number] = torch.compile(block, backend="aot_eager")


CLIPPED = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 3, "max_epochs": 3}
CASES: dict[str, tuple[type[PlainNet], dict[str, Any], dict[str, Any]]] = {  # module, of the preset, of the Trainer
    "transformer": (Transformer, {}, {"num_sanity_val_steps": 2}),
    "offload": (Transformer, {"offload": True}, {}),
    "clipped": (Transformer, {}, CLIPPED),
    "clipped-offload": (Transformer, {"offload": True}, CLIPPED),
    "by-value": (Transformer, {}, {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}),
    "recomputed": (Transformer, {"activation_checkpointing": True}, {}),
    "named": (Transformer, {"blocks": ["Block", "MultiheadAttention"]}, {}),
    "one group": (PlainNet, {}, {}),
    "manual": (Manual, {}, {}),
    "sam": (SAMTransformer, {}, {"accumulate_grad_batches": 3}),
}


def two(case: str, precision: str = "32-true", **more: Any) -> tuple[Any, pl.Trainer]:
    kind, arguments, settings = CASES[case]
    strategy = lt.preset("fsdp2_bf16", precision=precision, **arguments)
    module = build(kind)
    data = {"train": rank_loader(), "devices": 2, "use_distributed_sampler": False}
    return module, fit(module, **{**data, **strategy, **settings, **more})


def one(case: str, precision: str = "32-true", **more: Any) -> tuple[Any, pl.Trainer]:
    kind, _, settings = CASES[case]
    module = build(kind)
    return module, fit(module, train=loader(48, 16), precision=precision, **{**settings, **more})


def evaluated(run: pl.Trainer, module: pl.LightningModule, path: Any = None) -> dict[str, Any]:
    """All ranks see all data, so that each result is that of one process."""
    scores = {
        **run.validate(module, loader(24), verbose=False, ckpt_path=path)[0],
        **run.test(module, loader(24), verbose=False, ckpt_path=path)[0],
    }
    return {"scores": scores, "predicted": torch.cat(run.predict(module, loader(24), ckpt_path=path)).float()}


def every_case() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for case in CASES:
        module, run = two(case)
        found[case] = whole(module)
        assert run.precision == "32-true"
    calls, Block.calls = Block.calls, 0
    module, run = two("transformer", "bf16-mixed")
    found["plain calls"], Block.calls = Block.calls, 0
    found["bf16"], found["seen"], found["evaluated"] = whole(module), module.seen, evaluated(run, module)
    optimizer = run.optimizers[0]
    states = [t for state in optimizer.state.values() for t in state.values() if t.ndim]
    found["bytes"] = [local_bytes(module.parameters()), local_bytes(states)]
    found["dtypes"] = {t.dtype for t in (*states, *module.parameters())}
    found["groups"] = [name for name, each in module.named_modules() if isinstance(each, FSDPModule)]
    two("recomputed")
    found["recomputed calls"], found["calls"] = Block.calls, calls
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(every_case)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one_process_on_their_batches(ranks: list[dict[str, Any]], case: str) -> None:
    module, _ = one(case)
    for rank in ranks:
        assert_close(rank[case], weights(module), 1e-5)


def test_in_bf16_too(ranks: list[dict[str, Any]]) -> None:
    module, run = one("transformer", "bf16-mixed")
    expected = evaluated(run, module)
    for rank in ranks:
        assert_close(rank["bf16"], weights(module), 5e-3)
        assert rank["evaluated"]["scores"] == pytest.approx(expected["scores"], abs=1e-2)
        torch.testing.assert_close(rank["evaluated"]["predicted"], expected["predicted"], atol=5e-2, rtol=5e-2)
        assert rank["seen"] == module.seen
        assert (rank["seen"]["product"], rank["seen"]["loss"]) == (torch.bfloat16, torch.float32)
        assert rank["seen"]["same"], "a step gets the very batch"


def test_each_rank_has_half(ranks: list[dict[str, Any]]) -> None:
    module = build(Transformer)
    held = sum(p.nbytes for p in module.parameters())
    trained = sum(p.nbytes for p in module.parameters() if p.requires_grad and p is not module.unused.weight)
    assert sum(rank["bytes"][0] for rank in ranks) == held
    assert sum(rank["bytes"][1] for rank in ranks) == 2 * (trained - module.unused.bias.nbytes)
    for rank in ranks:
        assert rank["bytes"][0] == pytest.approx(held / 2, rel=0.02)
        assert rank["dtypes"] == {torch.float32}
        assert rank["groups"] == ["", "blocks.0", "blocks.1"]


def test_blocks_are_run_again_in_the_backward_pass_and_only_then(ranks: list[dict[str, Any]]) -> None:
    forward = 2 * 2 * 3 * 2  # epochs, passes, batches, blocks
    assert ranks[0]["plain calls"] == 2 * forward - forward + 2 * 3 * 2 // 1
    assert ranks[0]["recomputed calls"] - ranks[0]["plain calls"] == forward


# -- checkpoints ------------------------------------------------------------------------------------------------------


def saved(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for one_file in (False, True):
        kind = "file" if one_file else "folder"
        for case in ("transformer", "offload"):
            path = f"{folder}/{kind}-{case}.ckpt"

            def strategy(case: str = case, one_file: bool = one_file) -> Any:
                arguments = {**CASES[case][1], "precision": "32-true", "save_distributed_checkpoint": not one_file}
                return lt.preset("fsdp2_bf16", **arguments)["strategy"]

            emas = [lt.EMA(0.9, at_end="raw") for _ in range(2)]
            first, _ = two(case, strategy=strategy(), callbacks=[emas[0], Save(path)], max_epochs=3)
            resumed, run = two(case, strategy=strategy(), callbacks=[emas[1]], max_epochs=3, ckpt_path=path)
            assert Path(path).is_dir() != one_file
            assert_equal(whole(resumed), whole(first))
            assert_equal(emas[0].averaged_state_dict(), emas[1].averaged_state_dict())
            assert run.global_step == 9
            plain = f"{folder}/plain-{kind}-{case}.ckpt"
            trained, run = two(case, strategy=strategy(), callbacks=[Save(plain)], max_epochs=1)
            found[f"{kind}-{case}"] = evaluated(run, trained)
            fresh = trainer(devices=2, use_distributed_sampler=False, strategy=strategy())
            found[f"loaded-{kind}-{case}"] = evaluated(fresh, build(Transformer, lr=1.0), plain)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fsdp")


@pytest.fixture(scope="module")
def checkpoints(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(saved, str(folder))


def test_what_was_saved_is_validated_tested_and_predicted_the_same(checkpoints: list[dict[str, Any]]) -> None:
    for found in checkpoints:
        for kind in ("folder-transformer", "folder-offload", "file-transformer", "file-offload"):
            assert found[kind]["scores"] == found[f"loaded-{kind}"]["scores"], kind
            assert torch.equal(found[kind]["predicted"], found[f"loaded-{kind}"]["predicted"]), kind
