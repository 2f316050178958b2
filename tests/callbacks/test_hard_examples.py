"""Hard examples against naive steps that filter for themselves, with other tricks and on two processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

import lightning_tricks as lt
from lightning_tricks.functional import ohem_loss
from tests.conformance.engines import cpu_deepspeed
from tests.conformance.runs import Gather, ShardedNet, fp16
from tests.core.batches.test_scoring import (
    CE,
    KeepingPlain,
    KeepingTask,
    Task,
    X,
    Y,
    given,
    modes,
    rows,
    run_one,
    scored,
    top,
)
from tests.device.devices import device
from tests.nets import (
    Net,
    NormNet,
    PlainNet,
    SteppedByHand,
    assert_close,
    assert_equal,
    build,
    data,
    fit,
    loader,
    trained,
    trainer,
    weights,
)
from tests.ranks import run_ranks
from tests.reference.sam import naive_sam

# ---- the loss


def test_ohem_is_the_mean_of_the_largest_losses_and_of_their_gradients_only() -> None:
    losses = torch.tensor([1.0, 5.0, 2.0, 5.0, 3.0], requires_grad=True)
    for keep, count in ((0.01, 1), (0.3, 2), (0.5, 2), (0.7, 4), (1.0, 5)):  # round: 1.5 and 2.5 are 2, 3.5 is 4
        losses.grad = None
        loss = ohem_loss(losses, keep)
        loss.backward()
        assert torch.equal(loss, losses.sort(descending=True).values[:count].mean())
        assert losses.grad.count_nonzero() == count
        torch.testing.assert_close(losses.grad.sum(), torch.tensor(1.0))
    ties = torch.ones(6, requires_grad=True)
    ohem_loss(ties, 0.5).backward()
    assert sorted(ties.grad.tolist()) == pytest.approx([0, 0, 0, 1 / 3, 1 / 3, 1 / 3])


def test_ohem_that_keeps_all_is_bit_equal_to_the_mean_of_any_losses() -> None:
    strided = torch.rand(2 * 4097, generator=torch.Generator().manual_seed(0))[::2]
    for many in (strided, strided.contiguous()):
        assert torch.equal(ohem_loss(many, 1.0), many.mean())


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ohem_loss(torch.ones(2, 2), 0.5), ValueError, r"one entry per sample, \(n,\), got \(2, 2\)"),
        (lambda: ohem_loss(torch.ones(0), 0.5), ValueError, r"got \(0,\)"),
        (lambda: ohem_loss(torch.ones(2), 0), ValueError, r"keep must be in \(0, 1\], got 0"),
        (lambda: lt.HardExampleFilter(float("nan")), ValueError, "keep must be in"),
        (lambda: lt.HardExampleFilter(True), TypeError, "keep must be a number"),
        (lambda: lt.HardExampleFilter(mode="pruned"), ValueError, "Did you mean 'prune'"),
        (lambda: lt.HardExampleFilter(across_ranks=True), ValueError, 'across_ranks needs mode="loss"'),
        (lambda: lt.HardExampleFilter(mode="loss", score_scale=0.5), ValueError, 'score_scale .* mode="prune"'),
        (lambda: lt.HardExampleFilter(score_scale=0), ValueError, "score_scale must be above 0"),
        (lambda: lt.HardExampleFilter(score_scale=1.0), ValueError, "score_scale"),
        (lambda: lt.HardExampleFilter(every_n_batches=0), ValueError, "every_n_batches must be at least 1"),
        (lambda: lt.HardExampleFilter(start=1.5), ValueError, "start must be"),
    ],
)
def test_bad_values_are_named(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


# ---- equal to steps that filter for themselves


class NaivePrune(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        kept = top(scored(self, *batch))
        return super().training_step((batch[0][kept], batch[1][kept]), batch_idx)


class NaiveLoss(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = CE(self(batch[0]), batch[1], reduction="none")
        return losses[top(losses)].mean()


@pytest.mark.few(3)
@modes
@pytest.mark.parametrize(
    "regime",
    [
        dict,
        lambda: {"accumulate_grad_batches": 4, "gradient_clip_val": 0.1},
        lambda: {"precision": "bf16-mixed"},
        fp16,
        lambda: {"train": loader(batch_size=5)},
    ],
    ids=["fp32", "accumulate-clip", "bf16-mixed", "fp16", "ragged"],
)
def test_equals_a_step_that_filters_for_itself_and_keeping_all_changes_nothing(regime: Any, mode: Any) -> None:
    every, plain = build(Net), build(Net)
    ours = trained(Net, lt.HardExampleFilter(mode=mode), **regime())
    numbers = torch.get_rng_state()
    theirs = trained(NaivePrune if mode == "prune" else NaiveLoss, **regime())
    assert torch.equal(numbers, torch.get_rng_state())
    (assert_equal if mode == "prune" else assert_close)(ours, theirs)
    run, reference = fit(every, callbacks=[lt.HardExampleFilter(1.0, mode=mode)], **regime()), fit(plain, **regime())
    assert_equal(weights(every), weights(plain))
    assert run.callback_metrics == reference.callback_metrics


@pytest.mark.parametrize("size", [1, 3, 8])
def test_which_batches_are_filtered_and_how_many_are_kept(size: int) -> None:
    module = build(KeepingPlain)
    window = lt.HardExampleFilter(start=2, stop=0.75, every_n_batches=2)
    fit(module, train=loader(8 * size, size), callbacks=[window], max_epochs=2)
    kept = max(1, round(size / 2))
    assert [len(y) for _, y in module.kept] == [kept if n in (2, 4, 6, 8, 10) else size for n in range(16)]


class Thresholds(NaivePrune):
    """Logs for itself what the callback logs."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = scored(self, *batch)
        self.expected = len(top(losses)) / len(losses), losses[top(losses)].min().item()
        return super().training_step(batch, batch_idx)


@modes
def test_share_and_threshold_are_logged(mode: Any) -> None:
    lines: list[Any] = []

    class Note(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            names = ("tricks/kept_fraction", "tricks/loss_threshold")
            logged = tuple(float(trainer.callback_metrics[n]) for n in names if n in trainer.callback_metrics)
            lines.append(logged or pl_module.expected)

    for kind, callbacks in ((Net, [lt.HardExampleFilter(mode=mode)]), (Thresholds, [])):
        fit(build(kind), train=loader(45, 9), callbacks=[*callbacks, Note()], log_every_n_steps=1, max_steps=1)
    assert lines[0] == pytest.approx(lines[1])
    assert lines[0][0] == pytest.approx(4 / 9)


def test_share_and_threshold_are_logged_if_one_of_several_batches_is_filtered() -> None:
    run = fit(build(PlainNet), callbacks=[lt.HardExampleFilter(every_n_batches=2)], log_every_n_steps=2)
    assert "tricks/kept_fraction" in run.callback_metrics


@modes
def test_resume_is_bit_exact(mode: Any, tmp_path: Any) -> None:
    filtering, path = partial(lt.HardExampleFilter, mode=mode, every_n_batches=4, start=5), tmp_path / "x.ckpt"
    whole = trained(NormNet, filtering(), max_epochs=4)
    fit(build(NormNet), callbacks=[filtering()], max_epochs=3).save_checkpoint(path)
    assert_equal(trained(NormNet, filtering(), max_epochs=4, ckpt_path=path), whole)


class NormPrune(NaivePrune, NormNet):
    pass


class NormLoss(NaiveLoss, NormNet):
    pass


@pytest.mark.few(2)
@pytest.mark.filterwarnings("ignore")  # the compiler has its own in each version of torch
@pytest.mark.parametrize(
    ("on", "compiled"),
    [
        *(pytest.param("real cuda", compiled, marks=pytest.mark.gpu) for compiled in (False, True)),
        ("simulated cuda", False),  # where nothing is compiled
        ("host cpu", False),
        ("host cpu", True),
    ],
)
@modes
def test_under_autocast_a_compiled_network_equals_a_step_that_filters_for_itself(
    mode: Any, on: str, compiled: bool
) -> None:
    ours, theirs = build(NormNet), build(NormPrune if mode == "prune" else NormLoss)
    for module, callbacks in ((ours, [lt.HardExampleFilter(mode=mode)]), (theirs, [])):
        if compiled:
            torch.compiler.reset()
            module.layers.compile(**({} if on == "real cuda" else {"backend": "eager"}))
        with device(on) as there:
            precision = "bf16-mixed" if on == "host cpu" else "16-mixed"
            fit(module, callbacks=callbacks, accelerator=there.name, precision=precision)
    assert_close(weights(ours), weights(theirs), 1e-3 if compiled else 1e-5)
    assert not torch.equal(weights(ours)["layers.0.weight"], weights(build(NormNet))["layers.0.weight"])


# ---- with other tricks


class Simple(NormNet):
    """Without momentum, so that each step may have an optimizer of its own."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SimplePlain(PlainNet):
    configure_optimizers = Simple.configure_optimizers


@pytest.mark.parametrize(
    ("base", "mode", "micro"), [(Simple, "prune", None), (SimplePlain, "loss", None), (SimplePlain, "prune", 3)]
)
def test_sam_runs_again_on_the_same_samples(base: type[Net], mode: Any, micro: int | None) -> None:
    kind = type(base)("Sharp", (lt.SAMMixin, base), {"sam": lt.SAM(rho=0.5, micro_batch_size=micro)})
    theirs = build(base)
    ours = trained(kind, lt.HardExampleFilter(mode=mode), max_epochs=1)
    theirs.train()
    for x, y in loader():
        kept = top(scored(theirs, x, y))
        naive_sam(theirs, [[(x[kept], y[kept])]], rho=0.5, accumulate=1, micro=micro)
    assert_close(ours, weights(theirs))


def test_micro_batches_of_sam_are_refused_in_loss_mode() -> None:
    kind = type(Net)("Sharp", (lt.SAMMixin, PlainNet), {"sam": lt.SAM(micro_batch_size=4)})
    with pytest.raises(MisconfigurationException, match=r'Remove micro_batch_size, or use mode="prune"'):
        fit(build(kind), callbacks=[lt.HardExampleFilter(mode="loss")])


@modes
@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("first", [True, False])
def test_what_is_kept_is_mixed_and_in_loss_mode_mixed_losses_are_compared(
    mode: Any, per_sample: bool, first: bool
) -> None:
    mix = lt.Mixup(1.0, per_sample=per_sample)
    callbacks = [lt.HardExampleFilter(mode=mode), mix][:: 1 if first else -1]
    ours = run_one(build(Task), {"x": X, "y": Y}, *callbacks)
    kept = top(CE(build(Task)(X), Y, reduction="none").detach()) if mode == "prune" else torch.arange(8)
    lam, index, x, y = mix.drawn.lam, mix.drawn.index, X[kept], Y[kept]

    def loss(z: Tensor, y: Tensor) -> Tensor:
        losses = lam * CE(z, y, reduction="none") + (1 - lam) * CE(z, y[index], reduction="none")
        return losses[top(losses.detach(), 4)].mean()

    assert len(index) == len(kept)
    assert_close(ours, run_one(build(Task, loss=loss), {"x": lt.functional.mixup(x, lam, index), "y": y}))


class Manual(SteppedByHand, PlainNet):
    """Steps by itself."""


def test_manual_optimization_works_in_loss_mode_and_is_refused_in_prune_mode() -> None:
    ours, theirs = build(Manual), build(PlainNet)
    for module in (ours, theirs):
        fit(module, callbacks=[lt.HardExampleFilter(mode="loss")])
    assert_close(weights(ours), weights(theirs))
    with pytest.raises(MisconfigurationException, match=r'Manual.automatic_optimization=False: use mode="loss"'):
        fit(build(Manual), callbacks=[lt.HardExampleFilter()])


def test_a_manual_module_may_be_validated_with_the_callback() -> None:
    trainer(callbacks=[lt.HardExampleFilter()]).validate(build(Manual), loader(24), verbose=False)


def test_in_manual_sam_the_second_run_takes_the_samples_of_its_own_first_run() -> None:
    class Two(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(CE(self(batch[0]), 1 - batch[1]))
            self.again(lambda: CE(self(batch[0]), batch[1]))
            self.optimizers().step()
            self.optimizers().zero_grad()

        def again(self, closure: Any) -> None:
            self.manual_backward(closure())

    class Still(lt.SAMMixin, Two):
        sam = lt.SAM(rho=0)

        def again(self, closure: Any) -> None:
            self.sam_backward(closure)

    ours, theirs = build(Still), build(Two)
    for module in (ours, theirs):
        fit(module, callbacks=[lt.HardExampleFilter(mode="loss")], max_epochs=1)
    assert_close(weights(ours), weights(theirs))


# ---- two processes


def batches_of(sizes: tuple[int, int], biased: bool) -> list[list[tuple[Tensor, Tensor]]]:
    """Three steps of a batch a rank; the first rank's labels are all wrong, the other's all right, if biased."""
    x, y = data(3 * sum(sizes)).tensors
    parts = list(zip(x.split([*sizes] * 3), y.split([*sizes] * 3), strict=True))
    if biased:
        guesses = [build(PlainNet)(x).argmax(1) for x, _ in parts]
        parts = [
            (x, guess if n % 2 else 1 - guess) for n, ((x, _), guess) in enumerate(zip(parts, guesses, strict=True))
        ]
    return [parts[n : n + 2] for n in (0, 2, 4)]


def alone(sizes: tuple[int, int], biased: bool, across: bool) -> dict[str, Tensor]:
    """Training on the mean over what both ranks keep."""
    module, count = build(PlainNet), max(1, round(min(sizes) / 2))
    optimizer = module.configure_optimizers()
    for parts in batches_of(sizes, biased):
        losses = [CE(module(x), y, reduction="none") for x, y in parts]
        kept = [torch.cat(losses).topk(2 * count).values] if across else [each.topk(count).values for each in losses]
        optimizer.zero_grad()
        torch.cat(kept).mean().backward()
        optimizer.step()
    return weights(module)


CASES = [((8, 8), False), ((8, 5), False), ((4, 9), False), ((6, 6), True)]
FILTERS = {"prune": {}, "loss": {"mode": "loss"}, "across": {"mode": "loss", "across_ranks": True}}


def two_ranks(engine: str, case: Any, settings: dict[str, Any]) -> dict[str, Tensor]:
    mine = [parts[int(os.environ["RANK"])] for parts in batches_of(*case)]
    strategies = {"DeepSpeed": partial(cpu_deepspeed, logging_batch_size_per_gpu=8), "DDP": lambda: "ddp"}
    fsdp = partial(ModelParallelStrategy, data_parallel_size=2, tensor_parallel_size=1)
    gathers = [] if engine == "DDP" else [Gather()]
    common = {"train": given(*mine), "devices": 2, "use_distributed_sampler": False, "max_epochs": 1}
    kind, strategy = ShardedNet if engine == "FSDP2" else PlainNet, strategies.get(engine, fsdp)()
    ended = trained(kind, lt.HardExampleFilter(**settings), *gathers, strategy=strategy, **common)
    return gathers[0].weights if gathers else ended


def ddp() -> list[dict[str, Tensor]]:
    return [two_ranks("DDP", case, settings) for case in CASES for settings in FILTERS.values()]


def test_two_ranks_equal_one_process_on_what_both_keep() -> None:
    cases = [(case, name) for case in CASES for name in FILTERS]
    for (case, name), first, second in zip(cases, *run_ranks(ddp), strict=True):
        assert_equal(first, second)
        assert_close(first, alone(*case, name == "across"))


def test_one_sample_that_batchnorm_cannot_train_on_is_named() -> None:
    message = r"HardExampleFilter\(keep=0\.1\) leaves NormNet one sample, .* keep more, or use mode="
    with pytest.raises(MisconfigurationException, match=message):
        fit(build(NormNet), callbacks=[lt.HardExampleFilter(0.1)])


def test_a_batch_of_one_sample_that_was_not_filtered_is_nobodys_fault() -> None:
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        fit(build(NormNet), train=loader(9), callbacks=[lt.HardExampleFilter(0.5, every_n_batches=2)])


def statistics(*keeps: float) -> dict[str, Tensor]:
    settings: dict[str, Any] = {"strategy": "ddp", "devices": 2, "max_epochs": 1, "limit_val_batches": 0}
    return trained(NormNet, *map(lt.HardExampleFilter, keeps), **settings)


def test_ranks_exchange_statistics_before_each_step_as_without_it() -> None:
    for ours, theirs in zip(run_ranks(statistics, 0.999), run_ranks(statistics), strict=True):
        assert_equal(ours, theirs)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("engine", ["FSDP2", "DeepSpeed"])
def test_sharded_weights_equal_one_process_too(engine: str, name: str) -> None:
    first, _ = run_ranks(two_ranks, engine, CASES[1], FILTERS[name])
    assert_close(first, alone(*CASES[1], name == "across"), 1e-5)


# -- by which losses samples are compared, and which losses a filter refuses ------------------------------------------


def ignoring(y: Tensor) -> Tensor:
    return torch.where((y + torch.arange(8)[:, None]) % 3 == 0, -100, y).index_fill(0, torch.tensor([5]), -100)


def focal(z: Tensor, y: Tensor) -> Tensor:
    losses = CE(z, y, reduction="none")
    return ((1 - torch.exp(-losses)) ** 2 * losses).mean()


def tokens(z: Tensor, y: Tensor) -> Tensor:
    return CE(z.view(-1, 3), y.reshape(-1), ignore_index=-100)


def token_values(z: Tensor, y: Tensor) -> Tensor:
    return CE(z.view(-1, 3), y.flatten(), reduction="none").mean()


WEIGHT = torch.tensor([0.2, 1.0, 4.0])


LOSSES: dict[str, tuple[Any, ...]] = {  # loss, target, outputs; by which samples are compared if not the loss of each
    "ce": (CE, rows(3), 3),
    "smooth": (nn.CrossEntropyLoss(label_smoothing=0.2), rows(3), 3),
    "weighted": (partial(CE, weight=WEIGHT), rows(3), 3, partial(CE, weight=WEIGHT, reduction="none")),
    "one-hot": (CE, F.one_hot(rows(3), 3).float(), 3),
    "multi-label": (partial(F.binary_cross_entropy_with_logits, pos_weight=WEIGHT), rows(2, 3).float(), 3),
    "regression": (nn.MSELoss(), X[:, :1] * 2, 1),
    "huber-flat": (lambda z, y: F.huber_loss(z.flatten(), y), X[:, 0] * 2, 1),
    "kl": (lambda z, y: F.kl_div(z.log_softmax(1), y, reduction="batchmean"), rows(9, 3).float().softmax(1), 3),
    "tokens": (tokens, ignoring(rows(3, 4)), 12),
    "tokens-dense": (lambda z, y: CE(z.view(-1, 3, 4), y), ignoring(rows(3, 4)), 12),
    "token-values": (token_values, rows(3, 4), 12),
    "segmentation": (lambda z, y: CE(z.view(-1, 3, 2, 2), y), rows(3, 2, 2), 12),
    "focal": (focal, rows(3), 3),
}


SUMS: dict[str, Any] = {
    "sum": partial(CE, reduction="sum"),
    "sum-by-hand": lambda z, y: CE(z, y, reduction="none").sum() / 8,
    "masked": lambda z, y: (CE(z, y, reduction="none") * (y >= 0)).sum() / (y >= 0).sum(),
    "part": lambda z, y: CE(z[:4], y[:4]),
}


RAW: dict[str, Any] = {
    "gather": lambda z, y: (-z.log_softmax(1).gather(1, y[:, None])).mean(),
    "minus": lambda z, y: -z.log_softmax(1)[range(len(y)), y].mean(),
    "one-hot": lambda z, y: -(F.one_hot(y, 2) * z.log_softmax(1)).sum(1).mean(),
    "squares": lambda z, y: ((z - y[:, None]) ** 2).sum(1).mean(),
}


@modes
@pytest.mark.parametrize("name", LOSSES)
def test_equals_training_on_the_hardest_samples_alone(name: str, mode: Any) -> None:
    loss, y, out, *compare = LOSSES[name]
    z = build(Task, loss=loss, out=out)(X).detach()
    each = compare[0](z, y) if compare else torch.stack([loss(z[n : n + 1], y[n : n + 1]) for n in range(8)])
    kept = top(each.nan_to_num(-torch.inf))
    ours = run_one(build(Task, loss=loss, out=out), {"x": X, "y": y}, lt.HardExampleFilter(mode=mode))
    alone = run_one(build(Task, loss=loss, out=out), {"x": X[kept], "y": y[kept]})
    assert_close(ours, alone)


across = pytest.mark.parametrize("across_ranks", [False, True])


@across
@pytest.mark.parametrize("name", SUMS)
def test_sums_and_means_of_a_part_are_refused_in_loss_mode_and_right_in_prune_mode(
    name: str, across_ranks: bool
) -> None:
    loss, message = SUMS[name], r"or sees only a part of the samples\. Take the mean over all of them"
    with pytest.raises(MisconfigurationException, match=message):
        run_one(build(Task, loss=loss), {"x": X, "y": Y}, lt.HardExampleFilter(mode="loss", across_ranks=across_ranks))
    if name != "part":
        kept = top(CE(build(Task)(X), Y, reduction="none").detach())
        ours = run_one(build(Task, loss=loss), {"x": X, "y": Y}, lt.HardExampleFilter())
        assert_close(ours, run_one(build(Task, loss=loss), {"x": X[kept], "y": Y[kept]}))


@across
@pytest.mark.parametrize("name", RAW)
def test_a_formula_of_ones_own_is_refused_in_both_modes(name: str, across_ranks: bool) -> None:
    pruning, choosing = lt.HardExampleFilter(), lt.HardExampleFilter(mode="loss", across_ranks=across_ranks)
    message = r"batch 0: a part of the loss is ambiguous: .* Compute the loss by a function of torch.nn.functional"
    with pytest.raises(MisconfigurationException, match=message):
        run_one(build(Task, loss=RAW[name]), {"x": X, "y": Y}, choosing)
    with pytest.raises(MisconfigurationException, match=r"computed no loss of torch.nn.functional .* Compute one"):
        run_one(build(Task, loss=RAW[name]), {"x": X, "y": Y}, pruning)


@modes
def test_targets_may_be_viewed_flat(mode: Any) -> None:
    ended = []
    for view in (lambda y: y.view(-1), lambda y: y.reshape(-1)):
        module = build(Task, loss=lambda z, y, view=view: CE(z.view(-1, 3), view(y)), out=12)
        ended.append(run_one(module, {"x": X, "y": rows(3, 4)}, lt.HardExampleFilter(mode=mode)))
    assert_equal(*ended)


def test_long_sequences_are_compared_right_in_bf16() -> None:
    module = build(KeepingTask, loss=lambda z, y: F.mse_loss(0 * z.flatten(), y.flatten()), out=600)
    y = (1.9 - 0.1 * torch.arange(8)).sqrt()[:, None].expand(8, 600).clone()
    run_one(module, {"x": X, "y": y}, lt.HardExampleFilter(), precision="bf16-true")
    assert torch.equal(module.kept[0]["x"].float(), X[:4].bfloat16().float())


def test_a_sample_that_one_of_two_losses_ignores_is_compared_by_the_other() -> None:
    labels = torch.full((8,), -100).index_fill(0, torch.tensor([0]), 1)

    class Two(KeepingTask):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) + CE(self(batch["x"]), batch["labels"])

    module = build(Two)
    losses = CE(module(X), Y, reduction="none").detach()
    kept = top(losses + CE(module(X), labels, reduction="none").detach())
    run_one(module, {"x": X, "y": Y, "labels": labels}, lt.HardExampleFilter(target=["y", "labels"]))
    assert torch.equal(module.kept[0]["x"], X[kept])


@pytest.mark.parametrize(
    ("made", "largest"),
    [(lambda losses: 1 - torch.exp(-losses), True), (torch.neg, False)],
    ids=["probability of a mistake", "log-likelihood"],
)
def test_what_is_made_of_a_loss_without_reduction_is_compared_as_it_is(made: Any, largest: bool) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        return made(CE(z, y, reduction="none")).mean()

    losses = CE(build(Task)(X), Y, reduction="none").detach()
    kept = top(losses if largest else -losses)
    ours = run_one(build(Task, loss=loss), {"x": X, "y": Y}, lt.HardExampleFilter(mode="loss"))
    assert_close(ours, run_one(build(Task, loss=loss), {"x": X[kept], "y": Y[kept]}))


class Language(PlainNet):
    def __init__(self, model: str) -> None:
        super().__init__()
        size = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "pad_token_id": 0}
        few = {"num_hidden_layers": 1, "num_attention_heads": 2}
        quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        bert, one = (transformers.BertConfig(**size, **few, **quiet, num_labels=count) for count in (2, 1))
        self.layers = {
            "classifier": lambda: transformers.BertForSequenceClassification(bert),
            "regression": lambda: transformers.BertForSequenceClassification(one),
            "tokens": lambda: transformers.BertForTokenClassification(bert),
            "causal": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**size, **few)),
        }[model]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layers(**batch).loss


@modes
@pytest.mark.parametrize("model", ["classifier", "regression", "tokens", "causal"])
def test_models_of_transformers_are_trained_on_the_hardest_samples(model: str, mode: Any) -> None:
    ids = 1 + rows(19, 6)
    labels = {"classifier": rows(2), "regression": rows(5).float(), "tokens": ignoring(ids % 2)}
    batch = {"input_ids": ids, "labels": labels.get(model, ids)}
    module = build(Language, model=model)
    each = [{name: value[n : n + 1] for name, value in batch.items()} for n in range(8)]
    kept = top(torch.stack([module.training_step(one, 0).detach() for one in each]).nan_to_num(-torch.inf))
    ours = run_one(module, batch, lt.HardExampleFilter(mode=mode))
    alone = {name: value[kept] for name, value in batch.items()}
    assert_close(ours, run_one(build(Language, model=model), alone))
