"""The rules by hand, what they refuse, and the batch size of real Trainers."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_tricks import BatchSizeWarmup
from lightning_tricks.schedules.scaling import effective_batch_size, scale_adam, scale_lr, scaled_lrs
from tests.nets import PlainNet, build, fit, loader, trainer
from tests.ranks import run_ranks
from tests.refusals import assert_refused

BATCHES = {"batch_size": 1024, "base_batch_size": 256}


def test_the_rules_by_hand():
    generator = random.Random(0)
    for _ in range(50):
        lr, batch, base = generator.uniform(1e-5, 1), generator.randint(1, 5000), generator.randint(1, 5000)
        sizes: Any = {"batch_size": batch, "base_batch_size": base}
        for warmup in (0.05, 100):
            assert scale_lr(lr, **sizes, warmup=warmup) == pytest.approx(lr * batch / base)
        assert scale_lr(lr, **sizes, rule="sqrt") == pytest.approx(lr * (batch / base) ** 0.5)


def test_the_same_batch_size_leaves_the_learning_rate_alone():
    for rule in ("linear", "sqrt"):
        assert scale_lr(0.3, batch_size=7, base_batch_size=7, rule=rule) == 0.3


def test_a_linear_rise_without_warm_up_warns():
    with pytest.warns(UserWarning, match=r"linear rule needs a warm-up for a batch 4 times .*warmup=") as seen:
        assert scale_lr(0.1, **BATCHES) == 0.4
    assert seen[0].filename == __file__


def test_a_fall_needs_no_warm_up():
    assert scale_lr(0.4, batch_size=64, base_batch_size=256) == 0.1  # warnings are errors here


def test_an_error_names_the_argument_the_value_and_what_is_allowed():
    cases = [
        (ValueError, {"rule": "cubic"}, r"rule must be one of 'linear', 'sqrt', got 'cubic'"),
        (ValueError, {"rule": "Linear"}, r"Did you mean 'linear'\?"),
        (ValueError, {"lr": -0.1}, r"lr must be in \[0.0, inf\), got -0.1"),
        (TypeError, {"lr": "0.1"}, r"lr must be a number .*got '0.1'"),
        (ValueError, {"batch_size": 0}, r"batch_size must be at least 1, got 0"),
        (TypeError, {"base_batch_size": 2.5}, r"base_batch_size must be an integer, got 2.5"),
        (TypeError, {"warmup": True}, r"warmup must be an int .*or a float .*got True"),
        (ValueError, {"warmup": 1.5}, r"warmup must be .*got 1.5"),
    ]
    assert_refused(lambda **settings: scale_lr(**{"lr": 0.1, **BATCHES, **settings}), cases)


# -- Adam -------------------------------------------------------------------------------------------------------------


def test_adams_rule_by_hand():
    settings = scale_adam(1e-3, **BATCHES, betas=(0.9, 0.98), eps=1e-6)
    assert settings["lr"] == pytest.approx(1e-3 * 2)
    assert settings["betas"] == pytest.approx((1 - 4 * 0.1, 1 - 4 * 0.02))
    assert settings["eps"] == pytest.approx(1e-6 / 2)
    torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], **settings)


def test_adams_rule_goes_back_the_way_it_came():
    there = scale_adam(1e-3, batch_size=192, base_batch_size=64)
    back = scale_adam(there["lr"], batch_size=64, base_batch_size=192, betas=there["betas"], eps=there["eps"])
    assert (back["lr"], *back["betas"], back["eps"]) == pytest.approx((1e-3, 0.9, 0.999, 1e-8))


def test_adams_averages_remember_as_many_samples():
    """After the same number of samples a gradient's share in the averages is nearly the same."""
    small = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))], betas=(0.99, 0.9999)).defaults["betas"]
    large = scale_adam(1e-3, batch_size=40, base_batch_size=10, betas=small)["betas"]
    assert [beta**25 for beta in large] == pytest.approx([beta**100 for beta in small], rel=0.03)


def test_adams_rule_ends_where_a_beta_would_be_negative():
    assert scale_adam(1e-3, batch_size=640, base_batch_size=64)["betas"][0] == pytest.approx(0, abs=1e-12)
    with pytest.raises(ValueError, match=r"batch_size must be at most 640 .*betas\[0\]=0.9, got 641: .*sqrt"):
        scale_adam(1e-3, batch_size=641, base_batch_size=64)


def test_an_error_of_adams_rule_names_the_argument():
    cases = [
        (ValueError, {"betas": (0.9, 1.0)}, r"betas\[1\] must be in \[0.0, 1.0\), got 1.0"),
        (ValueError, {"eps": -1e-8}, r"eps must be in \[0.0, inf\), got -1e-08"),
        (ValueError, {"lr": -1}, r"lr must be in \[0.0, inf\), got -1"),
        (ValueError, {"base_batch_size": 0}, r"base_batch_size must be at least 1, got 0"),
    ]
    assert_refused(lambda **settings: scale_adam(**{"lr": 1e-3, **BATCHES, **settings}), cases)


# -- the batch size of a Trainer --------------------------------------------------------------------------------------


class Asking(PlainNet):
    """Asks where a user would: in configure_optimizers."""

    def configure_optimizers(self) -> Any:
        self.seen = effective_batch_size(self.trainer, per_device=8)
        return super().configure_optimizers()

    def configure_model(self) -> None:
        """ModelParallelStrategy insists on it; here every rank keeps its copy."""


def asked(**settings: Any) -> int:
    module = build(Asking)
    fit(module, train=loader(96), max_steps=1, **settings)
    return module.seen


def asked_on_a_mesh(data: int, tensor: int) -> int:
    return asked(devices=2, strategy=ModelParallelStrategy(data_parallel_size=data, tensor_parallel_size=tensor))


def step_of_ddp(accumulate: int) -> dict[str, Any]:
    """The effective batch size that a rank sees, and the weights after one step."""
    module = build(Asking)
    fit(module, train=loader(32), max_steps=1, devices=2, strategy="ddp", accumulate_grad_batches=accumulate)
    return {"seen": module.seen, **{name: value.tolist() for name, value in module.state_dict().items()}}


def test_accumulated_batches_of_one_device_count():
    assert asked() == 8
    assert asked(accumulate_grad_batches=3) == 24
    assert asked(callbacks=[GradientAccumulationScheduler({0: 4})]) == 32


def test_a_factor_that_changes_is_refused():
    run = trainer(callbacks=[GradientAccumulationScheduler({2: 4})])
    with pytest.raises(ValueError, match=r"accumulation must be the same in all epochs .*factors \[1, 4\]"):
        effective_batch_size(run, per_device=8)


def test_a_batch_that_grows_is_refused_by_name():
    run = trainer(callbacks=[BatchSizeWarmup(final=4)])
    with pytest.raises(ValueError, match=r"same in all epochs, got a Trainer with BatchSizeWarmup"):
        effective_batch_size(run, per_device=8)


def test_nodes_count_before_any_of_them_starts():
    run = trainer(devices=2, num_nodes=3, strategy="ddp")
    assert effective_batch_size(run, per_device=8) == 48


def test_a_batch_size_is_a_count():
    cases = [
        (error, {"per_device": value}, "per_device must be") for error, value in ((ValueError, 0), (TypeError, 8.0))
    ]
    assert_refused(partial(effective_batch_size, trainer()), cases)


def test_a_step_of_two_ranks_is_a_step_of_one_process_on_the_effective_batch():
    ranks = run_ranks(step_of_ddp, 2)
    assert [rank.pop("seen") for rank in ranks] == [32, 32]
    alone = build(Asking)
    fit(alone, train=loader(32, batch_size=32), max_steps=1)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(torch.tensor(ranks[0][name]), value, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("data", "tensor", "expected"), [(2, 1, 16), (1, 2, 8)])
def test_devices_that_share_a_batch_are_one_replica(data, tensor, expected):
    assert run_ranks(asked_on_a_mesh, data, tensor) == [expected, expected]


def test_both_together_scale_by_what_the_trainer_accumulates():
    class Scaled(Asking):
        def configure_optimizers(self) -> Any:
            size = effective_batch_size(self.trainer, per_device=8)
            return torch.optim.SGD(self.parameters(), lr=scale_lr(0.1, batch_size=size, base_batch_size=8, warmup=1))

    module = build(Scaled)
    run = fit(module, max_steps=1, accumulate_grad_batches=2)
    assert run.optimizers[0].param_groups[0]["lr"] == 0.2


@pytest.mark.parametrize("wrap", [float, torch.tensor])
def test_learning_rates_are_scaled_for_a_step_and_put_back(wrap):
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": wrap(lr)} for lr in (0.5, 0.25)]
    optimizer = torch.optim.AdamW(groups, foreach=False)
    kept = optimizer.param_groups[1]["lr"]
    with scaled_lrs(optimizer, 0.5, "It"):
        assert [float(group["lr"]) for group in optimizer.param_groups] == [0.25, 0.125]
    with pytest.raises(KeyError), scaled_lrs(optimizer, 0.5, "It"):
        raise KeyError
    refused = pytest.raises(MisconfigurationException, match=r"It scales .* set meanwhile")
    with refused, scaled_lrs(optimizer, 0.5, "It"):
        optimizer.param_groups[0]["lr"] = wrap(1.0)
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.5, 0.25]
    if wrap is torch.tensor:
        assert optimizer.param_groups[1]["lr"] is kept
