"""Greedy soups, against a naive one on real checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_tricks.checkpoints import greedy_soup
from tests.nets import NormNet, assert_close, assert_equal, build, data, fit


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Checkpoints of one initialisation trained with several learning rates."""
    folder = tmp_path_factory.mktemp("runs")
    for lr in (0.02, 0.3, 0.05, 1.0, 0.1):
        fit(build(NormNet, lr=lr)).save_checkpoint(folder / f"{lr}.ckpt")
    return [folder / f"{lr}.ckpt" for lr in (0.02, 0.3, 0.05, 1.0, 0.1)]


@torch.no_grad()
def loss(state: dict[str, Any]) -> float:
    module = NormNet()
    module.load_state_dict(state)
    x, y = data(40, seed=5).tensors
    return torch.nn.functional.cross_entropy(module.eval()(x), y).item()


def weights(file: Path) -> dict[str, Tensor]:
    return torch.load(file)["state_dict"]


def naive(files: list[Path]) -> tuple[list[Path], dict[str, Tensor]]:
    def average(chosen: list[Path]) -> dict[str, Tensor]:
        states = [weights(file) for file in chosen]
        return {
            name: torch.stack([state[name].double() for state in states]).mean(0).to(last.dtype)
            if last.is_floating_point()
            else last
            for name, last in states[-1].items()
        }

    ordered = sorted(files, key=lambda file: loss(weights(file)))
    chosen = ordered[:1]
    for file in ordered[1:]:
        if loss(average([*chosen, file])) <= loss(average(chosen)):
            chosen.append(file)
    return chosen, average(chosen)


def test_equals_the_naive_soup(runs: list[Path], tmp_path: Path) -> None:
    seen: list[dict[str, Tensor]] = []

    def evaluate(state: dict[str, Tensor]) -> float:
        found = loss(state)
        seen.append({name: value.clone() for name, value in state.items()})
        for value in state.values():  # the tensors are the function's own
            value.zero_()
        return found

    chosen = greedy_soup(runs, evaluate, tmp_path / "soup.ckpt", mode="min")
    expected, state = naive(runs)
    assert chosen == expected
    assert 1 < len(chosen) < len(runs), "the settings show both decisions"
    written = torch.load(tmp_path / "soup.ckpt")
    assert_close(written["state_dict"], state)
    assert any(all(torch.equal(each[name], v) for name, v in written["state_dict"].items()) for each in seen)
    assert len(seen) == 2 * len(runs) - 1
    assert written["global_step"] == 12
    assert loss(written["state_dict"]) <= min(loss(weights(file)) for file in runs)


def numbers(folder: Path, *values: float) -> list[Path]:
    files = [folder / f"{place}.pt" for place in range(len(values))]
    for value, file in zip(values, files, strict=True):
        torch.save({"x": torch.tensor(value)}, file)
    return files


def near_two(state: dict[str, Tensor]) -> float:
    return -abs(state["x"].item() - 2)


def test_best_first_each_once_and_equal_scores_are_kept(tmp_path: Path) -> None:
    files = numbers(tmp_path, 9.0, 1.0, 3.0, 2.0)
    chosen = greedy_soup([str(file) for file in files], near_two, tmp_path / "soup.pt")
    assert chosen == [files[3]]
    files = numbers(tmp_path, -9.0, 1.0, 1.0, 3.0)
    chosen = greedy_soup(files, near_two, tmp_path / "soup.pt", force=True)
    assert chosen == [files[1], files[2], files[3]]
    assert_equal(torch.load(tmp_path / "soup.pt"), {"x": torch.tensor(5.0) / 3})


def test_mode_max_and_min_mirror_each_other(tmp_path: Path) -> None:
    files = numbers(tmp_path, 7.0, 1.0, 4.0)
    best = greedy_soup(files, near_two, tmp_path / "a.pt")
    assert greedy_soup(files, lambda state: -near_two(state), tmp_path / "b.pt", mode="min") == best


@pytest.mark.parametrize("mode", ["max", "min"])
def test_a_diverged_model_is_left_out(mode: Any, tmp_path: Path) -> None:
    files = numbers(tmp_path, float("nan"), 1.0, float("nan"))
    chosen = greedy_soup(files, lambda state: state["x"].item(), tmp_path / "soup.pt", mode=mode)
    assert chosen == [files[1]]
    with pytest.raises(ValueError, match="a finite score for at least one file"):
        greedy_soup(files[:1], lambda state: state["x"].item(), tmp_path / "none.pt", mode=mode)
    assert not (tmp_path / "none.pt").exists()


def test_a_tensor_is_a_score(tmp_path: Path) -> None:
    assert greedy_soup(numbers(tmp_path, 1.0), lambda state: state["x"], tmp_path / "soup.pt")  # type: ignore[arg-type]


def never(state: dict[str, Tensor]) -> float:
    pytest.fail("evaluated before the arguments were checked")


def test_mistakes_are_found_before_anything_is_evaluated(tmp_path: Path) -> None:
    a, b = numbers(tmp_path, 1.0, 2.0)
    torch.save({"y": torch.ones(1)}, tmp_path / "other.pt")
    with pytest.raises(FileExistsError, match="force=True"):
        greedy_soup([a, b], never, a)
    with pytest.raises(ValueError, match="each file once"):
        greedy_soup([a, b, tmp_path / "." / a.name], never, tmp_path / "soup.pt")
    with pytest.raises(ValueError, match="not of the same model"):
        greedy_soup([a, tmp_path / "other.pt"], never, tmp_path / "soup.pt")
    with pytest.raises(ValueError, match="mode must be one of 'max', 'min', got 'maximum'"):
        greedy_soup([a, b], never, tmp_path / "soup.pt", mode="maximum")  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        greedy_soup([a, tmp_path / "none.pt"], never, tmp_path / "soup.pt")
    with pytest.raises(TypeError, match="NoneType"):
        greedy_soup([a, b], lambda state: None, tmp_path / "soup.pt")  # type: ignore[arg-type, return-value]
