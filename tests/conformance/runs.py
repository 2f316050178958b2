"""Fits with a trick, and the networks that the regimes need."""

from __future__ import annotations

import re
import warnings
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed.fsdp import fully_shard

from tests.conformance.preset_runs import of_deepspeed
from tests.conformance.trick import LAST_GOOD, Enrolment, spoil_first_batch
from tests.nets import Net, NormNet, PlainNet, Steps, assert_equal, build, fit, weights
from tests.reference.loop import naive_fit
from tests.reference.tricks import Seen, spoil


def run(trick: Enrolment, state: str = "on", base: type[Net] = NormNet, **settings: Any) -> dict[str, torch.Tensor]:
    """The end weights of a fit with the trick."""
    callbacks = [*trick.make_callbacks(state), *settings.pop("callbacks", [])]
    return weights(fitted(trick.module(base, state), callbacks=callbacks, **settings))


def beside_the_plain_loop(
    trick: Enrolment, batches: Any, loop: dict[str, Any], **settings: Any
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int]:
    """The end weights of a fit with the trick and of its naive form in a plain loop, and the steps left out there."""
    seen, reference = Seen(), build(trick.plain(NormNet))
    ended = run(trick, train=batches, callbacks=[seen, *settings.pop("callbacks", [])], **settings)
    given = [reference.on_after_batch_transfer(batch, 0) for batch in batches]
    form = trick.form([spoil(batch) for batch in given] if trick.spoiled else given, seen)
    left_out = naive_fit(reference, form, given, **loop)
    return ended, weights(reference), left_out


def fitted(kind: type[Net], **settings: Any) -> Any:
    """A module after a fit; of one that is stopped by a bad batch, after a fit that goes on from what was left."""
    if kind.on_before_batch_transfer is not spoil_first_batch:
        module = build(kind)
        fit(module, **settings)
        return module
    watch, callbacks, again = Watch(), settings.pop("callbacks"), deepcopy({**settings, "callbacks": []})
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder, warnings.catch_warnings():
        with pytest.raises(FloatingPointError) as caught:
            fit(build(kind), callbacks=[watch, *callbacks], default_root_dir=folder, **settings)
        assert_equal(watch.stopped, watch.begun)
        warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch ended")
        warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")
        if hasattr(again.get("train"), "load_state_dict"):  # which would go on behind the bad batch
            again["train"].load_state_dict = lambda state: None
        module = build(kind)
        fit(module, **{**again, "callbacks": callbacks, "ckpt_path": last_good(caught.value)})
    return module


def last_good(stopped: BaseException) -> Path:
    """The checkpoint that the error names."""
    found = re.fullmatch(
        r"TerminateOnNonFinite has stopped training after step \d+, in batch 0 of epoch \d+; not finite: the loss; .*"
        r" The state before it and the batch are in (.*): find_non_finite tells which operation it was\.",
        str(stopped),
    )
    assert found, stopped
    return Path(found[1]) / LAST_GOOD


class Watch(Callback):
    """The weights before a batch, and at an error in it."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.begun = weights(pl_module)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.stopped = weights(pl_module)


def fp16() -> dict[str, Any]:
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=64.0))]}


class Compiled(PlainNet):
    """The network runs compiled."""

    def setup(self, stage: str) -> None:
        self.run = torch.compile(self.layers, backend="aot_eager")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x)


class ShardedNet(PlainNet):
    """FSDP2 as its users write it."""

    def configure_model(self) -> None:
        fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])


class Gather(Callback):
    """The full weights at the end, in fp32, put together from their shards."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if isinstance(trainer.strategy, ModelParallelStrategy):
            pl_module.layers.reshard()  # validation leaves the root unsharded
            self.weights = weights(pl_module)
        else:
            self.weights = of_deepspeed(pl_module)
            kept = pl_module.state_dict()
            self.weights |= {name: buffer for name, buffer in pl_module.named_buffers() if name in kept}


REFUSED_BY = {  # what the error says of a regime
    "accumulate": "accumulate_grad_batches",
    "clip": "gradient_clip_val",
    "fp16": "precision='16-mixed'",
    "fp64": "torch.float64",
}


def refusal(trick: Enrolment, base: type[Net] = NormNet, **settings: Any) -> str:
    """The message of the error that the fit must raise before its first optimizer step."""
    steps = Steps()
    try:
        run(trick, base=base, callbacks=[steps, *settings.pop("callbacks", [])], **settings)
    except MisconfigurationException as error:
        assert steps.made == 0, "refused too late"
        return str(error)
    raise AssertionError("it was not refused")
