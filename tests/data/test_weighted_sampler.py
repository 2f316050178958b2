"""DistributedWeightedSampler and balanced_sampler: draws by weights, ranks that are one process, and resumed epochs."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from functools import partial
from itertools import accumulate, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Sampler

import lightning_tricks as lt
from lightning_tricks.data.weighted_sampler import weighted_order
from tests.data.test_length_buckets import Numbered, Recorder, Saver, Validated, not_resumable, resumed
from tests.nets import spelled, trainer, weights
from tests.ranks import run_cases
from tests.refusals import assert_refused


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def slopes(size: int) -> Tensor:
    """Weights that differ, and are 0 for every fifth sample."""
    return torch.arange(size) % 5 * torch.linspace(1, 3, size)


def loader(size: int = 44, batch_size: int = 4, num_workers: int = 0, drop_last: bool = False, **given: Any) -> Any:
    sampler = lt.DistributedWeightedSampler(slopes(size), **given)
    return DataLoader(Numbered(size), batch_size, sampler=sampler, num_workers=num_workers, drop_last=drop_last)


# -- draws ------------------------------------------------------------------------------------------------------------


def naive_order(weights: list[float], count: int, replacement: bool, seed: int) -> list[int]:
    """The same random numbers, one after the other."""
    if replacement:
        ends = [*accumulate(weights)]
        numbers = torch.rand(count, dtype=torch.float64, generator=generator(seed)).tolist()
        return [bisect_right(ends, number * ends[-1]) for number in numbers]
    waits = torch.empty(len(weights), dtype=torch.float64).exponential_(generator=generator(seed)).tolist()
    times = [wait / weight if weight else float("inf") for wait, weight in zip(waits, weights, strict=True)]
    return sorted(range(len(weights)), key=lambda number: times[number])[:count]


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize(("size", "count"), [(1, 1), (7, 3), (50, 40), (1000, 800)])
def test_the_draws_are_those_of_the_naive_form(size: int, count: int, replacement: bool) -> None:
    drawn = (slopes(size) + (size == 1)).double()
    found = weighted_order(drawn, count, replacement=replacement, generator=generator(3))
    assert found.tolist() == naive_order(drawn.tolist(), count, replacement, 3)
    assert (drawn[found] > 0).all()
    assert replacement or len(set(found.tolist())) == count


def test_samples_come_in_proportion_to_their_weights() -> None:
    drawn = torch.tensor([1.0, 0.0, 2.0, 5.0], dtype=torch.float64)
    shares = weighted_order(drawn, 80_000, replacement=True, generator=generator()).bincount(minlength=4) / 80_000
    torch.testing.assert_close(shares.double(), drawn / 8, atol=0.01, rtol=0)


def test_without_replacement_each_draw_is_in_proportion_among_those_left() -> None:
    drawn, rounds = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64), 20_000
    draw, numbers = partial(weighted_order, drawn, 3, replacement=False), generator()
    found = Counter(tuple(draw(generator=numbers).tolist()) for _ in range(rounds))
    for order in permutations(range(3)):
        first, second, _ = (float(drawn[number]) for number in order)
        assert found[order] / rounds == pytest.approx(first / 8 * second / (8 - first), abs=0.012), order


def test_more_samples_than_torch_draws_from() -> None:
    many = torch.ones(2**24 + 2, dtype=torch.float64)
    assert weighted_order(many, 3, replacement=True, generator=generator()).max() > 0
    with pytest.raises(RuntimeError, match="2\\^24"):
        torch.multinomial(many, 3, replacement=True)


def test_equal_weights_without_replacement_are_a_shuffled_epoch() -> None:
    sampler = lt.DistributedWeightedSampler([0.1] * 30, replacement=False)
    assert sorted(sampler) == [*range(30)] != [*sampler]


def test_the_order_is_of_seed_and_epoch() -> None:
    def order(epoch: int, **given: Any) -> list[int]:
        sampler = loader(**given).sampler
        sampler.set_epoch(epoch)
        return [*sampler]

    assert order(0) == order(0) != order(1) != order(0, seed=7)
    assert len(order(0, num_samples=100)) == len(loader(num_samples=100).sampler) == 100
    assert len(loader(num_samples=10)) == 3


def test_classes_are_balanced_by_the_power() -> None:
    labels = ["cat"] * 90 + ["dog"] * 10
    for power, rare in ((0.0, 0.1), (0.5, 0.25), (1.0, 0.5)):
        sampler = lt.balanced_sampler(labels, power=power)
        drawn = [number for epoch in range(200) for number in of_epoch(sampler, epoch)]
        assert sum(number >= 90 for number in drawn) / len(drawn) == pytest.approx(rare, abs=0.01)


def of_epoch(sampler: Any, epoch: int) -> list[int]:
    sampler.set_epoch(epoch)
    return [*sampler]


@pytest.mark.parametrize("make", [list, np.array, torch.tensor, lambda values: torch.tensor(values).float()])
def test_labels_may_be_of_any_kind(make: Any) -> None:
    labels = [0, 2, 2, -1, 0, 0]
    assert of_epoch(lt.balanced_sampler(make(labels)), 0) == of_epoch(lt.balanced_sampler(labels), 0)
    assert lt.balanced_sampler([True, False, True]).weights.tolist() == [0.5, 1, 0.5]


@pytest.mark.parametrize("kind", [torch.tensor, np.int64, np.array])
def test_labels_may_be_a_list_of_tensors_as_a_data_set_has_them(kind: Any) -> None:
    assert lt.balanced_sampler([kind(label) for label in (0, 0, 1)]).weights.tolist() == [0.5, 0.5, 1]


def test_wrong_values_are_refused() -> None:
    cases = [
        (ValueError, {"weights": []}, r"one number for each sample, got shape \(0,\)"),
        (ValueError, {"weights": [[1.0], [2.0]]}, r"got shape \(2, 1\)"),
        (ValueError, {"weights": [1.0, -1.0]}, "finite and not negative, .* got -1 to 1"),
        (ValueError, {"weights": [1.0, float("nan")]}, "finite and not negative"),
        (ValueError, {"weights": [0.0, 0.0]}, "with a sum above 0"),
        (TypeError, {"weights": ["a"]}, "weights must be numbers"),
        (TypeError, {"weights": 3j * torch.ones(2)}, "weights must be real numbers"),
        (ValueError, {"weights": [1.0], "num_samples": 0}, "num_samples must be at least 1"),
        (ValueError, {"weights": [1.0], "seed": -1}, "seed must be at least 0"),
        (TypeError, {"weights": [1.0], "replacement": 1}, "replacement must be"),
        (ValueError, {"weights": [1.0, 0.0], "replacement": False}, "at most the 1 samples with a weight above 0"),
    ]
    assert_refused(lt.DistributedWeightedSampler, cases)


@pytest.mark.parametrize(
    ("labels", "error", "message"),
    [
        ([], ValueError, "got none"),
        ([0.5, 1.0], TypeError, "got the number 0.5"),
        ([np.float32(0.5), np.float32(1)], TypeError, "got the number 0.5"),
        ([torch.tensor([0]), torch.tensor([1])], TypeError, "one class for each sample"),
        (torch.eye(2), TypeError, "one class for each sample"),
        (None, TypeError, "got NoneType"),
    ],
    ids=spelled,
)
def test_what_is_no_class_is_refused(labels: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        lt.balanced_sampler(labels)


def test_another_data_set_is_refused() -> None:
    wrong = DataLoader(Numbered(45), 4, sampler=lt.DistributedWeightedSampler(slopes(44)))
    with pytest.raises(ValueError, match="got 44 weights and 45 samples"):
        trainer().fit(Recorder(), wrong)


# -- resume -----------------------------------------------------------------------------------------------------------


def unbroken(folder: Path, make: Any, **settings: Any) -> tuple[Recorder, dict[str, int]]:
    module, saver = Validated(), Saver(folder)
    trainer(max_epochs=3, callbacks=[saver], val_check_interval=5, **settings).fit(module, make(), loader(8))
    return module, saver.saved


def without_batches(**given: Any) -> Any:
    """A loader of lists of one sample each."""
    sampler = lt.DistributedWeightedSampler(slopes(12), **given)
    collate = lambda one: (one[0][None], *map(torch.tensor, ([one[1]], [one[2]])))  # noqa: E731
    return DataLoader(Numbered(12), batch_size=None, sampler=sampler, collate_fn=collate)


def in_batch_sampler(**given: Any) -> Any:
    sampler = lt.DistributedWeightedSampler(slopes(44), **given)
    return DataLoader(Numbered(44), batch_sampler=BatchSampler(sampler, 4, drop_last=False))


MAKES = {
    "plain": loader,
    "workers": partial(loader, num_workers=2),
    "incomplete": partial(loader, 45),
    "dropped": partial(loader, 45, drop_last=True),
    "without replacement": partial(loader, replacement=False, num_samples=30),
    "more samples": partial(loader, num_samples=60),
    "without batches": without_batches,
    "in a batch sampler": in_batch_sampler,
}


@not_resumable
@pytest.mark.few(2)
@pytest.mark.parametrize("make", MAKES)
def test_a_resumed_fit_goes_on_with_the_samples_of_an_unbroken_one(make: str, tmp_path: Path) -> None:
    module, saved = unbroken(tmp_path, MAKES[make])
    assert {name.split("-")[0] for name in saved} == {"batch_end", "validation_end", "epoch_end"}
    for name, steps in [*saved.items()][:: 5 if "workers" in make else 2]:
        assert resumed(tmp_path / name, MAKES[make]()) == module.seen[steps:], name


@not_resumable
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # by torchdata
@pytest.mark.few(2)
@pytest.mark.parametrize("make", [loader, lambda **given: lt_buckets(**given)], ids=["weighted", "buckets"])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("exact", [False, True])
def test_so_it_does_in_a_loader_that_leaves_samples_out_itself(
    make: Any, num_workers: int, exact: bool, tmp_path: Path
) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

    def train() -> Any:
        sampler = make().sampler
        return stateful.StatefulDataLoader(Numbered(44), 4, sampler=sampler, num_workers=num_workers)

    def run(*callbacks: Any, ckpt_path: Path | None = None) -> Any:
        more = [lt.ExactResume()] if exact else []
        module = Recorder()
        trainer(max_epochs=3, callbacks=[*more, *callbacks]).fit(module, train(), ckpt_path=ckpt_path)
        return module.seen

    saver = Saver(tmp_path)
    whole = run(saver)
    assert [*map(len, (whole[:11], whole[11:22], whole[22:]))] == [11, 11, 11]
    plain = Recorder()
    trainer(max_epochs=3).fit(plain, make())
    assert whole == plain.seen
    for name in ("batch_end-0-4", "batch_end-1-16", "epoch_end-0-11"):
        assert run(ckpt_path=tmp_path / name) == whole[saver.saved[name] :], name


def lt_buckets(size: int = 44, **given: Any) -> Any:
    return DataLoader(Numbered(size), 4, sampler=lt.LengthBuckets([1 + n % 9 for n in range(size)], 4, pool=3))


@not_resumable
def test_a_shorter_loader_that_is_cycled_goes_on_in_its_pass(tmp_path: Path) -> None:
    class Both(Recorder):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch[self.global_step % 2], batch_idx)

    def fit(ckpt_path: Path | None = None) -> Any:
        module = Both()
        train = CombinedLoader([loader(10, drop_last=True), loader(44)], "max_size_cycle")
        trainer(max_epochs=1, callbacks=[Saver(tmp_path)]).fit(module, train, ckpt_path=ckpt_path)
        return module.seen

    whole = fit()
    assert whole[:2:2] == [(0, 0, whole[0][2])]
    assert fit(tmp_path / "batch_end-0-7") == whole[7:]


@pytest.mark.few(2)
@not_resumable
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"seed": 1}, "seed was 0, now 1"),
        ({"batch_size": 2}, "batch_size was 4, now 2"),
        ({"num_samples": 40}, "num_samples was 44, now 40"),
        ({"replacement": False, "num_samples": 30}, "num_samples was 44, now 30; replacement was True, now False"),
    ],
    ids=spelled,
)
def test_within_an_epoch_another_order_is_refused_by_name(given: Any, told: str, tmp_path: Path) -> None:
    unbroken(tmp_path, loader)
    message = f"DistributedWeightedSampler resumes within an epoch .*{told}: .* never"
    with pytest.raises(MisconfigurationException, match=message):
        resumed(tmp_path / "batch_end-1-16", loader(**given))
    seen = resumed(tmp_path / "epoch_end-0-11", loader(**given))
    assert seen[0][:2] == (1, 0)


class OwnBatches(Sampler[list[int]]):
    """A batch sampler of a user that does not say how large its batches are."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler) // 4

    def __iter__(self) -> Any:
        numbers = [*self.sampler]
        return (numbers[first : first + 4] for first in range(0, len(numbers), 4))


@not_resumable
def test_batches_of_unknown_size_are_refused_where_an_epoch_goes_on(tmp_path: Path) -> None:
    def make() -> Any:
        return DataLoader(Numbered(44), batch_sampler=OwnBatches(loader().sampler))

    module, _ = unbroken(tmp_path, make)
    assert resumed(tmp_path / "epoch_end-0-11", make()) == module.seen[11:]
    with pytest.raises(MisconfigurationException, match=r"size no batch_size tells: use DataLoader\(dataset, batch_"):
        resumed(tmp_path / "batch_end-1-16", make())


@pytest.mark.few(1)
@not_resumable
@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_that_grow_are_resumed(num_workers: int, tmp_path: Path) -> None:
    def fit(*callbacks: Any, ckpt_path: Path | None = None) -> Any:
        module, warmup = Recorder(), lt.BatchSizeWarmup(initial=1, final=2, over=2, grow="loader")
        run = trainer(max_epochs=3, callbacks=[warmup, *callbacks])
        run.fit(module, loader(num_workers=num_workers), ckpt_path=ckpt_path)
        return module.seen

    saver = Saver(tmp_path)
    whole = fit(saver)
    assert {len(batch) for _, _, batch in whole} == {4, 8}
    for name, steps in [*saver.saved.items()][::3]:
        assert fit(ckpt_path=tmp_path / name) == whole[steps:], name


def of_exact(devices: int, batch_size: int, ckpt_path: Path | None = None, folder: Path | None = None) -> Any:
    module, callbacks = Recorder(), [lt.ExactResume(), *([Saver(folder)] if folder else [])]
    strategy = "ddp" if devices > 1 else "auto"
    run = trainer(accelerator="cpu", devices=devices, strategy=strategy, max_epochs=2, callbacks=callbacks)
    run.fit(module, loader(batch_size=batch_size), ckpt_path=ckpt_path)
    return module.seen


@not_resumable
def test_with_exact_resume_the_draws_that_are_left_are_dealt_out_anew(tmp_path: Path) -> None:
    whole = of_exact(1, 4, folder=tmp_path)
    drawn = [number for epoch, _, batch in whole for number in batch if epoch == 0]
    path = tmp_path / "batch_end-0-4"
    for seen in (of_exact(1, 2, path), of_exact(1, 4, path)):
        assert [number for epoch, _, batch in seen for number in batch if epoch == 0] == drawn[16:]
    ranks = run_cases(partial(_of_two, path=path), ["two"])["two"]
    steps = zip(*([batch for epoch, _, batch in seen if epoch == 0] for seen in ranks), strict=True)
    assert [number for one, other in steps for pair in zip(one, other, strict=True) for number in pair] == drawn[16:]


def _of_two(case: str, path: Path) -> Any:
    return of_exact(2, 4, path)


# -- several ranks ----------------------------------------------------------------------------------------------------


class Plain(Recorder):
    """Has no statistics of a batch, which ranks do not share."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))


def of_ranks(case: str, folder: Path) -> Any:
    settings = {"accelerator": "cpu", "devices": 2, "strategy": "ddp", "max_epochs": 2, "precision": "64-true"}
    module, again = Plain(), Plain()
    train = loader(48, 4, replacement=case == "with", num_samples=32)
    saver = ModelCheckpoint(folder / case, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    run = trainer(**settings, enable_checkpointing=True, callbacks=[saver])
    run.fit(module, train)
    assert run.train_dataloader.sampler is train.sampler  # type: ignore[union-attr]
    trainer(**settings).fit(again, train, ckpt_path=folder / case / "step=6.ckpt")
    assert again.seen == module.seen[6:]
    return module.seen, weights(module)


@not_resumable
def test_two_ranks_are_one_process(tmp_path: Path) -> None:
    cases = run_cases(partial(of_ranks, folder=tmp_path), ["with", "out"])
    for case in ("with", "out"):
        (first, trained), (second, _) = cases[case]
        alone = Plain()
        trainer(max_epochs=2, precision="64-true").fit(alone, loader(48, 8, replacement=case == "with", num_samples=32))
        assert len(first) == len(second) == len(alone.seen) == 8
        for (_, _, one), (_, _, other), (_, _, both) in zip(first, second, alone.seen, strict=True):
            assert [one, other] == [both[::2], both[1::2]]
        torch.testing.assert_close(trained, weights(alone), rtol=0, atol=1e-6)
    with pytest.raises(MisconfigurationException, match="ranks was 2, now 1"):
        train = loader(48, 4, num_samples=32)
        trainer(max_epochs=2).fit(Recorder(), train, ckpt_path=tmp_path / "with" / "step=6.ckpt")


def uneven(case: str) -> Any:
    sampler = lt.DistributedWeightedSampler(slopes(9), num_samples=7)
    module = Recorder()
    run = trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1)
    run.fit(module, DataLoader(Numbered(9), 2, sampler=sampler))
    return module.seen, run.num_training_batches


def test_ranks_have_equally_many_samples() -> None:
    (first, steps), (second, _) = run_cases(uneven, ["uneven"])["uneven"]
    assert [len(batch) for _, _, batch in first] == [len(batch) for _, _, batch in second] == [2, 2]
    assert steps == 2
    pairs = zip((n for *_, batch in first for n in batch), (n for *_, batch in second for n in batch), strict=True)
    drawn = [number for pair in pairs for number in pair]
    assert drawn[:7] == [*lt.DistributedWeightedSampler(slopes(9), num_samples=7)]
    assert drawn[7] == drawn[0]
