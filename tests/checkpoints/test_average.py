"""Averages of checkpoints, against a reference in double precision."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import lightning_tricks as lt
from lightning_tricks.checkpoints import average_checkpoints
from lightning_tricks.checkpoints.average import CHUNK
from tests.nets import Net, assert_equal, build, fit, loader, trainer
from tests.ranks import run_ranks


class Configured(Net):
    """With hyperparameters, extra state and something of its own in the checkpoint."""

    def __init__(self, lr: float = 0.1, name: str = "none") -> None:
        super().__init__(lr)
        self.save_hyperparameters()
        self.fits = 0

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["vocabulary"] = ["a", "b"]

    def get_extra_state(self) -> dict[str, int]:
        return {"epoch": self.current_epoch}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.fits = state["epoch"]


class Data(L.LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader()

    def val_dataloader(self) -> Any:
        return loader(24)

    def state_dict(self) -> dict[str, int]:
        return {"shard": 3}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The checkpoints of a fit of three epochs with EMA."""
    folder = tmp_path_factory.mktemp("run")
    keep = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    fit(build(Configured, name="mine"), max_epochs=3, enable_checkpointing=True, callbacks=[lt.EMA(decay=0.9), keep])
    return sorted(folder.glob("*.ckpt"))


def reference(states: Sequence[dict[str, Tensor]], weights: Sequence[float]) -> dict[str, Tensor]:
    total = sum(weights)
    return {
        name: (sum(w * state[name].double() for w, state in zip(weights, states, strict=True)) / total).to(last.dtype)
        if last.is_floating_point()
        else last
        for name, last in states[-1].items()
        if isinstance(last, Tensor)
    }


def tensors(file: Path) -> dict[str, Tensor]:
    loaded = load_file(file) if file.suffix == ".safetensors" else torch.load(file)
    return {name: value for name, value in loaded.get("state_dict", loaded).items() if isinstance(value, Tensor)}


def saved(folder: Path, *states: dict[str, Any]) -> list[Path]:
    files = [folder / f"{place}.pt" for place in range(len(states))]
    for state, file in zip(states, files, strict=True):
        torch.save(state, file)
    return files


# -- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [None, [1, 2, 3], [0.5, 0, 7.25], [0, 0, 2], [-2, 1, 4]])
@pytest.mark.parametrize("name", ["mean.ckpt", "mean.safetensors"])
def test_equals_the_reference(run: list[Path], weights: list[float] | None, name: str, tmp_path: Path) -> None:
    output = tmp_path / name
    if output.suffix == ".safetensors":
        run = [lt_plain(file, tmp_path) for file in run]
    average_checkpoints(run, output, weights)
    expected = reference([tensors(file) for file in run], weights or [1, 1, 1])
    assert_equal(tensors(output), expected)
    assert expected["layers.1.num_batches_tracked"] == 18


def lt_plain(file: Path, folder: Path) -> Path:
    """The weights alone, since safetensors holds no extra state."""
    torch.save(tensors(file), folder / f"{file.stem}.pt")
    return folder / f"{file.stem}.pt"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.complex64])
def test_a_model_averaged_with_itself_is_itself(dtype: torch.dtype, tmp_path: Path) -> None:
    state = {"x": torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)}
    average_checkpoints(saved(tmp_path, state) * 7, tmp_path / "mean.pt")
    got = torch.load(tmp_path / "mean.pt")["x"]
    assert got.dtype == dtype
    assert torch.equal(got.to(torch.complex128), state["x"].to(torch.complex128))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_half_precision_is_summed_in_more_and_rounded_once(dtype: torch.dtype, tmp_path: Path) -> None:
    states = [{"x": torch.randn(1000).to(dtype)} for _ in range(5)]
    average_checkpoints(saved(tmp_path, *states), tmp_path / "mean.pt")
    expected = reference(states, [1] * 5)
    if dtype == torch.float64:
        torch.testing.assert_close(torch.load(tmp_path / "mean.pt"), expected, rtol=1e-14, atol=1e-15)
    else:
        assert_equal(torch.load(tmp_path / "mean.pt"), expected)


def test_a_tensor_of_many_pieces_and_of_any_layout(tmp_path: Path) -> None:
    states = [
        {"long": torch.rand(2 * CHUNK + 5), "turned": torch.rand(6, 7).T, "one": torch.tensor(v)} for v in (1.0, 2.0)
    ]
    average_checkpoints(saved(tmp_path, *states), tmp_path / "mean.pt", [1, 2])
    assert_equal(torch.load(tmp_path / "mean.pt"), reference(states, [1, 2]))


def test_integers_booleans_and_extra_state_are_the_last_files(tmp_path: Path) -> None:
    states = [
        {
            "n": torch.tensor(n),
            "mask": torch.tensor([n > 3]),
            "_extra_state": {"n": n},
            "b": torch.tensor([n], dtype=torch.uint8),
        }
        for n in (2, 9, 4)
    ]
    average_checkpoints(saved(tmp_path, *states), tmp_path / "mean.pt", [8, 1, 0])
    assert torch.load(tmp_path / "mean.pt") == states[-1]


def test_a_weight_of_zero_leaves_even_infinities_out(tmp_path: Path) -> None:
    files = saved(tmp_path, {"x": torch.tensor([1.0])}, {"x": torch.tensor([float("nan")])})
    average_checkpoints(files, tmp_path / "mean.pt", [1, 0])
    assert torch.load(tmp_path / "mean.pt")["x"].item() == 1


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    states = []
    for _ in range(3):
        weight = torch.randn(300, 40)
        states.append({"a": weight, "b": weight, "c": weight.clone()})
    files = saved(tmp_path, *states)
    average_checkpoints(files, tmp_path / "mean.pt")
    got = torch.load(tmp_path / "mean.pt")
    assert got["a"].data_ptr() == got["b"].data_ptr() != got["c"].data_ptr()
    assert torch.equal(got["a"], got["c"])
    average_checkpoints(files, tmp_path / "mean.safetensors")
    assert_equal(load_file(tmp_path / "mean.safetensors"), got)


def test_weights_tied_in_one_file_only_are_averaged_apart(tmp_path: Path) -> None:
    weight = torch.ones(2)
    files = saved(tmp_path, {"a": weight, "b": weight.clone() * 3}, {"a": weight, "b": weight})
    average_checkpoints(files, tmp_path / "mean.pt")
    assert_equal(torch.load(tmp_path / "mean.pt"), {"a": torch.ones(2), "b": torch.full((2,), 2.0)})


def test_parameters_that_require_grad_are_read(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    average_checkpoints(saved(tmp_path, module.state_dict(keep_vars=True)) * 2, tmp_path / "mean.pt")
    assert_equal(torch.load(tmp_path / "mean.pt"), module.state_dict())


# -- formats ----------------------------------------------------------------------------------------------------------


def test_lightning_loads_tests_and_predicts_with_the_output(run: list[Path], tmp_path: Path) -> None:
    output = tmp_path / "mean.ckpt"
    average_checkpoints(run, output)
    module = Configured.load_from_checkpoint(output)
    assert module.hparams == {"lr": 0.1, "name": "mine"}
    assert module.fits == 2
    expected = reference([tensors(file) for file in run], [1, 1, 1])
    assert_equal({name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}, expected)
    tested = trainer().test(module, loader(24), verbose=False)
    assert trainer().test(build(Configured), loader(24), ckpt_path=output, verbose=False) == tested
    assert trainer().validate(build(Configured), loader(24), ckpt_path=output, verbose=False)
    assert len(trainer().predict(build(Configured), loader(24), ckpt_path=output)) == 3


def test_what_else_the_output_has(run: list[Path], tmp_path: Path) -> None:
    average_checkpoints(run, tmp_path / "mean.ckpt")
    output, last = torch.load(tmp_path / "mean.ckpt"), torch.load(run[-1])
    training = {"callbacks", "loops", "lr_schedulers", "optimizer_states", "current_model_state", "averaging_state"}
    assert last.keys() - output.keys() == training
    assert output["vocabulary"] == ["a", "b"]
    assert (output["epoch"], output["global_step"]) == (2, 18)
    assert output["hyper_parameters"] == {"lr": 0.1, "name": "mine"}


@pytest.mark.parametrize("callbacks", [[], [lt.EMA()]], ids=["plain", "EMA"])
def test_no_training_resumes_from_it(run: list[Path], callbacks: list[Any], tmp_path: Path) -> None:
    average_checkpoints(run, tmp_path / "mean.ckpt")
    with pytest.raises(KeyError, match="checkpoint contains only the model"):
        fit(build(Configured), ckpt_path=tmp_path / "mean.ckpt", callbacks=callbacks)


def test_the_state_of_a_datamodule_is_kept(tmp_path: Path) -> None:
    run = trainer(max_epochs=1)
    run.fit(build(), datamodule=Data())
    run.save_checkpoint(tmp_path / "a.ckpt")
    average_checkpoints([tmp_path / "a.ckpt"], tmp_path / "mean.ckpt")
    assert torch.load(tmp_path / "mean.ckpt")["Data"] == {"shard": 3}


def test_formats_mix_and_the_last_says_what_is_written(run: list[Path], tmp_path: Path) -> None:
    plain = [lt_plain(file, tmp_path) for file in run]
    mixed = tmp_path / "b.safetensors"
    save_file(tensors(plain[1]), mixed)
    full = tmp_path / "c.ckpt"
    torch.save({"state_dict": tensors(plain[2]), "epoch": 2}, full)
    average_checkpoints([plain[0], full, mixed], tmp_path / "mean.ckpt")
    average_checkpoints([plain[0], mixed, full], tmp_path / "full.ckpt")
    assert "state_dict" not in torch.load(tmp_path / "mean.ckpt")
    assert torch.load(tmp_path / "full.ckpt")["epoch"] == 2
    expected = reference([tensors(file) for file in run], [1, 1, 1])
    assert_equal(tensors(tmp_path / "full.ckpt"), expected)


@pytest.mark.parametrize("suffix", [".ckpt", ".safetensors"])
def test_the_output_may_be_an_input(run: list[Path], suffix: str, tmp_path: Path) -> None:
    states = [tensors(file) for file in run]
    files = [tmp_path / f"{place}{suffix}" for place in range(3)]
    for state, file in zip(states, files, strict=True):
        save_file(state, file) if suffix == ".safetensors" else torch.save({"state_dict": state}, file)
    before = files[1].read_bytes()
    with pytest.raises(FileExistsError, match="force=True"):
        average_checkpoints(files, files[1])
    assert files[1].read_bytes() == before
    average_checkpoints(files, files[1], force=True)
    assert_equal(tensors(files[1]), reference(states, [1, 1, 1]))
    assert len(list(tmp_path.iterdir())) == 3


# -- refusals ---------------------------------------------------------------------------------------------------------

A = {"x": torch.ones(2, 3), "y": torch.ones(2)}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"x": A["x"]}, r"0.pt and .*1.pt are not of the same model: the second has no y\."),
        ({**A, **{f"z{n}": A["y"] for n in range(9)}}, r"1.pt .*the first has no z0, z1, z2, z3, z4 and 4 more\."),
        ({**A, "x": torch.ones(3, 2)}, r"0.pt and .*1.pt .*: x is float32 \[2, 3\] and float32 \[3, 2\]\."),
        ({**A, "y": A["y"].half()}, r"y is float32 \[2\] and float16 \[2\]\."),
    ],
)
def test_other_models_are_refused_by_name(other: dict[str, Tensor], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        average_checkpoints(saved(tmp_path, A, other), tmp_path / "mean.pt")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "mean.pt").exists()


def test_a_tensor_is_no_extra_state(tmp_path: Path) -> None:
    files = saved(tmp_path, {**A, "_extra_state": 1}, {**A, "_extra_state": torch.ones(1)})
    with pytest.raises(ValueError, match=r"_extra_state is not a tensor and float32 \[1\]"):
        average_checkpoints(files, tmp_path / "mean.pt")


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0], "weights must have one value per file, got 1 for 2 files"),
        ([1, -1], "weights must have a sum above 0, got 0"),
        ([-2.5, 1], "weights must have a sum above 0, got -1.5"),
        ([float("nan"), 1], r"weights\[0\] must be in"),
        ([float("inf"), 1], r"weights\[0\] must be in"),
        ([0, 0.0], "weights must have a sum above 0, got 0.0"),
    ],
)
def test_wrong_weights(weights: list[float], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        average_checkpoints(saved(tmp_path, A, A), tmp_path / "mean.pt", weights)


def test_wrong_paths(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one file"):
        average_checkpoints([], tmp_path / "mean.pt")
    with pytest.raises(TypeError, match=r"must be a list of files, got 'a.ckpt'"):
        average_checkpoints("a.ckpt", tmp_path / "mean.pt")
    with pytest.raises(FileNotFoundError, match=r"none\.pt"):
        average_checkpoints([*saved(tmp_path, A), tmp_path / "none.pt"], tmp_path / "mean.pt")
    assert not (tmp_path / "mean.pt").exists()


# -- memory -----------------------------------------------------------------------------------------------------------


def own_memory() -> int:
    """Bytes of this process in memory that are its own, not pages of mapped files."""
    resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
    return (int(resident) - int(shared)) * 4096


def peak(function: Callable[[], object]) -> int:
    """The most memory that the process had of its own while the function ran, above what it had before."""
    highest, done = own_memory(), threading.Event()
    before = highest

    def watch() -> None:
        nonlocal highest
        while not done.is_set():
            highest = max(highest, own_memory())
            time.sleep(0.0005)

    thread = threading.Thread(target=watch)
    thread.start()
    function()
    done.set()
    thread.join()
    return highest - before


def average_and_measure(files: list[str], output: str) -> int:
    average_checkpoints(files[:1], output)  # imports what it needs
    return peak(partial(average_checkpoints, files, output, force=True))


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.slow
def test_the_inputs_are_never_in_memory_together(suffix: str, tmp_path: Path) -> None:
    size = 2**21  # elements of a tensor: 8 MiB
    for place in range(6):
        state = {f"x{n}": torch.full((size,), float(place + n)) for n in range(8)}
        checkpoint = (
            state if suffix == ".safetensors" else {"state_dict": state, "optimizer_states": [state, dict(state)]}
        )
        path = tmp_path / f"{place}{suffix}"
        save_file(state, path) if suffix == ".safetensors" else torch.save(checkpoint, path)
    files = [str(tmp_path / f"{place}{suffix}") for place in range(6)]
    (used,) = run_ranks(average_and_measure, files, str(tmp_path / f"mean{suffix}"), nprocs=1)
    megabytes = used / 2**20
    assert 0 < megabytes < 64 + 32, "the output (64) and small change; the inputs are 384"
