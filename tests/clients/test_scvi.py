"""scvi-tools: its models train themselves, by a training plan that is a module."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import scvi
import torch.nn.functional as F
from torch import Tensor

from tests.clients import page
from tests.clients.base import FLOAT8, QUIET, Kind
from tests.clients.oracles import Client


class Cells(Client):
    """Synthetic counts of genes in cells. The loss is a bound on the likelihood of the inputs: there is no target."""

    inputs = "X"
    target = "labels"
    refused = {
        "Mixup": "no loss of .*TrainingPlan.training_step was computed from the target",
        "HardExampleFilter": "computed no loss of torch.nn.functional from the target",
        'HardExampleFilter(mode="loss")': "no loss of .*TrainingPlan.training_step was computed from the target",
        "FitsMemory": "cannot count the targets|got AdversarialTrainingPlan with automatic_optimization",
    }
    monitor = "elbo_validation"
    own: dict[str, Any] = {}  # arguments of train()
    blocks = "fc_layers"
    none = {"find_lr": "train() makes the Trainer and the module", "resume": "train() has no resume"}

    def train(self, module: Any, *callbacks: Any, ckpt_path: Any = None, **settings: Any) -> Any:
        scvi.settings.logging_dir = Path.cwd()  # otherwise that of the import
        settings = {**QUIET, "logger": None, "check_val_every_n_epoch": 1, **settings}
        split = {"batch_size": 40, "train_size": 0.8, "shuffle_set_split": False}
        module.train(**split, **self.own, callbacks=list(callbacks), early_stopping=False, **settings)
        return module.trainer

    def recast(self, module: Any, kind: Callable[[Kind], Kind]) -> None:
        module._training_plan_cls = kind(module._training_plan_cls)


class TestSCVI(Cells):
    model = "SCVI"
    refused = {**Cells.refused, **FLOAT8}

    def module(self) -> Any:
        cells = scvi.data.synthetic_iid(batch_size=60, n_genes=20)
        scvi.model.SCVI.setup_anndata(cells, batch_key="batch", labels_key="labels")
        return scvi.model.SCVI(cells, n_hidden=16, n_latent=4)


class TestSCANVI(Cells):
    """A batch is one of all cells and one of cells with labels, of which a classifier's loss is a part of the loss."""

    model = "SCANVI"
    inputs = "1.X"
    target = "1.labels"
    output = r"^module\.classifier\."
    refused = {**FLOAT8, "HardExampleFilter": 'mode="loss"'}  # which would cut the other cells as well

    def module(self) -> Any:
        cells = scvi.data.synthetic_iid(batch_size=60, n_genes=20)
        scvi.model.SCANVI.setup_anndata(cells, "labels", "label_2", batch_key="batch")
        sizes = {"n_hidden": 16, "n_latent": 4}
        return scvi.model.SCANVI(cells, dropout_rate=0.0, classifier_parameters={"dropout_rate": 0.0}, **sizes)

    def sample_losses(self, module: Any, batch: Any) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(F, "cross_entropy", partial(F.cross_entropy, reduction="none"))
            return module.module.classification_loss(batch[1])[0]

    def hard_loss(self, module: Any, batch: Any, plain: Callable[[Any], Tensor]) -> Tensor:
        """The classifier's part is of the harder half."""
        own = F.cross_entropy
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(F, "cross_entropy", lambda x, y: own(x, y, reduction="none").topk(len(y) // 2).values.mean())
            return plain(batch)


class TestTOTALVI(Cells):
    """Two optimizers in manual optimization."""

    model = "TOTALVI"
    steps = 2
    own = {"adversarial_classifier": True, "reduce_lr_on_plateau": False}  # it steps a schedule in validation
    late = "with two optimizers a loss of the target may follow to the end of the batch, which is trained on by then"
    defects = {"Mixup": f"late: {late}", 'HardExampleFilter(mode="loss")': f"late: {late}"}
    refused = {
        **Cells.refused,
        "SAMCallback": "SAMCallback works inside automatic optimization",
        "SAMMixin": "optimizes manually and never called self.sam_backward",
        'optimizer("muon")': "AdversarialTrainingPlan has none to train",  # in the second optimizer
        "ScheduleFree": "which must not step the optimizers",
        "StepInBackward": "works in automatic optimization",
        "HardExampleFilter": 'use mode="loss"',
        "LRSchedule": "LRSchedule needs automatic optimization",
        "RewindOnSpike": "RewindOnSpike cannot work with AdversarialTrainingPlan.automatic_optimization=False",
        "BatchSizeWarmup": "BatchSizeWarmup cannot work with AdversarialTrainingPlan.automatic_optimization=False",
    }

    def module(self) -> Any:
        cells = scvi.data.synthetic_iid(batch_size=60, n_genes=20, n_proteins=5)
        scvi.model.TOTALVI.setup_anndata(
            cells,
            batch_key="batch",
            protein_expression_obsm_key="protein_expression",
            protein_names_uns_key="protein_names",
        )
        return scvi.model.TOTALVI(cells, n_latent=4)

    def optimizers(self, make: Callable[[str], Any]) -> Any:
        return [make(r"^module\."), make(r"^adversarial_classifier\.")]


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cells = scvi.data.synthetic_iid(batch_size=60, n_genes=20)
    scvi.model.SCVI.setup_anndata(cells)
    assert page.run("scvi-tools", cells=cells)["latent"].shape[0] == len(cells)
