"""The tasks: fixed splits, wrong labels in the training part alone, networks that learn them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import lightning as L
import pytest
import torch
from torch import nn

import lightning_tricks as lt
from lightning_tricks.examples import digits, glosses, textures
from lightning_tricks.examples.tasks import Classifier, SharpClassifier, Split, TaskData, mislabel
from lightning_tricks_cli.runs.demo import small_runs
from tests.nets import trainer as quiet_trainer


class Task(NamedTuple):
    load: Callable[[float], Split]
    data: type[TaskData]
    network: Callable[[], nn.Module]
    classes: int
    sizes: tuple[int, int, int]
    optimizer: str
    lr: float
    epochs: int
    learnt: float  # the least test accuracy


TASKS = {
    "digits": Task(digits.load_digits, digits.DigitsData, digits.network, 10, (900, 300, 597), "sgd", 0.1, 8, 0.9),
    "textures": Task(
        textures.load_textures, textures.TexturesData, textures.network, 3, (192, 192, 384), "sgd", 0.1, 25, 0.8
    ),
    "glosses": Task(
        *(glosses.load_glosses, glosses.GlossesData, glosses.GlossTransformer, 5, (2000, 1000, 4000)),
        *("adamw", 3e-3, 3, 0.6),
    ),
}


@pytest.mark.parametrize("task", TASKS.values(), ids=list(TASKS))
def test_the_split_is_fixed_and_only_training_labels_are_wrong(task: Task) -> None:
    clean, noisy = task.load(0.0), task.load(0.4)
    assert tuple(len(labels) for _, labels in clean.values()) == task.sizes
    for part in clean:
        assert torch.equal(clean[part][0], noisy[part][0])
        assert clean[part][1].unique().tolist() == list(range(task.classes))
    assert all(torch.equal(clean[part][1], noisy[part][1]) for part in ("val", "test"))
    wrong = clean["train"][1] != noisy["train"][1]
    assert 0.35 < wrong.float().mean() < 0.45
    assert all(torch.equal(*pair) for pair in zip(noisy["train"], task.load(0.4)["train"], strict=True))


@pytest.mark.parametrize(
    "task",
    [pytest.param(task, id=name, marks=[pytest.mark.slow] * (name != "digits")) for name, task in TASKS.items()],
)
def test_the_network_learns_it_from_its_data_module(task: Task) -> None:
    L.seed_everything(0, verbose=False)
    module, data = Classifier(task.network(), task.lr, task.optimizer), task.data()
    with small_runs():
        trainer = quiet_trainer(max_epochs=task.epochs)
        trainer.fit(module, datamodule=data)
        validated = trainer.callback_metrics["val_accuracy"].item()
        (tested,) = trainer.test(module, datamodule=data, verbose=False)
    assert tested["test_accuracy"] > task.learnt
    assert validated == pytest.approx(tested["test_accuracy"], abs=0.12)


def test_wrong_labels_are_the_share_asked_for_and_every_other_class() -> None:
    labels = torch.zeros(10_000, dtype=torch.long)
    noisy = mislabel(labels, 0.3, classes=4, generator=torch.Generator().manual_seed(0))
    assert (noisy.bincount(minlength=4) / 10_000).tolist() == pytest.approx([0.7, 0.1, 0.1, 0.1], abs=0.015)
    assert torch.equal(mislabel(labels, 0.0, classes=4, generator=torch.Generator()), labels)
    with pytest.raises(ValueError, match="noise"):
        digits.DigitsData(noise=1.5)


def test_patches_of_a_photograph_are_in_one_part_only() -> None:
    parts = textures.load_textures(0.0)
    images = torch.cat([images for images, _ in parts.values()])
    assert images.shape == (768, 1, 32, 32)
    assert len(images.flatten(1).unique(dim=0)) == 768
    assert parts["train"][0].mean().item() == pytest.approx(0, abs=1e-4)
    assert all(labels.bincount().tolist() == [len(labels) // 3] * 3 for _, labels in parts.values())


def test_the_subjects_of_glosses_are_those_of_their_synsets() -> None:
    found = glosses.read_glosses()
    assert len(found) == 20_663
    assert found["any mature animal"] == "animal"
    assert found["a fabric woven from goat hair and camel hair"] == "artifact"  # the first of them
    assert found["a dish or dessert that is formed in or on a mold"] == "food"
    assert found["the chief person responsible for a zoological garden"] == "person"
    assert found["microscopic plants; bacteria are often considered to be microflora"] == "plant"
    assert "a grain of barley" not in found  # food and plant


def test_words_outside_the_training_rows_are_unknown() -> None:
    vocabulary = {"a": 2, "dog": 3}
    assert glosses.tokens("A dog's life", vocabulary)[:5] == [2, 3, 1, 1, 0]
    assert len(glosses.tokens("dog " * 99, vocabulary)) == glosses.LENGTH
    parts = glosses.load_glosses(0.0)
    assert parts["train"][0].max() == glosses.WORDS - 1
    assert all((texts[:, 0] != glosses.PADDING).all() for texts, _ in parts.values())


def test_padding_does_not_change_what_is_predicted() -> None:
    net = glosses.GlossTransformer().eval()
    text = torch.tensor([[5, 6, 7] + [0] * 13])
    with torch.no_grad():
        before = net(text)
        net.words.weight[glosses.PADDING] = 9.0
        torch.testing.assert_close(net(text), before)


def test_the_sharp_classifier_takes_the_settings_of_both() -> None:
    module = SharpClassifier(nn.Linear(2, 2), lt.SAM(rho=0.2), lr=0.3, weight_decay=0.1)
    assert (module.sam.rho, module.lr, module.weight_decay) == (0.2, 0.3, 0.1)
    assert SharpClassifier(nn.Linear(2, 2)).sam == lt.SAM()


@pytest.mark.parametrize(
    ("package", "load"), [("sklearn.datasets", digits.load_digits), ("skimage", textures.load_textures)]
)
def test_what_is_missing_is_named(
    package: str, load: Callable[[float], Split], monkeypatch: pytest.MonkeyPatch
) -> None:
    digits.read_digits.cache_clear()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r"pip install 'lightning-tricks\["):
        load(0.0)


def test_missing_timm_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    glosses.read_glosses.cache_clear()
    monkeypatch.setitem(sys.modules, "timm.data", None)
    with pytest.raises(ImportError, match=r"pip install 'lightning-tricks\[vision\]"):
        glosses.load_glosses(0.0)
