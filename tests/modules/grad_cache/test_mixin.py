"""GradCacheMixin: the gradient of the whole batch from chunks of it, and the memory of one chunk."""

from __future__ import annotations

import io
import os
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, LambdaCallback
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import lightning_tricks as lt
from tests.conformance.engines import cpu_deepspeed
from tests.losses.towers import Kept, OneWay, Towers, on_ranks, pairs, step
from tests.nets import assert_close, assert_equal, build, trainer, weights
from tests.ranks import Cases, run_cases


class Noisy(Towers):
    """With dropout, embeddings that depend on a count of the samples, and a count of the losses."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("losses", torch.zeros(()))

    def embed(self, batch: Any) -> Any:
        a, b = super().embed(batch)
        self.seen += len(a)
        return self.dropout(a) * self.seen.clone(), b

    def contrast(self, a: Tensor, b: Tensor) -> Tensor:
        self.losses += 1
        return super().contrast(a, b)


class Headed(Towers):
    """With a layer in ``contrast``, whose weights are also used in ``embed``, and labels beside the embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 5)

    def embed(self, batch: Any) -> Any:
        a, b = super().embed(batch)
        return self.head(a), b, torch.arange(len(a))

    def contrast(self, a: Tensor, b: Tensor, labels: Tensor) -> Tensor:
        assert labels.dtype == torch.int64
        return super().contrast(F.normalize(self.head(a), dim=-1), b)


class Phased(Towers):
    """With complex embeddings, and a complex weight in ``contrast``."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.full((5,), 1 + 0.5j))

    def embed(self, batch: Any) -> Any:
        a, b = super().embed(batch)
        return torch.complex(a, b), b

    def contrast(self, z: Tensor, b: Tensor) -> Tensor:
        return super().contrast(torch.view_as_real(z * self.phase).sum(-1), b)


class Normed(Towers):
    """With BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.a.insert(1, nn.BatchNorm1d(16))


class Synced(Towers):
    def __init__(self) -> None:
        super().__init__()
        self.a.insert(1, nn.SyncBatchNorm(16))


def cached(kind: type[Towers], size: int, **body: Any) -> Any:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        loss = super(net, self).training_step(batch, batch_idx)
        self.log("train_loss", loss)
        return loss

    # The mixin's step is reached by MRO: Towers' own one, which stands for the module without it, is behind.
    net = type(kind)("Cached", (lt.GradCacheMixin, kind), {"chunk": size, "training_step": training_step, **body})
    return net


def gradients(kind: Any, batches: list[Any] | None = None, **settings: Any) -> tuple[Kept, Any]:
    module = build(kind)
    return step(module, [pairs()] if batches is None else batches, **settings), module


@pytest.mark.parametrize("size", [1, 5, 8, 11])
@pytest.mark.parametrize("kind", [Towers, OneWay, Headed, Phased])
def test_the_gradient_is_that_of_the_whole_batch(kind: Any, size: int) -> None:
    (whole, plain), (found, module) = gradients(kind), gradients(cached(kind, size))
    assert found.losses == pytest.approx(whole.losses, abs=1e-6)
    assert_close(found.gradients[0], whole.gradients[0])
    assert_close(weights(module), weights(plain))


@pytest.mark.parametrize("kind", [Towers, Noisy, Normed, Headed])
def test_a_chunk_as_large_as_the_batch_changes_no_bit(kind: Any) -> None:
    for size in (12, 100):
        (whole, plain), (found, module) = gradients(kind), gradients(cached(kind, size))
        assert found.losses == whole.losses
        assert_equal(found.gradients[0], whole.gradients[0])
        assert_equal(weights(module), weights(plain))


def naive(module: Any, batch: tuple[Tensor, ...], sizes: list[int]) -> dict[str, Tensor]:
    """The gradient of a loss of embeddings that were made in chunks, with all graphs at once."""
    parts = [module.embed(chunk) for chunk in zip(*(part.split(sizes) for part in batch), strict=True)]
    module.contrast(*(torch.cat(several) for several in zip(*parts, strict=True))).backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


class Draws(Callback):
    """Seeds a step, and draws after it."""

    def on_train_batch_start(self, *_: Any) -> None:
        torch.manual_seed(11)

    def on_train_batch_end(self, *_: Any) -> None:
        self.drawn = torch.rand(3)


@pytest.mark.parametrize("kind", [Noisy, Normed])
def test_random_numbers_and_buffers_are_those_of_one_forward_pass(kind: Any) -> None:
    draws = Draws()
    found, module = gradients(cached(kind, 5), callbacks=[draws])
    reference = build(kind)
    torch.manual_seed(11)
    assert_close(found.gradients[0], naive(reference, pairs(), [4, 4, 4]))
    assert torch.equal(draws.drawn, torch.rand(3))
    assert_close(dict(module.named_buffers()), dict(reference.named_buffers()))
    assert float(next(module.buffers()).abs().sum()) > 0


def test_accumulated_and_clipped_in_16_bits() -> None:
    batches = [pairs(12, 0), pairs(10, 1), pairs(12, 2), pairs(3, 3)]
    for settings in (
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.01},
        {"precision": "bf16-mixed", "accumulate_grad_batches": 2},
        {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=64.0))]},
    ):
        (whole, plain), (found, module) = (
            gradients(Headed, batches, **settings),
            gradients(cached(Headed, 4), batches, **settings),
        )
        assert len(found.gradients) == len(whole.gradients)
        wide = 1e-6 if "gradient_clip_val" in settings else 2e-2  # 16 bits round sums over other samples differently
        for one, other in zip(found.gradients, whole.gradients, strict=True):
            assert_close(one, other, wide)
        assert_close(weights(module), weights(plain), wide)


class Popping(Towers):
    """Takes the parts of a batch out of it."""

    def embed(self, batch: Any) -> Any:
        return super().embed((batch["pair"].pop("a"), batch["pair"].pop("b")))


def test_embed_may_take_its_batch_apart() -> None:
    (x, y), (whole, _) = pairs(), gradients(Towers)
    found, _ = gradients(cached(Popping, 5), [{"pair": {"a": x, "b": y}}])
    assert_close(found.gradients[0], whole.gradients[0])


class Logs(Towers):
    def contrast(self, a: Tensor, b: Tensor) -> Tensor:
        loss = super().contrast(a, b)
        self.log("loss_of_contrast", loss)
        return loss

    def embed(self, batch: Any) -> Any:
        self.log("embedded", float(len(batch[0])))
        return super().embed(batch)


def test_what_embed_leaves_behind_and_contrast_does_not_read_changes_nothing() -> None:
    found, _ = gradients(cached(Towers, 5, embed=stores))
    expected, _ = gradients(cached(Towers, 5))
    assert_equal(found.gradients[0], expected.gradients[0])


def test_what_is_logged_is_logged_once() -> None:
    seen: list[dict[str, Any]] = []
    note = LambdaCallback(on_train_batch_end=lambda trainer, *_: seen.append(dict(trainer.callback_metrics)))
    kept, _ = gradients(cached(Logs, 5), callbacks=[note])
    assert seen == [{"loss_of_contrast": kept.losses[0], "train_loss": kept.losses[0], "embedded": 4.0}]


def test_it_is_right_beside_averages_and_checkpointing() -> None:
    batches = [pairs(seed=seed) for seed in range(3)]
    _, plain = gradients(Towers, batches, callbacks=[lt.EMA(0.5)])
    _, module = gradients(cached(Towers, 5), batches, callbacks=[lt.EMA(0.5), lt.ActivationCheckpointing("a")])
    assert_close(weights(module), weights(plain))


class Activations:
    """The bytes that wait for the backward pass, now and at most."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def pack(self, x: Tensor) -> Any:
        return Waiting(self, x)


class Waiting:
    def __init__(self, count: Activations, x: Tensor) -> None:
        self.count, self.x = count, x
        count.now += x.nbytes
        count.most = max(count.most, count.now)

    def __del__(self) -> None:
        self.count.now -= self.x.nbytes


def peak(kind: Any, samples: int) -> int:
    count = Activations()
    with torch.autograd.graph.saved_tensors_hooks(count.pack, lambda waiting: waiting.x):
        gradients(kind, [pairs(samples)])
    return count.most


class Deep(Towers):
    """Whose activations are much larger than its embeddings and weights."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(20) for layer in (nn.Linear(16, 16), nn.Tanh())]
        self.a = nn.Sequential(nn.Linear(6, 16), *layers, nn.Linear(16, 5))

    def contrast(self, a: Tensor, b: Tensor) -> Tensor:
        return (a - b).square().mean()


def test_the_activations_of_one_chunk_are_in_memory() -> None:
    assert peak(cached(Deep, 256), 4096) == pytest.approx(peak(Deep, 256), rel=0.01)


def test_a_pickled_module_has_no_fit() -> None:
    module = build(Pickled)
    kept = step(module, [pairs()])
    assert kept.gradients
    assert pickle.loads(pickle.dumps(module))._grad_cache is None


class Pickled(lt.GradCacheMixin, Towers):
    chunk = 4
    training_step = lt.GradCacheMixin.training_step


# -- refusals ---------------------------------------------------------------------------------------------------------


def after(kind: str) -> Any:
    def broken(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = lt.GradCacheMixin.training_step(self, batch, batch_idx)
        match kind:
            case "changed":
                return loss * 2
            case "twice":
                return lt.GradCacheMixin.training_step(self, batch, batch_idx)
            case "own":
                return self.contrast(*self.embed(batch))

    return broken


class Drawn:
    """Random numbers that nobody can set back."""

    def __init__(self) -> None:
        self.calls = 0


DRAWN = Drawn()  # not of a module


def unrepeatable(self: Any, batch: Any) -> Any:
    DRAWN.calls += 1
    a, b = Towers.embed(self, batch)
    return a * DRAWN.calls, b


def stores(self: Any, batch: Any) -> Any:
    a, b = Towers.embed(self, batch)
    self.a.size = a.square().mean()
    return a, b


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "chunk of no sample": ({"chunk": 0}, r"Cached.chunk must be at least 1, got 0"),
    "chunk of half a sample": ({"chunk": 0.5}, r"Cached.chunk must be an integer, got 0.5"),
    "no embed": ({"embed": None}, "calls embed in every training step: define it"),
    "no contrast": ({"contrast": None}, "calls contrast in every training step: define it"),
    "one tensor": ({"embed": lambda self, batch: self.a(batch[0])}, r"got a tensor \(\d+, 5\): return \(x,\)"),
    "no tensor": ({"embed": lambda self, batch: None}, "embed must return a tuple of tensors .* got None"),
    "numbers": ({"embed": lambda self, batch: (1.0, 2.0)}, r"got \['float', 'float'\]"),
    "nothing": ({"embed": lambda self, batch: ()}, "embed must return a tuple of tensors"),
    "labels alone": ({"embed": lambda self, batch: (torch.arange(len(batch[0])),)}, "got 0: int64"),
    "a mean": ({"embed": lambda self, batch: (self.a(batch[0]).mean(0),)}, r"a row for each of its \d+ samples"),
    "a number a sample": ({"embed": lambda self, batch: (self.a(batch[0]).mean(1),)}, r"embeddings \(N, d\)"),
    "a constant loss": ({"contrast": lambda self, a, b: torch.tensor(1.0)}, "depends on none of the embeddings"),
    "a loss of weights": ({"contrast": lambda self, a, b: self.log_scale * 2}, "depends on none of the embeddings"),
    "detached": ({"contrast": lambda self, a, b: Towers.contrast(self, a.detach(), b.detach())}, "depends on none"),
    "losses": ({"contrast": lambda self, a, b: (a * b).sum(1)}, r"tensor with one entry, got a tensor \(12,\)"),
    "no loss": ({"contrast": lambda self, a, b: None}, "tensor with one entry, got None"),
    "manual": ({"automatic_optimization": False}, "works inside automatic optimization"),
}
IN_CHUNKS: dict[str, tuple[dict[str, Any], str]] = {
    "changed": ({"training_step": after("changed")}, r"must return the loss of super\(\).training_step"),
    "own": ({"training_step": after("own")}, r"must return the loss of super\(\).training_step"),
    "twice": ({"training_step": after("twice")}, "twice for a batch"),
    "unrepeatable": ({"embed": unrepeatable}, "other embeddings in its second run"),
    "stores": (
        {"embed": stores, "contrast": lambda self, a, b: Towers.contrast(self, a, b) + self.a.size},
        r"contrast reads a\.size, which embed sets",
    ),
    "writes": ({"embed": lambda self, batch: (batch[0].mul_(2)[:, :5], batch[1][:, :5])}, "writes into its batch"),
    "file": (
        {
            "setup": lambda self, stage: setattr(self, "file", io.BytesIO()),
            "on_before_backward": lambda self, loss: self.file.write(b"line"),
        },
        r"file \(BytesIO\) has changed in a step",
    ),
    "backward": ({"backward": lambda self, loss, *a: None}, r"must call super\(\).backward"),
}


def refused(kind: Any, batches: Any = None, **settings: Any) -> str:
    module = build(kind)
    kept = Kept()
    with pytest.raises(MisconfigurationException) as caught:
        step(module, [pairs()] if batches is None else batches, **{**settings, "callbacks": [kept]})
    assert not kept.gradients, "refused too late"
    return str(caught.value)


@pytest.mark.parametrize("size", [5, 100])
@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_right_is_refused(case: str, size: int) -> None:
    body, message = WRONG[case]
    match = refused(
        cached(Towers, **{"size": body.get("chunk", size), **{k: v for k, v in body.items() if k != "chunk"}})
    )
    assert re.search(message, match), match


@pytest.mark.parametrize("case", IN_CHUNKS)
def test_a_step_that_cannot_be_cut_is_refused(case: str) -> None:
    body, message = IN_CHUNKS[case]
    told = refused(cached(Towers, 5, **body))
    assert re.search(message, told), told


def test_batches_are_not_cut_by_guesswork() -> None:
    x, y = pairs()
    told = refused(cached(Towers, 5), [{"a": x, "b": y[:5]}])
    assert "needs tensors with one entry per sample, got a batch with a: float32 (12, 6), b: float32 (5, 8)" in told
    told = refused(cached(Towers, 5), [{"a": x, "b": y, "edges": torch.zeros(2, 40).long()}])
    assert "how samples are stored in batch['edges'], a tensor (2, 40): give it one entry per sample" in told


def test_batchnorm_cannot_train_on_one_sample() -> None:
    assert "a chunk of one sample, on which its BatchNorm cannot train" in refused(cached(Normed, 1))


def test_it_comes_first() -> None:
    with pytest.raises(TypeError, match="GradCacheMixin must come first"):
        type("Wrong", (Towers, lt.GradCacheMixin), {})


@pytest.mark.parametrize(
    "freeze",
    [lambda: lt.LayerFreezing(start=2, stop=2, parameters=["^a"]), lambda: lt.GradualUnfreeze([2], parameters=["^a"])],
    ids=["LayerFreezing", "GradualUnfreeze"],
)
def test_beside_a_frozen_tower_the_gradient_is_that_of_the_whole_batch(freeze: Callable[[], Callback]) -> None:
    batches = [pairs(seed=seed) for seed in range(4)]
    (whole, plain), (found, module) = (
        gradients(kind, batches, callbacks=[freeze()]) for kind in (Towers, cached(Towers, 5))
    )
    assert sorted(map(len, whole.gradients)) == [3, 3, 7, 7]
    for ours, expected in zip(found.gradients, whole.gradients, strict=True):
        assert_close(ours, expected)
    assert_close(weights(module), weights(plain))


def test_a_trial_fit_trains_on_whole_batches() -> None:
    module, batches = build(Pickled), DataLoader([pairs(seed=seed) for seed in range(12)], batch_size=None)
    before = weights(module)
    found = lt.find_lr(trainer(max_epochs=1), module, batches, steps=10)
    assert len(found.losses) >= 5
    assert_equal(weights(module), before)


# -- several ranks ----------------------------------------------------------------------------------------------------


class Sharded(Towers):
    """FSDP2 as its users write it, where ``contrast`` has no parameters of its own."""

    def configure_model(self) -> None:
        fully_shard(self.a, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.b, mesh=self.device_mesh["data_parallel"])

    def contrast(self, a: Tensor, b: Tensor) -> Tensor:
        return lt.clip_loss(a, b, temperature=0.2)


KINDS = {kind.__name__: kind for kind in (Towers, OneWay, Headed, Sharded, Synced)}
CASES = [
    ("Towers", 5, "even", "ddp", 1),  # two chunks of three
    ("Headed", 2, "uneven", "ddp_find_unused_parameters_true", 1),
    ("Headed", 3, "uneven", "ddp", 2),
    ("OneWay", 5, "uneven", "ddp", 2),  # one rank has one chunk, the other two
    ("OneWay", 50, "uneven", "ddp", 1),
    ("Sharded", 4, "even", "fsdp2", 1),
    ("Headed", 4, "even", "fsdp2_preset", 2),
]
REFUSED = [("Sharded", 5, "uneven", "fsdp2", 1), ("Towers", 5, "even", "zero", 1)]


def fitted(case: tuple[str, int, str, str, int]) -> Any:
    kind, size, sizes, strategy, accumulate = case
    named = {
        "fsdp2": lambda: ModelParallelStrategy(int(os.environ["WORLD_SIZE"]), 1),
        "fsdp2_preset": lambda: lt.FSDP2Preset(precision="32-true"),
        "zero": cpu_deepspeed,
    }
    settings = {"strategy": named.get(strategy, lambda: strategy)(), "accumulate_grad_batches": accumulate}
    try:
        return on_ranks(cached(KINDS[kind], size), sizes, batches=2, **settings)
    except MisconfigurationException as error:
        return str(error)


@pytest.fixture(scope="module")
def two() -> Cases:
    return run_cases(fitted, [*CASES, *REFUSED])


@pytest.fixture(scope="module")
def four() -> Cases:
    return run_cases(fitted, [case for case in CASES if case[1] != 50], nprocs=4)


RANKS = [("two", case) for case in CASES] + [
    pytest.param("four", case, marks=pytest.mark.slow) for case in CASES if case[1] != 50
]


@pytest.mark.parametrize(("ranks", "case"), RANKS)
def test_ranks_have_the_gradient_of_one_process(ranks: str, case: Any, request: pytest.FixtureRequest) -> None:
    kind, _, _, _, accumulate = case
    plain = type("Plain", (KINDS[kind],), {"configure_model": lambda self: None})
    expected, _ = gradients(plain, [pairs(seed=0), pairs(seed=1)], accumulate_grad_batches=accumulate)
    for found, losses in request.getfixturevalue(ranks)[case]:
        assert losses == pytest.approx(expected.losses, abs=1e-6)
        assert len(found) == len(expected.gradients) == 2 // accumulate
        for one, other in zip(found, expected.gradients, strict=True):
            assert_close({name: torch.from_numpy(gradient) for name, gradient in one.items()}, other)


def test_batchnorm_over_ranks_needs_equal_numbers_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_tricks.modules.grad_cache.engine.extremes", lambda *_: (1, 2))
    told = refused(cached(Synced, 6))
    assert "into 1 chunks on one rank and 2 on another, and SyncBatchNorm meets the other ranks" in told


@pytest.mark.parametrize("case", REFUSED)
def test_what_ranks_cannot_do_is_refused(case: Any, two: Cases) -> None:
    first, second = two[case]
    message = "DeepSpeedStrategy" if case[3] == "zero" else "into 1 chunks on one rank and 2 on another"
    assert message in first
    assert "GradCacheMixin" in first
    assert first == second
