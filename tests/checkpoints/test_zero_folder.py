"""fp32 masters, frozen weights and buffers from folders by ZeRO-1, 2 and 3, against DeepSpeed's own accessors."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_tricks.checkpoints.zero_folder import zero_weights
from tests.checkpoints.sharded import Tied
from tests.conformance.engines import cpu_deepspeed
from tests.nets import assert_equal, build, rank_loader, trainer
from tests.ranks import run_ranks


class Groups(Tied):
    """With two groups of the optimizer, weights whose sizes no number of ranks divides, and a frozen one."""

    def __init__(self) -> None:
        super().__init__(0.01)
        self.layers = nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 2))
        self.again = self.layers[2]
        self.layers[0].weight.requires_grad_(False)

    def get_extra_state(self) -> dict[str, str]:
        return {"note": "extra"}

    def set_extra_state(self, state: dict[str, str]) -> None:
        assert state == {"note": "extra"}

    def configure_optimizers(self) -> Any:
        biases = [p for name, p in self.named_parameters() if name.endswith("bias")]
        others = [p for name, p in self.named_parameters() if not name.endswith("bias") and p.requires_grad]
        return torch.optim.AdamW([{"params": others}, {"params": biases, "weight_decay": 0.0}], lr=0.01)


CASES = [(stage, precision) for stage in (1, 2, 3) for precision in ("32-true", "bf16-mixed")]


def save_all(folder: str) -> dict[str, dict[str, Tensor]]:
    """Save under each engine; the weights as DeepSpeed shows them in the run."""
    return {
        f"{stage}-{precision}": save(f"{folder}/{stage}-{precision}.ckpt", stage, precision)
        for stage, precision in CASES
    }


def save(folder: str, stage: int, precision: Any) -> dict[str, Tensor]:
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    module = build(Groups)
    run = trainer(
        strategy=cpu_deepspeed(stage), precision=precision, devices=2, max_epochs=1, use_distributed_sampler=False
    )
    run.fit(module, rank_loader())
    run.save_checkpoint(folder)
    found = {name: buffer.float() if buffer.is_floating_point() else buffer for name, buffer in module.named_buffers()}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            found[name] = safe_get_full_fp32_param(parameter).clone()
        else:
            with deepspeed.zero.GatheredParameters([parameter]):
                found[name] = parameter.detach().clone()
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Tensor]]]:
    folder = tmp_path_factory.mktemp("zero")
    return folder, run_ranks(save_all, str(folder))[0]


@pytest.mark.parametrize(("stage", "precision"), CASES)
def test_the_masters_bit_for_bit(saved: Any, stage: int, precision: str) -> None:
    name = f"{stage}-{precision}"
    state = zero_weights(saved[0] / f"{name}.ckpt")
    assert list(state) == list(build(Groups).state_dict())
    assert state.pop("_extra_state") == {"note": "extra"}
    assert all(each.read().dtype == each.dtype and each.read().shape == each.shape for each in state.values())
    assert_equal({key: each.read() for key, each in state.items()}, saved[1][name])
    assert state["again.weight"] is state["layers.2.weight"]
    assert not any(each.read().requires_grad for each in state.values())


@pytest.mark.parametrize("stage", [1, 3])
def test_a_file_of_one_rank_is_missing(saved: Any, stage: int, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved[0] / f"{stage}-32-true.ckpt", tmp_path / "a.ckpt"))
    if stage == 3:
        model = folder / "checkpoint" / "zero_pp_rank_1_mp_rank_00_model_states.pt"
        model.rename(tmp_path / "away")
        with pytest.raises(ValueError, match="model states of 1 ranks, expected 2"):
            zero_weights(folder)
        (tmp_path / "away").rename(model)
    next(folder.glob("checkpoint/*rank_1_*optim_states.pt")).unlink()
    with pytest.raises(ValueError, match="optimizer states of 1 ranks, expected 2"):
        zero_weights(folder)


def test_a_weight_without_its_values_is_refused(saved: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved[0] / "3-32-true.ckpt", tmp_path / "a.ckpt"))
    for file in folder.glob("checkpoint/*model_states.pt"):
        model = torch.load(file, weights_only=False)
        model["frozen_param_shapes"].clear()
        torch.save(model, file)
    with pytest.raises(ValueError, match=r"no values of layers.0.weight"):
        zero_weights(folder)


@pytest.mark.parametrize("stage", [1, 3])
def test_states_of_another_model_are_refused(saved: Any, stage: int, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved[0] / f"{stage}-32-true.ckpt", tmp_path / "a.ckpt"))
    for file in folder.glob("checkpoint/*model_states.pt"):
        model = torch.load(file, weights_only=False)
        model["param_shapes"][0]["more"] = torch.Size([100])
        torch.save(model, file)
    with pytest.raises(ValueError, match="has other weights than its optimizer states"):
        zero_weights(folder)
