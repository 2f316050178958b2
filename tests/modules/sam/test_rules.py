"""SAM's rules of perturbation, alone and together, against a naive loop."""

from __future__ import annotations

import functools
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

import lightning_tricks as lt
from lightning_tricks.core.replay.rerun import is_replaying
from lightning_tricks.modules.sam.rules import asam_perturb_, sam_perturb_, selected_names
from tests.nets import (
    Net,
    NormNet,
    PlainNet,
    assert_close,
    assert_equal,
    build,
    data,
    fit,
    loader,
    rank_loader,
    weights,
)
from tests.ranks import run_ranks
from tests.reference.sam import naive_perturb, naive_sam

PLAIN = lt.SAM(rho=0.1)
RULES = {
    "adaptive": lt.SAM(rho=0.5, adaptive=True),
    "every 2": lt.SAM(rho=0.1, every_n_steps=2),
    "every 3": lt.SAM(rho=0.1, every_n_steps=3),
    "micro 5": lt.SAM(rho=0.1, micro_batch_size=5),  # parts of 5 and 3; the last batch has 4
    "first layer": lt.SAM(rho=0.1, parameters=r"layers\.0"),
    "all": lt.SAM(rho=0.5, adaptive=True, eta=0.1, every_n_steps=2, micro_batch_size=5, parameters="weight"),
}
CLIPS = [None, ("norm", 0.1), ("value", 0.01)]
DTYPES = {"32-true": None, "bf16-mixed": torch.bfloat16, "scaled": torch.float16}
SCALE = 64.0

Case = tuple[lt.SAM, str, int, tuple[str, float] | None]


class SAMNet(lt.SAMMixin, Net):
    sam = PLAIN


class SAMNormNet(lt.SAMMixin, NormNet):
    sam = PLAIN


class SAMPlainNet(lt.SAMMixin, PlainNet):
    sam = PLAIN


def settings_of(case: Case) -> dict[str, Any]:
    _, precision, accumulate, clip = case
    settings: dict[str, Any] = {"accumulate_grad_batches": accumulate}
    if clip is not None:
        settings |= {"gradient_clip_algorithm": clip[0], "gradient_clip_val": clip[1]}
    if precision == "scaled":
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        return settings | {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)]}
    return settings | {"precision": precision}


def with_sam(kind: type[Net], sam: lt.SAM) -> Any:
    module = build(kind)
    module.sam = sam
    return module


def naive(module: Net, case: Case, batches: list[Any], ranks: int = 1, epochs: int = 2) -> list[float]:
    """The naive loop with the settings of a case; the batches of several ranks' steps follow each other."""
    sam, precision, accumulate, clip = case
    length = ranks * accumulate
    windows = [batches[i : i + length] for i in range(0, len(batches), length)] * epochs
    return naive_sam(
        module,
        windows,
        rho=sam.rho,
        accumulate=length,
        clip=clip,
        dtype=DTYPES[precision],
        scale=SCALE if precision == "scaled" else 1.0,
        eta=sam.eta if sam.adaptive else None,
        every=sam.every_n_steps,
        micro=sam.micro_batch_size,
        only={None: "", "norm": r"layers\.1\."}.get(sam.parameters, sam.parameters),
    )


def tolerance(case: Case) -> float:
    return 1e-6 if case[1] == "32-true" else 2e-4


# ---- the formulas


@pytest.mark.parametrize("eta", [0.0, 0.01, 1.0])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_the_perturbations_are_the_formulas_in_double_precision(eta: float, scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a.weight": (5, 3), "a.bias": (5,), "weight_hh": (2, 2), "scale": ()}
    start = {n: torch.randn(s, dtype=torch.float64, generator=generator) for n, s in shapes.items()}
    gradients = [torch.randn(s, dtype=torch.float64, generator=generator) * scale for s in shapes.values()]
    adapts = ["weight" in name for name in shapes]
    assert adapts == [True, False, True, False]
    for adaptive in (False, True):
        ours, theirs, rule = ({n: w.clone() for n, w in start.items()} for _ in range(3))
        moved, kept = list(ours.values()), [g.clone() for g in gradients]
        if adaptive:
            norm = asam_perturb_(moved, gradients, 0.5, eta=eta, adapts=adapts)
        else:
            norm = sam_perturb_(moved, gradients, 0.5)
        expected = naive_perturb(theirs, gradients, 0.5, eta if adaptive else None)
        sam = lt.SAM(0.5, adaptive=adaptive, eta=eta)
        assert sam.perturb_(list(rule.values()), gradients, list(rule)).item() == norm.item()
        assert norm.item() == pytest.approx(expected, rel=1e-12)
        for name in start:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-6 if scale < 1 else 1e-12, atol=1e-12)
            assert torch.equal(ours[name], rule[name])
        assert all(torch.equal(a, b) for a, b in zip(gradients, kept, strict=True))


def test_no_weights_and_zero_gradients_move_nothing() -> None:
    weight = torch.ones(3)
    assert asam_perturb_([weight], [torch.zeros(3)], 0.5, eta=0.0, adapts=[True]) == 0
    assert sam_perturb_([weight], [torch.zeros(3)], 0.5) == 0
    assert torch.equal(weight, torch.ones(3))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"rho": -0.1}, ValueError, r"rho must be in \[0.0, inf\), got -0.1"),
        ({"rho": float("nan")}, ValueError, r"rho must be in \[0.0, inf\), got nan"),
        ({"rho": float("inf")}, ValueError, r"rho must be in \[0.0, inf\), got inf"),
        ({"rho": True}, TypeError, r"rho must be a number in \[0.0, inf\), got True"),
        ({"adaptive": 1}, TypeError, "adaptive must be True or False, got 1"),
        ({"eta": -1}, ValueError, r"eta must be in \[0.0, inf\), got -1"),
        ({"eta": "0"}, TypeError, "eta must be a number in .*, got '0'"),
        ({"every_n_steps": 0}, ValueError, "every_n_steps must be at least 1, got 0"),
        ({"every_n_steps": 2.0}, TypeError, "every_n_steps must be an integer, got 2.0"),
        ({"micro_batch_size": 0}, ValueError, "micro_batch_size must be at least 1, got 0"),
        ({"micro_batch_size": 2.5}, TypeError, "micro_batch_size must be an integer, got 2.5"),
        ({"parameters": 3}, TypeError, "parameters must be a string or a list of strings, got 3"),
        ({"parameters": "("}, ValueError, r"parameters: '\(' is not a regular expression"),
    ],
    ids=str,
)
def test_a_bad_setting_is_named(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        lt.SAM(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rho": -0.1}, r"rho must be in \[0.0, inf\), got -0.1"),
        ({"eta": float("nan")}, "eta must be .* got nan"),
        ({"adapts": [True, False]}, "adapts must have a flag for each of 1 weights, got 2"),
    ],
)
def test_a_bad_number_of_a_rule_is_named(arguments: dict[str, Any], message: str) -> None:
    w, g = [torch.zeros(2)], [torch.ones(2)]
    for adapts in (1, [1.0]):
        with pytest.raises(TypeError, match="adapts must be "):
            asam_perturb_(w, g, 0.1, eta=0.01, adapts=adapts)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        asam_perturb_(w, g, **{"rho": 0.1, "eta": 0.01, "adapts": [True], **arguments})
    if "rho" in arguments:
        with pytest.raises(ValueError, match=message):
            sam_perturb_(w, g, **arguments)
    assert not w[0].any()


class RMSNorm(nn.Module):
    """Of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))


class ManyNorms(L.LightningModule):
    """Its own name says nothing about its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.ones(2))
        self.norm_free = nn.Linear(2, 2)
        self.stem = nn.Sequential(nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2))
        self.block = nn.ModuleDict({"attention": nn.Linear(2, 2), "ln": nn.LayerNorm(2), "rms": RMSNorm()})


@pytest.mark.parametrize(
    ("parameters", "names"),
    [
        ("norm", {"stem.1.weight", "stem.1.bias", "block.ln.weight", "block.ln.bias", "block.rms.scale"}),
        (r"^stem\.0", {"stem.0.weight", "stem.0.bias"}),
        ("bias$", {"norm_free.bias", "stem.0.bias", "stem.1.bias", "block.attention.bias", "block.ln.bias"}),
    ],
)
def test_parameters_select_exactly_these(parameters: str, names: set[str]) -> None:
    assert selected_names(ManyNorms(), parameters) == names


# ---- equal to the naive loop, one process


# 6 batches: windows of 4 leave a ragged one
SINGLE: list[Case] = [(PLAIN, p, accumulate, clip) for p in DTYPES for accumulate in (1, 2, 4) for clip in CLIPS]
SINGLE += [(rule, "32-true", accumulate, None) for rule in RULES.values() for accumulate in (1, 4)]
SINGLE += [(lt.SAM(rho=0.1, parameters="norm"), "32-true", 1, None), (RULES["all"], "bf16-mixed", 4, CLIPS[1])]
SINGLE += [(rule, p, 2, CLIPS[1]) for rule in (RULES["adaptive"], RULES["micro 5"]) for p in ("bf16-mixed", "scaled")]
SINGLE += [(RULES["every 2"], "scaled", 2, CLIPS[2]), (RULES["all"], "scaled", 4, CLIPS[1])]


def name_of(case: Case) -> str:
    names = {PLAIN: "plain", **{rule: name for name, rule in RULES.items()}}
    return f"{names.get(case[0], case[0])}, {case[1]}, {case[2]}, {case[3]}"


@pytest.mark.few(15)
@pytest.mark.parametrize("case", SINGLE, ids=name_of)
def test_equals_a_naive_loop(case: Case) -> None:
    ours, theirs = with_sam(SAMNormNet, case[0]), build(NormNet)
    fit(ours, **settings_of(case))
    naive(theirs, case, list(loader()))
    assert_close(weights(ours), weights(theirs), tolerance(case))


def test_every_rule_has_another_effect() -> None:
    ends = []
    for rule in (PLAIN, *RULES.values()):
        module = with_sam(SAMNormNet, rule)
        fit(module, max_epochs=1)
        ends.append(torch.cat([w.flatten() for w in module.parameters()]))
    for i, one in enumerate(ends):
        assert all(not torch.allclose(one, other, atol=1e-5) for other in ends[:i])


class Noting(SAMNormNet):
    """Keeps what is logged as the gradient's norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.norms.append(self.trainer.callback_metrics["tricks/sam_grad_norm"].item())


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "case",
    [
        (PLAIN, "32-true", 4, CLIPS[1]),
        (PLAIN, "scaled", 2, None),
        (RULES["micro 5"], "32-true", 2, None),
        (RULES["micro 5"], "scaled", 2, None),
        (RULES["adaptive"], "32-true", 1, None),
    ],
    ids=name_of,
)
def test_the_logged_norm_is_that_of_the_batch(case: Case) -> None:
    module = with_sam(Noting, case[0])
    fit(module, log_every_n_steps=1, **settings_of(case))
    expected = naive(build(NormNet), case, list(loader()))
    assert module.norms == pytest.approx(expected, rel=1e-4 if case[1] == "32-true" else 2e-2)


# ---- the no-op limits


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "rule",
    [
        lt.SAM(0, adaptive=True),
        lt.SAM(0, every_n_steps=2),
        lt.SAM(0, parameters="norm"),
        lt.SAM(0, micro_batch_size=8),
        lt.SAM(0, adaptive=True, every_n_steps=3, micro_batch_size=100, parameters="weight"),
    ],
    ids=str,
)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "scaled"])
def test_rho_zero_is_bit_equal_to_no_mixin(rule: lt.SAM, precision: str) -> None:
    case = (rule, precision, 4, CLIPS[1])
    plain, still = build(Net), with_sam(SAMNet, rule)
    plain_run, run = fit(plain, **settings_of(case)), fit(still, **settings_of(case))
    assert_equal(weights(plain), weights(still))
    ours = {name: value for name, value in run.callback_metrics.items() if not name.startswith("tricks/")}
    assert ours == plain_run.callback_metrics
    assert run.global_step == plain_run.global_step


def test_only_the_first_step_is_perturbed_where_the_next_would_come_after_the_end() -> None:
    class FirstStep(SAMNormNet):
        """Perturbs as long as the optimizer has not stepped."""

        perturbed = False

        def on_train_batch_start(self, *_: Any) -> None:
            self.perturbs = self.trainer.global_step == 0

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if is_replaying():
                assert self.perturbs
                FirstStep.perturbed = True
            return super().training_step(batch, batch_idx)

    never, start = with_sam(FirstStep, lt.SAM(0.1, every_n_steps=1000)), build(NormNet)
    fit(never)
    assert never.perturbed
    naive(start, (lt.SAM(0.1, every_n_steps=1000), "32-true", 1, None), list(loader()))
    assert_close(weights(never), weights(start))
    plain, rest = build(NormNet), with_sam(SAMNormNet, lt.SAM(0, every_n_steps=1000))
    fit(plain), fit(rest)
    assert_equal(weights(plain), weights(rest))


def test_micro_batches_as_large_as_the_batch_are_plain_sam() -> None:
    whole, parts = build(SAMNet), with_sam(SAMNet, lt.SAM(0.1, micro_batch_size=8))
    fit(whole, accumulate_grad_batches=2), fit(parts, accumulate_grad_batches=2)
    assert_close(weights(whole), weights(parts))


def test_resume_is_bit_exact(tmp_path: Any) -> None:
    whole, half, rest = (with_sam(SAMNormNet, RULES["all"]) for _ in range(3))
    train = loader(40)  # 5 steps: the second half begins with a step of the other parity
    fit(whole, train=train, max_epochs=2)
    fit(half, train=train, max_epochs=1).save_checkpoint(tmp_path / "x.ckpt")
    fit(rest, train=train, max_epochs=2, ckpt_path=tmp_path / "x.ckpt")
    assert_equal(weights(whole), weights(rest))
    assert not torch.load(tmp_path / "x.ckpt", weights_only=True)["callbacks"]


# ---- what is seen of the other runs


class Watched(Net):
    """Logs a metric, and notes the random state after each batch."""

    def __init__(self) -> None:
        super().__init__(lr=0.0)
        self.accuracy = MulticlassAccuracy(num_classes=2)
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.accuracy(self(batch[0]), batch[1])
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.steps += 1
        return super().training_step(batch, batch_idx)


class SAMWatched(lt.SAMMixin, Watched):
    sam = PLAIN


class RandomStates(Callback):
    def __init__(self) -> None:
        self.states: list[Tensor] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.states.append(torch.get_rng_state())


@pytest.mark.few(5)
@pytest.mark.parametrize("rule", [PLAIN, *RULES.values()], ids=["plain", *RULES])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_logs_metrics_statistics_and_random_numbers_are_those_of_one_run(rule: lt.SAM, precision: Any) -> None:
    plain, sharp = build(Watched), with_sam(SAMWatched, rule)  # lr = 0: the weights stay what they are
    theirs, ours = RandomStates(), RandomStates()
    plain_run = fit(plain, callbacks=[theirs], precision=precision)
    run = fit(sharp, callbacks=[ours], precision=precision)
    assert_equal(weights(plain), weights(sharp))
    logged = {name: value for name, value in run.callback_metrics.items() if not name.startswith("tricks/")}
    assert logged == plain_run.callback_metrics
    assert sharp.steps == 12
    assert len(ours.states) == 12
    assert all(torch.equal(a, b) for a, b in zip(ours.states, theirs.states, strict=True))


def test_each_micro_batch_sees_the_same_random_numbers_twice_and_no_two_the_same() -> None:
    seen: list[tuple[int, float]] = []

    class Drawing(SAMPlainNet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            seen.append((len(batch[1]), torch.rand(()).item()))
            return super().training_step(batch, batch_idx)

    module = with_sam(Drawing, lt.SAM(0.1, micro_batch_size=5))
    fit(module, max_steps=1)
    (whole, *parts) = seen
    assert whole[0] == 8
    assert [size for size, _ in parts] == [5, 5, 3, 3]
    assert parts[0::2] == parts[1::2]
    assert len({draw for _, draw in parts}) == 2


def test_micro_batches_train_modules_that_hold_their_weights_in_lists() -> None:
    class Listed(SAMPlainNet):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.own = nn.LSTM(8, 8), list(self.layers.parameters())

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step((self.cell(batch[0][None])[0][0], batch[1]), batch_idx)

    parts, whole = with_sam(Listed, lt.SAM(0.1, micro_batch_size=4)), with_sam(Listed, lt.SAM(0.1, micro_batch_size=8))
    fit(parts, max_steps=1), fit(whole, max_steps=1)
    assert not torch.equal(parts.cell.weight_ih_l0, whole.cell.weight_ih_l0)  # each part perturbs for itself


# ---- micro-batches of batches of other kinds


def test_micro_batches_of_nested_batches_are_the_same() -> None:
    class FromNested(SAMNormNet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            names, x = batch["inputs"].pop("name"), batch["inputs"].pop("x")
            assert len(names) == len(x)
            return super().training_step((x, batch["targets"][0]), batch_idx)

    # a dictionary in a dictionary, with names beside the tensors
    samples = [{"inputs": {"x": x, "name": f"sample {n}"}, "targets": (y,)} for n, (x, y) in enumerate(data())]
    rule = RULES["micro 5"]
    nested, flat = with_sam(FromNested, rule), with_sam(SAMNormNet, rule)
    fit(nested, train=DataLoader(samples, batch_size=8)), fit(flat)
    assert_equal(weights(nested), weights(flat))


@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`")
def test_what_is_no_sample_is_not_cut() -> None:
    class Weighted(SAMPlainNet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y, factor, shift = batch
            assert factor.shape == ()
            assert shift.shape == (1, 8)
            assert len(x) == len(y)
            return super().training_step((x * factor + shift, y), batch_idx)

    def collate(samples: list[Any]) -> Any:
        x, y = torch.utils.data.default_collate(samples)
        return x, y, torch.ones(()), torch.zeros(1, 8)

    rule = RULES["micro 5"]
    weighted, plain = with_sam(Weighted, rule), with_sam(SAMPlainNet, rule)
    fit(weighted, train=DataLoader(data(), 8, collate_fn=collate)), fit(plain)
    assert_equal(weights(weighted), weights(plain))


@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`")
def test_a_batch_without_samples_is_refused() -> None:
    class Names(SAMPlainNet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.layers(torch.ones(2, 8)).mean()

    module = with_sam(Names, lt.SAM(0.1, micro_batch_size=2))
    message = r"SAM\(micro_batch_size=2\) needs targets with one entry per sample, got a batch with a list: 2 str"
    with pytest.raises(MisconfigurationException, match=message):
        fit(module, train=DataLoader(["a", "b", "c", "d"], batch_size=2))


def test_weights_that_are_chosen_but_do_not_train_leave_plain_training() -> None:
    class FrozenFirst(Net):
        def __init__(self) -> None:
            super().__init__()
            self.layers[0].requires_grad_(False)

    class SAMFrozenFirst(lt.SAMMixin, FrozenFirst):
        sam = lt.SAM(0.1, parameters=r"layers\.0")

    plain, sharp = build(FrozenFirst), build(SAMFrozenFirst)
    fit(plain), fit(sharp)
    assert_equal(weights(plain), weights(sharp))


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_perturbed_step_that_is_left_out_does_not_perturb_the_next() -> None:
    class LeavesOut(NormNet):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 0 else super().training_step(batch, batch_idx)

    class SAMLeavesOut(lt.SAMMixin, LeavesOut):
        sam = lt.SAM(0.1, every_n_steps=100)

    plain, sharp = build(LeavesOut), build(SAMLeavesOut)
    fit(plain, max_epochs=1), fit(sharp, max_epochs=1)
    assert_equal(weights(plain), weights(sharp))


@pytest.mark.parametrize("rule", [PLAIN, *RULES.values()], ids=["plain", *RULES])
@pytest.mark.parametrize("when", ["first run", "other runs"])
def test_an_overflow_skips_the_step_and_leaves_everything_finite(rule: lt.SAM, when: str) -> None:
    class Overflow(SAMNormNet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            hit = is_replaying() == (when == "other runs")
            return super().training_step(batch, batch_idx) * (float("inf") if hit else 1.0)

    module, start = with_sam(Overflow, rule), build(NormNet)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    fit(module, plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)], max_steps=1)
    assert all(torch.isfinite(value).all() for value in weights(module).values())
    if when == "other runs" or rule.micro_batch_size is None:  # of micro-batches the first run gives no gradient
        assert scaler.get_scale() == SCALE / 2
        assert_equal(dict(module.named_parameters()), dict(start.named_parameters()))


# ---- two processes


RANKED: list[Case] = [(PLAIN, p, a, clip) for p in DTYPES for a in (1, 2, 4) for clip in CLIPS]  # 3 batches a rank
RANKED += [(rule, "32-true", 2, CLIPS[1]) for rule in RULES.values()]
RANKED += [(RULES["all"], "bf16-mixed", 2, None), (RULES["micro 5"], "scaled", 1, CLIPS[2])]
RANKS = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False}


class Reductions(Callback):
    """Counts the all-reduces of gradients."""

    def __init__(self) -> None:
        self.count = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.strategy.model.register_comm_hook(None, self._note)

    def _note(self, group, bucket):  # torch looks at annotations
        self.count += 1
        return allreduce_hook(group, bucket)


def fit_rank(kind: type[Net], case: Case, **more: Any) -> tuple[dict[str, Any], int]:
    module, reductions = build(kind), Reductions()
    module.sam = case[0]
    fit(module, train=rank_loader(), callbacks=[reductions], **RANKS, **settings_of(case), **more)
    return {name: value.numpy() for name, value in weights(module).items()}, reductions.count


def fit_ranked() -> dict[str, Any]:
    """All cases in one pair of processes, and plain training with the same accumulation."""
    ends = {name_of(case): fit_rank(SAMPlainNet, case) for case in RANKED}
    return ends | {
        f"no SAM, {accumulate}": fit_rank(PlainNet, (PLAIN, "32-true", accumulate, None)) for accumulate in (1, 2, 4)
    }


@functools.cache
def ranked() -> list[dict[str, Any]]:
    return run_ranks(fit_ranked)


@pytest.mark.slow
@pytest.mark.parametrize("case", RANKED, ids=name_of)
def test_two_ranks_equal_a_naive_loop_over_the_batches_of_both(case: Case) -> None:
    (first, reductions), (second, _) = (rank[name_of(case)] for rank in ranked())
    assert all((first[name] == second[name]).all() for name in first)
    theirs = build(PlainNet)
    naive(theirs, case, list(loader(48)), ranks=2)
    assert_close({n: torch.from_numpy(w) for n, w in first.items()}, weights(theirs), tolerance(case))
    assert reductions == ranked()[0][f"no SAM, {case[2]}"][1] > 0


@pytest.mark.slow
def test_ranks_agree_bit_for_bit_after_many_steps() -> None:
    case = (RULES["adaptive"], "32-true", 1, None)
    (first, _), (second, _) = run_ranks(functools.partial(fit_rank, max_epochs=334), SAMPlainNet, case)
    assert all((first[name] == second[name]).all() for name in first)


def test_a_micro_batch_of_one_sample_is_named_where_batchnorm_cannot_train_on_it() -> None:
    module = with_sam(SAMNet, lt.SAM(0.1, micro_batch_size=7))  # 8 samples are 7 and 1
    with pytest.raises(MisconfigurationException, match=r"SAM\(micro_batch_size=7\) gives .* one sample"):
        fit(module)
