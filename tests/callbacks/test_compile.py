"""Compiled modules train as eager ones do, and where the compiler fails training goes on in eager."""

from __future__ import annotations

import ast
import copy
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._functorch import config
from torch.distributed.fsdp import fully_shard

import lightning_tricks as lt
from tests.conformance.engines import cpu_deepspeed
from tests.nets import Net, NormNet, assert_close, assert_equal, build, fit, rank_loader, weights
from tests.ranks import run_ranks
from tests.refusals import assert_refused

ROOT = Path(__file__).parent.parent.parent
FAST = "aot_eager"
# torch's own, when a graph starts behind another one
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.compiler.list_backends()  # torch registers its own at the first use: not while a test has replaced the list
    torch.compiler.reset()
    counters.clear()


def register(monkeypatch: pytest.MonkeyPatch, backend: Callable[[Any, Any], Any], name: str) -> None:
    from torch._dynamo.backends import registry

    monkeypatch.setattr(registry, "_BACKENDS", dict(registry._BACKENDS))
    monkeypatch.setattr(registry, "_COMPILER_FNS", dict(registry._COMPILER_FNS))
    registry.register_backend(backend, name=name)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A backend by the name "broken" that fails from its nth graph on."""
    compiled, fails_from = [], [0]

    def broken(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        if len(compiled) > fails_from[0]:
            raise NotImplementedError("no such operation here")
        return graph

    register(monkeypatch, broken, "broken")
    return fails_from


class Deep(Net):
    """Blocks of one class, in a list."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        block = lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 8))  # noqa: E731
        self.layers = nn.ModuleList([block() for _ in range(3)])
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Inner(Deep):
    """Whose training step does not call ``forward``."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(Deep.forward(self, batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        Deep.forward(self, batch[0])


def trained(kind: type[Net], *callbacks: Callback, **settings: Any) -> dict[str, Tensor]:
    module = build(kind)
    fit(module, callbacks=list(callbacks), **settings)
    assert not any("forward" in each.__dict__ for each in module.modules())
    return weights(module)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "modules", "graphs"),
    [
        (Net, None, 1),
        pytest.param(Net, "layers", 1, marks=pytest.mark.slow),
        pytest.param(Deep, None, 1, marks=pytest.mark.slow),
        (Inner, None, 3),  # the blocks share theirs, but for the one whose input needs no gradient
        (Deep, "Sequential", 2),
        pytest.param(Deep, ["layers.1", "head"], 2, marks=pytest.mark.slow),
    ],
)
def test_compiled_modules_train_as_eager_ones(kind: type[Net], modules: Any, graphs: int) -> None:
    compiled = trained(kind, lt.Compile(modules, backend=FAST), limit_val_batches=0)
    assert counters["stats"]["unique_graphs"] in (graphs, 2 * graphs)  # again for the last batch, of another size
    assert not counters["graph_break"]
    assert_close(compiled, trained(kind, limit_val_batches=0))


def hooked(linear: nn.Linear, n: int) -> None:
    linear.register_forward_hook(lambda module, args, output: output * (n + 0.5))


def hooked_before(linear: nn.Linear, n: int) -> None:
    linear.register_forward_pre_hook(lambda module, args: (args[0] * (n + 0.5),))


def with_forward(linear: nn.Linear, n: int) -> None:
    linear.forward = MethodType(lambda self, x, n=n: nn.functional.linear(x, self.weight) * (n + 0.5), linear)


@pytest.mark.slow
@pytest.mark.parametrize("changed", [hooked, hooked_before, with_forward])
@pytest.mark.parametrize("which", [(0, 1, 2), (1,)])
def test_equal_modules_that_do_something_else_each_do_their_own(changed: Any, which: tuple[int, ...]) -> None:
    class Changed(Inner):
        def __init__(self, lr: float = 0.1) -> None:
            super().__init__(lr)
            for n in which:
                changed(self.layers[n][3], n)

    ended = []
    for callbacks in ([lt.Compile(backend=FAST)], []):
        module = build(Changed)
        fit(module, callbacks=callbacks, limit_val_batches=0)
        ended.append(weights(module))
    assert_close(*ended)


class Many(Net):
    """More modules than the versions that torch keeps of one function, no two of one size."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8 + i, 9 + i), nn.Tanh()) for i in range(10)))
        self.head = nn.Linear(18, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


@pytest.mark.slow
def test_many_modules_are_all_compiled_and_for_their_own_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs: list[Any] = []
    register(monkeypatch, lambda graph, given: inputs.append(given) or graph, "spy")
    names = [f"layers.{i}" for i in range(10)]
    trained(Many, lt.Compile(names, backend="spy"), limit_train_batches=2, limit_val_batches=0)
    assert len(inputs) == 10
    assert not any(isinstance(each, torch.SymInt) for given in inputs for each in given)


@pytest.mark.slow
def test_a_copy_or_a_pickle_made_in_a_fit_is_eager() -> None:
    copies: list[Any] = []

    class Copy(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.on_train_batch_end(trainer, pl_module)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            copies.extend((copy.deepcopy(pl_module.layers), pickle.loads(pickle.dumps(pl_module.layers))))
            x = torch.ones(2, 8)
            assert_equal({"y": copies[-1].eval()(x)}, {"y": copies[-2].eval()(x)})

    trained(Net, Copy(), lt.Compile("layers", backend=FAST), max_epochs=1, limit_train_batches=1)
    trained(Net, lt.Compile("layers", backend=FAST), Copy(), max_epochs=1, limit_train_batches=1)
    assert counters["stats"]["unique_graphs"] in (2, 4)  # training and validation


def test_validation_runs_compiled_and_metrics_are_the_same() -> None:
    compiled, eager = build(NormNet), build(NormNet)
    runs = [fit(compiled, callbacks=[lt.Compile(backend=FAST)]), fit(eager)]
    assert_close(runs[0].callback_metrics, runs[1].callback_metrics)
    assert list(compiled.state_dict()) == list(eager.state_dict())


@pytest.mark.slow
def test_inductor_trains_as_eager() -> None:
    assert_close(trained(NormNet, lt.Compile()), trained(NormNet), 1e-5)


class Opaque:
    """Not for torch."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def __call__(self, x: Tensor) -> Tensor:
        self.seen.append(float(x.detach().numpy().sum()))  # a C extension
        return x * 2 if self.seen[-1] > 0 else x


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.opaque = nn.BatchNorm1d(16), nn.Dropout(0.3), Opaque()

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(x))
        if x.sum().item() > 0:
            x = x + 1
        return self.opaque(x)


class Hard(Net):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.layers.insert(1, Untraceable())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo")
@pytest.mark.parametrize("modules", ["layers", None, "Untraceable"])
def test_what_cannot_be_traced_still_trains(modules: Any) -> None:
    short = {"max_epochs": 1, "limit_train_batches": 3} if modules == "Untraceable" else {}
    compiled = trained(Hard, lt.Compile(modules, backend=FAST, fallback=False), **short)
    assert counters["graph_break"]
    assert_close(compiled, trained(Hard, **short), 1e-5)


# -- fallback ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("fails_from", [0, 1, 2])
@pytest.mark.parametrize("modules", [None, "layers"])
def test_a_compiler_that_fails_costs_no_step(broken: list[int], fails_from: int, modules: Any) -> None:
    broken[0] = fails_from  # with a graph in two parts, of which the first has run; for the last batch's size
    kind = Hard if fails_from == 1 else Net
    with pytest.warns(UserWarning, match="no such operation here") as caught:
        compiled = trained(kind, lt.Compile(modules, backend="broken"))
    ours = [str(each.message) for each in caught if "Compile" in str(each.message)]
    assert len(ours) == 1
    told = f"Compile: {modules or 'forward'} ({'Sequential' if modules else kind.__name__}) does not"
    assert ours[0].startswith(told)
    assert_equal(compiled, trained(kind))


class Codes(nn.Module):
    """Moves codes by its inputs, before an operation that breaks the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.codes, self.opaque = nn.Parameter(torch.zeros(16), requires_grad=False), Opaque()

    def forward(self, x: Tensor) -> Tensor:
        self.codes.data.lerp_(x.detach().mean(0), 0.5)
        return self.opaque(x + self.codes.clone())


class Coded(Net):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.layers.insert(1, Codes())


def test_weights_that_a_compiled_part_has_written_are_written_once(broken: list[int]) -> None:
    broken[0] = 1
    with pytest.warns(UserWarning, match="no such operation here"):
        compiled = trained(Coded, lt.Compile("layers", backend="broken"))
    assert_equal(compiled, trained(Coded))


def test_without_fallback_the_error_comes_through(broken: list[int]) -> None:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="no such operation"):
        trained(Net, lt.Compile(backend="broken", fallback=False))


@pytest.mark.skipif(
    not hasattr(config, "force_non_lazy_backward_lowering"),
    reason="a limit of older torch: it compiles the backward pass in the first one",
)
def test_an_error_of_the_backward_compiler_comes_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.backends import common

    def fails(graph: Any, inputs: Any) -> Any:
        raise NotImplementedError("no backward here")

    backend = common.aot_autograd(fw_compiler=lambda graph, inputs: graph, bw_compiler=fails)
    register(monkeypatch, lambda graph, inputs: backend(graph, inputs), "halfway")
    with pytest.warns(UserWarning, match="no backward here"):
        compiled = trained(Net, lt.Compile(backend="halfway"))
    assert_equal(compiled, trained(Net))


WITHOUT_COMPILER = """
import warnings, torch, lightning_tricks as lt
from tests.nets import Net, assert_equal, build, fit, weights
compiled, eager = build(Net), build(Net)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    fit(compiled, callbacks=[lt.Compile()])
fit(eager)
assert_equal(weights(compiled), weights(eager))
print([str(each.message) for each in caught if "Compile" in str(each.message)])
"""


@pytest.mark.slow
def test_a_missing_cpp_compiler_is_named(tmp_path: Any) -> None:
    environment = {**os.environ, "CXX": "no-such-compiler", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", WITHOUT_COMPILER]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    (warning,) = ast.literal_eval(run.stdout.strip().splitlines()[-1])
    assert warning.startswith("Compile: forward (Net) does not compile with backend='inductor'")
    assert "compiler" in warning


def test_an_error_of_the_module_is_its_own() -> None:
    class Wrong(Net):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fit(build(Wrong), callbacks=[lt.Compile(backend=FAST)])


# -- beside others ----------------------------------------------------------------------------------------------------


class Sharp(lt.SAMMixin, Deep):
    sam = lt.SAM(rho=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Sharp, Deep])
@pytest.mark.parametrize("modules", ["Sequential", None])
def test_it_works_beside_other_tricks(kind: type[Net], modules: Any) -> None:
    def others() -> list[Callback]:
        return [lt.EMA(0.9), lt.Mixup(), lt.ActivationCheckpointing()]

    settings = {"max_epochs": 1, "limit_train_batches": 3}
    compiled = trained(kind, lt.Compile(modules, backend=FAST), *others(), **settings)
    assert_close(compiled, trained(kind, *others(), **settings), 1e-5)


class Manual(Net):
    """Two backward passes through one graph."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss, optimizer = nn.functional.cross_entropy(self(batch[0]), batch[1]), self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(0.5 * loss)
        optimizer.step()


@pytest.mark.slow
def test_a_compiled_graph_is_used_twice() -> None:
    before = config.donated_buffer
    assert_close(trained(Manual, lt.Compile(backend=FAST)), trained(Manual), 1e-5)
    assert config.donated_buffer == before


class Sharded(Deep):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        for layer in self.layers:
            layer[1] = nn.Identity()

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            for each in (*self.layers, self):
                fully_shard(each, mesh=self.device_mesh["data_parallel"])


ENGINES: dict[str, Any] = {
    "ddp": lambda: DDPStrategy(),
    "static": lambda: DDPStrategy(static_graph=True),
    "FSDP2": lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
    "ZeRO-1": lambda: cpu_deepspeed(1),
    "ZeRO-3": lambda: cpu_deepspeed(3),
}


class Losses(Callback):
    def __init__(self) -> None:
        self.losses: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs["loss"].clone())


def two_ranks(engines: list[str]) -> None:
    warnings.simplefilter("ignore")
    for name in engines:
        losses = []
        both = [lt.Compile("Sequential", backend=FAST), lt.ActivationCheckpointing()]
        for callbacks in ([], [lt.Compile(backend=FAST)], both):
            noted, settings = Losses(), {"train": rank_loader(), "devices": 2, "use_distributed_sampler": False}
            settings |= {"max_epochs": 1, "limit_val_batches": 0}
            fit(build(Sharded), callbacks=[noted, *callbacks], strategy=ENGINES[name](), **settings)
            losses.append(torch.stack(noted.losses))
            assert not any(getattr(each, "_eager", False) for each in callbacks), (name, callbacks)
        for each in losses[1:]:
            torch.testing.assert_close(each, losses[0], msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.slow
@pytest.mark.parametrize("engines", [["ddp"], ["static", "FSDP2"], ["ZeRO-1"], ["ZeRO-3"]], ids=str)
def test_two_ranks_train_as_two_eager_ones(engines: list[str]) -> None:
    run_ranks(two_ranks, engines, timeout=300)


# -- what is refused --------------------------------------------------------------------------------------------------


def test_wrong_arguments_are_named() -> None:
    cases = [
        (TypeError, {"modules": [nn.Linear]}, "modules must be a string or a list"),
        (ValueError, {"mode": "fast"}, "must be one of"),
        (ValueError, {"backend": "inductr"}, "Did you mean 'inductor'"),
        (ValueError, {"mode": "max-autotune", "backend": "eager"}, "leave mode out"),
        (TypeError, {"fallback": 1}, "True or False"),
    ]
    assert_refused(lt.Compile, cases)


def test_a_module_that_is_not_there_or_not_called_is_an_error() -> None:
    with pytest.raises(MisconfigurationException, match=r"'encoder' is neither\. Names are 'layers'"):
        trained(Net, lt.Compile("encoder"))

    class Idle(Net):
        def __init__(self, lr: float = 0.1) -> None:
            super().__init__(lr)
            self.idle = nn.Linear(2, 2)

    with pytest.raises(MisconfigurationException, match=r"did nothing.*called none of 'idle'"):
        trained(Idle, lt.Compile("idle", backend=FAST))


# -- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # of the compiler, about the device
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_kernels_and_graphs_of_cuda_train_as_eager_ones(mode: Any) -> None:
    eager, compiled = build(NormNet), build(NormNet)
    fit(eager, accelerator="cuda", max_epochs=3)
    fit(compiled, callbacks=[lt.Compile("layers", mode=mode)], accelerator="cuda", max_epochs=3)
    assert_close(weights(compiled), weights(eager), 1e-3)
