"""Tricks together: each does its part, in any order of the callbacks, and a resumed run ends as one that was not."""

from __future__ import annotations

import random
from dataclasses import replace
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
from tests.conformance.runs import Steps, beside_the_plain_loop, run
from tests.conformance.settings import SETTINGS
from tests.conformance.test_resume import Resumable, resumable
from tests.conformance.trick import public_name, together
from tests.core.test_conflicts import DECLARED, conflicts
from tests.nets import NormNet, PlainNet, assert_close, assert_equal, build, data, fit, loader, rank_loader, weights
from tests.ranks import run_ranks

Pair = tuple[str, str]

# -- two of all tricks ------------------------------------------------------------------------------------------------

# Not here: what compiles or draws for seconds, needs another network or ends the fit; curves and settings with a twin.
WITHOUT = ("Compile", "InspectTraining", "ChannelsLast", "TerminateOnNonFinite")
TWINS = [name for name, trick in SETTINGS.items() if trick.twin == "cosine" or (trick.twin and "(" in name)]
NAMES = [name for name in SETTINGS if name not in (*WITHOUT, *TWINS)]
OPTIMIZERS = ("ScheduleFree", 'optimizer("lookahead_sgd")')
CURVES = [name for name in NAMES if SETTINGS[name].schedule and name not in OPTIMIZERS]


def pairs() -> list[Pair]:
    """All but two optimizers or two curves; an optimizer comes before its curve."""
    every = [sorted(pair, key=lambda name: name not in OPTIMIZERS) for pair in combinations(NAMES, 2)]
    return [(one, other) for one, other in every if other not in OPTIMIZERS and not {one, other} <= {*CURVES}]


QUICK = (
    *("AdaptiveClip+GradCacheMixin", "EMA+GradCacheMixin", "EMA+MoEBalance", "EMA+SequenceLengthWarmup", "Mixup+QAT"),
    *("QAT+SAMMixin", "SAMMixin+SequenceLengthWarmup", "ScheduleFree+Mixup", "ScheduleFree+SAMMixin"),
    *("CutMix+HardExampleFilter", "EMA+SkipNonFinite", "LRSchedule+SWA", "SWA+SkipNonFinite"),
)


def said(of: str, pair: Pair) -> bool:
    """Whether the entry of one of both names the other one in this field."""
    one, other = pair
    return other in getattr(SETTINGS[one], of) or one in getattr(SETTINGS[other], of)


def refusals(pair: Pair) -> list[str]:
    """What an error says, by the entry of one of both, that is no conflict of two classes."""
    return [SETTINGS[one].refuses[other] for one, other in (pair, pair[::-1]) if other in SETTINGS[one].refuses]


def rules(pair: Pair) -> list[str]:
    """What an error may say of two tricks."""
    names = [{public_name(name), *(["schedule from configure_optimizers"] * (name in CURVES))} for name in pair]
    both = [
        conflict.rule
        for conflict, owners in DECLARED.items()
        for mine, other in (names, names[::-1])
        if mine & {*owners} and other & {*conflicts.others(conflict)}
    ]
    return [*both, *refusals(pair)]


@pytest.mark.few(7)
@pytest.mark.filterwarnings("ignore:Doctor, frozen-parameters")  # of which adapters have some
@pytest.mark.parametrize(
    "pair",
    [pytest.param(pair, marks=[pytest.mark.slow] * ("+".join(pair) not in QUICK)) for pair in pairs()],
    ids="+".join,
)
def test_two_tricks_train_what_a_plain_loop_with_both_trains(pair: Pair, tmp_path: Any) -> None:
    both, steps = together(*(SETTINGS[each] for each in pair)), Steps()
    save = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1, enable_version_counter=False)
    settings, told = {"callbacks": [save, steps], "enable_checkpointing": True}, ""
    try:
        if said("unseen", pair) or said("rounded", pair):
            ended = run(both, train=resumable(both, data(44)), **settings)
        else:
            ended, expected, _ = beside_the_plain_loop(both, resumable(both, data(44)), {}, **settings)
            assert_close(ended, expected)
    except (MisconfigurationException, ValueError) as error:
        told = str(error)
    if told:
        assert steps.made == 0, "refused too late"
        assert any(rule in told for rule in rules(pair)), told
        return
    assert not refusals(pair)
    if said("rounded", pair):
        assert_close(*beside_the_plain_loop(both, loader(24), {"epochs": 1}, max_epochs=1)[:2])
    assert_equal(run(both, train=resumable(both, data(44)), ckpt_path=tmp_path / "step=3.ckpt"), ended)
    if not said("ordered", pair):
        turned = replace(both, callbacks={"on": lambda: both.make_callbacks("on")[::-1]})
        assert_equal(run(turned, train=resumable(both, data(44))), ended)


def test_what_is_said_of_pairs_is_said_of_some() -> None:
    assert {*QUICK} <= {"+".join(pair) for pair in pairs()}
    others = {name: {*entry.refuses, *entry.unseen, *entry.rounded, *entry.ordered} for name, entry in SETTINGS.items()}
    assert {frozenset((name, other)) for name in others for other in others[name]} <= {*map(frozenset, pairs())}


# -- two averages, and several tricks ---------------------------------------------------------------------------------

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
ALL = [*CALLBACKS, "SAM"]
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


def end(*names: str, also: tuple[Callback, ...] = (), **settings: Any) -> dict[str, Tensor]:
    """The end weights of a fit with these tricks."""
    module = module_of(*names)
    callbacks = [*callbacks_of(*names), *also]
    fit(module, train=Resumable(samples(*names)), callbacks=callbacks, max_epochs=EPOCHS, **settings)
    return weights(module)


@cache
def alone(name: str) -> dict[str, Tensor]:
    return end(name)


def resumed(folder: Any, *names: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The end weights of a run that saves in the middle of an epoch, and of one that goes on from there."""
    save = ModelCheckpoint(folder, "{step}", every_n_train_steps=MIDDLE, save_top_k=-1, enable_version_counter=False)
    whole = end(*names, also=(save,), enable_checkpointing=True)
    return whole, end(*names, ckpt_path=folder / f"step={MIDDLE}.ckpt")


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
    return random.Random(seed).sample(ALL, len(ALL))


def test_all_together_in_any_order_and_resumed(tmp_path: Any) -> None:
    whole, again = resumed(tmp_path, *ALL)
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
    module = module_of(*ALL, base=PlainNet)
    batches = Resumable(data(48))
    fit(module, train=batches, callbacks=callbacks_of(*ALL), accumulate_grad_batches=2)
    assert_close({key: torch.from_numpy(value) for key, value in first.items()}, weights(module), 1e-5)
