"""Tricks together: each does its part, in any order of the callbacks, and a resumed run ends as one that was not."""

from __future__ import annotations

import random
from functools import cache
from itertools import combinations
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import TensorDataset

import lightning_tricks as lt
from tests.conformance.settings import SETTINGS
from tests.conformance.test_resume import Resumable
from tests.nets import NormNet, PlainNet, assert_close, assert_equal, build, data, fit, rank_loader, weights
from tests.ranks import run_ranks

HIDDEN = {"validate": "raw", "at_end": "raw"}  # of two averages one is shown
CALLBACKS: dict[str, Any] = {
    "EMA": lambda: lt.EMA(0.9),
    "SWA": lambda: lt.SWA(start=3, every_n_steps=2),
    "Mixup": lt.Mixup,
    "CutMix": lt.CutMix,
    "HardExampleFilter": lt.HardExampleFilter,
    "LRSchedule": lambda: lt.LRSchedule("cosine", warmup=2),
    "SkipNonFinite": lt.SkipNonFinite,
}
NAMES = [*CALLBACKS, "SAM"]
PAIRS = [pair for pair in combinations(NAMES, 2) if pair != ("EMA", "SWA")]
EPOCHS, MIDDLE = 3, 9


def samples(*names: str) -> TensorDataset:
    """Where steps may be left out, the third batch is not finite."""
    given = data(44)
    if "SkipNonFinite" in names:
        given.tensors[0][16:24] = torch.nan
    return given


def callbacks_of(*names: str) -> list[Callback]:
    both = {"EMA", "SWA"} <= set(names)
    made = {"SWA": lambda: lt.SWA(start=3, every_n_steps=2, **HIDDEN)} if both else {}
    return [{**CALLBACKS, **made}[name]() for name in names if name != "SAM"]


def module_of(*names: str, base: type[NormNet] | type[PlainNet] = NormNet) -> Any:
    net = SETTINGS["CutMix"].plain(base)  # gets images
    return build(type(net)("Sharp", (lt.SAMMixin, net), {}) if "SAM" in names else net)


def end(*names: str, bad: tuple[str, ...] = (), also: tuple[Callback, ...] = (), **settings: Any) -> dict[str, Tensor]:
    """The end weights of a fit with these tricks."""
    module = module_of(*names)
    callbacks = [*callbacks_of(*names), *also]
    fit(module, train=Resumable(samples(*names, *bad)), callbacks=callbacks, max_epochs=EPOCHS, **settings)
    return weights(module)


@cache
def alone(name: str, bad: tuple[str, ...] = ()) -> dict[str, Tensor]:
    return end(name, bad=bad)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[key], b[key]) for key in a)


def resumed(folder: Any, *names: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The end weights of a run that saves in the middle of an epoch, and of one that goes on from there."""
    save = ModelCheckpoint(folder, "{step}", every_n_train_steps=MIDDLE, save_top_k=-1, enable_version_counter=False)
    whole = end(*names, also=(save,), enable_checkpointing=True)
    return whole, end(*names, ckpt_path=folder / f"step={MIDDLE}.ckpt")


@pytest.mark.parametrize(
    "pair",
    [pytest.param(pair, marks=[pytest.mark.slow] * (number % 3 > 0)) for number, pair in enumerate(PAIRS)],
    ids="+".join,
)
def test_a_pair_works_in_any_order_and_resumes(pair: tuple[str, str], tmp_path: Any) -> None:
    both, again = resumed(tmp_path, *pair)
    assert_equal(again, both)
    assert_equal(end(*pair[::-1]), both)
    assert all(value.isfinite().all() for value in both.values())
    bad = ("SkipNonFinite",) if "SkipNonFinite" in pair else ()
    for name in pair:
        assert not same(both, alone(name, bad)), f"the other trick of {pair} did nothing beside {name}"


@pytest.mark.parametrize("order", [("EMA", "SWA"), ("SWA", "EMA")], ids="+".join)
def test_of_two_averages_one_is_shown_and_both_are_kept(order: tuple[str, str], tmp_path: Any) -> None:
    ema, swa = lt.EMA(0.9), lt.SWA(start=3, every_n_steps=2, **HIDDEN)
    fit(module := module_of(), train=Resumable(data(44)), callbacks=[ema, swa], max_epochs=EPOCHS)
    assert_equal(weights(module), alone("EMA"))
    averaged = swa.averaged_state_dict()
    assert_equal({name: averaged[name] for name in alone("SWA")}, alone("SWA"))
    both, again = resumed(tmp_path, *order)
    assert_equal(both, alone("EMA"))
    assert_equal(again, both)


def test_two_averages_are_not_shown_together() -> None:
    with pytest.raises(MisconfigurationException, match=r"EMA\(decay=0.9\) and SWA") as caught:
        fit(module_of(), callbacks=[lt.EMA(0.9), lt.SWA()])
    assert 'Set both to "raw"' in str(caught.value)


def shuffled(seed: int) -> list[str]:
    return random.Random(seed).sample(NAMES, len(NAMES))


def test_all_together_in_any_order_and_resumed(tmp_path: Any) -> None:
    whole, again = resumed(tmp_path, *NAMES)
    assert_equal(again, whole)
    for seed in range(3):
        assert_equal(end(*shuffled(seed)), whole)
    assert all(value.isfinite().all() for value in whole.values())


def all_in(order: list[str]) -> dict[str, Any]:
    module = module_of(*order, base=PlainNet)
    settings = {"devices": 2, "strategy": "ddp", "use_distributed_sampler": False}
    fit(module, train=rank_loader(), callbacks=callbacks_of(*order), **settings)
    return {key: value.numpy() for key, value in weights(module).items()}


def test_all_together_on_two_ranks_equal_one_process() -> None:
    first, second = run_ranks(all_in, shuffled(0))
    assert all((first[key] == second[key]).all() for key in first)
    (other, _) = run_ranks(all_in, shuffled(1))
    assert all((first[key] == other[key]).all() for key in first)
    module = module_of(*NAMES, base=PlainNet)
    batches = Resumable(data(48))
    fit(module, train=batches, callbacks=callbacks_of(*NAMES), accumulate_grad_batches=2)
    assert_close({key: torch.from_numpy(value) for key, value in first.items()}, weights(module), 1e-5)
