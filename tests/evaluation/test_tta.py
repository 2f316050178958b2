"""tta: the mean over views in every stage, from the same weights, and a module that stays as it is."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import lightning_tricks as lt
from tests.evaluation.recipes import DATA, Scored
from tests.evaluation.test_ensemble import Output, saved
from tests.nets import build, fit, loader, trainer
from tests.ranks import run_cases


def negated(x: Tensor) -> Tensor:
    return -x


def flipped(x: Tensor) -> Tensor:
    return x.flip(-1)


VIEWS = [nn.Identity(), flipped, negated]


class Measured(Scored):
    """Has dropout, which its own forward asks about, BatchNorm, a metric object and hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.metric = MulticlassAccuracy(2, average="micro")
        self.ends = 0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(self.norm(x), 0.5, self.training))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        logits = self(batch[0])
        self.metric(logits, batch[1])
        self.log("metric", self.metric)
        self.log("nll", F.cross_entropy(logits, batch[1]))

    def on_test_epoch_end(self) -> None:
        self.ends += 1


def trained(kind: Any = Measured) -> Any:
    module = build(kind)
    fit(module, max_epochs=2)
    return module


def by_hand(module: Any, x: Tensor, mean: str) -> Tensor:
    module = copy.deepcopy(module).eval()
    with torch.no_grad():
        outputs = [module(view(x)) for view in VIEWS]
    if mean == "logits":
        return sum(outputs) / len(outputs)
    return (sum(each.softmax(-1) for each in outputs) / len(outputs)).log()


@pytest.mark.parametrize("mean", ["probabilities", "logits"])
def test_all_stages_see_the_mean(mean: Any) -> None:
    module, (x, y) = trained(), DATA.tensors
    expected = by_hand(module, x, mean)
    seen, run = lt.tta(module, VIEWS, mean=mean), trainer()
    assert isinstance(seen, Measured)
    torch.testing.assert_close(torch.cat(run.predict(seen, loader())), expected)
    (row,) = run.test(seen, loader(), verbose=False)
    assert row["metric"] == pytest.approx((expected.argmax(-1) == y).float().mean().item())
    assert row["nll"] == pytest.approx(F.cross_entropy(expected, y).item(), rel=1e-5)
    assert (seen.ends, module.ends) == (1, 1)  # as after a test of the module itself
    (row,) = run.validate(seen, loader(), verbose=False)
    assert row["loss"] == pytest.approx(F.cross_entropy(expected, y).item(), rel=1e-5)


def state(module: Any) -> Any:
    parts = {name: (part.training, dict(part._forward_hooks)) for name, part in module.named_modules()}
    attributes = {name: value for name, value in vars(module).items() if name != "_trainer"}
    return parts, [*attributes], type(module), {key: value.clone() for key, value in module.state_dict().items()}


def test_the_module_stays_as_it_is_and_shares_its_weights() -> None:
    module = trained()
    module.layers[0].eval()
    before, alone = state(module), trainer().validate(module, loader(), verbose=False)
    seen = lt.tta(module, VIEWS)
    trainer().test(seen, loader(), verbose=False)
    after = state(module)
    assert before[:3] == after[:3]
    assert all(torch.equal(before[3][key], after[3][key]) for key in before[3])
    assert trainer().validate(module, loader(), verbose=False) == alone
    x = DATA.tensors[0]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.5)
    torch.testing.assert_close(seen.eval()(x), by_hand(module, x, "probabilities"))
    fit(module.train())
    torch.testing.assert_close(seen.eval()(x), by_hand(module, x, "probabilities"))


class Notes(Scored):
    """A forward hook, which is a method of the module, writes what the step reads, and asks where training is."""

    def __init__(self) -> None:
        super().__init__()
        self.noted, self.hook = -1.0, self.layers[0].register_forward_hook(self.note)

    def note(self, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        assert not self.trainer.training
        self.noted = output.mean().item()
        self.log("hooked", self.noted)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("noted", self(batch[0]).mean() * 0 + self.noted)


def test_a_hook_that_is_a_method_of_the_module_writes_what_a_step_reads() -> None:
    module = build(Notes)
    alone = trainer().validate(module, loader(), verbose=False)
    module.noted = -1.0
    assert trainer().validate(lt.tta(module, [nn.Identity()], mean="logits"), loader(), verbose=False) == alone
    assert module.noted != -1
    assert "means" not in vars(module)


def test_the_same_view_twice_is_the_module() -> None:
    module = trained().eval()
    x = DATA.tensors[0]
    assert torch.equal(lt.tta(module, [nn.Identity()] * 2, mean="logits")(x), module(x))
    torch.testing.assert_close(lt.tta(module, [nn.Identity()])(x), module(x).log_softmax(-1))


def test_hooks_of_the_module_run_for_each_view() -> None:
    module, (x, _) = trained().eval(), DATA.tensors
    expected = (sum((module(view(x)) / 3).softmax(-1) for view in VIEWS) / 3).log()
    handle = module.register_forward_hook(lambda module, args, output: output / 3)
    seen = lt.tta(module, VIEWS)
    torch.testing.assert_close(seen(x), expected)
    handle.remove()
    torch.testing.assert_close(seen(x), by_hand(module, x, "probabilities"))


class Bypasses(Scored):
    """Calls itself once, and takes its loss from one view."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self(batch[0])
        self.log("loss", F.cross_entropy(self.forward(batch[0]), batch[1]))


PASSES_BY = r"averages .* passes by it: call self\(\.\.\.\)\."


def test_a_step_that_calls_itself_and_takes_its_loss_past_the_mean_is_refused(tmp_path: Any) -> None:
    module = build(Bypasses)
    trainer().validate(module, loader(), verbose=False)
    averaged = [lt.tta(module, VIEWS), lt.Ensemble.from_checkpoints(saved(Bypasses, tmp_path), Bypasses)]
    for seen, trick in zip(averaged, ["tta", "Ensemble"], strict=True):
        with pytest.raises(MisconfigurationException, match=f"^{trick} {PASSES_BY}"):
            trainer().validate(seen, loader(), verbose=False)
        assert seen(DATA.tensors[0]).shape == (44, 2)


def test_a_class_may_ask_something_of_its_subclasses() -> None:
    tasks = []

    class Asks(Scored):
        def __init_subclass__(cls, *, task: str) -> None:
            tasks.append(task)

    class Digits(Asks, task="digits"):
        pass

    assert isinstance(lt.tta(build(Digits), VIEWS), Digits)
    assert tasks == ["digits"], "the class of the views is none of the user's"


def test_views_of_an_ensemble(tmp_path: Any) -> None:
    files = saved(Scored, tmp_path)
    members = [Scored.load_from_checkpoint(file, weights_only=True).eval() for file in files]
    x = DATA.tensors[0]
    both = lt.tta(lt.Ensemble.from_checkpoints(files, Scored), VIEWS)
    outputs = [member(view(x)).softmax(-1) for member in members for view in VIEWS]
    expected = (sum(outputs) / 6).log()
    torch.testing.assert_close(both(x), expected)
    torch.testing.assert_close(pickle.loads(pickle.dumps(both))(x), expected)
    (row,) = trainer().validate(both, loader(), verbose=False)
    assert row["loss"] == pytest.approx(F.cross_entropy(expected, DATA.tensors[1]).item(), rel=1e-5)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_it_can_be_copied(copied: Any) -> None:
    module, (x, _) = trained(), DATA.tensors
    seen = lt.tta(module, VIEWS).eval()
    expected = seen(x)
    other = copied(seen)
    with torch.no_grad():
        for parameter in seen.parameters():
            parameter.zero_()
    assert torch.equal(other(x), expected)
    assert isinstance(other, Measured)
    assert type(other).__name__ == type(seen).__name__ == "TTAOfMeasured"


# -- outputs ----------------------------------------------------------------------------------------------------------


class Segments(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 5, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])


def test_outputs_with_places_are_turned_back() -> None:
    module, x = Segments(), torch.randn(6, 3, 8, 8)
    batches = DataLoader(TensorDataset(x), 3)
    seen = lt.tta(module, [nn.Identity(), (flipped, flipped)])
    with torch.no_grad():
        expected = ((module(x).softmax(1) + module(x.flip(-1)).softmax(1).flip(-1)) / 2).log()
    torch.testing.assert_close(torch.cat(trainer().predict(seen, batches)), expected)
    with pytest.raises(MisconfigurationException, match=r"outputs of shape \(3, 5, 8, 8\), whose places .* pass pairs"):
        trainer().predict(lt.tta(module, [nn.Identity(), flipped]), batches)
    crop = lambda x: x[..., :4]  # noqa: E731
    with pytest.raises(
        MisconfigurationException, match=r"got \(3, 5, 8, 8\) for a view and \(3, 5, 8, 4\) for another"
    ):
        trainer().predict(lt.tta(module, [nn.Identity(), (crop, nn.Identity())]), batches)


def test_crops_of_images_that_are_larger_than_the_network_takes() -> None:
    class Sized(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3 * 4 * 4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.flatten(1))

    module, x = Sized(), torch.randn(2, 3, 6, 6)
    corners = [lambda x: x[..., :4, :4], lambda x: x[..., 2:, 2:], lambda x: x[..., :4, :4].flip(-1)]
    expected = (sum(module(view(x)).softmax(-1) for view in corners) / 3).log()
    torch.testing.assert_close(lt.tta(module, corners)(x), expected)


class Named(L.LightningModule):
    """As a network of transformers, whose arguments have names and whose output is an object."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.layer(pixel_values)
        return Output(logits, None if labels is None else F.cross_entropy(logits, labels))


def test_arguments_by_name_and_outputs_with_logits() -> None:
    module, (x, y) = Named(), DATA.tensors
    found = lt.tta(module, VIEWS)(pixel_values=x, labels=y)
    expected = (sum(module(view(x)).logits.softmax(-1) for view in VIEWS) / 3).log()
    torch.testing.assert_close(found.logits, expected)
    assert found.loss is None
    torch.testing.assert_close(lt.tta(module, VIEWS)(x, labels=y).logits, expected)


class InPlace(Scored):
    """Its first layer changes its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2))


@pytest.mark.parametrize("kind", [Scored, InPlace])
def test_views_and_layers_may_work_in_place(kind: Any) -> None:
    module, x = build(kind).eval(), DATA.tensors[0].clone()
    expected = by_hand(module, x, "logits") if kind is Scored else sum(module(view(x.clone())) for view in VIEWS) / 3
    views = [nn.Identity(), Tensor.neg_, flipped]
    torch.testing.assert_close(lt.tta(module, views, mean="logits")(x), expected)
    assert x.equal(DATA.tensors[0])


class Whole(NamedTuple):
    logits: Tensor
    hidden: Tensor


# -- what is refused --------------------------------------------------------------------------------------------------


def test_a_step_that_passes_by_the_mean_is_refused() -> None:
    class Direct(Scored):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", F.cross_entropy(self.layers(batch[0]), batch[1]))

    with pytest.raises(
        MisconfigurationException, match=r"tta averages .* validation_step does not call self\(\.\.\.\)"
    ):
        trainer().validate(lt.tta(Direct(), VIEWS), loader(), verbose=False)


def test_wrong_values_are_refused() -> None:
    module = Scored()
    for views, message in (
        (3, "list of functions, got int"),
        ([3], "got 3"),
        ([(flipped, None)], "pairs of functions"),
    ):
        with pytest.raises(TypeError, match=message):
            lt.tta(module, views)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one function or more, got none"):
        lt.tta(module, [])
    with pytest.raises(ValueError, match="mean must be one of 'probabilities', 'logits', got 'votes'"):
        lt.tta(module, VIEWS, mean="votes")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="module must be LightningModule, got"):
        lt.tta(nn.Linear(8, 2), VIEWS)  # type: ignore[arg-type]
    with pytest.raises(MisconfigurationException, match="has views already: name all of them in one"):
        lt.tta(lt.tta(module, VIEWS), VIEWS)
    with pytest.raises(MisconfigurationException, match="not trained: fit the module itself"):
        fit(lt.tta(module, VIEWS))
    module.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(MisconfigurationException, match=r"forward was replaced by .* cannot call for each view"):
        lt.tta(module, VIEWS)


@pytest.mark.parametrize(
    ("output", "error", "message"),
    [
        (lambda x: {"logits": x}, MisconfigurationException, "averages tensors, got dict from forward"),
        (
            lambda x: Whole(x, x),
            MisconfigurationException,
            r"Whole\(logits=...\) cannot be made .* logits from forward",
        ),
        (lambda x: x.softmax(-1), ValueError, "must not be probabilities"),
        (lambda x: x[:, :1], ValueError, "two classes or more, got .* use mean='logits'"),
    ],
)
def test_outputs_without_a_mean_are_refused(output: Any, error: type[Exception], message: str) -> None:
    class Odd(Scored):
        def forward(self, x: Tensor) -> Any:
            return output(super().forward(x))

    with pytest.raises(error, match=message):
        lt.tta(Odd(), VIEWS)(DATA.tensors[0])


# -- several ranks ----------------------------------------------------------------------------------------------------


class Bare(Scored):
    """Has no statistics of batches, which ranks of ZeRO do not share."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2))


def on_ranks(case: str) -> Any:
    torch.manual_seed(0)

    def settings() -> dict[str, Any]:
        if case == "zero":
            return {"devices": 2, **lt.preset("zero1_bf16", precision="32-true")}
        return {"accelerator": "cpu", "devices": 2, "strategy": "ddp"}

    module = Bare()
    fit(module, **settings())
    expected = F.cross_entropy(by_hand(module, DATA.tensors[0], "probabilities"), DATA.tensors[1])
    (row,) = trainer(**settings()).validate(lt.tta(module, VIEWS), loader(batch_size=11), verbose=False)
    if case == "ddp":
        with pytest.raises(MisconfigurationException, match=f"^tta {PASSES_BY}"):
            trainer(**settings()).validate(lt.tta(Bypasses(), VIEWS), loader(), verbose=False)
    return row["loss"], float(expected)


@pytest.mark.parametrize("case", ["ddp", pytest.param("zero", marks=pytest.mark.slow)])
def test_ranks_see_the_mean_after_a_fit_of_theirs(case: str) -> None:
    if case == "zero":
        pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    for found, expected in run_cases(partial(on_ranks), [case])[case]:
        assert found == pytest.approx(expected, rel=1e-5)
