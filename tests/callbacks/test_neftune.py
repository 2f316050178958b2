"""NEFTune: noise of the right size on the embeddings of tokens while training, and nowhere else."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import transformers
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import lightning_tricks as lt
from lightning_tricks.callbacks.neftune import noisy_embeddings
from tests.losses.test_lean_loss import causal
from tests.nets import Steps, assert_close, assert_equal, build, fit, weights

WORDS = 97


def test_the_noise_is_uniform_and_smaller_for_longer_and_wider_sequences() -> None:
    x = torch.randn(64, 25, 16)
    noise = noisy_embeddings(x, 5.0) - x
    assert noise.abs().max() == pytest.approx(5 / 20, rel=1e-2)
    assert noise.abs().max() <= 5 / 20 + 1e-6
    assert noise.mean().abs() < 0.01
    assert noise.std() == pytest.approx(5 / 20 / 3**0.5, rel=1e-2)
    assert torch.equal(noisy_embeddings(x, 0.0), x)
    half = x.half().requires_grad_()
    noisy = noisy_embeddings(half, 5.0)
    assert noisy.dtype is torch.half
    noisy.sum().backward()
    assert (half.grad == 1).all()


class Language(L.LightningModule):
    """A small language model, and what its embeddings gave in training and in validation."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.drop, self.head = nn.Embedding(WORDS, 8), nn.Dropout(0.2), nn.Linear(8, WORDS)
        self.seen: dict[str, list[Tensor]] = {"training": [], "validation": []}

    def embedded(self, ids: Tensor) -> Tensor:
        return self.words(ids)

    def loss(self, batch: Any) -> Tensor:
        x = self.embedded(batch["input_ids"])
        with torch.no_grad():
            clean = F.embedding(batch["input_ids"], self.words.weight)
        self.seen["training" if self.trainer.training else "validation"].append(x.detach() - clean)
        return F.cross_entropy(self.head(self.drop(x)).flatten(0, 1), batch["labels"].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches(number: int = 4) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(WORDS, (number, 3, 10), generator=generator)
    return [{"input_ids": each, "labels": each} for each in ids]


def trained(kind: Any = Language, *callbacks: Any, **settings: Any) -> Any:
    module = build(kind)
    given = DataLoader(batches(), batch_size=None)
    fit(module, train=given, val=given, callbacks=[*callbacks], **settings)
    return module


def test_each_batch_has_noise_of_its_own_and_validation_has_none() -> None:
    seen = trained(Language, lt.NEFTune(5.0)).seen
    assert all((noise == 0).all() for noise in seen["validation"])
    assert len(seen["validation"]) == len(seen["training"]) == 8
    limit = 5 / (10 * 8) ** 0.5
    assert all(0.9 * limit < noise.abs().max() <= limit + 1e-6 for noise in seen["training"])
    assert len({float(noise[0, 0, 0]) for noise in seen["training"]}) == 8


def test_validation_in_train_mode_has_none_either() -> None:
    class Drops(Language):
        def on_validation_model_eval(self) -> None:
            """Monte Carlo dropout."""

    assert all((noise == 0).all() for noise in trained(Drops, lt.NEFTune()).seen["validation"])


def test_dropout_draws_what_it_draws_without() -> None:
    assert_equal(weights(trained(Language, lt.NEFTune(0.0))), weights(trained()))
    masks: list[list[Tensor]] = []

    class Masks(Language):
        def __init__(self) -> None:
            super().__init__()
            self.drop.register_forward_hook(lambda layer, given, out: masks[-1].append(out == 0))

    for callbacks in ([], [lt.NEFTune()]):
        masks.append([])
        trained(Masks, *callbacks)
    assert all(torch.equal(one, other) for one, other in zip(*masks, strict=True))


def test_an_embedding_in_eval_mode_has_none() -> None:
    class Frozen(Language):
        def on_train_epoch_start(self) -> None:
            self.words.eval()

    assert all((noise == 0).all() for noise in trained(Frozen, lt.NEFTune()).seen["training"])


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_embedding_has_the_same_noise_again(reentrant: bool) -> None:
    class Recomputed(Language):
        def embedded(self, ids: Tensor) -> Tensor:
            one = torch.ones((), device=ids.device, requires_grad=True)
            run = lambda ids, one: torch.tanh(one * self.words(ids))  # noqa: E731
            return checkpoint(run, ids, one, use_reentrant=reentrant, preserve_rng_state=False)

    class Plain(Language):
        def embedded(self, ids: Tensor) -> Tensor:
            return torch.tanh(self.words(ids))

    assert_close(weights(trained(Recomputed, lt.NEFTune())), weights(trained(Plain, lt.NEFTune())))


# -- which embeddings -------------------------------------------------------------------------------------------------


def small(kind: str) -> nn.Module:
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    if kind == "t5":
        few = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
        return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=WORDS, **few))
    if kind == "bert":
        return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=WORDS, **size))
    return causal(kind)


class Library(Language):
    """Has its loss from transformers."""

    kind = ""

    def __init__(self) -> None:
        super().__init__()
        self.words = self.drop = self.head = nn.Identity()
        self.model = small(self.kind)

    def loss(self, batch: Any) -> Tensor:
        return self.model(**batch).loss


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert", "t5"])
def test_in_models_of_transformers_the_input_embeddings_are_found(kind: str) -> None:
    """The weights are those of a module that adds the same noise by hand to what the model embeds."""
    named = type("Named", (Library,), {"kind": kind})
    trick = lt.NEFTune(5.0)

    class ByHand(named):
        def __init__(self) -> None:
            super().__init__()
            stacks = [self.model.encoder, self.model.decoder] if kind == "t5" else [self.model]
            for table in {id(each): each for each in (stack.get_input_embeddings() for stack in stacks)}.values():
                table.forward = partial(self.noisy, table.forward)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.seed = seeds.pop(0)
            return super().training_step(batch, batch_idx)

        def noisy(self, forward: Any, ids: Tensor) -> Tensor:
            x = forward(ids)
            with torch.random.fork_rng():
                torch.manual_seed(self.seed)
                return x + 5 / (x.shape[1] * x.shape[2]) ** 0.5 * (2 * torch.rand(x.shape) - 1)

    seeds: list[int] = []

    class Seeds(L.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            seeds.append(trick.drawn)

    ours = weights(trained(named, trick, Seeds(), limit_val_batches=0))
    assert_close(ours, weights(trained(ByHand, limit_val_batches=0)), 1e-5)
    assert any((ours[name] - value).abs().max() > 1e-4 for name, value in weights(trained(named)).items())


class Two(Language):
    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(10, 8)

    def embedded(self, ids: Tensor) -> Tensor:
        return self.words(ids) + 0 * self.places(torch.arange(10, device=ids.device))


def test_one_of_several_embeddings_is_named() -> None:
    with pytest.raises(MisconfigurationException, match=r"several embeddings, words, places\. Name them in modules="):
        trained(Two, lt.NEFTune())
    assert all(noise.any() for noise in trained(Two, lt.NEFTune(modules="words")).seen["training"])


def test_of_nested_modules_the_outermost_has_the_noise() -> None:
    class Inside(Language):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Sequential(nn.Embedding(WORDS, 8), nn.Identity())

        def loss(self, batch: Any) -> Tensor:
            x = self.words(batch["input_ids"])
            self.seen["training"].append(x.detach() - self.words[0].weight[batch["input_ids"]].detach())
            return F.cross_entropy(self.head(x).flatten(0, 1), batch["labels"].flatten())

    noises = trained(Inside, lt.NEFTune(modules="words"), max_epochs=1).seen["training"][:4]
    assert all(noise.abs().max() <= 5 / (10 * 8) ** 0.5 + 1e-6 for noise in noises)


class ByFunction(Language):
    def embedded(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.words.weight)


class OfSamples(Language):
    def embedded(self, ids: Tensor) -> Tensor:
        return self.words(ids[:, 0])[:, None].expand(-1, 10, -1)


class Without(Language):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Identity()


@pytest.mark.parametrize(
    ("kind", "modules", "told"),
    [
        (ByFunction, None, r"NEFTune did nothing: ByFunction.training_step did not call words\. "),
        (OfSamples, None, r"needs embeddings of tokens \(B, L, d\), got torch.float32 \(3, 8\) from words"),
        (Without, None, "does not know where the embeddings of tokens are: Without has no torch.nn.Embedding"),
        (Language, "tokens", "NEFTune selects nothing in Language: modules: a pattern must be found in a name"),
    ],
)
def test_what_has_no_embeddings_of_tokens_is_refused(kind: Any, modules: Any, told: str) -> None:
    steps = Steps()
    with pytest.raises(MisconfigurationException, match=told):
        trained(kind, lt.NEFTune(modules=modules), steps)
    assert steps.made == 0


def test_a_later_batch_may_have_no_tokens() -> None:
    class Sometimes(Language):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch) if batch_idx != 2 else self.head.weight.square().mean()

    assert len(trained(Sometimes, lt.NEFTune(), max_epochs=1).seen["training"]) == 3
