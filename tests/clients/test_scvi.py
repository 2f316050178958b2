"""scvi-tools: its models train themselves, by a training plan that is a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import scvi

from tests.clients.oracles import QUIET, Client, Kind


class Cells(Client):
    """Synthetic counts of genes in cells. The loss is a bound on the likelihood of the inputs: there is no target."""

    inputs = "X"
    target = "labels"
    refused = {
        "Mixup": "no loss of .*TrainingPlan.training_step was computed from the target",
        "HardExampleFilter": "computed no loss of torch.nn.functional from the target",
        'HardExampleFilter(mode="loss")': "no loss of .*TrainingPlan.training_step was computed from the target",
    }
    monitor = "elbo_validation"
    blocks = "fc_layers"
    none = {"find_lr": "train() makes the Trainer and the module", "resume": "train() has no resume"}

    def train(self, module: Any, *callbacks: Any, ckpt_path: Any = None, **settings: Any) -> Any:
        settings = {**QUIET, "logger": None, "check_val_every_n_epoch": 1, **settings}
        own = {"batch_size": 40, "train_size": 0.8, "shuffle_set_split": False, "early_stopping": False}
        module.train(**own, callbacks=list(callbacks), **settings)
        return module.trainer

    def recast(self, module: Any, kind: Callable[[Kind], Kind]) -> None:
        module._training_plan_cls = kind(module._training_plan_cls)


class TestSCVI(Cells):
    model = "SCVI"

    def module(self) -> Any:
        cells = scvi.data.synthetic_iid(batch_size=60, n_genes=20)
        scvi.model.SCVI.setup_anndata(cells, batch_key="batch", labels_key="labels")
        return scvi.model.SCVI(cells, n_hidden=16, n_latent=4)


class TestSCANVI(Cells):
    """A batch is one of all cells and one of cells with labels, of which a classifier's loss is a part of the loss."""

    model = "SCANVI"
    inputs = "1.X"
    target = "1.labels"
    refused = {}

    def module(self) -> Any:
        cells = scvi.data.synthetic_iid(batch_size=60, n_genes=20)
        scvi.model.SCANVI.setup_anndata(cells, "labels", "label_2", batch_key="batch")
        return scvi.model.SCANVI(cells, n_hidden=16, n_latent=4)


class TestTOTALVI(Cells):
    """Two optimizers in manual optimization."""

    model = "TOTALVI"
    steps = 2
    refused = {
        **Cells.refused,
        "SAM": "SAMCallback works inside automatic optimization",
        "HardExampleFilter": "runs training_step once more, which would step the optimizers",
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
