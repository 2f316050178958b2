"""The report of suspect labels: its order, table, picture and file, and predictions of other modules in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

import lightning_tricks as lt
from lightning_tricks.evaluation import LabelReport
from tests.nets import PlainNet, build, data, trainer

LOGITS = torch.tensor([[2.0, 0.0, 1.0], [0.5, 1.0, 0.0], [3.0, 0.0, 2.5]])


def test_margins_and_probabilities_are_those_of_a_loop() -> None:
    labels = torch.tensor([0, 0, 1])
    report = lt.label_report(LOGITS, labels)
    for row, label in enumerate(labels.tolist()):
        logits = LOGITS[row].tolist()
        others = {value: place for place, value in enumerate(logits) if place != label}
        assert float(report.margin[row]) == pytest.approx(logits[label] - max(others))
        assert int(report.other[row]) == others[max(others)]
        assert float(report.confidence[row]) == pytest.approx(float(LOGITS[row].softmax(0)[label]))
        assert float(report.loss[row]) == pytest.approx(float(F.cross_entropy(LOGITS[row], labels[row])))
    assert report.suspects() == [2, 1]
    assert [report.suspects(share) for share in (0.0, 1 / 3, 1.0)] == [[], [2], [2, 1, 0]]


def test_the_table_begins_with_the_most_suspect_sample() -> None:
    lines = str(lt.label_report(LOGITS, torch.tensor([0, 0, 1]))).splitlines()
    assert lines[0] == "3 samples, 2 of them with a mean margin below 0; the most suspect ones:"
    assert [line.split()[0] for line in lines[1:]] == ["sample", "2", "1", "0"]
    many = str(lt.label_report(torch.randn(100, 3), torch.zeros(100).long())).splitlines()
    assert len(many) == 22


def test_the_picture_is_a_data_map(tmp_path: Path) -> None:
    report = lt.label_report(LOGITS, torch.tensor([0, 0, 1]))
    points: Any = report.plot()[1].collections[0].get_offsets()
    assert points.tolist() == pytest.approx(torch.stack([report.variability, report.confidence], 1).numpy())
    other, mine = plt.subplots()
    assert report.plot(mine)[0] is other
    plt.close("all")


def test_the_file_has_the_columns_from_the_most_suspect_sample_on(tmp_path: Path) -> None:
    report = lt.label_report(LOGITS, torch.tensor([0, 0, 1]))
    report.to_json(tmp_path / "a.json")
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["sample"] == [2, 1, 0]
    assert found["label"] == [1, 0, 0]
    assert found["margin"] == pytest.approx([-3.0, -0.5, 1.0])
    unknown = LabelReport(**{**vars(report), "margin": torch.full((3,), torch.nan)})
    unknown.to_json(tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text())["margin"] == [None] * 3


def test_out_of_fold_predictions_find_a_wrong_label(tmp_path: Path) -> None:
    x, y = data(120)[:]
    y = (x[:, 0] > 0).long()
    y[[7, 70]] = 1 - y[[7, 70]]
    result = lt.cross_validate(
        lambda _: build(PlainNet),
        TensorDataset(x, y),
        lambda fold, folder: trainer(max_epochs=20, default_root_dir=folder),
        splitter=3,
        folder=tmp_path,
    )
    assert {7, 70} <= {*lt.label_report(result.predictions, y).suspects(0.2)}


@pytest.mark.parametrize(
    ("predictions", "labels", "error", "message"),
    [
        (
            LOGITS,
            torch.tensor([0, 0]),
            ValueError,
            r"must be of the same samples, C at least 2, got \(3, 3\) and \(2,\)",
        ),
        (LOGITS[:, :1], torch.tensor([0, 0, 0]), ValueError, "C at least 2"),
        (LOGITS, torch.tensor([0, 0, 3]), ValueError, r"labels must be in \[0, 3\), got 0 to 3"),
        (LOGITS, torch.tensor([0.0, 0.0, 1.0]), TypeError, "labels must be integers"),
        (LOGITS.long(), torch.tensor([0, 0, 1]), TypeError, "predictions logits, got torch.int64 and torch.int64"),
        ([[0.0, 1.0]], torch.tensor([0]), TypeError, "predictions must be Tensor"),
    ],
)
def test_wrong_arguments(predictions: Any, labels: Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        lt.label_report(predictions, labels)
