"""SAM in manual optimization, by ``sam_step`` and ``sam_backward``, against naive loops."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torchmetrics.classification import MulticlassAccuracy

import lightning_tricks as lt
from lightning_tricks.core.replay.rerun import is_replaying
from tests.modules.sam.test_rules import RandomStates, Reductions, SAMNormNet
from tests.nets import (
    Net,
    NormNet,
    PlainNet,
    assert_close,
    assert_equal,
    build,
    fit,
    loader,
    rank_loader,
    trainer,
    weights,
)
from tests.ranks import run_ranks
from tests.reference.sam import naive_gan, naive_sam

DTYPES = {"32-true": None, "bf16-mixed": torch.bfloat16, "scaled": torch.float16}
SCALE = 64.0

Case = tuple[str, int, float | None]  # precision, accumulate, clip_norm


class Manual(Net):
    """Manual optimization without SAM: what ``sam_step`` does, written by hand."""

    accumulate, clip_norm = 1, None

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.automatic_optimization = False
        self.accuracy = MulticlassAccuracy(num_classes=2)
        self.calls = 0

    def loss(self, batch: Any) -> Tensor:
        logits = self(batch[0])
        self.accuracy(logits, batch[1])
        self.calls += 1
        loss = F.cross_entropy(logits, batch[1])
        self.log_dict({"train_loss": loss, "accuracy": self.accuracy}, on_step=True, on_epoch=True)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.manual_backward(self.loss(batch) / self.accumulate)
        self.step(batch_idx)

    def step(self, batch_idx: int) -> None:
        if (batch_idx + 1) % self.accumulate == 0 or self.trainer.is_last_batch:
            optimizer = self.optimizers()
            if self.clip_norm is not None:
                self.clip_gradients(optimizer, self.clip_norm, "norm")
            optimizer.step()
            optimizer.zero_grad()


class Sharp(lt.SAMMixin, Manual):
    """The same by ``sam_step``."""

    sam = lt.SAM(rho=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.sam_step(lambda: self.loss(batch), accumulate=self.accumulate, clip_norm=self.clip_norm)


class SharpNorm(Sharp, NormNet):
    pass


class PlainManual(Manual, PlainNet):
    pass


class SharpPlain(Sharp, PlainNet):
    pass


class ByHand(Sharp):
    """``sam_backward`` where ``Manual`` has ``manual_backward``."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.sam_backward(lambda: self.loss(batch) / self.accumulate)
        self.step(batch_idx)


class ByHandNorm(ByHand, NormNet):
    pass


class ByHandPlain(ByHand, PlainNet):
    pass


def prepared(kind: type[Net], case: Case, **arguments: Any) -> Any:
    module = build(kind, **arguments)
    _, module.accumulate, module.clip_norm = case
    return module


def settings_of(case: Case) -> dict[str, Any]:
    if case[0] != "scaled":
        return {"precision": case[0]}
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=SCALE))]}


def naive(module: Net, case: Case, batches: list[Any], ranks: int = 1, rho: float = 0.1) -> list[float]:
    precision, accumulate, clip_norm = case
    length = ranks * accumulate
    return naive_sam(
        module,
        [batches[i : i + length] for i in range(0, len(batches), length)] * 2,
        rho=rho,
        accumulate=length,
        clip=None if clip_norm is None else ("norm", clip_norm),
        dtype=DTYPES[precision],
        scale=SCALE if precision == "scaled" else 1.0,
    )


def tolerance(case: Case) -> float:
    return 1e-6 if case[0] == "32-true" else 2e-4


CASES: list[Case] = [(p, accumulate, clip) for p in DTYPES for accumulate in (1, 2, 4) for clip in (None, 0.1)]


# ---- equal to the naive loop


@pytest.mark.few(4)
@pytest.mark.parametrize("case", CASES, ids=str)  # 6 batches: 4 leaves a ragged window
def test_sam_step_equals_a_naive_loop(case: Case) -> None:
    ours, theirs = prepared(SharpNorm, case), build(NormNet)
    fit(ours, **settings_of(case))
    naive(theirs, case, list(loader()))
    assert_close(weights(ours), weights(theirs), tolerance(case))
    assert ours.calls == 12


@pytest.mark.parametrize("case", [("32-true", 2, 0.1), ("bf16-mixed", 4, None), ("scaled", 2, None)], ids=str)
def test_sam_backward_by_hand_equals_sam_step(case: Case) -> None:
    one, other = prepared(SharpNorm, case), prepared(ByHandNorm, case)
    fit(one, **settings_of(case)), fit(other, **settings_of(case))
    assert_equal(weights(one), weights(other))


DEFAULT: Case = ("32-true", 1, None)


@pytest.mark.parametrize(
    ("case", "rule"),
    [
        (DEFAULT, lt.SAM(0.1)),
        (("32-true", 4, 0.1), lt.SAM(0.1)),
        (("scaled", 2, None), lt.SAM(0.1)),
        (DEFAULT, lt.SAM(0.5, adaptive=True)),
        (DEFAULT, lt.SAM(0.1, parameters="norm")),
    ],
    ids=str,
)
def test_sam_step_equals_automatic_optimization(case: Case, rule: lt.SAM) -> None:
    manual, automatic = prepared(SharpNorm, case), build(SAMNormNet)
    manual.sam = automatic.sam = rule
    settings = {"accumulate_grad_batches": case[1], "gradient_clip_val": case[2]}
    fit(manual, **settings_of(case)), fit(automatic, **settings_of(case), **settings)
    assert_close(weights(manual), weights(automatic))


@pytest.mark.parametrize("case", [("32-true", 1, None), ("32-true", 4, 0.1), ("scaled", 2, None)], ids=str)
def test_the_logged_norm_is_that_of_the_batch(case: Case) -> None:
    class Noting(SharpNorm):
        norms: tuple[float, ...] = ()

        def on_train_batch_end(self, *_: Any) -> None:
            self.norms = (*self.norms, self.trainer.callback_metrics["tricks/sam_grad_norm"].item())

    module = prepared(Noting, case)
    fit(module, log_every_n_steps=1, **settings_of(case))
    expected = naive(build(NormNet), case, list(loader()))
    assert module.norms == pytest.approx(expected, rel=1e-4 if case[0] == "32-true" else 2e-2)


def test_the_loss_is_handed_back_as_it_was() -> None:
    class Returned(SharpPlain):
        seen: tuple[Any, ...] = ()

        def training_step(self, batch: Any, batch_idx: int) -> None:
            with torch.no_grad():
                expected = F.cross_entropy(self(batch[0]), batch[1])
            loss = super().training_step(batch, batch_idx)
            self.seen = (*self.seen, (loss, expected))

    module = prepared(Returned, ("32-true", 4, None))
    fit(module)
    assert len(module.seen) == 12
    for loss, expected in module.seen:
        assert not loss.requires_grad
        torch.testing.assert_close(loss, expected)


# ---- steps, schedules, ends


class Scheduled(PlainNet):
    """Notes when its optimizer steps, and has schedules by both intervals."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        optimizer.register_step_post_hook(lambda *_: self.steps.append(self.trainer.global_step))
        self.steps: list[int] = []
        self.schedules = [LambdaLR(optimizer, lambda _: 1.0) for _ in range(4)]
        kinds = [("step", 1), ("epoch", 1), ("step", 2), ("epoch", 2)]
        named = [{"interval": interval, "frequency": frequency} for interval, frequency in kinds]
        return [optimizer], [{"scheduler": s, **name} for s, name in zip(self.schedules, named, strict=True)]


class SharpScheduled(Sharp, Scheduled):
    pass


@pytest.mark.parametrize(("accumulate", "steps"), [(1, 6), (2, 3), (4, 2)])
def test_optimizer_and_schedules_step_as_in_automatic_optimization(accumulate: int, steps: int) -> None:
    module, automatic = prepared(SharpScheduled, ("32-true", accumulate, None)), build(Scheduled)
    run = fit(module)
    fit(automatic, accumulate_grad_batches=accumulate)
    assert module.steps == automatic.steps == list(range(2 * steps))
    assert run.global_step == 2 * steps
    by_step, by_epoch, *_ = module.schedules
    assert by_step.last_epoch == 2 * steps
    assert by_epoch.last_epoch == 2
    assert [s.last_epoch for s in module.schedules] == [s.last_epoch for s in automatic.schedules]


def test_a_schedule_on_a_plateau_is_left_alone() -> None:
    class OnPlateau(SharpPlain):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [ReduceLROnPlateau(optimizer)]

    assert fit(build(OnPlateau)).lr_scheduler_configs[0].scheduler.last_epoch == 0


@pytest.mark.parametrize("accumulate", [1, 4])
def test_max_steps_is_respected(accumulate: int) -> None:
    module = prepared(SharpScheduled, ("32-true", accumulate, None))
    assert fit(module, max_steps=3, max_epochs=-1).global_step == 3
    assert module.steps == [0, 1, 2]


def test_a_second_fit_begins_a_new_window() -> None:
    module = prepared(SharpScheduled, ("32-true", 4, None))
    with pytest.raises(RuntimeError, match="planned"):
        fit(module, callbacks=[StopsAt(2)])
    module.zero_grad()
    fit(module, max_epochs=1)
    assert module.steps == [0, 1]


class StopsAt(Callback):
    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch:
            raise RuntimeError("planned")


def test_resume_is_bit_exact(tmp_path: Any) -> None:
    class Decaying(SharpNorm):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            return [optimizer], [{"scheduler": LambdaLR(optimizer, lambda n: 0.9**n), "interval": "step"}]

    whole, half, rest = (prepared(Decaying, ("32-true", 1, 0.1)) for _ in range(3))
    fit(whole, max_epochs=4)
    fit(half, max_epochs=2).save_checkpoint(tmp_path / "x.ckpt")
    run = fit(rest, max_epochs=4, ckpt_path=tmp_path / "x.ckpt")
    assert_equal(weights(whole), weights(rest))
    assert run.global_step == 24
    assert run.lr_scheduler_configs[0].scheduler.last_epoch == 24


# ---- the second run is not seen


def assert_seen_alike(plain: Any, sharp: Any, **settings: Any) -> None:
    """Weights, buffers, attributes, logged values and random numbers of two modules are bit-equal."""
    theirs, ours = RandomStates(), RandomStates()
    plain_run, run = fit(plain, callbacks=[theirs], **settings), fit(sharp, callbacks=[ours], **settings)
    assert_equal(weights(plain), weights(sharp))
    logged = {name: value for name, value in run.callback_metrics.items() if not name.startswith("tricks/")}
    assert logged == plain_run.callback_metrics
    assert {"train_loss_epoch", "accuracy_step"} <= logged.keys()
    assert run.global_step == plain_run.global_step
    assert sharp.calls == plain.calls == 12
    assert all(torch.equal(a, b) for a, b in zip(ours.states, theirs.states, strict=True))


@pytest.mark.parametrize(
    "case", [("32-true", 1, None), ("32-true", 4, 0.1), ("bf16-mixed", 2, 0.1), ("scaled", 2, None)], ids=str
)
def test_rho_zero_is_bit_equal_to_manual_backward(case: Case) -> None:
    plain, still = prepared(Manual, case), prepared(Sharp, case)
    still.sam = lt.SAM(0)
    assert_seen_alike(plain, still, **settings_of(case))


@pytest.mark.parametrize("case", [("32-true", 2, 0.1), ("bf16-mixed", 1, None)], ids=str)
def test_logs_metrics_statistics_and_random_numbers_are_those_of_one_run(case: Case) -> None:
    plain, sharp = prepared(Manual, case, lr=0.0), prepared(Sharp, case, lr=0.0)
    sharp.sam = lt.SAM(1.0)
    assert_seen_alike(plain, sharp, **settings_of(case))


@pytest.mark.parametrize("error", [RuntimeError("planned"), KeyboardInterrupt()], ids=repr)
def test_an_exception_in_the_second_run_leaves_the_weights_unperturbed(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fails(Sharp):
        def loss(self, batch: Any) -> Tensor:
            loss = super().loss(batch)
            if is_replaying():
                raise error
            self.own = weights(self)
            return loss

    module = build(Fails)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # Lightning would ignore Ctrl-C from then on
    with pytest.raises((RuntimeError, SystemExit)):
        fit(module)
    assert_equal(weights(module), module.own)  # with the statistics of the first run
    assert module.calls == 1
    assert not is_replaying()


@pytest.mark.parametrize("when", ["first run", "second run"])
def test_an_overflow_skips_the_step_and_leaves_everything_finite(when: str) -> None:
    class Overflow(SharpNorm):
        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch) * (float("inf") if is_replaying() == (when == "second run") else 1.0)

    module, start = prepared(Overflow, ("scaled", 2, 0.1)), build(Overflow)
    settings = settings_of(("scaled", 2, 0.1))
    run = fit(module, max_steps=1, **settings)
    assert settings["plugins"][0].scaler.get_scale() == SCALE / 2
    assert all(torch.isfinite(value).all() for value in weights(module).values())
    assert_equal(dict(module.named_parameters()), dict(start.named_parameters()))
    assert run.global_step == 1


# ---- two optimizers


class GAN(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.discriminator = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def validation_step(self, *_: Any) -> None:
        pass

    def loss_d(self, x: Tensor) -> Tensor:
        fake = self.generator(x.flip(1)).detach()
        return F.softplus(-self.discriminator(x)).mean() + F.softplus(self.discriminator(fake)).mean()

    def loss_g(self, x: Tensor) -> Tensor:
        return F.softplus(-self.discriminator(self.generator(x.flip(1)))).mean()

    def configure_optimizers(self) -> Any:
        d = torch.optim.SGD(self.discriminator.parameters(), lr=0.1, momentum=0.9)
        return [d, torch.optim.Adam(self.generator.parameters(), lr=0.01)]


class SharpGAN(lt.SAMMixin, GAN):
    """The generator by SAM, the discriminator plainly."""

    sam = lt.SAM(rho=0.1)
    accumulate = 1

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, (d, g) = batch[0], self.optimizers()
        self.toggle_optimizer(d)
        self.manual_backward(self.loss_d(x))
        d.step()
        d.zero_grad()
        self.untoggle_optimizer(d)
        self.toggle_optimizer(g)
        self.sam_step(lambda: self.loss_g(x), g, accumulate=self.accumulate)
        self.untoggle_optimizer(g)


def test_a_gan_with_a_sharp_generator_equals_a_naive_loop() -> None:
    ours, theirs = build(SharpGAN), build(GAN)
    run = fit(ours)
    naive_gan(theirs, [[x] for x, _ in loader()] * 2, (theirs.loss_d, theirs.loss_g), rho=0.1)
    assert_close(weights(ours), weights(theirs))
    assert run.global_step == 24  # Lightning counts the steps of both


def test_each_optimizer_has_a_window_and_schedules_of_its_own() -> None:
    class Both(lt.SAMMixin, GAN):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            x, (d, g) = batch[0], self.optimizers()
            self.sam_step(lambda: self.loss_d(x), d, accumulate=2)
            self.sam_step(lambda: self.loss_g(x), g, accumulate=4)

        def configure_optimizers(self) -> Any:
            optimizers = super().configure_optimizers()
            self.steps = [0, 0]
            for n, optimizer in enumerate(optimizers):
                optimizer.register_step_post_hook(functools.partial(self.count, n))
            self.schedules = [LambdaLR(optimizer, lambda _: 1.0) for optimizer in optimizers]
            return optimizers, [{"scheduler": schedule, "interval": "step"} for schedule in self.schedules]

        def count(self, n: int, *_: Any) -> None:
            self.steps[n] += 1

    module = build(Both)
    fit(module)
    assert module.steps == [6, 4]
    assert [schedule.last_epoch for schedule in module.schedules] == [6, 4]


def test_a_schedule_by_steps_keeps_its_frequency_beside_another_optimizer() -> None:
    class EverySecond(SharpGAN):
        def configure_optimizers(self) -> Any:
            d, g = super().configure_optimizers()
            self.schedule = LambdaLR(g, lambda _: 1.0)
            return [d, g], [{"scheduler": self.schedule, "interval": "step", "frequency": 2}]

    module = build(EverySecond)
    fit(module)
    assert module.schedule.last_epoch == 6


# ---- refusals


class Asks(Sharp):
    """Calls as a test says."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.call(self, lambda: self.loss(batch))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m, c: m.sam_step(c, accumulate=0), ValueError, "accumulate must be at least 1, got 0"),
        (lambda m, c: m.sam_step(c, accumulate=2.0), TypeError, "accumulate must be an integer, got 2.0"),
        (lambda m, c: m.sam_step(c, clip_norm=-1.0), ValueError, "clip_norm must be .*, got -1.0"),
        (lambda m, c: m.sam_step(c, clip_norm=0), ValueError, "clip_norm must be .*, got 0"),
        (lambda m, c: m.sam_step(c, clip_norm="1"), TypeError, "clip_norm must be a number in .*, got '1'"),
        (  # whose steps are not counted
            lambda m, c: m.sam_step(c, m.optimizers(use_pl_optimizer=False)),
            TypeError,
            r"optimizer of self.optimizers\(\), got SGD",
        ),
    ],
)
def test_a_bad_argument_is_named(call: Callable[..., Any], error: type[Exception], message: str) -> None:
    module = build(Asks)
    module.call = call
    with pytest.raises(error, match=message):
        fit(module)


def test_one_of_several_optimizers_must_be_chosen() -> None:
    class Undecided(SharpGAN):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.sam_step(lambda: self.loss_g(batch[0]))

    with pytest.raises(ValueError, match=r"sam_step needs one of the 2 optimizers: pass optimizer=self.optimizers\(\)"):
        fit(build(Undecided))


@pytest.mark.parametrize("method", ["sam_step", "sam_backward"])
def test_a_call_outside_of_manual_optimization_is_refused(method: str) -> None:
    module = build(Asks)
    call = getattr(module, method)
    with pytest.raises(MisconfigurationException, match="belongs in the training_step of a fit"):
        call(lambda: torch.zeros(()))
    trainer().validate(module, loader(24), verbose=False)
    with pytest.raises(MisconfigurationException, match="belongs in the training_step of a fit"):
        call(lambda: torch.zeros(()))
    module.automatic_optimization = True
    module.call = lambda m, c: getattr(m, method)(c)
    with pytest.raises(MisconfigurationException, match="with automatic optimization SAM works by itself"):
        fit(module)


# ---- two processes


BY_HAND: list[Case] = [("32-true", 1, 0.1), ("32-true", 2, None), ("scaled", 4, None)]
RANKS = {"devices": 2, "use_distributed_sampler": False}


def ended(module: Any) -> dict[str, Any]:
    return {name: value.detach().clone().numpy() for name, value in module.named_parameters()}


def fit_ranked() -> dict[str, Any]:
    """All cases in one pair of processes; the GAN too."""
    ends: dict[str, Any] = {}
    kinds = [(SharpPlain, case) for case in CASES] + [(ByHandPlain, case) for case in BY_HAND]
    for kind, case in [*kinds, (PlainManual, CASES[0])]:
        module, reductions = prepared(kind, case), Reductions()
        fit(module, train=rank_loader(), strategy="ddp", callbacks=[reductions], **RANKS, **settings_of(case))
        ends[f"{kind.__name__} {case}"] = ended(module), reductions.count
    gan = build(SharpGAN)
    fit(gan, train=rank_loader(), strategy="ddp_find_unused_parameters_true", **RANKS)
    return ends | {"GAN": (ended(gan), 0)}


@functools.cache
def ranked() -> list[dict[str, Any]]:
    return run_ranks(fit_ranked)


def of_both(name: str) -> tuple[dict[str, Tensor], int]:
    """What both ranks ended with, which is bit-equal, and the all-reduces of one."""
    (first, reductions), (second, _) = (rank[name] for rank in ranked())
    assert all((first[n] == second[n]).all() for n in first)
    return {n: torch.from_numpy(w) for n, w in first.items()}, reductions


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_ranks_equal_one_rank_with_twice_the_micro_batches(case: Case) -> None:
    first, reductions = of_both(f"SharpPlain {case}")
    theirs = build(PlainNet)
    naive(theirs, case, list(loader(48)), ranks=2)
    assert_close(first, dict(theirs.named_parameters()), tolerance(case))
    precision, accumulate, clip_norm = case
    ours = prepared(SharpPlain, (precision, 2 * accumulate, clip_norm))
    fit(ours, train=loader(48), **settings_of(case))
    assert_close(first, dict(ours.named_parameters()), tolerance(case))
    plain = of_both(f"PlainManual {CASES[0]}")[1]  # in 6 steps
    assert reductions * 6 == plain * 2 * -(-3 // accumulate) > 0


@pytest.mark.slow
@pytest.mark.parametrize("case", BY_HAND, ids=str)
def test_sam_backward_by_hand_equals_sam_step_on_two_ranks(case: Case) -> None:
    assert_close(of_both(f"SharpPlain {case}")[0], of_both(f"ByHandPlain {case}")[0], tolerance(case))


@pytest.mark.slow
def test_a_gan_on_two_ranks_equals_a_naive_loop() -> None:
    theirs, batches = build(GAN), [x for x, _ in loader(48)]
    naive_gan(theirs, [batches[i : i + 2] for i in (0, 2, 4)] * 2, (theirs.loss_d, theirs.loss_g), rho=0.1)
    assert_close(of_both("GAN")[0], dict(theirs.named_parameters()))
