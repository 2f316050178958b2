"""A block that runs again gives the same gradients, state and random numbers, and keeps less for the backward pass."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import lightning_tricks as lt
from lightning_tricks.callbacks.activation_checkpointing import offload
from lightning_tricks.core.lightning.patching import wrap_method
from lightning_tricks.core.replay.recompute import recompute, require_python
from lightning_tricks.core.selection import select_blocks
from tests.nets import PlainNet, assert_equal, build, fit, weights

policies = pytest.mark.parametrize("policy", ["full", "selective"])


def wrapped(model: nn.Module, policy: Any) -> nn.Module:
    """A copy of the model whose blocks are recomputed, or offloaded."""
    model = copy.deepcopy(model)
    for each in select_blocks(model).values():
        wrap_method(
            each, "forward", partial(offload, each) if policy == "offload" else partial(recompute, each, policy)
        )
    return model


def resnet() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    timm = pytest.importorskip("timm")
    x = torch.randn(4, 3, 32, 32)
    return timm.create_model("resnet18", drop_path_rate=0.2), lambda model: model(x).square().mean()


def bert() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=50, **sizes))
    ids, mask = torch.randint(50, (4, 12)), torch.ones(4, 12).long()
    mask[:, 9:] = 0
    return model, lambda model: model(input_ids=ids, attention_mask=mask, labels=torch.arange(4) % 2).loss


def descend(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    """What a training step leaves: gradients, state and random numbers."""
    model.train().zero_grad()
    torch.manual_seed(5)
    random.seed(5)
    loss(model).backward()
    trained = {name: weight for name, weight in model.named_parameters() if weight.grad is not None}
    gradients = {f"{name}.grad": weight.grad.clone() for name, weight in trained.items()}
    return {**gradients, **weights(model), "random": torch.get_rng_state()}


@pytest.mark.few(1)
@policies
@pytest.mark.parametrize("made", [resnet, bert])
def test_gradients_and_state_are_bit_equal(made: Any, policy: str) -> None:
    torch.manual_seed(0)
    model, loss = made()
    again = wrapped(model, policy)
    for _ in range(2):
        assert_equal(descend(again, loss), descend(model, loss))


@pytest.mark.few(1)
@policies
def test_gradients_are_equal_under_autocast(policy: str) -> None:
    torch.manual_seed(0)
    model, loss = resnet()
    with torch.autocast("cpu", torch.bfloat16):
        assert_equal(descend(wrapped(model, policy), loss), descend(model, loss))


class Odd(nn.Module):
    """All that a forward may change or draw from."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls, self.seen = spectral_norm(nn.Linear(4, 4)), 0, []
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.scale *= 1.5
        x = x * self.calls * self.scale.clone() * random.random()
        return torch.tanh(self.linear(x)).sin()


@policies
def test_state_is_that_of_the_first_run(policy: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Sequential(Odd()), nn.Sequential(Odd())), torch.randn(3, 4)
    again = wrapped(model, policy)

    def loss(model: nn.Module) -> Tensor:
        return model(model(x)).square().sum()  # each block twice

    for _ in range(2):
        assert_equal(descend(again, loss), descend(model, loss))
    assert [again[0][0].calls, again[0][0].seen] == [4, [1, 2, 3, 4]]


class Writes(nn.Module):
    """Counts its runs in a tensor of a list, which its output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.counts = nn.Linear(4, 4), [torch.zeros(1)]

    def forward(self, x: Tensor) -> Tensor:
        self.counts[0] += 1
        return torch.tanh(self.linear(x) * self.counts[0].clone())


def test_a_write_into_a_tensor_of_a_container_is_refused_before_the_second_run() -> None:
    block = Writes()
    output = recompute(block, "full", block.forward, torch.randn(3, 4))
    with pytest.raises(
        MisconfigurationException, match=r"ActivationCheckpointing.*Writes writes into the tensor Writes.counts\[0\]"
    ):
        output.sum().backward()
    assert block.counts[0] == 1


class Listed(nn.Module):
    """Holds weights of its own in lists: by itself, and as every RNN of torch does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.cell = nn.Linear(4, 4), nn.GRU(4, 4, batch_first=True)
        self.own = list(self.linear.parameters())

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(self.linear(x))[0]


def test_own_weights_in_a_list_may_move_between_the_runs_as_zero3_moves_them() -> None:
    block, x = Listed(), torch.randn(2, 3, 4)
    block(x).sum().backward()
    gradients = {name: weight.grad.clone() for name, weight in block.named_parameters()}
    block.zero_grad()
    output = recompute(block, "full", block.forward, x)
    for weight in block.parameters():
        weight.data = weight.data.clone()
    output.sum().backward()
    assert_equal({name: weight.grad for name, weight in block.named_parameters()}, gradients)


class Taught(nn.Module):
    """Holds a frozen teacher and its student in a list, and updates the one by the other."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.pairs = list(zip(self.teacher.parameters(), self.student.parameters(), strict=True))

    @torch.no_grad()
    def follow(self) -> None:
        for own, others in self.pairs:
            own.lerp_(others, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        self.follow()
        return torch.tanh(self.student(x)) * self.teacher(x)


def test_a_write_into_a_frozen_weight_of_a_list_is_refused_as_well() -> None:
    block = Taught()
    output = recompute(block, "full", block.forward, torch.randn(3, 4))
    with pytest.raises(MisconfigurationException, match=r"Taught writes into the frozen parameter teacher.weight"):
        output.sum().backward()


class Codes(nn.Module):
    """Moves codes by the means of its inputs, through their ``.data``, as an EMA of vector quantization does."""

    def __init__(self, write: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.linear, self.write = nn.Linear(4, 4), write
        self.codes = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.write(self.codes, x.detach().mean(0))
        return torch.tanh(self.linear(x) * self.codes.clone())


def assigned(codes: Tensor, x: Tensor) -> None:
    codes.data = 0.5 * codes.data + 0.5 * x


@policies
@pytest.mark.parametrize("write", [assigned, lambda codes, x: codes.data.lerp_(x, 0.5)])
def test_weights_that_a_block_writes_itself_are_written_once(write: Any, policy: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Sequential(Codes(write)), nn.Sequential(Codes(write))), torch.randn(3, 4)
    again = wrapped(model, policy)

    def loss(model: nn.Module) -> Tensor:
        return model(model(x)).square().sum()  # each block twice

    for _ in range(2):
        assert_equal(descend(again, loss), descend(model, loss))


def test_torchscript_is_refused() -> None:
    scripted = torch.jit.script(nn.Linear(4, 4))
    for block in (scripted, nn.Sequential(nn.Tanh(), scripted)):
        with pytest.raises(MisconfigurationException, match=r"^Asked .* torch\.jit has compiled encoder or a part"):
            require_python(block.modules(), "encoder", "Asked")
    require_python(nn.Linear(4, 4).modules(), "encoder", "Asked")


def twice(model: nn.Module, x: Tensor) -> Tensor:
    """A gradient penalty, after a backward pass of its own through the same graph."""
    x = x.clone().requires_grad_()
    value = model(x).square().sum()
    value.backward(retain_graph=True)
    (slope,) = torch.autograd.grad(value, x, create_graph=True)
    return value + slope.square().sum()


def test_a_graph_is_used_several_times() -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.3)) for _ in range(2)]
    model, x = nn.Sequential(*blocks), torch.randn(6, 4)
    again = wrapped(model, "full")
    for _ in range(2):
        assert_equal(descend(again, lambda each: twice(each, x)), descend(model, lambda each: twice(each, x)))
    with pytest.raises(RuntimeError, match="backward an extra time"):  # torch keeps what is selected for one
        twice(wrapped(model, "selective"), x)


@pytest.mark.parametrize(("made", "share"), [(resnet, 0.6), pytest.param(bert, 0.6, marks=pytest.mark.slow)])
def test_fewer_bytes_are_kept_for_the_backward_pass(made: Any, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    from space import memory

    model, loss = made()
    kept, other = {}, torch.eye(2).to_sparse()  # as other tests of the process may leave: it has no storage
    for name, each in [("plain", model), *((policy, wrapped(model, policy)) for policy in ("selective", "full"))]:
        figures, value = memory(lambda each=each: loss(each.train()), "cpu", 1)
        kept[name] = figures["kept"]
        assert isinstance(value, Tensor)
        value.backward()
    assert kept["full"] < share * kept["plain"]
    assert kept["full"] < kept["selective"] < 0.95 * kept["plain"]
    assert other.is_sparse


def test_saved_tensors_are_fewer() -> None:
    model, loss = bert()
    bytes_saved = []
    for each in (model, wrapped(model, "full")):
        saved: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, saved=saved: saved.append(x.nbytes) or x, lambda x: x):
            loss(each)
        bytes_saved.append(sum(saved))
    assert bytes_saved[1] < 0.4 * bytes_saved[0]


def test_selective_runs_the_products_once() -> None:
    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls = getattr(self, "calls", 0) + (function is torch.ops.aten.convolution.default)
            return function(*args, **(kwargs or {}))

    model, loss = resnet()
    calls = []
    for each in (model, wrapped(model, "selective"), wrapped(model, "full")):
        with Count() as count:
            loss(each).backward()
        calls.append(count.calls)
    assert calls[0] == calls[1] < calls[2]


def test_a_kept_result_that_is_written_raises() -> None:
    layers = [nn.Sequential(nn.Conv2d(2, 2, 3), nn.Hardtanh(inplace=True)) for _ in range(2)]
    model = wrapped(nn.Sequential(*layers), "selective")
    with pytest.raises(RuntimeError, match="has been mutated"):
        model(torch.randn(1, 2, 8, 8)).sum().backward()


@pytest.mark.gpu
@policies
def test_a_gpu_keeps_fewer_bytes(policy: str) -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model("resnet18").cuda()
    x, peaks = torch.randn(32, 3, 128, 128, device="cuda"), []
    for each in (model, wrapped(model, policy)):
        F.cross_entropy(each(x), torch.zeros(32, device="cuda").long()).backward()  # workspaces are made
        each.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        value = F.cross_entropy(each(x), torch.zeros(32, device="cuda").long())
        peaks.append(torch.cuda.memory_allocated() - before)
        value.backward()
    assert peaks[1] < (0.5 if policy == "full" else 0.9) * peaks[0]


class Counted(nn.Module):
    """Counts its calls in a closure, which cannot be set back."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.layer, self.fails = nn.Linear(8, 2), fails
        self.count = counter()

    def forward(self, x: Tensor) -> Tensor:
        if self.count() == 2 and self.fails:
            raise RuntimeError("the user's own")
        return torch.tanh(self.layer(x)) * torch.ones_like(x[:, :1])


def counter() -> Callable[[], int]:
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    return count


@pytest.mark.parametrize(
    ("fails", "error", "message"),
    [
        (False, MisconfigurationException, r"Counted\.count \(function\) has changed"),
        (True, RuntimeError, "the user's own"),
    ],
)
def test_a_recomputed_block_that_counts_is_refused_and_its_own_error_is_not_hidden(
    fails: bool, error: type[Exception], message: str
) -> None:
    class Blocks(PlainNet):
        def __init__(self, lr: float = 0.1) -> None:
            super().__init__(lr)
            self.layers = nn.Sequential(Counted(fails))

    with pytest.raises(error, match=message):
        fit(build(Blocks), callbacks=[lt.ActivationCheckpointing("Counted")], limit_val_batches=0)
