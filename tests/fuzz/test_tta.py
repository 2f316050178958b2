"""Random modules are validated through one view, the input as it is, as without views, or are refused by name."""

from __future__ import annotations

import random
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

import lightning_tricks as lt
from tests.fuzz.modules import Generated, Planned, Spec, loader, module_of, specs
from tests.fuzz.profiles import cases, modules
from tests.fuzz.runs import Outcome, difference, refusal_problem
from tests.nets import trainer

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning and torch, about what users do


def calls_itself(module: Generated, batch: Any, batch_idx: int) -> None:
    """A validation step by ``self(x)``, which random modules lack."""
    logits, _, y, *_ = module.embed(batch)
    module.log("val_loss", F.cross_entropy(logits.flatten(0, -2), y.flatten()), batch_size=len(y))
    module.log("drawn", torch.rand(1).item(), batch_size=len(y))


def validated(spec: Spec, *views: Any) -> Outcome:
    """What came of a validation, with views or without."""
    L.seed_everything(spec.seed, verbose=False)
    module = module_of(spec, validation_step=calls_itself)()
    outcome = Outcome()
    try:
        seen = lt.tta(module, views, mean="logits") if views else module
        outcome.logged = dict(*trainer().validate(seen, loader(spec), verbose=False))
    except Planned as error:
        outcome.error = str(error)
    except MisconfigurationException as error:
        outcome.refused = error
        return outcome
    outcome.weights = {name: weight.detach().clone() for name, weight in module.state_dict().items()}
    outcome.memory = seen.memory()
    outcome.random = (torch.rand(1).item(), random.random())
    return outcome


def check(number: int) -> None:
    """So many modules, of which at least every second one is accepted."""
    found: list[bool] = []

    @cases(number, print_blob=False)
    @given(spec=specs())
    def test(spec: Spec) -> None:
        plain, other = validated(spec), validated(spec, nn.Identity())
        assert plain.refused is None
        problem = refusal_problem(("tta",), other.refused) if other.refused else difference(plain, other)
        assert not problem, f"tta with {spec}: {problem}"
        found.append(not other.refused)

    test()
    assert sum(found) >= number // 2, f"tta accepted {sum(found)} of {len(found)} modules"


def test_modules_are_validated_as_without_views_or_refused() -> None:
    check(5)


@pytest.mark.slow
def test_many_more_modules_are_validated_as_without_views_or_refused() -> None:
    check(modules(200))
