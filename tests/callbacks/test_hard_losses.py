"""By which losses samples are compared, and which losses a filter refuses."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

import lightning_tricks as lt
from tests.core.batches.test_scoring import CE, KeepingTask, Task, X, Y, modes, rows, run_one, top
from tests.nets import PlainNet, assert_close, assert_equal, build


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
    loss = SUMS[name]
    with pytest.raises(
        MisconfigurationException, match=r"or sees only a part of the samples\. Take the mean over all of them"
    ):
        run_one(build(Task, loss=loss), {"x": X, "y": Y}, lt.HardExampleFilter(mode="loss", across_ranks=across_ranks))
    if name != "part":
        kept = top(CE(build(Task)(X), Y, reduction="none").detach())
        ours = run_one(build(Task, loss=loss), {"x": X, "y": Y}, lt.HardExampleFilter())
        assert_close(ours, run_one(build(Task, loss=loss), {"x": X[kept], "y": Y[kept]}))


@across
@pytest.mark.parametrize("name", RAW)
def test_a_formula_of_ones_own_is_refused_in_both_modes(name: str, across_ranks: bool) -> None:
    pruning, choosing = lt.HardExampleFilter(), lt.HardExampleFilter(mode="loss", across_ranks=across_ranks)
    with pytest.raises(
        MisconfigurationException,
        match=r"batch 0: a part of the loss is ambiguous: .* Compute the loss by a function of torch.nn.functional",
    ):
        run_one(build(Task, loss=RAW[name]), {"x": X, "y": Y}, choosing)
    with pytest.raises(MisconfigurationException, match=r"computed no loss of torch.nn.functional .* Compute one"):
        run_one(build(Task, loss=RAW[name]), {"x": X, "y": Y}, pruning)


@modes
def test_targets_may_be_viewed_flat(mode: Any) -> None:
    flat = [
        run_one(
            build(Task, loss=lambda z, y, view=view: CE(z.view(-1, 3), view(y)), out=12),
            {"x": X, "y": rows(3, 4)},
            lt.HardExampleFilter(mode=mode),
        )
        for view in (lambda y: y.view(-1), lambda y: y.reshape(-1))
    ]
    assert_equal(*flat)


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


# ---- models that compute the loss themselves


class Language(PlainNet):
    def __init__(self, model: str) -> None:
        super().__init__()
        size = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "pad_token_id": 0}
        few = {"num_hidden_layers": 1, "num_attention_heads": 2}
        quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        bert = transformers.BertConfig(**size, **few, **quiet)
        self.layers = {
            "classifier": lambda: transformers.BertForSequenceClassification(bert),
            "regression": lambda: transformers.BertForSequenceClassification(
                transformers.BertConfig(**size, **few, **quiet, num_labels=1)
            ),
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
