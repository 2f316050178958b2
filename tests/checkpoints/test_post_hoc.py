"""The combination of snapshots is the one whose profile is nearest to that of the wanted average."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
import torch
from torch import Tensor

import lightning_tricks as lt
from lightning_tricks.checkpoints import PostHocSweep, post_hoc
from lightning_tricks.checkpoints.post_hoc import combination, power_of, snapshot_name
from lightning_tricks_cli.main import main
from tests.nets import assert_equal

mpl.use("Agg")

STEPS = [100 * number for number in range(1, 17)]
LENGTHS = (0.05, 0.10)


def profile(step: int, gamma: float) -> np.ndarray[Any, Any]:
    """How much the weights of each of 1,600 steps count in a power-function average after ``step`` steps."""
    counts = np.arange(1, step + 1.0)
    shares = (counts / step) ** (gamma + 1) - ((counts - 1) / step) ** (gamma + 1)
    return np.pad(shares, (0, STEPS[-1] - step))


def steps_and_lengths() -> tuple[list[int], list[float]]:
    return [step for step in STEPS for _ in LENGTHS], [length for _ in STEPS for length in LENGTHS]


@pytest.mark.parametrize("sigma_rel", [0.03, 0.05, 0.08, 0.13, 0.2])
def test_the_combination_is_that_of_a_least_squares_fit_of_every_step(sigma_rel: float) -> None:
    steps, lengths = steps_and_lengths()
    found, error = combination(steps, lengths, STEPS[-1], sigma_rel)
    among = np.stack([profile(step, power_of(length)) for step, length in zip(steps, lengths, strict=True)], 1)
    wanted = profile(STEPS[-1], power_of(sigma_rel))
    best = np.linalg.lstsq(among, wanted, rcond=None)[0]
    left = [np.linalg.norm(among @ factors - wanted) / np.linalg.norm(wanted) for factors in (best, found.numpy())]
    assert left[1] < 1.02 * left[0] + 1e-6
    assert left[1] == pytest.approx(error, abs=2e-3)
    assert sigma_rel == 0.05 or found.min() < 0


def test_a_length_that_was_saved_is_its_own_snapshot() -> None:
    found, error = combination(*steps_and_lengths(), STEPS[-1], 0.10)
    assert error < 1e-6
    torch.testing.assert_close(found, torch.eye(32, dtype=torch.float64)[-1], atol=1e-6, rtol=0)


def test_the_numbers_are_those_of_ema_pytorch() -> None:
    theirs = pytest.importorskip("ema_pytorch.post_hoc_ema")
    steps, lengths = steps_and_lengths()
    gammas = [theirs.sigma_rel_to_gamma(length) for length in lengths]
    assert gammas == pytest.approx([power_of(length) for length in lengths], rel=1e-12)
    for sigma_rel in (0.03, 0.08, 0.13, 0.25):
        step, gamma = torch.tensor([STEPS[-1]]), torch.tensor([theirs.sigma_rel_to_gamma(sigma_rel)])
        expected = theirs.solve_weights(torch.tensor(steps), torch.tensor(gammas), step, gamma)[:, 0]
        found, _ = combination(steps, lengths, STEPS[-1], sigma_rel)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)  # they compute gammas in fp32


def saved(folder: Path, states: dict[int, dict[str, Tensor]], buffers: Sequence[str] = ()) -> Path:
    """A folder with one run, of the same weights for both lengths."""
    (run := folder / "run").mkdir(parents=True)
    for step, state in states.items():
        averaged = [name for name in state if name not in buffers]
        for length in LENGTHS:
            torch.save({"state_dict": state, "averaged": averaged}, run / snapshot_name(step, length))
    return folder


def constant(steps: Sequence[int] = STEPS, value: float = 2.0) -> dict[int, dict[str, Tensor]]:
    return {step: {"w": torch.full((3,), value, dtype=torch.float16)} for step in steps}


def test_weights_that_do_not_move_are_their_own_average(tmp_path: Path) -> None:
    states = constant()
    for step, state in states.items():
        state |= {"variance": torch.tensor([0.1 * step]), "count": torch.tensor(step)}
    found = lt.post_hoc_average(saved(tmp_path, states, ["variance", "count"]), sigma_rel=0.13)
    assert found["w"].dtype == torch.float32
    torch.testing.assert_close(found["w"], torch.full((3,), 2.0))
    assert (found["variance"], found["count"]) == (torch.tensor([0.1 * STEPS[-1]]), torch.tensor(STEPS[-1]))


def test_weights_that_were_unfrozen_late_count_as_their_first_snapshot_before(tmp_path: Path) -> None:
    states = constant()
    for step in STEPS[-2:]:  # These two alone would have another profile.
        states[step]["late"] = torch.tensor([3.0 if step == STEPS[-2] else 5.0], dtype=torch.float16)
        states[step]["whole"] = states[step]["late"]
    for step in STEPS[:-2]:
        states[step]["whole"] = torch.tensor([3.0], dtype=torch.float16)
    found = lt.post_hoc_average(saved(tmp_path, states), sigma_rel=0.13)
    torch.testing.assert_close(found["late"], found["whole"])
    assert 3 < found["late"] < 5


def test_a_sweep_scores_every_length_and_draws_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, seen = saved(tmp_path, {**constant(STEPS[:12], 1.0), **constant(STEPS[12:], 5.0)}), []

    def evaluate(state: dict[str, Tensor]) -> float:
        seen.append(state)
        return abs(float(state["w"][0]) - 4.0)

    loads: list[Path] = []
    monkeypatch.setattr(post_hoc, "load", lambda path, load=post_hoc.load: loads.append(path) or load(path))
    sweep = lt.post_hoc_sweep(folder, evaluate, mode="min", sigma_rels=[0.2, 0.05, 0.1])
    assert len(loads) == 2 * len(STEPS)  # once for all lengths
    monkeypatch.undo()
    for length, state in zip((0.2, 0.05, 0.1), seen, strict=True):
        assert_equal(state, lt.post_hoc_average(folder, sigma_rel=length))
    assert sweep.scores == tuple(abs(float(state["w"][0]) - 4.0) for state in seen)
    assert sweep.best == sweep.sigma_rels[sweep.scores.index(min(sweep.scores))]
    (line, *_) = sweep.plot()[1].lines
    assert [*line.get_xdata()] == [0.05, 0.1, 0.2]
    assert [*line.get_ydata()] == [sweep.scores[place] for place in (1, 2, 0)]
    assert PostHocSweep((0.05, 0.1), (math.nan, -3.0), "max").best == 0.1


@pytest.mark.parametrize(
    ("sigma_rels", "message"),
    [
        ([], "sigma_rels must have at least one length"),
        ([0.1, 0.3], r"sigma_rels\[1\] must be in"),
        ([0.1, 0.001], "sigma_rel=0.001 is a length that the 32 snapshots up to step 1600 cannot give"),
    ],
)
def test_a_sweep_checks_all_lengths_before_it_scores_any(sigma_rels: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        lt.post_hoc_sweep(saved(tmp_path, constant()), pytest.fail, sigma_rels=sigma_rels)


def test_an_average_can_end_at_any_step_with_a_snapshot(tmp_path: Path) -> None:
    folder = saved(tmp_path, {**constant(STEPS[:8], 1.0), **constant(STEPS[8:], 5.0)})
    assert lt.post_hoc_average(folder, sigma_rel=0.08, step=STEPS[7])["w"][0].item() == pytest.approx(1.0)
    assert lt.post_hoc_average(folder, sigma_rel=0.08)["w"][0] != pytest.approx(1.0)
    with pytest.raises(FileNotFoundError, match="has no snapshot of step 750; near it are 600, 700, 800, 900"):
        lt.post_hoc_average(folder, sigma_rel=0.08, step=750)


def test_of_several_runs_the_newest_is_taken(tmp_path: Path) -> None:
    for name, value in {"20260101-000000-ff": 1.0, "20260102-000000-00": 7.0}.items():
        saved(tmp_path / name, constant(value=value)).joinpath("run").rename(tmp_path / "moved")
        (tmp_path / name).rmdir()
        (tmp_path / "moved").rename(tmp_path / name)
    (tmp_path / "20260103-000000-00").mkdir()  # of a run that has no snapshot yet
    assert lt.post_hoc_average(tmp_path, sigma_rel=0.1)["w"][0].item() == pytest.approx(7.0)
    first = tmp_path / "20260101-000000-ff"
    assert lt.post_hoc_average(first, sigma_rel=0.1)["w"][0].item() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("sigma_rel", "message"),
    [
        (0.0, "sigma_rel must be above 0"),
        (0.3, r"sigma_rel must be in \[0.0, 0.288"),
        (0.001, r"the 32 snapshots up to step 1600 cannot give: .* Choose a length nearer to 0.05, 0.1, or save more"),
    ],
)
def test_lengths_that_cannot_be_given(sigma_rel: float, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        lt.post_hoc_average(saved(tmp_path, constant()), sigma_rel=sigma_rel)


def test_folders_without_snapshots_and_other_files(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(FileNotFoundError, match="There are no snapshots of PostHocEMA in"):
            lt.post_hoc_average(folder, sigma_rel=0.1)
    for content in ({"w": torch.ones(1)}, {"state_dict": {}, "averaged": ["w"]}):
        torch.save(content, tmp_path / snapshot_name(1, 0.05))
        with pytest.raises(ValueError, match="is no snapshot of PostHocEMA"):
            lt.post_hoc_average(tmp_path, sigma_rel=0.05)


def test_the_command_writes_a_file_for_each_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(saved(tmp_path, {**constant(STEPS[:12], 1.0), **constant(STEPS[12:], 5.0)}))
    assert main(["average", "--posthoc", ".", "--sigma-rel", "0.13", "-o", "one.pt"]) == 0
    assert main(["average", "--posthoc", "run", "--sigma-rel", "0.05", "0.13", "-o", "ema.safetensors"]) == 0
    assert capsys.readouterr().out == "wrote one.pt\nwrote ema-0.05.safetensors\nwrote ema-0.13.safetensors\n"
    torch.testing.assert_close(torch.load("one.pt"), lt.post_hoc_average(tmp_path, sigma_rel=0.13))
    assert main(["average", "--posthoc", ".", "--sigma-rel", "0.13", "--step", "500", "-o", "early.pt"]) == 0
    assert torch.load("early.pt")["w"][0].item() == pytest.approx(1.0)
    capsys.readouterr()
    Path("out-0.1.pt").touch()
    for words, message in (
        (["--posthoc", ".", "--sigma-rel", "0.4"], "--sigma-rel must be in [0.0, 0.288"),
        (["--posthoc", ".", "--sigma-rel", "0.05", "0.1"], "out-0.1.pt exists"),
    ):
        assert main(["average", *words, "-o", "out.pt"]) == 1
        assert message in capsys.readouterr().err
    assert not Path("out-0.05.pt").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sigma-rel", "0.1"], "the following arguments are required: CKPT"),
        (["a.pt", "--step", "4"], "--sigma-rel and --step are for the snapshots of --posthoc"),
        (["a.pt", "--posthoc", ".", "--sigma-rel", "0.1"], "--posthoc needs --sigma-rel, and takes no CKPT"),
        (["--posthoc", "."], "--posthoc needs --sigma-rel, and takes no CKPT"),
    ],
)
def test_wrong_usage(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["average", *words, "-o", "out.pt"])
    assert message in capsys.readouterr().err
