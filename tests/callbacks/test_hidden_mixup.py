"""Hidden mixup against models taken apart by hand, the paper's pairs, and batches that must not notice it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import transformers
from lightning.pytorch.callbacks import Callback, LambdaCallback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_tricks as lt
from tests.core.batches.test_mixing import DEVICES, Steps
from tests.device.devices import device
from tests.few import few
from tests.nets import Net, NormNet, PlainNet, assert_close, assert_equal, build, fit, loader, trained, trainer, weights

SHAPE = {"vocab_size": 60, "num_labels": 3, "pad_token_id": 0, "initializer_range": 0.3, "max_position_embeddings": 16}
SIZE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
WIDE = {**SIZE, "intermediate_size": 32}
ENCODER = {**WIDE, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
DISTIL_DRY = dict.fromkeys(["dropout", "attention_dropout", "seq_classif_dropout"], 0.0)
DISTIL = {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32, **DISTIL_DRY}
DEBERTA = {**ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4}
MODERN = {**WIDE, **SPECIAL, "classifier_pooling": "mean"}  # as in the published checkpoints
GPT2 = {**SIZE, **SPECIAL, "n_inner": 32, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def linear(model: Any, h: Tensor) -> Tensor:
    return model.classifier(h)


class Case(NamedTuple):
    """A model: the layer to hook, the representations that meet there, and what the model makes of them."""

    kind: str
    layer: str
    settings: dict[str, Any]
    represent: Callable[[Any, Any], Tensor]
    head: Callable[[Any, Tensor], Tensor] = linear
    problem: str | None = "single_label_classification"


def states(model: Any, batch: Any) -> Tensor:
    return model.base_model(**inputs(batch)).last_hidden_state


def first_state(model: Any, batch: Any) -> Tensor:
    return states(model, batch)[:, 0]


def mean_state(model: Any, batch: Any) -> Tensor:
    mask = batch["attention_mask"][..., None]
    return (states(model, batch) * mask).sum(1) / mask.sum(1)


def last_logits(model: Any, batch: Any) -> Tensor:
    return model.score(states(model, batch)[torch.arange(len(batch["labels"])), batch["attention_mask"].sum(1) - 1])


def roberta_head(model: Any, h: Tensor) -> Tensor:
    return model.classifier.out_proj(torch.tanh(model.classifier.dense(h)))


CASES = {
    "bert": Case("Bert", "classifier", ENCODER, lambda m, batch: m.bert(**inputs(batch)).pooler_output),
    # its layer gets (batch, tokens, hidden), and takes the first token
    "roberta": Case("Roberta", "classifier", ENCODER, first_state, roberta_head),
    "distilbert": Case(
        "DistilBert", "pre_classifier", DISTIL, first_state, lambda m, h: m.classifier(m.pre_classifier(h).relu())
    ),
    # it gathers the labels that are not negative, and leaves problem_type alone
    "deberta": Case(
        "DebertaV2", "classifier", DEBERTA, lambda m, batch: F.gelu(m.pooler.dense(first_state(m, batch))), problem=None
    ),
    "modernbert": Case(
        "ModernBert", "head", MODERN, mean_state, lambda m, h: m.classifier(m.head.norm(F.gelu(m.head.dense(h))))
    ),
    # their layer gets (batch, tokens, hidden), and each row is pooled after it
    "gpt2": Case("GPT2", "score", GPT2, last_logits, lambda m, z: z),
    "llama": Case("Llama", "score", {**WIDE, **SPECIAL, "num_key_value_heads": 1}, last_logits, lambda m, z: z),
    "tokens": Case("Bert", "classifier", ENCODER, states, problem=None),
}
TYPED = {**DEBERTA, "problem_type": "single_label_classification"}
CASES["deberta-typed"] = CASES["deberta"]._replace(settings=TYPED, problem=TYPED["problem_type"])
PACKS = {"dict": dict, "BatchEncoding": transformers.BatchEncoding}


class Text(L.LightningModule):
    """What everybody writes around a Hugging Face model."""

    def __init__(self, name: str, lr: float = 0.1) -> None:
        super().__init__()
        case, task = CASES[name], "Token" if name == "tokens" else "Sequence"
        config = getattr(transformers, f"{case.kind}Config")(**{**SHAPE, **case.settings})
        self.model = getattr(transformers, f"{case.kind}For{task}Classification")(config)
        self.model.train()
        self.lr = lr

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(**batch).loss

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        output = self.model(**batch)
        return {"loss": output.loss, "logits": output.logits}

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def texts(name: str, pack: str = "dict", seed: int = 0) -> Any:
    """Six texts of different lengths, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([7, 3, 5, 2, 6, 4])[torch.randperm(6, generator=generator)]
    mask = torch.arange(7) < lengths[:, None]
    ids = torch.randint(5, 60, (6, 7), generator=generator).where(mask, 0)
    labels = torch.randint(0, 3, (6, 7), generator=generator)
    labels = labels.where(mask, -100) if name == "tokens" else labels[:, 0].clone()
    return PACKS[pack]({"input_ids": ids, "attention_mask": mask.long(), "labels": labels})


def feed(*batches: Any) -> DataLoader[Any]:
    return DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch)


def inputs(batch: Any) -> dict[str, Tensor]:
    return {key: batch[key] for key in ("input_ids", "attention_mask")}


def fit_text(module: Any, callbacks: list[Any], *batches: Any, **settings: Any) -> L.Trainer:
    settings = {"max_epochs": 1, "limit_val_batches": 0, **settings}
    return fit(module, callbacks=callbacks, train=feed(*batches), val=feed(*batches), **settings)


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in module.named_parameters()}


class Watch(Callback):
    """Notes for every batch what was drawn, the loss and the gradients."""

    def __init__(self, mixup: Any) -> None:
        self.mixup = mixup
        self.drawn, self.losses, self.gradients = [], [], []

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        drawn = self.mixup.drawn
        self.drawn.append(drawn and (float(drawn.lam), drawn.index.clone()))
        self.losses.append(loss.detach().clone())

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.gradients.append(gradients(pl_module))


# ---- the loss and its gradient


def mixed(a: Tensor, lam: float, index: Tensor) -> Tensor:
    return lam * a + (1 - lam) * a[index]


def mixed_loss(z: Tensor, y: Tensor, lam: float, index: Tensor) -> Tensor:
    z, first, second = z.flatten(0, -2), y.flatten(), y[index].flatten()
    return lam * F.cross_entropy(z, first) + (1 - lam) * F.cross_entropy(z, second)


def by_hand(case: Case, model: Any, batch: Any, lam: float, index: Tensor) -> Tensor:
    z = case.head(model, mixed(case.represent(model, batch), lam, index))
    return mixed_loss(z, batch["labels"], lam, index)


def by_logits(case: Case, model: Any, batch: Any, lam: float, index: Tensor) -> Tensor:
    return mixed_loss(mixed(model(**inputs(batch)).logits, lam, index), batch["labels"], lam, index)


def by_pairs(case: Case, model: Any, batch: Any, lam: float, index: Tensor) -> Tensor:
    """As the paper has it: texts are encoded one by one, without padding; label probabilities are mixed too."""

    def alone(row: int) -> tuple[Tensor, Tensor]:
        keep, label = int(batch["attention_mask"][row].sum()), batch["labels"][row : row + 1]
        text = {key: value[row : row + 1, :keep] for key, value in inputs(batch).items()}
        return case.represent(model, {**text, "labels": label}), F.one_hot(label, 3).float()

    losses = []
    for i, j in enumerate(index.tolist()):
        (h_i, y_i), (h_j, y_j) = alone(i), alone(j)
        z = case.head(model, lam * h_i + (1 - lam) * h_j)
        losses.append(-((lam * y_i + (1 - lam) * y_j) * z.log_softmax(-1)).sum())
    return torch.stack(losses).mean()


WAYS = [(name, by_hand) for name in CASES]
WAYS += [(name, by_logits) for name, case in CASES.items() if case.head is linear or case.layer == "score"]
WAYS += [(name, by_pairs) for name in CASES if name != "tokens"]


@pytest.mark.few(8)
@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize(("name", "way"), WAYS, ids=lambda value: getattr(value, "__name__", value))
def test_a_step_has_the_gradient_of_mixed_representations(name: str, way: Callable[..., Tensor], pack: str) -> None:
    case, batch, plain, seen = CASES[name], texts(name, pack), texts(name), []
    mixup = lt.HiddenMixup(f"model.{case.layer}", alpha=2.0)
    module, watch = build(Text, name=name), Watch(mixup)
    module.model.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["labels"]), with_kwargs=True)
    fit_text(module, [mixup, watch], batch)
    ((lam, index),) = watch.drawn
    assert 0.5 <= lam <= 1
    assert sorted(index.tolist()) == list(range(6))

    copy, unmixed = build(Text, name=name), build(Text, name=name)
    loss = way(case, copy.model, plain, lam, index)
    loss.backward()
    torch.testing.assert_close(watch.losses[0], loss.detach(), atol=1e-6, rtol=1e-6)
    assert_close(watch.gradients[0], gradients(copy))
    unmixed.model(**plain).loss.backward()
    assert max((watch.gradients[0][key] - g).abs().max() for key, g in gradients(unmixed).items()) > 1e-3

    (labels,) = seen
    assert labels.dtype == torch.int64
    assert labels.tolist() == plain["labels"].tolist()
    assert module.model.config.problem_type == case.problem
    assert all(type(value) is Tensor and torch.equal(value, plain[key]) for key, value in batch.items())


# ---- what it leaves alone


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_evaluation_is_untouched_between_and_after_training_batches(name: str) -> None:
    compared = []

    def compare(trainer: L.Trainer, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        fresh = build(Text, name=name).eval()
        fresh.load_state_dict(module.state_dict())
        expected = fresh.validation_step(batch, 0)
        compared.append(all(torch.equal(outputs[key], value) for key, value in expected.items()))

    module, batch, mixup = build(Text, name=name), texts(name), lt.HiddenMixup(f"model.{CASES[name].layer}")
    callbacks = [mixup, LambdaCallback(on_validation_batch_end=compare, on_test_batch_end=compare)]
    settings = {"limit_val_batches": 1, "val_check_interval": 1, "num_sanity_val_steps": 1}
    run = fit_text(module, callbacks, batch, texts(name, seed=1), **settings)
    run.validate(module, feed(batch), verbose=False)
    run.test(module, feed(batch), verbose=False)
    assert compared == [True] * 5


def hooks(module: nn.Module) -> list[Any]:
    """What a callback may have left on a module and its submodules: attributes and hooks."""
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return [(sorted(vars(m)), [list(getattr(m, kind)) for kind in kinds]) for m in module.modules()]


def fail(*_: Any) -> None:
    raise RuntimeError("broken")


@pytest.mark.parametrize("where", ["on_train_batch_start", "on_before_backward", None])
@pytest.mark.parametrize("name", ["roberta", "gpt2"])
def test_nothing_is_left_after_a_fit_or_an_exception_and_it_can_go_again(name: str, where: str | None) -> None:
    module, batch = build(Text, name=name, lr=0.0), texts(name)
    mixup, before = lt.HiddenMixup(f"model.{CASES[name].layer}", alpha=2.0), hooks(module.model)
    run = trainer(callbacks=[mixup, *([LambdaCallback(**{where: fail})] if where else [])], max_epochs=1)
    with pytest.raises(RuntimeError, match="broken") if where else nullcontext():
        run.fit(module, feed(batch), feed(batch))
    assert hooks(module.model) == before
    assert not {"training_step", "batch_to_device"} & vars(run.strategy).keys()
    assert torch.equal(module.model.train()(**batch).loss, build(Text, name=name).model(**batch).loss)
    watch = Watch(mixup)
    fit_text(module, [mixup, watch], batch)
    assert watch.drawn[0]


@pytest.mark.parametrize("settings", [{"alpha": 0}, {"alpha": 0.0}, {"prob": 0.0}], ids=str)
def test_never_mixing_is_bit_equal_to_no_callback(settings: dict[str, Any]) -> None:
    batches = [texts("gpt2", seed=seed) for seed in (0, 1)]
    assert_equal(trained(Net, lt.HiddenMixup("layers.4", **settings)), trained(Net))  # dropout would notice numbers
    with_it, without = build(Text, name="gpt2"), build(Text, name="gpt2")
    fit_text(with_it, [lt.HiddenMixup("model.score", **settings)], *batches)
    fit_text(without, [], *batches)
    assert_equal(weights(with_it), weights(without))


# ---- batches of other modules, and when to mix


def hidden_loss(net: Any, x: Tensor, y: Tensor, lam: float, index: Tensor) -> Tensor:
    return mixed_loss(net.layers[2](mixed(net.layers[:2](x), lam, index)), y, lam, index)


def train_by_hand(drawn: list[Any], batches: list[Any]) -> dict[str, Tensor]:
    """The weights of a PlainNet whose last layer gets mixed inputs in the batches for which there are numbers."""
    net = build(PlainNet)
    optimizer = net.configure_optimizers()
    for (x, y), numbers in zip(batches, drawn, strict=True):
        lam, index = numbers or (1.0, torch.arange(len(y)))
        optimizer.zero_grad()
        hidden_loss(net, x, y, lam, index).backward()
        optimizer.step()
    return weights(net)


BETWEEN = [({"start": 2, "stop": 5}, range(2, 5)), ({"start": 0.25, "stop": 0.5}, range(3, 6))]


@pytest.mark.parametrize(("settings", "steps"), [({}, range(12)), *BETWEEN, ({"prob": 0.5}, None)], ids=str)
def test_a_run_is_the_naive_one_mixed_from_start_to_stop(settings: dict[str, Any], steps: range | None) -> None:
    mixup = lt.HiddenMixup("layers.2", 1.0, **settings)
    watch = Watch(mixup)
    module = trained(PlainNet, mixup, watch)
    chosen = [step for step, numbers in enumerate(watch.drawn) if numbers]
    assert 0 < len(chosen) < 12 if steps is None else chosen == list(steps)
    assert len({watch.drawn[step][0] for step in chosen}) == len(chosen)  # new numbers for every batch
    assert_close(module, train_by_hand(watch.drawn, 2 * list(loader())))


class Named(PlainNet):
    """Takes dictionaries, and looks at the labels as one does for a metric."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key = key

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        y, z = batch[self.key], self(batch["x"])
        plain = list(loader())[batch_idx][1]
        assert (z.argmax(-1) == y).sum() == (z.argmax(-1) == plain).sum()
        return F.cross_entropy(z, y)


@pytest.mark.parametrize("key", ["labels", "label", "target", "targets", "y", "gold"])
def test_the_target_of_a_dictionary_is_found_or_named(key: str) -> None:
    mixup = lt.HiddenMixup("layers.2", 1.0, target="gold" if key == "gold" else None)
    module, watch, batches = build(Named, key=key), Watch(mixup), list(loader())
    fit(module, callbacks=[mixup, watch], train=feed(*({"x": x, key: y} for x, y in batches)), limit_val_batches=0)
    assert_close(weights(module), train_by_hand(watch.drawn, 2 * batches))


@pytest.mark.parametrize(("on", "precision"), DEVICES)
def test_a_step_on_a_device_has_the_gradient_of_a_naive_one(on: str, precision: str) -> None:
    mixup, module, steps, hand = lt.HiddenMixup("layers.2", 1.0), build(PlainNet), Steps(), build(PlainNet)
    watch, losses = Watch(mixup), []
    with device(on) as there:
        fit(module, callbacks=[mixup, watch, steps], accelerator=there.name, precision=precision)
        assert {index.device.type for _, index in watch.drawn} == {there.name}
    for (x, y), (lam, index) in zip(2 * list(loader()), watch.drawn, strict=True):
        numbers = {"x": x, "y": y, "lam": lam, "index": index.cpu()}
        losses.append(lambda n=numbers: hidden_loss(hand, **n))
    steps.compare(hand, losses)


@pytest.mark.parametrize("samples", [44, 48])  # with and without a smaller batch at the end
def test_statistics_of_an_average_are_those_of_batches_that_are_not_mixed(samples: int) -> None:
    """In any order: where ``SWA`` comes first, the last batch has not ended."""
    tricks = lambda: [lt.HiddenMixup("layers.1"), lt.SWA(start=3)]  # noqa: E731
    ended = (trained(NormNet, *tricks()[::turn], train=loader(samples)) for turn in (1, -1))
    assert_equal(*ended)


# ---- other integers in the batch


class Columns(Text):
    """Takes what its model takes out of a batch with columns of a data set."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("length", batch["length"].float().mean())
        return self.model(**{key: batch[key] for key in batch if key not in ("idx", "length", "topic")}).loss


@pytest.mark.parametrize("name", CASES)
def test_columns_of_a_data_set_change_nothing(name: str) -> None:
    case, ends = CASES[name], []
    for columns in ({}, {"idx": torch.arange(6), "topic": torch.arange(6) % 3}):
        batch = {**texts(name), "length": texts(name)["attention_mask"].sum(1), **columns}
        mixup, module = lt.HiddenMixup(f"model.{case.layer}", alpha=2.0), build(Columns, name=name)
        fit_text(module, [mixup], batch)
        ends.append(weights(module))
    assert_equal(*ends)


def test_a_layer_of_token_ids_is_refused_with_what_to_name() -> None:
    module = build(Text, name="bert")
    before = weights(module)
    layer = "model.bert.embeddings.word_embeddings"
    message = rf"HiddenMixup\('{layer}'\) .* Embedding gets torch\.int64, which cannot be mixed: name a layer after"
    with pytest.raises(MisconfigurationException, match=message):
        fit_text(module, [lt.HiddenMixup(layer, alpha=2.0)], texts("bert"))
    assert_equal(weights(module), before)


def test_a_second_label_of_a_model_is_refused_by_its_name() -> None:
    class Pretrains(Text):
        def __init__(self, name: str) -> None:
            super().__init__(name)
            self.model = transformers.BertForPreTraining(transformers.BertConfig(**{**SHAPE, **ENCODER}))

    batch = {**texts("tokens"), "next_sentence_label": torch.arange(6) % 2}
    module = build(Pretrains, name="bert")
    before = weights(module)
    message = r"HiddenMixup.* batch\['next_sentence_label'\], which is not mixed.*\['labels', 'next_sentence_label'\]"
    with pytest.raises(MisconfigurationException, match=message):
        fit_text(module, [lt.HiddenMixup("model.cls.predictions", target="labels")], batch)
    assert_equal(weights(module), before)


class CompiledText(Text):
    """An encoder that is compiled as a whole, and a head behind it; takes dictionaries and tuples."""

    def __init__(self, name: str, labels: str = "labels") -> None:
        super().__init__(name)
        pooled = lambda ids, mask: self.model.bert(input_ids=ids, attention_mask=mask).pooler_output  # noqa: E731
        self.encode, self.labels = torch.compile(pooled, backend="aot_eager", fullgraph=True), labels

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if isinstance(batch, tuple):
            batch = dict(zip(("input_ids", "attention_mask", "labels", "second"), batch, strict=False))
        logits = self.model.classifier(self.encode(batch["input_ids"], batch["attention_mask"]))
        loss = F.cross_entropy(logits, batch["labels"])
        return loss if self.labels == "labels" else loss + F.cross_entropy(logits, batch["second"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's
@pytest.mark.parametrize(("kind", "mask"), [(dict, torch.long), (dict, torch.float32), (tuple, torch.long)])
def test_tokens_and_masks_do_not_interrupt_compiled_code(kind: Any, mask: torch.dtype) -> None:
    torch._dynamo.reset()
    plain = {**texts("bert"), "attention_mask": texts("bert")["attention_mask"].to(mask)}
    batch = tuple(plain.values()) if kind is tuple else plain
    mixup = lt.HiddenMixup("model.classifier", target=2 if kind is tuple else None)
    module, eager = build(CompiledText, name="bert"), build(Text, name="bert")
    fit_text(module, [mixup], batch)
    fit_text(eager, [lt.HiddenMixup("model.classifier")], texts("bert"))
    assert_close(weights(module), weights(eager), 1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's
@pytest.mark.parametrize("kind", few([dict, tuple], 1))
def test_a_second_label_behind_compiled_code_is_refused(kind: Any) -> None:
    torch._dynamo.reset()
    batch = {**texts("bert"), "second": torch.arange(6) % 3}
    name = r"batch\['second'\]" if kind is dict else r"batch\[3\]"
    mixup = lt.HiddenMixup("model.classifier", target=2 if kind is tuple else "labels")
    module, given = build(CompiledText, name="bert", labels="second"), tuple(batch.values())
    with pytest.raises(MisconfigurationException, match=f"HiddenMixup.* {name}, which is not mixed"):
        fit_text(module, [mixup], given if kind is tuple else batch)


# ---- mistakes


@pytest.mark.parametrize("layer", ["model.clasifier", "classifer"])
def test_an_unknown_layer_is_named_with_its_neighbours(layer: str) -> None:
    module = build(Text, name="bert")
    with pytest.raises(MisconfigurationException) as error:
        fit_text(module, [lt.HiddenMixup(layer)], texts("bert"))
    assert layer in str(error.value)
    assert "model.classifier" in str(error.value)


def test_a_layer_that_is_never_called_raises_after_the_first_batch() -> None:
    module, run = build(PlainNet), trainer(callbacks=[lt.HiddenMixup("spare")])
    module.spare = nn.Linear(16, 2)
    before = hooks(module.layers), hooks(module.spare)
    with pytest.raises(Exception, match="spare"):
        run.fit(module, loader(), loader())
    assert run.global_step <= 1
    assert (hooks(module.layers), hooks(module.spare)) == before


def test_a_second_fit_finds_in_its_first_batch_that_the_layer_is_not_called() -> None:
    callback, other = lt.HiddenMixup("layers.2", start=6), build(PlainNet)
    fit(build(PlainNet), train=loader(4), callbacks=[callback])
    other.forward = lambda x: other.layers[0](x)[:, :2]  # type: ignore[method-assign]
    run = trainer(callbacks=[callback])
    with pytest.raises(MisconfigurationException, match=r"did not call the layer 'layers\.2'"):
        run.fit(other, loader(4), loader())
    assert run.global_step <= 1
