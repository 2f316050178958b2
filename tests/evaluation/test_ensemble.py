"""Ensembles: the mean of their members in every stage, and what would silently be one member's is refused."""

from __future__ import annotations

import copy
import importlib
import pickle
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import lightning_tricks as lt
from lightning_tricks.checkpoints import average_checkpoints
from lightning_tricks.evaluation import CrossValidation, Ensemble, soup_and_ensemble
from lightning_tricks.evaluation.folds import Fold
from lightning_tricks.evaluation.mean_output import mean_logits
from tests.evaluation.recipes import DATA, Scored, make_loader, make_trainer, run
from tests.nets import build, fit, loader, quiet, trainer


class Wide(Scored):
    """Its width is a hyperparameter, it logs a metric object and counts in a hook."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 2))
        self.metric = MulticlassAccuracy(2, average="micro")
        self.ends = 0

    def test_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.metric(logits, y)
        self.log("metric", self.metric)
        self.log("nll", F.cross_entropy(logits, y))

    def on_test_epoch_end(self) -> None:
        self.ends += 1


class Direct(Scored):
    """Its steps call the network, not the module."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", F.cross_entropy(self.layers(batch[0]), batch[1]))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder, found = tmp_path_factory.mktemp("members"), []
    for width in (4, 6, 8):
        module = build(Wide, width=width)
        found.append(folder / f"{width}.ckpt")
        fit(module, max_epochs=1).save_checkpoint(found[-1])
    return found


def by_hand(files: list[Path], x: Tensor, mean: str) -> Tensor:
    with torch.no_grad():
        outputs = [Wide.load_from_checkpoint(file, weights_only=True).eval()(x) for file in files]
    if mean == "logits":
        return sum(outputs) / len(outputs)
    return (sum(each.softmax(-1) for each in outputs) / len(outputs)).log()


@pytest.mark.few(1)
@pytest.mark.parametrize("mean", ["probabilities", "logits"])
def test_all_stages_see_the_mean(mean: Any, files: list[Path]) -> None:
    net = Ensemble.from_checkpoints(files, Wide, mean=mean)
    assert isinstance(net, Ensemble)
    assert isinstance(net, Wide)
    batches = loader()
    x, y = DATA.tensors
    expected = by_hand(files, x, mean)
    torch.testing.assert_close(net(x), expected)
    run = trainer()
    predicted = torch.cat(run.predict(net, batches))
    torch.testing.assert_close(predicted, expected)
    (row,) = run.test(net, batches, verbose=False)
    assert row["metric"] == pytest.approx((expected.argmax(-1) == y).float().mean().item())
    assert row["nll"] == pytest.approx(F.cross_entropy(expected, y).item(), rel=1e-5)
    assert net.ends == 1
    (row,) = run.validate(net, batches, verbose=False)
    assert row["loss"] == pytest.approx(F.cross_entropy(expected, y).item(), rel=1e-5)


def test_the_mean_of_one_module_is_that_module(files: list[Path], tmp_path: Path) -> None:
    (tmp_path / "again.ckpt").write_bytes(files[0].read_bytes())
    net = Ensemble.from_checkpoints([files[0], tmp_path / "again.ckpt"], Wide, mean="logits")
    assert torch.equal(net(DATA.tensors[0]), by_hand(files[:1], DATA.tensors[0], "logits"))


@pytest.mark.few(1)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_it_can_be_copied_and_moved(copied: Any, files: list[Path]) -> None:
    net = Ensemble.from_checkpoints(files, Wide)
    other = copied(net)
    expected = net(DATA.tensors[0])
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    assert torch.equal(other(DATA.tensors[0]), expected)
    assert type(other) is type(net)
    doubled = other.double()
    assert {parameter.dtype for parameter in doubled.parameters()} == {torch.float64}
    torch.testing.assert_close(doubled(DATA.tensors[0].double()).float(), expected.float())


@pytest.mark.slow
def test_a_step_that_passes_by_the_mean_is_refused(tmp_path: Path) -> None:
    files = [tmp_path / "a.ckpt", tmp_path / "b.ckpt"]
    for seed, file in enumerate(files):
        torch.manual_seed(seed)
        module = Direct()
        fit(module, max_epochs=1).save_checkpoint(file)
    with pytest.raises(MisconfigurationException, match=r"validation_step does not call self\(\.\.\.\)"):
        trainer().validate(Ensemble.from_checkpoints(files, Direct), loader(), verbose=False)
    net = Ensemble.from_checkpoints(files, Direct, output="layers")
    (row,) = trainer().validate(net, loader(), verbose=False)
    x, y = DATA.tensors
    members = [Direct.load_from_checkpoint(file).eval() for file in files]
    with torch.no_grad():
        expected = (sum(member(x).softmax(-1) for member in members) / 2).log()
    assert row["loss"] == pytest.approx(F.cross_entropy(expected, y).item(), rel=1e-5)
    with pytest.raises(ValueError, match=r"output='layers.4' must name a submodule with all parameters"):
        Ensemble.from_checkpoints(files, Direct, output="layers.4")
    with pytest.raises(ValueError, match="output must be the name of a submodule of Direct, got 'head'"):
        Ensemble.from_checkpoints(files, Direct, output="head")
    with pytest.raises(TypeError, match="output must be str, got 0"):
        Ensemble.from_checkpoints(files, Direct, output=0)  # type: ignore[arg-type]
    for dim in ("c", True):
        with pytest.raises(TypeError, match=f"dim must be an integer or None, got {dim!r}"):
            Ensemble.from_checkpoints(files, Direct, dim=dim)  # type: ignore[arg-type]


def test_averaged_weights_are_what_ema_has_saved(tmp_path: Path) -> None:
    files = []
    for decay in (0.3, 0.6):
        module = build(Scored)
        files.append(tmp_path / f"{decay}.ckpt")
        fit(module, callbacks=[lt.EMA(decay=decay)]).save_checkpoint(files[-1])
    net, x = Ensemble.from_checkpoints(files, Scored), DATA.tensors[0]
    total = 0
    for file in files:
        averaged = Scored()
        averaged.load_state_dict(torch.load(file, weights_only=True)["state_dict"])
        with torch.no_grad():
            total = total + averaged.eval()(x).softmax(-1) / 2
    torch.testing.assert_close(net(x).softmax(-1), total)


class Odd(Scored):
    def __init__(self, kind: str = "dict") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        logits = super().forward(x)
        return {"dict": {"logits": logits}, "sure": logits.softmax(-1), "one": logits[:, :1], "flat": logits[:, 0],
                "pixels": logits[:, :, None]}[self.kind]  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("dict", MisconfigurationException, "averages tensors, got dict from EnsembleOfOdd"),
        ("sure", ValueError, "must not be probabilities"),
        ("one", ValueError, "two classes or more, got .* use mean='logits'"),
        ("flat", ValueError, r"must be \(B, C\), got \(44,\): pass dim="),
        ("pixels", ValueError, r"must be \(B, C\), got \(44, 2, 1\): pass dim="),
    ],
)
def test_outputs_without_a_mean_are_refused(kind: str, error: type[Exception], message: str, tmp_path: Path) -> None:
    net = Ensemble.from_checkpoints(saved(Odd, tmp_path, kind=lambda: kind), Odd)
    with pytest.raises(error, match=message):
        net(DATA.tensors[0])


def saved(kind: type[L.LightningModule], folder: Path, /, **networks: Any) -> list[Path]:
    return [saved_of(kind, folder / f"{name}.ckpt", **networks) for name in "ab"]


def saved_of(kind: type[L.LightningModule], file: Path, /, **networks: Any) -> Path:
    run = trainer()
    run.strategy.connect(kind(**{key: make() for key, make in networks.items()}))
    run.save_checkpoint(file, weights_only=True)
    return file


class Given(Scored):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.layers = network

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        output = self(batch[0])
        self.log("loss", F.cross_entropy(getattr(output, "logits", output), batch[1]))


def test_a_network_that_is_an_argument_is_not_shared_by_the_members(tmp_path: Path) -> None:
    files, own = saved(Given, tmp_path, network=lambda: nn.Linear(8, 2)), nn.Linear(8, 2)
    before, x = own.weight.clone(), DATA.tensors[0]
    net = Ensemble.from_checkpoints(files, Given, network=own)
    members = [Given.load_from_checkpoint(file, network=nn.Linear(8, 2)).eval() for file in files]
    torch.testing.assert_close(net(x).exp(), sum(member(x).softmax(-1) for member in members) / 2)
    assert torch.equal(own.weight, before)


@dataclass
class Output:
    """As the models of transformers return it."""

    logits: Tensor
    loss: Tensor | None = None


class Returns(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        logits = super().forward(x)
        return Output(logits, logits.sum())


def test_logits_in_a_dataclass_are_averaged_and_a_loss_of_one_member_is_left_out(tmp_path: Path) -> None:
    files = saved(Given, tmp_path, network=lambda: Returns(8, 2))
    found = Ensemble.from_checkpoints(files, Given, network=Returns(8, 2))(DATA.tensors[0])
    expected = Ensemble.from_checkpoints(files, Given, network=nn.Linear(8, 2))(DATA.tensors[0])
    assert torch.equal(found.logits, expected)
    assert found.loss is None


@pytest.mark.slow
@pytest.mark.parametrize("library", ["torchvision", "timm", "transformers"])
def test_networks_of_libraries(library: str, tmp_path: Path) -> None:
    inputs: Tensor = torch.randn(4, 3, 64, 64)
    if library == "torchvision":
        make = partial(importlib.import_module("torchvision").models.resnet18, num_classes=2)
    elif library == "timm":
        make = partial(importlib.import_module("timm").create_model, "resnet10t", num_classes=2)
    else:
        transformers, inputs = importlib.import_module("transformers"), torch.randint(20, (4, 5))
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        make = partial(transformers.BertForSequenceClassification, transformers.BertConfig(vocab_size=20, **sizes))
    files, classes = saved(Given, tmp_path, network=make), torch.tensor([0, 1, 0, 1])
    data = DataLoader(TensorDataset(inputs, classes), 2)
    (found,) = trainer().validate(Ensemble.from_checkpoints(files, Given, network=make()), data, verbose=False)
    with torch.no_grad():
        members = [Given.load_from_checkpoint(file, network=make()).eval()(inputs) for file in files]
    mean = sum(getattr(member, "logits", member).softmax(-1) for member in members) / 2
    assert found["loss"] == pytest.approx(F.nll_loss(mean.log(), classes).item(), rel=1e-4)


def test_wrong_files_are_refused(files: list[Path], tmp_path: Path) -> None:
    for paths in (files[:1], [files[0], files[1], files[0]]):
        with pytest.raises(ValueError, match="paths must be two files or more, each once"):
            Ensemble.from_checkpoints(paths, Wide)
    with pytest.raises(ValueError, match="mean must be one of 'probabilities', 'logits', got 'votes'"):
        Ensemble.from_checkpoints(files, Wide, mean="votes")  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match="There is no file"):
        Ensemble.from_checkpoints([*files, tmp_path / "none.ckpt"], Wide)
    torch.save({"state_dict": {}, "hyper_parameters": Scored()}, tmp_path / "unsafe.ckpt")
    with pytest.raises(ValueError, match=r"unsafe\.ckpt was not read: it holds"):
        Ensemble.from_checkpoints([*files, tmp_path / "unsafe.ckpt"], Wide)


class AnyArgument(Scored):
    """Whose arguments have no types, so that LightningCLI's function makes an object of what names a class."""

    def __init__(self, net: Any = None, width=3) -> None:
        super().__init__()
        self.given = net, width


def with_hyperparameters(file: Path, saved: Path, **values: Any) -> Path:
    torch.save({**torch.load(saved, weights_only=True), "hyper_parameters": values}, file)
    return file


@pytest.mark.parametrize("argument", ["net", "width"])
def test_hyperparameters_that_name_code_are_refused(argument: str, tmp_path: Path) -> None:
    good = saved_of(AnyArgument, tmp_path / "good.ckpt")
    call = {"class_path": "os.system", "init_args": {"command": f"touch {tmp_path / 'mark'}"}}
    by = "lightning.pytorch.cli.instantiate_module"
    bad = with_hyperparameters(tmp_path / "bad.ckpt", good, _instantiator=by, **{argument: call})
    with pytest.raises(ValueError, match=rf"bad\.ckpt: its hyperparameter {argument}\.class_path names a class"):
        Ensemble.from_checkpoints([good, bad], AnyArgument)
    folds = [Fold([0], [1]), Fold([1], [0])]
    result = CrossValidation([{}, {}], None, [[bad, good], [good, bad]], folds)
    with pytest.raises(ValueError, match=r"bad\.ckpt: its hyperparameter"):
        soup_and_ensemble(result, AnyArgument, DATA, lambda fold, folder: trainer())
    assert not (tmp_path / "mark").exists()
    AnyArgument.load_from_checkpoint(bad, weights_only=True)
    assert (tmp_path / "mark").exists()  # as a loader that trusts it shows


def test_what_lightning_cli_saves_is_loaded_with_the_arguments_that_are_given(tmp_path: Path) -> None:
    good = saved_of(AnyArgument, tmp_path / "a.ckpt")
    own = {"_instantiator": "lightning.pytorch.cli.instantiate_module", "_class_path": "os.system"}
    other = with_hyperparameters(tmp_path / "b.ckpt", good, **own, net={"class_path": "os.system"}, width=4)
    with pytest.raises(ValueError, match=r"hyperparameter _instantiator names .* pass all arguments .*, width=\."):
        Ensemble.from_checkpoints([good, other], AnyArgument, net=1)
    made = Ensemble.from_checkpoints([good, other], AnyArgument, net=1, width=2)
    assert [made.given, made.ensemble_members[0].given] == [(1, 2), (1, 2)]


def test_what_is_no_checkpoint_of_lightning_is_named(files: list[Path], tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "weights.ckpt")
    with pytest.raises(ValueError, match=r"weights\.ckpt is no checkpoint of Lightning: it has w\."):
        Ensemble.from_checkpoints([*files, tmp_path / "weights.ckpt"], Wide)


def test_it_is_not_trained(files: list[Path]) -> None:
    with pytest.raises(MisconfigurationException, match="not trained"):
        fit(Ensemble.from_checkpoints(files, Wide))


def test_classes_in_another_dimension() -> None:
    logits = [torch.randn(2, 3, 4), torch.randn(2, 3, 4)]
    for dim in (1, -1, 2):
        expected = sum(each.softmax(dim) for each in logits) / 2
        torch.testing.assert_close(mean_logits(logits, dim=dim).exp(), expected)
    with pytest.raises(ValueError, match=r"dim must be a dimension of logits \(2, 3, 4\), got 3"):
        mean_logits(logits, dim=3)
    sure = mean_logits([torch.tensor([[1e4, -1e4]]), torch.tensor([[-1e4, 1e4]])])
    torch.testing.assert_close(sure.exp(), torch.tensor([[0.5, 0.5]]))


# -- against a soup ---------------------------------------------------------------------------------------------------


def three_best(fold: int, folder: Path) -> L.Trainer:
    best = ModelCheckpoint(folder, monitor="accuracy", mode="max", save_top_k=3)
    return L.Trainer(**{**quiet, "enable_checkpointing": True, "max_epochs": 3, "callbacks": [best]})


@pytest.mark.slow
def test_soup_and_ensemble_on_the_same_folds(tmp_path: Path) -> None:
    result = run(tmp_path / "cv", make_trainer=three_best, splitter=2, predict=False)
    assert [len(members) for members in result.members] == [3] * 2
    both = soup_and_ensemble(result, Scored, DATA, lambda fold, folder: trainer(), loader=make_loader)
    assert both.metrics["best"] == [pytest.approx(row) for row in result.metrics]
    for k, fold in enumerate(result.folds):
        x, y = (tensor[fold.validation] for tensor in DATA.tensors)
        average_checkpoints(result.members[k], tmp_path / "soup.ckpt", force=True)
        soup = Scored.load_from_checkpoint(tmp_path / "soup.ckpt").eval()
        members = [Scored.load_from_checkpoint(path).eval() for path in result.members[k]]
        with torch.no_grad():
            expected = {
                "soup": F.cross_entropy(soup(x), y),
                "ensemble": F.nll_loss((sum(member(x).softmax(-1) for member in members) / 3).log(), y),
            }
        for name, loss in expected.items():
            assert both.metrics[name][k]["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert both.overlap == result.overlap
    assert "ensemble" in str(both)
    with pytest.raises(ValueError, match="got one of fold 0: pass ModelCheckpoint"):
        soup_and_ensemble(replace(result, members=[each[:1] for each in result.members]), Scored, DATA, make_trainer)
    with pytest.raises(ValueError, match="dataset must be that of the cross-validation, got 10 samples"):
        soup_and_ensemble(result, Scored, list(DATA)[:10], make_trainer)
