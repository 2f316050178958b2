"""Distill: the gradient is that of the formula, the teacher is what it says, and nothing else changes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import timm
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import lightning_tricks as lt
from lightning_tricks.functional import distillation_loss
from tests.conformance.runs import ShardedNet
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
from tests.reference.loop import Naive, naive_fit
from tests.refusals import assert_refused


class NaiveDistill(Naive):
    """The teacher is a dictionary of tensors that are averaged one by one, or another module, called by torch.func."""

    depth = 3.5

    def __init__(self, decay: float = 0.9, weight: float = 1.0, other: nn.Module | None = None) -> None:
        self.decay, self.weight, self.other = decay, weight, other
        self.teacher: dict[str, Tensor] = {}
        self.updates, self.runs = 0, False
        self.distance: Any = None

    def begin(self, module: Any, optimizer: torch.optim.Optimizer) -> None:
        module.layers.register_forward_pre_hook(lambda layers, _: self.copied(layers))
        module.layers.register_forward_hook(self.compared)

    def copied(self, layers: nn.Module) -> None:
        if not self.teacher:
            self.teacher = {name: value.clone() for name, value in floats(layers).items()}

    def compared(self, layers: nn.Module, given: Any, mine: Tensor) -> None:
        if self.runs or not torch.is_grad_enabled():
            return
        self.runs = True
        with torch.no_grad(), in_eval(layers):
            theirs = torch.func.functional_call(layers, self.teacher, given) if not self.other else self.other(*given)
        self.runs = False
        p = torch.softmax(theirs.float() / 2, 1)
        self.distance = 4 * (p * (p.log() - torch.log_softmax(mine.float() / 2, 1))).sum(1).mean()

    def losses(self, module: Any, batch: Any, number: int) -> Tensor:
        losses = super().losses(module, batch, number)
        distance, self.distance = self.distance, None
        return losses + self.weight * distance

    def stepped(self, module: Any, step: int, ends_epoch: bool) -> None:
        d = self.decay if self.decay == 1 else min(self.decay, (1 + self.updates) / (10 + self.updates))
        for name, value in floats(module.layers).items():
            self.teacher[name] += (1 - d) * (value - self.teacher[name])
        self.updates += 1


def floats(layers: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in layers.state_dict().items() if value.is_floating_point()}


@contextmanager
def in_eval(module: nn.Module) -> Iterator[None]:
    modes = {part: part.training for part in module.modules()}
    module.eval()
    yield
    for part, mode in modes.items():
        part.training = mode


def other() -> nn.Module:
    """A teacher of the tests' data that was not trained, with BatchNorm and dropout."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return Net().layers


# -- the lines that a user writes -------------------------------------------------------------------------------------


class Small(L.LightningModule):
    """Calls a part of itself, as most modules do."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes))
        self.criterion = nn.CrossEntropyLoss()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return self.criterion(self.model(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def images() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 3, 32, 32, generator=generator)
    return DataLoader(TensorDataset(x, torch.tensor([0, 1, 2, 3])), 4)


class Gradients(Callback):
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.found = gradients_of(pl_module)


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def first_gradients(
    module: L.LightningModule, batches: Any, *callbacks: Callback, **settings: Any
) -> dict[str, Tensor]:
    watch = Gradients()
    val = loader(24) if isinstance(module, Net) else None
    trainer(callbacks=[*callbacks, watch], max_steps=1, **settings).fit(module, batches, val)
    return watch.found


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_large_model_of_timm_teaches_a_small_one(precision: Any) -> None:
    big, module = timm.create_model("resnet10t", num_classes=5), build(Small)
    before, reference = weights(big), copy.deepcopy(module)
    callback = lt.Distill(big, weight=0.5, temperature=4.0)
    found = first_gradients(module, images(), callback, precision=precision)
    x, y = next(iter(images()))
    with torch.autocast("cpu", torch.bfloat16, enabled=precision != "32-true"):
        z = reference.model(x)
        with torch.no_grad(), in_eval(big):
            t = big(x)
        p = torch.softmax(t.float() / 4, 1)
        distance = 16 * (p * (p.log() - torch.log_softmax(z.float() / 4, 1))).sum(1).mean()
        (F.cross_entropy(z, y) + 0.5 * distance).backward()
    assert_close(found, gradients_of(reference))
    assert_equal(weights(big), before)
    assert big.training
    assert not any(weight.grad is not None for weight in big.parameters())
    assert module.state_dict().keys() == reference.state_dict().keys()


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_frozen_copy_teaches_with_the_statistics_that_it_had(accumulate: int) -> None:
    naive, module = build(NormNet), build(NormNet)
    naive_fit(naive, NaiveDistill(decay=1.0), list(loader()), accumulate=accumulate)
    fit(module, callbacks=[lt.Distill(lt.Teacher(decay=1.0))], accumulate_grad_batches=accumulate)
    assert_close(weights(module), weights(naive))


class Consistent(NormNet):
    """Adds the loss itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        z = self(x)
        return F.cross_entropy(z, y) + distillation_loss(z, self.teacher(x))  # type: ignore[operator]


def test_a_module_that_asks_its_teacher_trains_the_same() -> None:
    own, module = build(Consistent), build(NormNet)
    fit(own, callbacks=[lt.Teacher(0.9)])
    fit(module, callbacks=[lt.Distill(lt.Teacher(0.9))])
    assert_equal(weights(own), weights(module))
    assert not hasattr(own, "teacher")


# -- what is compared -------------------------------------------------------------------------------------------------


def test_the_formula_is_that_of_the_paper() -> None:
    student, teacher = torch.randn(3, 4, 5, requires_grad=True), torch.randn(3, 4, 5)
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    rows = [
        9 * torch.sum(p * (p.log() - torch.log_softmax(z / 3, 0)))
        for i, j in mask.nonzero().tolist()
        for z, p in [(student[i, j], torch.softmax(teacher[i, j] / 3, 0))]
    ]
    found = distillation_loss(student, teacher, temperature=3, mask=mask)
    torch.testing.assert_close(found, torch.stack(rows).mean())
    torch.testing.assert_close(
        distillation_loss(student.movedim(-1, 1), teacher.movedim(-1, 1), temperature=3, dim=1),
        distillation_loss(student, teacher, temperature=3),
    )
    (gradient,) = torch.autograd.grad(distillation_loss(student, teacher, mask=torch.zeros(3, 4)), student)
    assert not gradient.any()


def test_a_class_that_both_mask_out_adds_nothing() -> None:
    student, teacher = torch.randn(6, 5, requires_grad=True), torch.randn(6, 5)
    whole = torch.cat([student, torch.full((6, 1), -torch.inf)], 1)
    masked = distillation_loss(whole, torch.cat([teacher, torch.full((6, 1), -torch.inf)], 1))
    (gradient,) = torch.autograd.grad(masked, student)
    (expected,) = torch.autograd.grad(distillation_loss(student, teacher), student)
    torch.testing.assert_close(masked, distillation_loss(student, teacher))
    torch.testing.assert_close(gradient, expected)


def test_at_a_high_temperature_its_gradients_are_those_of_the_squared_error_of_centred_logits() -> None:
    student, teacher = torch.randn(6, 5, requires_grad=True), torch.randn(6, 5)
    (found,) = torch.autograd.grad(distillation_loss(student, teacher, temperature=1e3), student)
    centred = student - student.mean(1, keepdim=True) - (teacher - teacher.mean(1, keepdim=True))
    torch.testing.assert_close(found, centred.detach() / (5 * 6), atol=1e-4, rtol=1e-2)


class Llama(L.LightningModule):
    def __init__(self, pad: bool) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
        self.model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, max_position_embeddings=16, **sizes))
        self.pad = pad

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (ids,) = batch
        mask, labels = torch.ones_like(ids), ids.clone()
        if self.pad:
            mask[0, 3:], labels[0, 3:] = 0, -100
        return self.model(input_ids=ids, attention_mask=mask, labels=labels).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("pad", [False, True])
def test_the_tokens_of_a_model_of_transformers_count_but_for_padding(pad: bool) -> None:
    torch.manual_seed(1)
    other, module = Llama(pad).model, build(partial(Llama, pad))  # type: ignore[arg-type]
    reference, ids = copy.deepcopy(module), torch.randint(32, (2, 6))
    found = first_gradients(module, DataLoader(TensorDataset(ids), 2), lt.Distill(other))
    loss = reference.training_step((ids,), 0)
    rows = [(0, slice(0, 3 if pad else 6)), (1, slice(None))]
    mine = torch.cat([reference.model(input_ids=ids[i : i + 1, part]).logits[0] for i, part in rows])
    with torch.no_grad(), in_eval(other):
        theirs = torch.cat([other(input_ids=ids[i : i + 1, part]).logits[0] for i, part in rows])
    (loss + distillation_loss(mine, theirs)).backward()
    assert_close(found, gradients_of(reference))


class Masked(nn.Module):
    """Has an output for each token, which a mask in the second place does not change."""

    def __init__(self, decodes: bool) -> None:
        super().__init__()
        self.table, self.decodes = nn.Embedding(32, 5), decodes

    def forward(self, ids: Tensor, attention_mask: Tensor, decoder_attention_mask: Tensor | None = None) -> Any:
        encoded = {"encoder_last_hidden_state": ids} if self.decodes else {}
        return SimpleNamespace(logits=self.table(ids), **encoded)


@pytest.mark.parametrize(
    ("decodes", "decoder_mask", "counts"), [(False, False, 2), (True, False, 6), (True, True, 4)], ids=str
)
def test_the_mask_is_found_by_its_place_and_an_encoder_has_another(
    decodes: bool, decoder_mask: bool, counts: int
) -> None:
    class Reads(Llama):
        def __init__(self) -> None:
            L.LightningModule.__init__(self)
            self.model = Masked(decodes)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            (ids,) = batch
            first = {n: torch.arange(6).lt(n).expand_as(ids) for n in (2, 4)}
            given = {"decoder_attention_mask": first[4]} if decoder_mask else {}
            return self.model(ids, first[2], **given).logits.square().mean()

    other, module, ids = Masked(False), build(Reads), torch.arange(12).view(2, 6)
    expected = distillation_loss(module.model.table(ids[:, :counts]), other.table(ids[:, :counts]))  # type: ignore
    run = trainer(callbacks=[lt.Distill(other)], max_steps=1, log_every_n_steps=1)
    run.fit(module, DataLoader(TensorDataset(ids), 2))
    torch.testing.assert_close(run.callback_metrics["tricks/distill_loss"], expected.detach())


class Translates(Llama):
    """A wrapper of an encoder and a decoder, which returns its logits alone."""

    def __init__(self, gives: tuple[str, ...]) -> None:
        from transformers import T5Config, T5ForConditionalGeneration

        class Bare(T5ForConditionalGeneration):
            def forward(self, input_ids: Any, attention_mask: Any, **kwargs: Any) -> Any:
                return super().forward(input_ids, attention_mask, **kwargs).logits

        L.LightningModule.__init__(self)
        sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
        self.model, self.gives = Bare(T5Config(vocab_size=32, decoder_start_token_id=0, **sizes)), gives

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (ids,) = batch
        mask = torch.arange(6).lt(4).expand_as(ids)
        values = {"labels": ids, "decoder_input_ids": ids, "decoder_attention_mask": mask}
        given = {name: values[name] for name in self.gives}
        return self.model(ids, torch.arange(6).lt(2).expand_as(ids), **given).square().mean()


@pytest.mark.parametrize(
    ("gives", "counts"),
    [(("labels",), None), (("decoder_input_ids",), 6), (("decoder_input_ids", "decoder_attention_mask"), 4)],
    ids=["unknown", "all", "mask"],
)
def test_the_mask_of_an_encoder_is_not_taken_for_that_of_the_decoder(gives: tuple[str, ...], counts: Any) -> None:
    module, other = (build(partial(Translates, gives)).train() for _ in range(2))  # type: ignore[arg-type]
    torch.nn.init.normal_(other.model.shared.weight)
    ids = torch.arange(12).view(2, 6)
    run = trainer(callbacks=[lt.Distill(other.model)], max_steps=1, log_every_n_steps=1)
    if counts is None:
        with pytest.raises(MisconfigurationException, match=r"whether attention_mask .* name the part .* student="):
            run.fit(module, DataLoader(TensorDataset(ids), 2))
        assert not run.global_step
        return
    seen = torch.arange(6).lt(2).expand_as(ids)
    values = {"decoder_input_ids": ids, "decoder_attention_mask": torch.arange(6).lt(4).expand_as(ids)}
    with in_eval(module.model), in_eval(other.model), torch.no_grad():
        mine, theirs = (m(ids, seen, **{name: values[name] for name in gives}) for m in (module.model, other.model))
    run.fit(module, DataLoader(TensorDataset(ids), 2))
    expected = distillation_loss(mine[:, :counts], theirs[:, :counts])
    torch.testing.assert_close(run.callback_metrics["tricks/distill_loss"], expected)


@pytest.mark.parametrize("features", ["^a$", "Linear", None], ids=str)
def test_a_layer_inside_of_a_reentrant_checkpoint_is_named(features: Any) -> None:
    class Recomputes(PlainNet):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 2)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            x = x.clone().requires_grad_()
            z = checkpoint(self.a, x, use_reentrant=True)
            return F.cross_entropy(checkpoint(self.b, z, use_reentrant=True) if features is None else self.b(z), y)

    with pytest.raises(MisconfigurationException, match=r"no gradient in a reentrant checkpoint: pass use_reentrant="):
        first_gradients(build(Recomputes), loader(), lt.Distill(lt.Teacher(0.9), features=features))


@pytest.mark.parametrize(
    ("features", "pairs"),
    [
        ("Conv2d", [("model.0", "conv")]),
        ({r"model\.0": "conv", "AdaptiveAvgPool2d": "pool"}, [("model.0", "conv"), ("model.1", "pool")]),
    ],
    ids=["one pattern", "names"],
)
def test_outputs_of_layers_are_compared(features: Any, pairs: list[tuple[str, str]]) -> None:
    class Wider(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.pool, self.head = nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Linear(8, 100)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.pool(self.conv(x)).flatten(1))

    other, module = Wider(), build(Small)
    reference = copy.deepcopy(module)
    found = first_gradients(module, images(), lt.Distill(other, weight=3.0, features=features))
    x, y = next(iter(images()))
    outputs: dict[str, Tensor] = {}
    for net, names in ((reference, [name for name, _ in pairs]), (other, [name for _, name in pairs])):
        for name in names:
            net.get_submodule(name).register_forward_hook(lambda *a, n=name: outputs.__setitem__(n, a[2]))  # type: ignore[misc]
    with torch.no_grad():
        other(x)
    loss = reference.training_step((x, y), 0)
    (loss + 3 * torch.stack([(outputs[a] - outputs[b]).square().mean() for a, b in pairs]).mean()).backward()
    assert_close(found, gradients_of(reference))


def test_outputs_of_a_layer_that_are_written_to_are_refused() -> None:
    class Inplace(Small):
        def __init__(self) -> None:
            super().__init__()
            self.model.insert(1, nn.ReLU(inplace=True))

    callback = lt.Distill(lt.Teacher(1.0), features="Conv2d")
    with pytest.raises(MisconfigurationException, match=r"outputs of model\.0 are written to by what follows"):
        trainer(callbacks=[callback], max_steps=1).fit(build(Inplace), images())


def test_numbers_that_are_no_logits_are_compared_by_their_squares() -> None:
    class Regression(PlainNet):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": self(batch[0]).square().mean()}

    module, teacher = build(Regression), nn.Linear(8, 2)
    reference = copy.deepcopy(module)
    found = first_gradients(module, loader(), lt.Distill(teacher, temperature=None))
    x, _ = next(iter(loader()))
    z = reference(x)
    (z.square().mean() + (z - teacher(x).detach()).square().mean()).backward()
    assert_close(found, gradients_of(reference))


def test_pixels_have_their_classes_in_the_second_dimension() -> None:
    class Masks(Small):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(nn.Conv2d(3, 5, 3))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(batch[0]).square().mean()

    module, teacher = build(Masks), nn.Conv2d(3, 5, 3)
    reference, (x, _) = copy.deepcopy(module), next(iter(images()))
    found = first_gradients(module, images(), lt.Distill(teacher))
    flat = [net(x).movedim(1, -1).reshape(-1, 5) for net in (reference.model, teacher)]
    (reference.training_step((x, None), 0) + distillation_loss(*flat)).backward()
    assert_close(found, gradients_of(reference))


class Twice(PlainNet):
    """Two views of a batch, and a metric."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        with torch.no_grad():
            self.log("metric", self(x).mean())
        return F.cross_entropy(self(x), y) + F.cross_entropy(self(-x), y)


def test_of_several_calls_the_mean_is_taken() -> None:
    module, teacher = build(Twice), nn.Linear(8, 2)
    reference, (x, y) = copy.deepcopy(module), next(iter(loader()))
    found = first_gradients(module, loader(), lt.Distill(teacher))
    distances = [distillation_loss(reference(each), teacher(each)) for each in (x, -x)]
    (F.cross_entropy(reference(x), y) + F.cross_entropy(reference(-x), y) + sum(distances) / 2).backward()
    assert_close(found, gradients_of(reference))


class Heads(PlainNet):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 2), nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.cross_entropy(self.one(x), y) + F.cross_entropy(self.two(x), y)


def test_every_part_may_have_an_average_that_teaches_it() -> None:
    module, apart = build(Heads), build(Heads)
    fit(module, callbacks=[lt.Distill(lt.Teacher(0.9), student=part) for part in ("one", "two")])
    teacher = lt.Teacher(0.9)
    fit(apart, callbacks=[teacher, *(lt.Distill(teacher, student=part) for part in ("one", "two"))])
    assert_equal(weights(module), weights(apart))


class WithLabels(nn.Module):
    """Computes its loss by itself, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = PlainNet().layers

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        assert type(labels) is Tensor or self.training, "a teacher's labels are plain"
        logits = self.layers(x)
        return {"logits": logits, "loss": F.cross_entropy(logits, labels)}


def test_labels_that_a_model_is_called_with_may_be_mixed() -> None:
    class Around(PlainNet):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.model = nn.Sequential(), WithLabels()

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x, labels=torch.zeros(len(x)).long())["logits"]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(batch[0], labels=batch[1])["loss"]

    class Outside(Around):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return F.cross_entropy(self.model.layers(batch[0]), batch[1])

    ended = []
    for kind, student in ((Around, None), (Outside, "model.layers")):
        teacher = build(WithLabels)
        callback = lt.Distill(teacher if student is None else teacher.layers, student=student)
        fit(module := build(kind), callbacks=[callback, lt.Mixup(1.0)])
        ended.append(weights(module))
    assert_equal(*ended)


def test_a_teacher_among_the_callbacks_is_shared() -> None:
    teacher, module, apart = lt.Teacher(0.9), build(NormNet), build(NormNet)
    both = [lt.Distill(teacher), lt.Distill(teacher, features="Linear")]
    fit(module, callbacks=[teacher, *both])
    assert [len(each.running()) for each in (teacher, *both)] == [1, 0, 0]
    fit(apart, callbacks=[lt.Distill(lt.Teacher(0.9)), lt.Distill(lt.Teacher(0.9), features="Linear")])
    assert_equal(weights(module), weights(apart))


# -- what it leaves ---------------------------------------------------------------------------------------------------


def test_a_checkpoint_has_the_average_beside_the_weights_and_no_other_module(tmp_path: Path) -> None:
    states = {}
    for name, teacher in (("average", lt.Teacher(0.9)), ("other", other())):
        save = ModelCheckpoint(tmp_path / name, name)
        fit(module := build(NormNet), callbacks=[lt.Distill(teacher), save], enable_checkpointing=True)
        states[name] = torch.load(tmp_path / name / f"{name}.ckpt", weights_only=True)
        assert states[name]["state_dict"].keys() == module.state_dict().keys()
    (average,) = [state for key, state in states["average"]["callbacks"].items() if "Distill" in key]
    assert not [key for key in states["other"]["callbacks"] if "Distill" in key]
    trained = states["average"]["state_dict"]
    assert average["averaged"].keys() == {*trained} - {"layers.1.num_batches_tracked"}
    assert any((average["averaged"][name] != trained[name]).any() for name in average["averaged"])


@pytest.mark.parametrize("decay", [0.9, 1.0])
def test_a_fit_resumed_amid_an_epoch_has_the_same_teacher(decay: float, tmp_path: Path) -> None:
    save = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=4, save_top_k=-1, enable_version_counter=False)
    whole, rest = build(NormNet), build(NormNet)
    fit(whole, callbacks=[lt.Distill(lt.Teacher(decay)), lt.ExactResume(), save], enable_checkpointing=True)
    fit(rest, callbacks=[lt.Distill(lt.Teacher(decay)), lt.ExactResume()], ckpt_path=tmp_path / "step=4.ckpt")
    assert_equal(weights(rest), weights(whole))


def on_shards() -> dict[str, Any]:
    return {"strategy": ModelParallelStrategy(2, 1), "devices": 2, "use_distributed_sampler": False}


def sharded(folder: Path, step: int | None) -> dict[str, Any]:
    save = ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1, enable_version_counter=False)
    settings = {"enable_checkpointing": True, "ckpt_path": step and folder / f"step={step}.ckpt"}
    callbacks = [lt.Distill(lt.Teacher(0.9)), save]
    fit(module := build(ShardedNet), train=rank_loader(), callbacks=callbacks, **on_shards(), **settings)
    module.layers.reshard()
    return weights(module)


def test_under_fsdp2_a_rank_has_its_shards_which_a_resumed_fit_reads(tmp_path: Path) -> None:
    (whole, _), (rest, _) = (run_ranks(sharded, tmp_path, step) for step in (None, 3))
    assert_equal(rest, whole)


def taught(cut: bool) -> dict[str, Any]:
    teacher = other()

    class Shards(ShardedNet):
        def configure_model(self) -> None:
            super().configure_model()
            if cut:
                fully_shard(teacher, mesh=self.device_mesh["data_parallel"])

    fit(module := build(Shards), train=rank_loader(), callbacks=[lt.Distill(teacher)], **on_shards())
    assert cut == any(isinstance(weight, DTensor) for weight in teacher.parameters())
    module.layers.reshard()
    return weights(module)


def test_another_module_that_is_sharded_teaches_the_same() -> None:
    found, expected = (run_ranks(taught, cut)[0] for cut in (True, False))
    assert_equal(found, expected)


def test_an_error_of_the_teacher_leaves_the_module_as_it_was() -> None:
    class Fails(NormNet):
        def forward(self, x: Tensor) -> Tensor:
            if not self.training and self.trainer.training and self.trainer.global_step == 3:
                raise RuntimeError("planned")
            return super().forward(x)

    module, plain = build(Fails), build(NormNet)
    with pytest.raises(RuntimeError, match="planned"):
        fit(module, callbacks=[lt.Distill(lt.Teacher(0.5), weight=0)])
    fit(plain, max_steps=3)
    assert all(map(torch.equal, module.parameters(), plain.parameters()))
    assert all(part.training for part in module.modules())


# -- what is refused --------------------------------------------------------------------------------------------------


class Parts(PlainNet):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.second(self.first(batch[0])), batch[1])

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 4), nn.Linear(4, 2)


class ByFunction(PlainNet):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(F.linear(batch[0], self.layers[0].weight)[:, :2], batch[1])


class ByHand(PlainNet):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Pair(PlainNet):
    def forward(self, x: Tensor) -> Any:
        return self.layers(x), x

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0])[0], batch[1])


class Inside(PlainNet):
    def __init__(self) -> None:
        super().__init__()
        self.big = nn.Linear(8, 2)


class Named(PlainNet):
    teacher = None


class WritesInputs(PlainNet):
    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(0, nn.ReLU(inplace=True))


class WritesOutputs(PlainNet):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        logits /= 2
        return F.cross_entropy(logits, batch[1])


@pytest.mark.parametrize(
    ("kind", "make", "message"),
    [
        (Parts, lambda _: lt.Distill(nn.Linear(8, 2)), r"Parts.training_step calls self.first, self.second\. Name"),
        (ByFunction, lambda _: lt.Distill(nn.Linear(8, 2)), "calls neither itself nor a part"),
        (Net, lambda _: lt.Distill(nn.Linear(8, 2), student="head"), "Net has no part 'head'; it has layers, layers.0"),
        (Parts, lambda _: lt.Distill(nn.Linear(8, 2), student="layers"), "nor a part, as student='layers' says"),
        (ByHand, lambda _: lt.Distill(nn.Linear(8, 2)), "automatic_optimization=False: put Teacher"),
        (Net, lambda _: lt.Distill(nn.Linear(8, 3)), r"same shape, got \(8, 2\) from the student and \(8, 3\) from"),
        (Net, lambda _: lt.Distill(nn.Linear(9, 2)), r"the inputs of the student, \[\(8, 8\)\]: RuntimeError: mat1"),
        (Pair, lambda _: lt.Distill(nn.Linear(8, 2)), "outputs that are tensors, or have them as logits, got tuple"),
        (Net, lambda _: lt.Distill(nn.Linear(8, 2), features="Conv2d"), r"Distill\(Linear\), in Net: features: a pat"),
        (Net, lambda _: lt.Distill(nn.Linear(8, 2), features={"Linear": "^"}), "Linear: features: a pattern must be"),
        (Net, lambda _: lt.Distill(nn.Sequential(nn.Linear(8, 2)), features="Linear"), "must select as many layers in"),
        (Parts, lambda _: lt.Distill(lt.Teacher(), student="first", features="layers"), "calls none of the layers"),
        (WritesInputs, lambda _: lt.Distill(nn.Linear(8, 2)), r"writes into the inputs or outputs of self\(\.\.\.\)"),
        (WritesOutputs, lambda _: lt.Distill(nn.Linear(8, 2)), "so that the teacher would see others: make new"),
        (Inside, lambda net: lt.Distill(net.big), r"Distill\(Linear\): this teacher is a part of Inside"),
        (Inside, lambda net: lt.Teacher(module=net), r"Teacher\(Inside\): this teacher is a part of Inside"),
        (Named, lambda _: lt.Teacher(), "called as self.teacher, and Named has such an attribute"),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", ""),
)
def test_what_cannot_be_right_is_refused_before_the_first_step(kind: Any, make: Any, message: str) -> None:
    module = build(kind)
    before = weights(module)
    with pytest.raises(MisconfigurationException, match=message):
        fit(module, callbacks=[make(module)])
    trained = {name for name, _ in module.named_parameters()}
    assert_equal({n: v for n, v in weights(module).items() if n in trained}, {n: before[n] for n in trained})


def test_logits_of_one_class_are_refused() -> None:
    class One(PlainNet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self(batch[0])[:, :1].mean()

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x)[:, :1]

    message = r"at least two classes, got outputs \(8, 1\): pass temperature"
    with pytest.raises(MisconfigurationException, match=message):
        fit(build(One), callbacks=[lt.Distill(nn.Linear(8, 1))])


def test_wrong_arguments_are_refused() -> None:
    cases = [
        (TypeError, {"teacher": 0.9}, "teacher must be Module or TeachingCallback, got 0.9"),
        (ValueError, {"weight": -1}, r"weight must be in \[0.0, inf\), got -1"),
        (ValueError, {"temperature": 0}, "temperature must be above 0, got 0"),
        (ValueError, {"temperature": 1e200}, r"temperature must be in \[0.0, 1000000.0\], got 1e\+200"),
        (ValueError, {"features": "("}, "is not a regular expression"),
        (TypeError, {"features": {"a": 1}}, "features must be a string"),
        (TypeError, {"features": 0}, "features must be a string"),
        (ValueError, {"features": {}}, "features must name something"),
        (TypeError, {"student": 1}, "student must be str or None, got 1"),
    ]
    assert_refused(lambda **given: lt.Distill(**{"teacher": nn.Linear(2, 2), **given}), cases)


def test_shapes_that_do_not_go_together_are_refused() -> None:
    logits = {"student": torch.zeros(4, 3), "teacher": torch.zeros(4, 3)}
    narrow, mask = torch.zeros(4, 2), torch.zeros(3)
    cases = [
        (ValueError, {"teacher": narrow}, r"logits of one shape, .* along dim=-1, got \(4, 3\) and \(4, 2\)"),
        (ValueError, {"dim": 2}, r"dim must be a dimension of the logits, \(4, 3\), got 2"),
        (ValueError, {"mask": mask}, r"mask must have the shape of the logits without dim=-1, \(4,\), got \(3,\)"),
    ]
    assert_refused(lambda **given: distillation_loss(**{**logits, **given}), cases)
