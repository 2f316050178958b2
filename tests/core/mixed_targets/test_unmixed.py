"""A second label or a length in integers that nobody has named: refused if a loss is made of it, and only then."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

import lightning_tricks as lt
from tests.batches import EXTRA, IDS, WEIGHT, fed, mixed_loss, refused, stepping, with_extra
from tests.callbacks.test_mixup import feed
from tests.core.batches.test_mixing import Watch, naive_mixup, train_by_hand
from tests.nets import PlainNet, assert_close, assert_equal, build, fit, weights

CE = F.cross_entropy
B, T, C, V = 8, 5, 3, 20
NUMBERS = torch.Generator().manual_seed(11)
LENGTHS = torch.tensor([5, 1, 3, 2, 4, 5, 2, 3])


def integers(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=NUMBERS)


def batch() -> dict[str, Tensor]:
    pictures = torch.randn(B, 2, 2, 4, generator=NUMBERS)
    return {
        "image": pictures,
        "ids": integers(V, B, T),
        "attention_mask": (torch.arange(T) < LENGTHS[:, None]).long(),
        "y": integers(C, B),
        "second": integers(C, B),
        "tags": integers(C, B, T),
        "sign": 2 * integers(2, B) - 1,
        "lengths": LENGTHS,
        "category": integers(4, B),
        "number": torch.arange(B),
        "neighbours": integers(B, B, 2),
        "tokens": 1 + integers(C - 1, B, 2),
        "token_lengths": 1 + integers(2, B),
    }


BATCHES = [batch() for _ in range(3)]


class Two(PlainNet):
    """Features of a picture, or of words, with a head for each of two labels."""

    def __init__(self, step: Any = None) -> None:
        super().__init__()
        self.step = step
        self.words, self.table = nn.Embedding(V, 8), nn.Embedding(4, 8)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
        self.head, self.other, self.dense = nn.Linear(16, C), nn.Linear(16, C), nn.Linear(16, T * C)
        self.rnn = nn.GRU(8, 16, batch_first=True)
        self.mixes_text = False

    def hidden(self, batch: Any) -> Tensor:
        return self.body(self.words(batch["ids"]).mean(1) if self.mixes_text else batch["image"].flatten(1)[:, :8])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.step(self, batch)


def second(loss: Callable[[Tensor, Any], Tensor]) -> Any:
    """A step with another loss, of the other head's outputs, beside that of the target."""

    def step(module: Two, batch: Any) -> Tensor:
        hidden = module.hidden(batch)
        return CE(module.head(hidden), batch["y"]) + 0.5 * loss(module.other(hidden), batch)

    return step


def focal(z: Tensor, batch: Any) -> Tensor:
    p = z.softmax(1).gather(1, batch["second"][:, None]).squeeze(1)
    return ((1 - p) ** 2 * -p.log()).mean()


def focal_by_losses(z: Tensor, batch: Any) -> Tensor:
    chosen = z.log_softmax(1)[torch.arange(B), batch["second"]]
    return -((1 - chosen.detach().exp()) ** 2 * chosen).mean()


def scattered(z: Tensor, batch: Any) -> Tensor:
    codes = torch.zeros(B, C).scatter_(1, batch["second"][:, None], 1.0)
    return -(codes * z.log_softmax(1)).sum(1).mean()


def set_by_index(z: Tensor, batch: Any) -> Tensor:
    codes = torch.zeros(B, C)
    codes[torch.arange(B), batch["second"]] = 1.0
    return -(codes * z.log_softmax(1)).sum(1).mean()


def one_by_one(z: Tensor, batch: Any) -> Tensor:
    return torch.stack([CE(z[n], batch["second"][n]) for n in range(B)]).mean()


def index_one_by_one(z: Tensor, batch: Any) -> Tensor:
    return -sum((row.log_softmax(0)[label] for row, label in zip(z, batch["second"], strict=True)), torch.zeros(())) / B


def by_class(z: Tensor, batch: Any) -> Tensor:
    """The outputs of the one class and those of the other."""
    positive = batch["sign"] > 0
    return (F.softplus(-z[:, 0][positive]).sum() + F.softplus(z[:, 0][~positive]).sum()) / B


def ranking(z: Tensor, batch: Any) -> Tensor:
    larger = batch["lengths"][:, None] > batch["lengths"][None]
    return (F.softplus(z[None, :, 0] - z[:, None, 0]) * larger).mean()


def adaptive(z: Tensor, batch: Any) -> Tensor:
    torch.manual_seed(0)
    return nn.AdaptiveLogSoftmaxWithLoss(C, C, [2], div_value=1.0)(z, batch["second"]).loss


def adaptive_of_two(z: Tensor, batch: Any) -> Tensor:
    """None of the labels is in its tail."""
    torch.manual_seed(0)
    return nn.AdaptiveLogSoftmaxWithLoss(C, C, [2], div_value=1.0)(z, (batch["sign"] > 0).long()).loss


def prototypes(z: Tensor, batch: Any) -> Tensor:
    """The distance of the mean of each class from a corner."""
    sums = torch.zeros(C, C).index_add(0, batch["second"], z)
    return (sums / B - torch.eye(C)).square().mean()


def summed_in_place(z: Tensor, batch: Any) -> Tensor:
    total = torch.zeros(())
    total += -z.log_softmax(1).gather(1, batch["second"][:, None]).mean()
    return total


def ctc(z: Tensor, batch: Any) -> Tensor:
    logp = z[None].expand(T, B, C).log_softmax(2)
    return F.ctc_loss(logp, batch["tokens"], torch.full((B,), T), batch["token_lengths"])


def supervised_contrast(z: Tensor, batch: Any) -> Tensor:
    similar = (z @ z.T).log_softmax(1)
    same = batch["second"][:, None] == batch["second"][None]
    return -((similar * same).sum(1) / same.sum(1)).mean()


def bce(z: Tensor, batch: Any) -> Tensor:
    y, p = (batch["sign"] > 0).float(), z[:, 0].sigmoid()
    return -(y * p.log() + (1 - y) * (1 - p).log()).mean()


def picked(z: Tensor, batch: Any) -> Tensor:
    """The probabilities of the labels, compared with ones."""
    return F.binary_cross_entropy(z.softmax(1).gather(1, batch["second"][:, None]), torch.ones(B, 1))


def logp(z: Tensor) -> Tensor:
    return z.log_softmax(1)


SECOND: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "cross_entropy": lambda z, b: CE(z, b["second"]),
    "module": lambda z, b: nn.CrossEntropyLoss()(z, b["second"].view(-1)),
    "nll": lambda z, b: F.nll_loss(logp(z), b["second"].long()),
    "regression": lambda z, b: (z[:, 0] - b["second"]).square().mean(),
    "mse": lambda z, b: F.mse_loss(z[:, 0], b["second"].float()),
    "gather": lambda z, b: -logp(z).gather(1, b["second"][:, None]).mean(),
    "gather of keywords alone": lambda z, b: -torch.gather(dim=1, index=b["second"][:, None], input=logp(z)).mean(),
    "gather of a keyword": lambda z, b: -logp(z).gather(dim=1, index=b["second"].unsqueeze(1)).mean(),
    "take_along_dim": lambda z, b: -torch.take_along_dim(logp(z), b["second"][:, None], 1).mean(),
    "index": lambda z, b: -logp(z)[range(B), b["second"]].mean(),
    "index of arange": lambda z, b: -logp(z)[torch.arange(B), b["second"]].sum() / B,
    "flat index": lambda z, b: -logp(z).flatten()[torch.arange(B) * C + b["second"]].mean(),
    "index of the transpose": lambda z, b: -logp(z).T[b["second"], torch.arange(B)].mean(),
    "diagonal": lambda z, b: -logp(z)[:, b["second"]].diagonal().mean(),
    "index_select": lambda z, b: -logp(z).index_select(dim=1, index=b["second"]).diag().mean(),
    "take": lambda z, b: -logp(z).take(torch.arange(B) * C + b["second"]).mean(),
    "one_hot": lambda z, b: -(F.one_hot(b["second"], C) * logp(z)).sum(1).mean(),
    "one_hot by einsum": lambda z, b: -torch.einsum("bc,bc->b", logp(z), F.one_hot(b["second"], C).float()).mean(),
    "one_hot by a mask": lambda z, b: -logp(z)[F.one_hot(b["second"], C).bool()].mean(),
    "masked_select": lambda z, b: -logp(z).masked_select(F.one_hot(b["second"], C) > 0).mean(),
    "where": lambda z, b: -torch.where(F.one_hot(b["second"], C) > 0, logp(z), 0.0).sum(1).mean(),
    "comparison": lambda z, b: -((torch.arange(C) == b["second"][:, None]) * logp(z)).sum(1).mean(),
    "row of the identity": lambda z, b: -(torch.eye(C)[b["second"]] * logp(z)).sum(1).mean(),
    "embedding of the identity": lambda z, b: -(F.embedding(b["second"], torch.eye(C)) * logp(z)).sum(1).mean(),
    "scatter": scattered,
    "prototypes": prototypes,
    "adaptive, of two classes": adaptive_of_two,
    "set by index": set_by_index,
    "focal": focal,
    "focal by losses": focal_by_losses,
    "hinge": lambda z, b: (1 - b["sign"] * z[:, 0]).clamp(min=0).mean(),
    "logistic": lambda z, b: F.softplus(-b["sign"] * z[:, 0]).mean(),
    "bce": bce,
    "which of two": lambda z, b: -torch.where(b["sign"] > 0, z[:, 0], -z[:, 0]).mean(),
    "margin": lambda z, b: F.multi_margin_loss(z, b["second"]),
    "ctc": ctc,
    "summed in place": summed_in_place,
    "one by one": one_by_one,
    "index one by one": index_one_by_one,
    "by class": by_class,
    "ranking": ranking,
    "adaptive": adaptive,
    "hardest": lambda z, b: -logp(z).gather(1, b["second"][:, None]).topk(3, 0)[0].mean(),
    "contrast": supervised_contrast,
    "picked, compared with ones": picked,
    "tags": lambda z, b: -z[:, None].expand(B, T, C).log_softmax(2).gather(2, b["tags"][..., None]).mean(),
}
# The part of the batch with the second label of a loss, where it is not "second".
PARTS = {
    **dict.fromkeys(("adaptive, of two classes", "hinge", "logistic", "bce", "which of two", "by class"), "sign"),
    "ctc": "tokens",
    "ranking": "lengths",
    "tags": "tags",
}
TRICKS: dict[str, Callable[..., Any]] = {
    "Mixup": lambda **named: lt.Mixup(1.0, inputs="image", **named),
    "Mixup per sample": lambda **named: lt.Mixup(1.0, per_sample=True, inputs="image", **named),
    "Mixup, later": lambda **named: lt.Mixup(1.0, start=2, inputs="image", **named),
    "CutMix": lambda **named: lt.CutMix(inputs="image", **named),
    "HiddenMixup": lambda **named: lt.HiddenMixup("body.0", **named),
}


def by_hand(module: Any, step: Any, batches: Any, drawn: Any, x: str, targets: Sequence[str]) -> dict[str, Tensor]:
    """The weights of a plain loop: inputs are mixed, and the loss is that of the own targets and of the others."""
    optimizer = module.configure_optimizers()
    for given, (lam, index) in zip(batches, drawn, strict=True):
        mixed = {**given, x: naive_mixup(given[x], lam, index)}
        other = {**mixed, **{name: given[name][index] for name in targets}}
        optimizer.zero_grad()
        (lam * step(module, mixed) + (1 - lam) * step(module, other)).backward()
        optimizer.step()
    return weights(module)


@pytest.mark.few(40)
@pytest.mark.parametrize("trick", TRICKS)
@pytest.mark.parametrize("name", SECOND)
def test_a_second_label_that_is_not_named_is_refused_by_its_path(name: str, trick: str) -> None:
    loss, part = SECOND[name], PARTS.get(name, "second")
    module = build(Two, step=second(loss))
    before = weights(module)
    module.mixes_text = trick == "HiddenMixup"
    path = rf"batch\['{part}'\]" if part != "tokens" else r"batch\['token(s|_lengths)'\]"
    message = rf"{trick.split(',')[0].split()[0]}.* {path}, which is not mixed as the target is.*target=\['y', '"
    with pytest.raises(MisconfigurationException, match=message):
        fit(module, train=feed(*BATCHES), callbacks=[TRICKS[trick](target="y")], max_epochs=1, limit_val_batches=0)
    assert_equal(weights(module), before)


UNMIXABLE = ("ctc", "hardest", "contrast", "by class", "ranking", "adaptive", "index one by one")


@pytest.mark.few(15)
@pytest.mark.parametrize("trick", ["Mixup", "HiddenMixup"])
@pytest.mark.parametrize("name", [name for name in SECOND if name not in UNMIXABLE])
def test_a_second_label_that_is_named_is_mixed(name: str, trick: str) -> None:
    loss, part = SECOND[name], PARTS.get(name, "second")
    made, hand = TRICKS[trick](target=["y", part]), build(Two, step=second(loss))
    hand.mixes_text, watch = trick == "HiddenMixup", Watch(made)
    module = build(Two, step=second(loss))
    module.mixes_text = hand.mixes_text
    fit(module, train=feed(*BATCHES), callbacks=[made, watch], max_epochs=1, limit_val_batches=0)
    optimizer = hand.configure_optimizers()
    for given, (lam, index) in zip(BATCHES, watch.drawn, strict=True):
        mixed = {**given, "image": naive_mixup(given["image"], lam, index)}
        if trick == "HiddenMixup":
            mixed, handle = (
                dict(given),
                hand.body[0].register_forward_pre_hook(
                    lambda _, x, lam=lam, index=index: (lam * x[0] + (1 - lam) * x[0][index],)
                ),
            )
        other = {**mixed, "y": given["y"][index], part: given[part][index]}
        optimizer.zero_grad()
        (lam * hand.training_step(mixed, 0) + (1 - lam) * hand.training_step(other, 0)).backward()
        optimizer.step()
        if trick == "HiddenMixup":
            handle.remove()
    assert_close(weights(module), weights(hand), 1e-5)


# ---- what the network sees goes on working


class Traced(Two):
    """Has a layer that torch.jit has compiled."""

    def __init__(self, step: Any = None) -> None:
        super().__init__(step)
        layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.compiled, self.wide = torch.jit.trace(layers, torch.zeros(2, 8)), nn.Linear(8, 16)


@pytest.mark.parametrize("trick", ["Mixup", "HiddenMixup"])
def test_a_compiled_layer_sees_what_is_not_mixed_and_a_compiled_loss_what_is(trick: str) -> None:
    loss = torch.jit.script(nn.CrossEntropyLoss())

    def step(module: Any, b: Any) -> Tensor:
        category = b["category"].float()[:, None].expand(B, 8)
        return loss(module.head(module.hidden(b) + module.wide(module.compiled(category))), b["y"])

    module = build(Traced, step=step)
    module.mixes_text, before = trick == "HiddenMixup", weights(module)
    fit(module, train=feed(*BATCHES), callbacks=[TRICKS[trick](target="y")], max_epochs=1, limit_val_batches=0)
    assert all(not torch.equal(before[name], weights(module)[name]) for name in ("compiled.0.weight", "head.weight"))


def last_by_index(module: Two, b: Any) -> Tensor:
    outputs, _ = module.rnn(module.words(b["ids"]) + b["image"].flatten(1)[:, None, :8])
    return CE(module.head(outputs[torch.arange(B), b["lengths"] - 1]), b["y"])


def last_by_gather(module: Two, b: Any) -> Tensor:
    outputs, _ = module.rnn(module.words(b["ids"]) + b["image"].flatten(1)[:, None, :8])
    index = (b["lengths"] - 1)[:, None, None].expand(B, 1, 16)
    return CE(module.head(outputs.gather(1, index).squeeze(1)), b["y"])


def score_of_the_last_step(module: Two, b: Any) -> Tensor:
    """Its outputs are numbers of steps, of which the last one is the prediction."""
    outputs, _ = module.rnn(module.words(b["ids"]) + b["image"].flatten(1)[:, None, :8])
    return F.mse_loss(outputs[..., 0].gather(1, b["lengths"][:, None] - 1).squeeze(1), b["y"].float())


def packed(module: Two, b: Any) -> Tensor:
    words = module.words(b["ids"]) + b["image"].flatten(1)[:, None, :8]
    sequences = nn.utils.rnn.pack_padded_sequence(words, b["lengths"].cpu(), batch_first=True, enforce_sorted=False)
    return CE(module.head(module.rnn(sequences)[1][0]), b["y"])


def mean_of_words(module: Two, b: Any) -> Tensor:
    mask = b["attention_mask"][..., None]
    words = ((module.words(b["ids"]) + b["image"].flatten(1)[:, None, :8]) * mask).sum(1) / mask.sum(1)
    return CE(module.head(module.body(words)), b["y"])


def mean_of_outputs(module: Two, b: Any) -> Tensor:
    """Outputs for words, of which the mean of those in the mask is the prediction."""
    logits = module.dense(module.hidden(b)).view(B, T, C)
    return CE((logits * b["attention_mask"][..., None]).sum(1) / b["lengths"][:, None], b["y"])


def penalty_on_words(module: Two, b: Any) -> Tensor:
    """A penalty on activations, without those of padding."""
    words, mask = module.words(b["ids"]) * module.hidden(b)[:, None, :8], b["attention_mask"]
    penalty = (words.square().mean(2) * mask).sum() / mask.sum() + (words.sum((1, 2)) / b["lengths"]).mean()
    return CE(module.head(module.hidden(b)), b["y"]) + 0.01 * penalty


def attention(module: Two, b: Any) -> Tensor:
    x = module.words(b["ids"]) + b["image"].flatten(1)[:, None, :8]
    scores = (x @ x.transpose(1, 2)).masked_fill(b["attention_mask"][:, None] == 0, -torch.inf)
    segments = b["tags"][:, :, None] == b["tags"][:, None]
    mixed = torch.where(segments, scores, scores - 1).softmax(2) @ x
    fast = F.scaled_dot_product_attention(x, x, x, attn_mask=b["attention_mask"][:, None].bool())
    return CE(module.head(module.body((mixed + fast).mean(1))), b["y"])


def categories(module: Two, b: Any) -> Tensor:
    """A category as an embedding, as codes, as a number and as a row of a table that does not train."""
    codes = F.one_hot(b["category"], 4).float()
    x = b["image"].flatten(1)[:, :8] + module.table(b["category"]) + module.table.weight[b["category"]]
    x = x + codes @ module.table.weight + torch.eye(8)[b["category"]]
    hidden = module.body(x) * (1 + 0.1 * b["category"][:, None])
    hidden = hidden * torch.zeros(B, 16).scatter_(1, b["category"][:, None], 1.0).add(1)
    return CE(module.head(torch.cat([hidden[:, :12], codes], 1)), b["y"])


def heads_by_category(module: Two, b: Any) -> Tensor:
    """One head of two, by a category."""
    hidden = module.hidden(b)
    heads = torch.stack([module.head(hidden), module.other(hidden)], 1)
    chosen = heads[torch.arange(B), b["category"] % 2]
    weighed = (heads * F.one_hot(b["category"] % 2, 2)[..., None]).sum(1)
    return CE(chosen, b["y"]) + CE(weighed, b["y"])


def graph(module: Two, b: Any) -> Tensor:
    """Every sample is a node, with neighbours by their indices, some of which are the samples' own."""
    hidden = module.hidden(b)
    messages = hidden[b["neighbours"]].mean(1) + hidden[b["neighbours"][:, 0]]
    pooled = torch.zeros_like(hidden).index_add(0, b["neighbours"][:, 1], hidden)
    return CE(module.head(hidden + messages + pooled), b["y"])


def logged(module: Two, b: Any) -> Tensor:
    """Another label in the log and in a metric."""
    hidden = module.hidden(b)
    z = module.other(hidden)
    likelihood = z.log_softmax(1).gather(1, b["second"][:, None])
    loss = CE(module.head(hidden), b["y"])
    module.log("second", -likelihood.mean())
    module.log("accuracy", (z.argmax(1) == b["second"]).float().mean())
    module.log("both", loss.detach() - likelihood.detach().mean())
    module.seen = likelihood.detach().squeeze(1)
    module.log("by number", module.memory[b["number"]].mean())
    module.memory[b["number"]] = module.seen.as_subclass(Tensor)
    return loss


def gradients(module: Two, b: Any) -> Tensor:
    """A penalty on the gradient of an output that a category chooses."""
    x = b["image"].flatten(1)[:, :8].clone().requires_grad_()
    outputs = module.dense(module.body(x))
    chosen = outputs.gather(1, b["category"][:, None])
    (gradient,) = torch.autograd.grad(chosen.sum(), x, create_graph=True)
    return CE(outputs[:, :C], b["y"]) + 0.1 * gradient.square().sum(1).mean()


def in_another_order(module: Two, b: Any) -> Tensor:
    """A penalty on neighbours in the order of the samples' numbers."""
    order = b["number"].flip(0).argsort()
    hidden = module.hidden(b)
    norms = hidden.square().sum(1)
    return CE(module.head(hidden), b["y"]) + 0.01 * (norms - norms[order] + hidden[order].sum(1)).square().mean()


def first_of_the_batch(module: Two, b: Any) -> Tensor:
    """A single number that is the same for all samples, and one of the first sample."""
    longest, first = b["lengths"].max(), b["category"][0]
    hidden = module.hidden(b) * longest / T + module.table.weight[first].mean() + first
    return CE(module.head(hidden), b["y"])


def converted(module: Two, b: Any) -> Tensor:
    """Tensors of the network in the numbers of a part."""
    hidden, codes = module.hidden(b), F.one_hot(b["category"], 4).float()
    same, like = hidden.to(codes), hidden.type_as(codes)
    assert type(hidden) is type(same) is type(like) is Tensor
    assert type(module.memory.to(codes)) is type(module.memory) is Tensor
    return CE(module.head((same + like + codes.new_ones(B, 16)) / 2), b["y"])


def poisson(module: Two, b: Any) -> Tensor:
    """A rate times a time of observation."""
    rate = module.head(module.hidden(b))[:, 0].exp()
    return F.poisson_nll_loss(rate * b["lengths"], b["y"].float(), log_input=False)


STEPS = [last_by_index, last_by_gather, score_of_the_last_step, packed, mean_of_words, mean_of_outputs]
STEPS += [penalty_on_words, attention, categories, heads_by_category, graph, logged, converted, poisson]
STEPS += [gradients, in_another_order, first_of_the_batch]
INPUTS: dict[str, Any] = {step.__name__: step for step in STEPS}


@pytest.mark.parametrize("name", INPUTS)
def test_integers_that_the_network_sees_stay_those_of_the_sample(name: str) -> None:
    step, mixup = INPUTS[name], lt.Mixup(1.0, inputs="image", target="y")
    watch = Watch(mixup)
    module, hand = build(Two, step=step), build(Two, step=step)
    module.memory, hand.memory = torch.zeros(B), torch.zeros(B)
    fit(module, train=feed(*BATCHES), callbacks=[mixup, watch], max_epochs=1, limit_val_batches=0)
    hand.log = lambda *_: None
    assert_close(weights(module), by_hand(hand, step, BATCHES, watch.drawn, "image", ["y"]), 1e-5)
    assert type(module.memory) is Tensor


SOURCES = {name: inspect.getsource(step) for name, step in INPUTS.items()}
CALL_THE_LAYER = [name for name, source in SOURCES.items() if "hidden(" in source or "body(" in source]


@pytest.mark.few(15)
@pytest.mark.parametrize(
    ("trick", "name"),
    [(trick, name) for trick in TRICKS for name in (CALL_THE_LAYER if trick == "HiddenMixup" else INPUTS)],
)
def test_no_trick_refuses_what_the_network_sees(trick: str, name: str) -> None:
    module = build(Two, step=INPUTS[name])
    module.memory = torch.zeros(B)
    run = fit(module, train=feed(*BATCHES), callbacks=[TRICKS[trick](target="y")], max_epochs=1, limit_val_batches=0)
    assert run.global_step == 3


class ByHand(Two):
    """Steps by hand: the two losses have a backward pass each."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        hidden = self.hidden(batch)
        self.manual_backward(CE(self.head(hidden), batch["y"]), retain_graph=True)
        self.manual_backward(self.step(self.other(hidden), batch))
        optimizer.step()


@pytest.mark.parametrize("trick", ["Mixup", "Mixup per sample", "HiddenMixup"])
@pytest.mark.parametrize("name", ["cross_entropy", "gather", "focal", "one_hot", "ctc"])
def test_a_second_label_by_hand_is_refused_before_the_step(name: str, trick: str) -> None:
    loss, part = SECOND[name], PARTS.get(name, "second")
    module = build(ByHand, step=loss)
    module.mixes_text, before = trick == "HiddenMixup", weights(module)
    path = part if part != "tokens" else "token(s|_lengths)"
    with pytest.raises(MisconfigurationException, match=rf"batch\['{path}'\], which is not mixed"):
        fit(module, train=feed(*BATCHES), callbacks=[TRICKS[trick](target="y")], max_epochs=1, limit_val_batches=0)
    assert_equal(weights(module), before)


def weighted(module: Any, batch: Any) -> Tensor:
    return (batch["weight"] * mixed_loss(module(batch["x"]), batch["y"])).mean()


def normed(module: Any, batch: Any) -> Tensor:
    return (mixed_loss(module(batch["x"]), batch["y"]) * (batch["weight"] / batch["weight"].sum())).sum()


def valid_only(module: Any, batch: Any) -> Tensor:
    return mixed_loss(module(batch["x"]), batch["y"])[batch["weight"] > 0.5].mean()


def ignoring(module: Any, batch: Any) -> Tensor:
    return F.cross_entropy(module(batch["x"]), batch["y"].masked_fill(batch["weight"] < 0.5, -100))


def two_labels(module: Any, batch: Any) -> Tensor:
    logits = module(batch["x"])
    return F.cross_entropy(logits, batch["y"]) + F.cross_entropy(logits, (batch["weight"] > 1).long())


@pytest.mark.parametrize("trick", [lambda: lt.Mixup(1.0), lambda: lt.Mixup(1.0, start=0.5)])
@pytest.mark.parametrize("step", [weighted, normed, valid_only, ignoring, two_labels])
def test_a_part_of_the_loss_that_is_not_mixed_with_the_target_is_refused(step: Any, trick: Any) -> None:
    message = r"Mixup.* batch\['weight'\], which is not mixed as the target is.*target=\['y', 'weight'\]"
    refused(stepping(step), message, [trick()], train=with_extra(weight=WEIGHT))


def regression(module: Any, batch: Any) -> Tensor:
    logits = module(batch["x"])
    return F.cross_entropy(logits, batch["y"]) + (batch["weight"] - logits[:, 0]).square().mean()


@pytest.mark.parametrize("step", [two_labels, regression])
def test_a_second_label_is_refused_beside_a_target_that_is_named(step: Any) -> None:
    trick = lt.Mixup(1.0, inputs="x", target="y")
    refused(stepping(step), r"target=\['y', 'weight'\]", [trick], train=with_extra(weight=WEIGHT))


@pytest.mark.parametrize("trick", [lambda: lt.Mixup(1.0), lambda: lt.HiddenMixup("layers.2")])
def test_equal_weights_need_no_name(trick: Callable[[], Any]) -> None:
    train = with_extra(weight=torch.ones(24))
    fit(build(stepping(weighted)), train=train, callbacks=[trick()], limit_val_batches=0, max_epochs=1)


@pytest.mark.parametrize("step", [weighted, normed, ignoring, two_labels])
def test_a_part_of_the_loss_that_is_named_goes_with_its_sample(step: Any) -> None:
    module, hand = build(stepping(step)), build(stepping(step))
    mixup = lt.Mixup(1.0, target=["y", "weight"])
    watch = Watch(mixup)
    fit(module, train=with_extra(weight=WEIGHT), callbacks=[mixup, watch], limit_val_batches=0, max_epochs=1)
    found = by_hand(hand, step, with_extra(weight=WEIGHT), watch.drawn, "x", ["y", "weight"])
    assert_close(weights(module), found)


def test_a_weight_in_a_tuple_is_refused_with_its_index() -> None:
    def step(module: Any, batch: Any) -> Tensor:
        return (batch[2] * mixed_loss(module(batch[0]), batch[1])).mean()

    train = fed(lambda x, y, ids: (x, y, WEIGHT[ids]))
    refused(stepping(step), r"target=\['1', '2'\]", [lt.Mixup(1.0, inputs=0, target=1)], train=train)
    named = lt.Mixup(1.0, inputs=0, target=["1", "2"])
    fit(build(stepping(step)), train=train, callbacks=[named], limit_val_batches=0)


def added(module: Any, batch: Any) -> Tensor:
    return F.cross_entropy(module(batch["x"] + 0.1 * batch["extra"]), batch["y"])


def written(module: Any, batch: Any) -> Tensor:
    x = batch["x"].clone()
    x[:, 4:] += batch["extra"][:, 4:]
    return F.cross_entropy(module(x), batch["y"])


@pytest.mark.parametrize("step", [added, written])
def test_features_that_are_not_mixed_with_the_inputs_are_refused(step: Any) -> None:
    message = r"Mixup.* batch\['extra'\], which is not mixed.*inputs=\['x', 'extra'\].*inputs=\['x'\]"
    refused(stepping(step), message, [lt.Mixup(1.0)], train=with_extra(extra=EXTRA))


@pytest.mark.parametrize("inputs", ["x", ["x", "extra"]])
def test_named_inputs_are_all_that_is_mixed(inputs: Any) -> None:
    module, hand = build(stepping(added)), build(PlainNet)
    mixup = lt.Mixup(1.0, inputs=inputs)
    watch = Watch(mixup)
    fit(module, train=with_extra(extra=EXTRA), callbacks=[mixup, watch], limit_val_batches=0, max_epochs=1)
    found = train_by_hand(
        hand,
        watch.drawn,
        [((x, extra), y) for x, y, extra in (batch.values() for batch in with_extra(extra=EXTRA))],
        lambda parts, lam, index: (
            naive_mixup(parts[0], lam, index)
            + 0.1 * (naive_mixup(parts[1], lam, index) if "extra" in inputs else parts[1])
        ),
    )
    assert_close(weights(module), found)


class Sorted(PlainNet):
    """Uses numbers of samples, lengths and ages in ways that no mixture of labels depends on."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.embedding, self.seen = nn.Embedding(24, 8), torch.zeros(24)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        order = batch["ids"].argsort(descending=True)
        logits = self(batch["x"][order] + 0.1 * self.embedding(batch["ids"][order]))
        losses = mixed_loss(logits, batch["y"][order])
        self.seen[batch["ids"]] = losses.detach().as_subclass(Tensor)
        self.log("young", losses[batch["age"] < 1].mean())
        self.log("age", batch["age"].mean())
        return losses.sum() / batch["ids"].clamp(1).sum()


@pytest.mark.parametrize("trick", [lambda: lt.Mixup(1.0), lambda: lt.HiddenMixup("layers.2")])
def test_numbers_and_what_is_only_logged_is_no_error(trick: Callable[[], Any]) -> None:
    train = with_extra(ids=IDS, age=WEIGHT, affine=torch.rand(24, 4, 4))
    run = fit(build(Sorted), train=train, callbacks=[trick()], limit_val_batches=0)
    assert run.callback_metrics["age"] > 0


def attending(module: Any, batch: Any) -> Tensor:
    """Features of words, of which some are padding."""
    mask = batch["attention_mask"][..., None]
    return F.cross_entropy(module((module.layers[0].weight[0] * batch["x"] * mask).sum(1) / mask.sum(1)), batch["y"])


@pytest.mark.parametrize("kind", [torch.float32, torch.long, torch.bool])
def test_an_attention_mask_stays_that_of_its_sample_in_any_numbers(kind: torch.dtype) -> None:
    words = torch.randn(24, 5, 8, generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(5) <= IDS[:, None] % 5).to(kind)
    train = fed(lambda x, y, ids: {"x": words[ids], "attention_mask": mask[ids], "y": y})
    module, hand, mixup = build(stepping(attending)), build(stepping(attending)), lt.Mixup(1.0)
    watch = Watch(mixup)
    fit(module, train=train, callbacks=[mixup, watch], limit_val_batches=0, max_epochs=1)
    assert_close(weights(module), by_hand(hand, attending, train, watch.drawn, "x", ["y"]))


def test_a_weight_that_hidden_mixup_does_not_mix_is_refused() -> None:
    trick = lt.HiddenMixup("layers.2")
    refused(stepping(weighted), r"target=\['y', 'weight'\]", [trick], train=with_extra(weight=WEIGHT))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_network_gets_parts_that_are_not_mixed() -> None:
    torch._dynamo.reset()

    class Compiled(Sorted):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            network = torch.compile(lambda x, ids: self(x + self.embedding(ids)), backend="eager")
            return F.cross_entropy(network(batch["x"], batch["ids"]), batch["y"])

    fit(build(Compiled), train=with_extra(ids=IDS), callbacks=[lt.Mixup(1.0)], limit_val_batches=0, max_epochs=1)
