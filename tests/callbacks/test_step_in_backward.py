"""StepInBackward: one gradient alive, and trained, saved and resumed bit for bit as without it, or refused by name."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import (
    Callback,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    OnExceptionCheckpoint,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lightning_tricks as lt
from lightning_tricks.callbacks.step_in_backward import require_weight_by_weight
from lightning_tricks.core.random_numbers import random_state, set_random_state
from lightning_tricks.optimizers.table import optimizers
from tests.conformance.runs import fp16
from tests.device.devices import CUDA, EVERY, device
from tests.faults.runs import differences, load, state
from tests.few import slow
from tests.nets import NormNet, PlainNet, SaveAt, assert_equal, build, fit, loader, trained, trainer, weights

COUPLED = {"lamb", "lookahead_sgd", "lookahead_adamw", "lookahead_radam", "prodigy", "ranger21"}
QUICK = {"sgd", "adamw", "adan", "muon", "mars", "schedulefree_adamw", "lamb", "lookahead_sgd", "prodigy"}


class Groups(PlainNet):
    """Three layers, so that hidden weights lie between the first and the last, and a schedule."""

    name = "adamw"

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)
        )

    def configure_optimizers(self) -> Any:
        settings = {"ranger21": {"num_iterations": 12}, "galore": {"rank": 4}}.get(self.name, {})
        optimizer = lt.optimizer(self.name, self, 0.05, weight_decay=0.1, **settings)
        return optimizer if self.name.startswith("schedulefree") else lt.cosine(optimizer, self, warmup=2)


def net(name: str = "adamw") -> Any:
    return build(type("Named", (Groups,), {"name": name}))


def both(kind: type[Any], callbacks: Callable[[], list[Callback]] = list, **settings: Any) -> list[Any]:
    """The modules after a fit without and with the trick."""
    modules = [build(kind), build(kind)]
    for module, trick in zip(modules, ([], [lt.StepInBackward()]), strict=True):
        fit(module, callbacks=[*callbacks(), *trick], **settings)
    return modules


def assert_same(kind: type[Any], callbacks: Callable[[], list[Callback]] = list, **settings: Any) -> None:
    plain, stepped = both(kind, callbacks, **settings)
    assert_equal(weights(stepped), weights(plain))
    assert any(not torch.equal(a, b) for a, b in zip(build(kind).parameters(), plain.parameters(), strict=True))
    one, other = (module.trainer.optimizers[0].state_dict() for module in (plain, stepped))
    torch.testing.assert_close(flat(other), flat(one), rtol=0, atol=0)
    assert plain.trainer.global_step == stepped.trainer.global_step


def flat(tree: Any, name: str = "") -> dict[str, Any]:
    """The tensors and numbers of an optimizer's state, by their paths."""
    if isinstance(tree, dict | list | tuple):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {path: leaf for key, value in items for path, leaf in flat(value, f"{name}.{key}").items()}
    if hasattr(tree, "__dict__") and not isinstance(tree, Tensor):
        return flat(vars(tree), name)
    return {name: tree} if isinstance(tree, Tensor | int | float) else {}


EVERY_NAME = [row["name"] for row in optimizers()]
NAMES = [name if name in QUICK else slow(name) for name in EVERY_NAME]  # of each library and kind of state one is quick


@pytest.mark.few(5)
@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_is_bit_equal_or_refused(name: str) -> None:
    extra = partial(lambda name: [lt.ScheduleFree()] if name.startswith("schedulefree") else [], name)
    if name not in COUPLED:
        with torch.compiler.set_stance("force_eager"):  # torchao compiles its step
            assert_same(type("Named", (Groups,), {"name": name}), extra)
        return
    module = net(name)
    before = weights(module)
    with pytest.raises(MisconfigurationException, match=r"StepInBackward .*(one weight at a time|does not allow)"):
        fit(module, callbacks=[lt.StepInBackward()])
    assert_equal(weights(module), before)


class Alive(Callback):
    """The bytes of gradients that are there when a gradient has come, the largest of all times."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.bytes, self.weights = 0, list(pl_module.parameters())
        self.handles = [weight.register_post_accumulate_grad_hook(self.count) for weight in self.weights]

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        for handle in self.handles:
            handle.remove()
        assert trainer.global_step
        self.left = [weight.grad for weight in self.weights if weight.grad is not None]

    def count(self, _: Tensor) -> None:
        self.bytes = max(self.bytes, sum(w.grad.nbytes for w in self.weights if w.grad is not None))


def test_one_gradient_is_alive() -> None:
    plain, stepped = Alive(), Alive()
    fit(net(), callbacks=[plain])
    fit(net(), callbacks=[stepped, lt.StepInBackward()])
    sizes = [weight.nbytes for weight in net().parameters()]
    assert (plain.bytes, stepped.bytes) == (sum(sizes), max(sizes))
    assert not stepped.left


class Tied(PlainNet):
    """A layer that is used twice, a weight that is tied to another layer, one without a gradient, one frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.layers.append(self.layers[0])
        self.head = nn.Linear(8, 8)
        self.head.weight = self.layers[2].weight
        self.unused, self.frozen = nn.Linear(2, 2), nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.frozen(self.layers(x)))[:, :2]


class TiedDecay(Tied):
    def configure_optimizers(self) -> Any:
        groups = [{"params": self.layers.parameters()}, {"params": [self.head.bias, *self.unused.parameters()]}]
        groups[1]["lr"] = 0.01
        return torch.optim.AdamW(groups, lr=0.1, amsgrad=True)


class Sparse(PlainNet):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(4, 8, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x + self.table((x[:, :3] > 0).long() + 1))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Sometimes(PlainNet):
    """Batches without a loss; another backward pass in the training step, whose gradients are cleared."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self(batch[0]).sum().backward()
        return None if batch_idx % 3 == 1 else super().training_step(batch, batch_idx)


class Looped(PlainNet):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.lstm(x.unflatten(1, (2, 4)))[0][:, -1])


@pytest.mark.filterwarnings("ignore:.*training_step. returned .None")
@pytest.mark.parametrize("kind", [Tied, TiedDecay, Sparse, Sometimes, Looped])
def test_uses_of_weights(kind: type[Any]) -> None:
    assert_same(kind)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_precisions(precision: Any) -> None:
    assert_same(Groups, precision=precision)


def ours() -> list[Callback]:
    return [lt.EMA(0.9, every_n_steps=2), lt.SWA(start=3, validate="raw", at_end="raw"), lt.Mixup(0.4)]


def changing() -> list[Callback]:
    """The weights that are trained change in the fit, and the gradients of some are cleared."""
    return [lt.GradualUnfreeze([3], parameters=[r"^layers\.0"], lr_factor=0.5), lt.Doctor()]


@pytest.mark.parametrize("callbacks", [ours, changing])
def test_beside_other_tricks(callbacks: Callable[[], list[Callback]]) -> None:
    assert_same(NormNet, callbacks)


@pytest.mark.filterwarnings("ignore:You have defined a .validation_step")
def test_rates_and_hooks_of_the_optimizer_are_as_without_it() -> None:
    rates, calls = [], []

    class Hooked(Groups):
        def configure_optimizers(self) -> Any:
            found = super().configure_optimizers()
            optimizer = found["optimizer"] if isinstance(found, dict) else found[0][0]
            optimizer.register_step_pre_hook(lambda *_: calls[-1].append("pre"))
            optimizer.register_step_post_hook(lambda *_: calls[-1].append("post"))
            return found

    for trick in ([], [lt.StepInBackward()]):
        calls.append([])
        seen: list[float] = []
        rate = lambda run, *_, seen=seen: seen.append(run.optimizers[0].param_groups[0]["lr"])  # noqa: E731
        fit(build(Hooked), callbacks=[*trick, LambdaCallback(on_train_batch_end=rate)])
        rates.append(seen)
    assert rates[0] == rates[1]
    assert len(set(rates[0])) > 10
    assert calls[0] == calls[1] == ["pre", "post"] * 12


def test_the_monitor_logs_the_schedule(tmp_path: Path) -> None:
    logged = []
    for trick in ([], [lt.StepInBackward()]):
        monitor, settings = LearningRateMonitor(), {"logger": True, "default_root_dir": tmp_path}
        run = fit(build(Groups), callbacks=[monitor, *trick], log_every_n_steps=1, **settings)
        logged.append((monitor.lrs, {name: float(value) for name, value in run.logged_metrics.items()}))
    assert logged[0] == logged[1]


@pytest.mark.few(2)
@pytest.mark.parametrize("first", [[], [lt.StepInBackward]])
@pytest.mark.parametrize("name", ["adamw", "schedulefree_adamw"])
def test_a_checkpoint_resumes_with_and_without_it(name: str, first: list[Any], tmp_path: Path) -> None:
    extra, kind = [lt.ScheduleFree] if name != "adamw" else [], type("Named", (Groups,), {"name": name})

    def ended(*more: Any, **settings: Any) -> dict[str, Tensor]:
        return trained(kind, *(make() for make in (*extra, *more)), max_epochs=3, **settings)

    path = tmp_path / "a.ckpt"
    whole = ended()
    ended(partial(SaveAt, path, epoch=0), *first)
    for then in ([], [lt.StepInBackward]):
        assert_equal(ended(*then, ckpt_path=path), whole)


class Signalled(Callback):
    """A signal makes it save, as Lightning in a SLURM job, amid the third step or before that step is counted."""

    def __init__(self, path: Path, comes_in: str) -> None:
        self.path, self.comes_in, self.sent = path, comes_in, False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        signal.signal(signal.SIGUSR1, lambda *_: self.save(trainer))
        if self.comes_in == "backward":
            next(pl_module.parameters()).register_hook(partial(self.send, trainer))  # of the others there are gradients
        else:
            trainer.optimizers[0].register_step_post_hook(partial(self.send, trainer))

    def save(self, trainer: Any) -> None:
        trainer.save_checkpoint(self.path, weights_only=True)
        trainer.save_checkpoint(self.path)  # replaces the first

    def send(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2 and not self.sent:
            self.sent = True
            signal.raise_signal(signal.SIGUSR1)
            assert not self.path.exists()


@pytest.mark.few(2)
@pytest.mark.parametrize("others", [list, lambda: [lt.EMA(0.9)]])
@pytest.mark.parametrize("comes_in", ["backward", "step"])
def test_a_signal_amid_a_step_saves_after_it(comes_in: str, others: Any, tmp_path: Path) -> None:
    third = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1)
    fit(net(), callbacks=[lt.StepInBackward(), *others(), third], enable_checkpointing=True)
    handler = signal.getsignal(signal.SIGUSR1)
    try:
        fit(net(), callbacks=[Signalled(tmp_path / "a.ckpt", comes_in), lt.StepInBackward(), *others()])
    finally:
        signal.signal(signal.SIGUSR1, handler)
    assert not differences(state(load(tmp_path / "a.ckpt")), state(load(tmp_path / "step=3.ckpt")))


def test_trial_runs_are_as_without_it() -> None:
    found = []
    for trick in ([], [lt.StepInBackward()]):
        losses = lt.find_lr(trainer(callbacks=trick), build(NormNet), loader(), steps=20).losses
        size = lt.find_batch_size(trainer(callbacks=trick), build(NormNet), loader(batch_size=2), max_size=4).batch_size
        found.append((losses, size))
    assert found[0] == found[1]


# -- blocks that are recomputed ---------------------------------------------------------------------------------------


class Blocks(PlainNet):
    """Two blocks that share a weight, and another with the head, all inside of what is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8)) for _ in range(3)]
        blocks[2][0].weight = blocks[0][0].weight
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(8, 8)
        self.head.weight = blocks[1][3].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))[:, :2]


class Reentrant(Blocks):
    reentrant = True

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)[:, :2]


class Checkpointed(Reentrant):
    reentrant = False


class Peeks(Checkpointed):
    """A block computes with the head's weight, without a gradient, in the forward pass and when recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        def peek(x: Tensor) -> Tensor:
            return self.blocks[0](x) @ self.head.weight.detach()

        return self.head(checkpoint(peek, x.requires_grad_(), use_reentrant=False))[:, :2]


class Keeps(PlainNet):
    """Autograd keeps the value of a weight for the gradient of another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x) @ self.head.weight.detach())[:, :2]


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_recomputed_blocks_that_share_weights(policy: Any) -> None:
    assert_same(Blocks, lambda: [lt.ActivationCheckpointing("blocks.*", policy=policy)])


def test_blocks_that_the_user_recomputes() -> None:
    assert_same(Checkpointed)


@pytest.mark.slow
def test_compiled_blocks_that_are_recomputed() -> None:
    compiled = partial(lt.Compile, "blocks", backend="aot_eager")
    assert_same(Blocks, lambda: [compiled()])
    assert_same(Blocks, lambda: [lt.ActivationCheckpointing("Sequential"), compiled()])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Reentrant, "a second backward pass runs inside the first"),
        (Peeks, r"uses a weight, by detach\(\), after it has stepped it"),
        (Keeps, "uses a weight after it has stepped it"),
    ],
)
def test_what_would_read_a_weight_that_is_stepped_is_refused(kind: type[Any], message: str) -> None:
    fit(build(kind), max_steps=2)
    with pytest.raises(MisconfigurationException, match=message):
        fit(build(kind), callbacks=[lt.StepInBackward()])


@pytest.mark.parametrize("on", CUDA)
def test_on_a_device_the_backward_pass_has_a_thread_of_its_own(on: str) -> None:
    """On a real one; a simulated one is not waited for, and keeps everything where it is."""
    with device(on) as there:
        assert_same(Blocks, lambda: [lt.ActivationCheckpointing("blocks.*")], accelerator=there.name)
        with pytest.raises(MisconfigurationException, match=r"uses a weight, by detach\(\), after it has stepped it"):
            fit(build(Peeks), callbacks=[lt.StepInBackward()], accelerator=there.name)


@pytest.mark.parametrize("on", EVERY)
def test_the_trial_of_the_optimizer_draws_nothing_of_the_devices_random_numbers(on: str) -> None:
    with device(on) as there:
        at = torch.device(there.name, 0)
        state = random_state(at)
        drawn = torch.rand(3, device=at)
        set_random_state(state, at)
        require_weight_by_weight(torch.optim.AdamW([torch.ones(4, device=at)]))
        assert torch.equal(torch.rand(3, device=at), drawn)


# -- refused ----------------------------------------------------------------------------------------------------------


class Manual(PlainNet):
    automatic_optimization = False


class Custom(torch.optim.SGD):
    """An optimizer that cannot be made from its groups alone."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module.parameters(), lr=0.1)


class CountsItself(torch.optim.SGD):
    """Only every second call of its step does anything."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        result = closure and closure()
        self.calls += 1
        if self.calls % 2:
            super().step()
        return result


def clipping(**settings: Any) -> type[Any]:
    """A module that takes torch's LAMB-like liberties: it clips the norm of all its gradients inside of its step."""

    class Clips(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            result = closure and closure()
            found = [w for group in self.param_groups for w in group["params"] if w.grad is not None]
            nn.utils.clip_grad_norm_(found, 1e6)
            super().step()
            return result

    return Clips


def with_optimizer(make: Callable[[Any], Any]) -> type[Any]:
    return type("Net", (PlainNet,), {"configure_optimizers": make})


def with_hook(name: str) -> type[Any]:
    return type("Net", (PlainNet,), {name: lambda self, *args, **kwargs: None})


HOOKS = ["backward", "configure_gradient_clipping", "on_after_backward", "on_before_optimizer_step", "optimizer_step"]
REFUSED: dict[str, tuple[type[Any], dict[str, Any], str]] = {
    "accumulate": (PlainNet, {"accumulate_grad_batches": 2}, r"InBackward\(\) and Trainer\(accumulate_grad_batches=2"),
    "clip": (PlainNet, {"gradient_clip_val": 1.0}, "gradient_clip_val=1.0"),
    "scaler": (PlainNet, fp16(), "precision='16-mixed'"),
    "manual": (Manual, {}, "automatic_optimization=False"),
    "lbfgs": (with_optimizer(lambda self: torch.optim.LBFGS(self.parameters())), {}, "LBFGS"),
    "custom": (with_optimizer(lambda self: Custom(self)), {}, "which Custom does not allow"),
    "counts": (with_optimizer(lambda self: CountsItself(self.parameters(), lr=0.1)), {}, "for CountsItself is not"),
    "norm": (with_optimizer(lambda self: clipping()(self.parameters(), lr=0.1)), {}, "for Clips is not the same"),
    "none": (with_optimizer(lambda self: None), {}, "which _MockOptimizer does not allow"),
    **{hook: (with_hook(hook), {}, rf"Net\.{hook}") for hook in (*HOOKS, "optimizer_zero_grad")},
    "callback": (PlainNet, {"callbacks": [LambdaCallback(on_after_backward=print)]}, r"LambdaCallback\.on_after_back"),
}


@pytest.mark.filterwarnings("ignore:.*configure_optimizers. returned .None")
@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_before_the_first_step(case: str) -> None:
    kind, settings, message = REFUSED[case]
    module = build(kind)
    before = weights(module)
    settings = {**settings, "callbacks": [*settings.get("callbacks", []), lt.StepInBackward()]}
    with pytest.raises(MisconfigurationException, match=message):
        fit(module, **settings)
    assert_equal(weights(module), before)


def test_settings_of_single_weights_in_bitsandbytes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from bitsandbytes.optim import GlobalOptimManager

    manager = GlobalOptimManager.get_instance()
    manager.initialize()
    monkeypatch.setattr(manager, "index2config", {(0, 0): {"optim_bits": 32}})
    with pytest.raises(MisconfigurationException, match="settings for single weights"):
        fit(net("adamw8bit"), callbacks=[lt.StepInBackward()])


@pytest.mark.filterwarnings("ignore:.*was called without a model")  # Lightning looks for a file of an earlier error
@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available")
def test_a_checkpoint_of_an_error_in_the_backward_pass_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match="leaves some weights stepped and others not"):
        fit(net(), callbacks=[lt.StepInBackward(), OnExceptionCheckpoint(tmp_path)], enable_checkpointing=True)


def test_a_fit_after_one_that_failed_in_the_backward_pass() -> None:
    class Failing(PlainNet):
        fails = True

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if self.fails and self.training:
                y.register_hook(lambda gradient: F.linear(gradient, torch.zeros(1, 1)))
            return y

    trick, module = lt.StepInBackward(), build(Failing)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        fit(module, callbacks=[trick])
    module.fails = False
    assert not any(weight._post_accumulate_grad_hooks for weight in module.parameters())
    assert_equal(trained(PlainNet, trick), trained(PlainNet))
    assert trick._tried is None  # which would keep the weights


class Indexed(NormNet):
    """Has a parameter of integers, which no optimizer can train."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.index = torch.nn.Parameter(torch.arange(8).flip(0), requires_grad=False)

    def forward(self, x: Any) -> Any:
        return super().forward(x[:, self.index])


@pytest.mark.parametrize("first", [False, True])
def test_a_parameter_of_integers_stays_as_it_is(first: bool) -> None:
    class Ordered(Indexed):
        def configure_optimizers(self) -> Any:
            own = list(self.parameters())
            return torch.optim.SGD(sorted(own, key=lambda weight: weight.is_floating_point() is first), lr=0.1)

    assert_equal(trained(Ordered, lt.StepInBackward()), trained(Ordered))
