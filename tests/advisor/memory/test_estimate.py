"""estimate_memory: its bytes are those of real training, and nothing of the module changes."""

from __future__ import annotations

import runpy
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

import lightning_tricks as lt
from lightning_tricks.advisor import estimate_memory
from lightning_tricks.advisor.memory.estimate import BUCKET
from lightning_tricks.advisor.memory.states import SETTINGS
from lightning_tricks.optimizers.table import ROWS, row_of
from lightning_tricks.strategies.zero.config import zero_config
from tests.nets import Net, assert_equal, build, weights

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
COUNT = 1_000_000


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return runpy.run_path(str(BENCHMARKS / "cost" / "memory.py"))


class Wide(Net):
    """Large enough for its activations to be seen beside what a Trainer allocates."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Dropout(), nn.Linear(512, 2))


def batch(size: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 8), torch.randint(2, (size,))


# -- against real training --------------------------------------------------------------------------------------------


def assert_true(row: dict[str, Any]) -> None:
    assert row["weights_exact"], row
    assert row["gradients_exact"], row
    assert row["optimizer_exact"], row
    assert abs(row["activations_error"]) < 0.1, row
    assert abs(row["total_error"]) < 0.1, row


@pytest.mark.filterwarnings("ignore")  # the profiler's and the loaders' notes
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_step_of_a_trainer_takes_what_was_estimated(script: dict[str, Any], precision: str) -> None:
    module = Wide()
    estimate = estimate_memory(
        module,
        optimizer=module.configure_optimizers(),
        precision=precision,
        batch=batch(2),
        batch_size=256,
        device="cpu",
    )
    assert_true(script["row"](estimate, script["trained"](module, batch(256), precision, "cpu")))


@pytest.mark.filterwarnings("ignore")
def test_gradients_that_stay_are_added_to() -> None:
    module, example = Wide(), batch(256)
    estimate = estimate_memory(module, strategy="ddp", precision="32-true", batch=example, device="cpu")
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        module.training_step(example, 0).backward()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    assert estimate.activations == pytest.approx(
        sum(each.nbytes for each in example) + max(accumulate(changes)), rel=0.01
    )


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.filterwarnings("ignore")
def test_a_recurrent_network_keeps_what_its_steps_compute(script: dict[str, Any], kind: type[nn.RNNBase]) -> None:
    class Recurrent(Net):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.head = kind(8, 64, 2, batch_first=True), nn.Linear(64, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layers(x)[0][:, -1])

    module, example = Recurrent(), (torch.randn(32, 20, 8), torch.randint(2, (32,)))
    with torch.backends.mkldnn.flags(enabled=False, allow_tf32=None):  # whose LSTM takes about twice as much
        meter = script["trained"](module, example, "32-true", "cpu")
    estimate = estimate_memory(module, precision="32-true", batch=example, device="cpu")
    assert estimate.activations == pytest.approx(meter.activations, rel=0.05)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("model", ["ResNet-50, 64 x 64", "ViT-tiny, 224 x 224", "BERT of 2 layers, 128 tokens"])
def test_models_take_what_was_estimated(script: dict[str, Any], model: str, precision: str, optimizer: str) -> None:
    assert_true(script["compare"](model, precision, optimizer, "cpu"))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("model", ["ResNet-50, 128 x 128", "ViT-tiny, 224 x 224", "BERT of 2 layers, 128 tokens"])
def test_a_gpu_takes_what_was_estimated(script: dict[str, Any], model: str, precision: str, optimizer: str) -> None:
    assert abs(script["compare"](model, precision, optimizer, "cuda")["total_error"]) < 0.1


# -- any batch size ---------------------------------------------------------------------------------------------------


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", [None, "ddp_bf16", "zero2_bf16"])
def test_another_batch_size_is_as_if_measured(strategy: str | None) -> None:
    net = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 64, 3000), nn.ReLU())
    estimate = estimate_memory(net, strategy=strategy, batch=torch.zeros(4, 3, 8, 8))
    for size in (1, 3, 16, 5000):
        exact = estimate_memory(net, strategy=strategy, batch=torch.zeros(2, 3, 8, 8), batch_size=size)
        assert estimate.with_batch(size).activations == pytest.approx(exact.activations, abs=2)
        assert exact.batch_size == size


def test_the_largest_batch_is_the_last_that_fits() -> None:
    estimate = estimate_memory(nn.Linear(1000, 1000), batch=torch.zeros(2, 1000), optimizer="sgd")
    memory = estimate.with_batch(37).total
    assert estimate.largest_batch(memory) == 37
    assert estimate.largest_batch(memory - 1) == 36
    assert estimate.largest_batch(0) == 0


# -- the table of bytes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*ROWS, *SETTINGS, "lookahead_lion"])
def test_bytes_of_a_number_of_parameters_are_those_of_the_table(name: str) -> None:
    per_weight = {"sgd_momentum": 4, "amsgrad": 12}.get(name) or row_of(name).bytes
    assert estimate_memory(COUNT, optimizer=name).optimizer == pytest.approx(per_weight * COUNT, abs=20)


@pytest.mark.parametrize("name", ["lion", "madgrad", "adamw8bit", "adamw"])
def test_states_in_16_bits_are_half_as_large_but_quantized_ones_are_not(name: str) -> None:
    full, half = (estimate_memory(COUNT, optimizer=name, precision=p).optimizer for p in ("32-true", "bf16-true"))
    assert half == pytest.approx(full if name == "adamw8bit" else full / 2, abs=20)


def held(optimizer: torch.optim.Optimizer) -> int:
    """The bytes of the storages of an optimizer's states."""
    leaves = tree_leaves(optimizer.state_dict()["state"])
    storages = [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.few(6)
@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.library == "torch" or row.by_shape])
def test_states_by_name_are_those_of_a_real_step(name: str) -> None:
    net = nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 11), nn.Linear(11, 3))
    settings = {"rank": 2} if name == "galore" else {}
    real = lt.optimizer(name, net, 0.1, **settings)
    expected = estimate_memory(net, optimizer=real if settings else name, precision="32-true").optimizer
    for _ in range(6):
        net(torch.zeros(2, 7)).sum().backward()
        real.step()
    assert held(real) == pytest.approx(expected, abs=40)


@pytest.mark.parametrize(
    "optimizer", [*SETTINGS, torch.optim.Adafactor, partial(torch.optim.SGD, lr=1, momentum=0.5), torch.optim.Adagrad]
)
def test_states_are_those_of_a_real_step(optimizer: Any) -> None:
    net = nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 3))
    real = (SETTINGS[optimizer] if isinstance(optimizer, str) else optimizer)(net.parameters())
    estimates = [estimate_memory(net, optimizer=each, precision="32-true") for each in (optimizer, real)]
    assert all(not value for state in real.state.values() for value in state["step"].reshape(1)), "it has not stepped"
    net(torch.zeros(2, 7)).sum().backward()
    real.step()
    assert [estimate.optimizer for estimate in estimates] == [held(real), held(real)]


def test_an_optimizer_around_another_is_refused_and_stays_unchanged() -> None:
    net = nn.Linear(2, 3)
    with pytest.raises(ValueError, match=r"Lookahead steps another optimizer .* pass its name, such as"):
        estimate_memory(net, optimizer=lt.optimizer("lookahead_sgd", net, 0.1))


def test_an_optimizer_of_another_model_is_refused() -> None:
    other = torch.optim.Adam(nn.Linear(3, 2).parameters())
    with pytest.raises(ValueError, match=r"optimizer has 2 parameters that are not all among the 2"):
        estimate_memory(nn.Linear(2, 3), optimizer=other)


N, W = 4, 8  # devices of a node, and of two nodes


@pytest.mark.parametrize(
    ("strategy", "device_bytes", "host", "nvme"),
    [
        ("single_bf16", 16, 0, 0),
        ("ddp_bf16", 16, 0, 0),
        ("ddp_diloco_bf16", 24, 0, 0),
        ("zero1_bf16", 4 + 12 / W, 0, 0),
        ("zero2_bf16", 2 + 14 / W, 0, 0),
        ("zero3_bf16", 16 / W, 0, 0),
        ("fsdp2_bf16", 16 / W, 0, 0),
        ("hsdp_bf16", 16 / N, 0, 0),
        ("tp_bf16", 16 / W, 0, 0),
        ("zero2_offload_bf16", 2, 16 / 2, 0),
        ("zero3_offload_bf16", 0, 18 / 2, 0),
        ("fsdp2_offload_bf16", 0, 16 / 2, 0),
        ("zero3_nvme_bf16", 0, 4 / 2, 14 / 2),
    ],
)
def test_bytes_of_a_parameter(strategy: str, device_bytes: float, host: float, nvme: float) -> None:
    nodes = 1 if strategy.startswith("single") else 2
    estimate = estimate_memory(COUNT, strategy=strategy, devices=1 if nodes == 1 else N, nodes=nodes)
    lasting = estimate.weights + estimate.gradients + estimate.optimizer
    assert lasting == pytest.approx(device_bytes * COUNT, abs=20)
    assert (estimate.host, estimate.nvme) == (pytest.approx(host * COUNT, abs=20), pytest.approx(nvme * COUNT, abs=20))


def test_fsdp2_gathers_what_the_strategy_groups() -> None:
    with torch.device("meta"):
        net = nn.Sequential(*(nn.Linear(5000, 5000, bias=False) for _ in range(3)), nn.Linear(5000, 2, bias=False))
    estimate = estimate_memory(net, strategy="fsdp2_bf16", devices=8)
    assert estimate.gathered == 4 * (2 * 25_000_000 + 10_000)  # two of the large layers, and what is in no group
    assert estimate.communication == 4 * 2 * 25_000_000
    assert estimate.casts == 2 * (3 * 25_000_000 + 10_000)  # kept for the backward pass by every process


def test_the_bucket_is_that_of_the_presets() -> None:
    config = zero_config(stage=2)
    assert config["zero_optimization"]["reduce_bucket_size"] == BUCKET


@pytest.mark.parametrize(
    ("precision", "expected"),
    [("32-true", (4, 0, 4, 8)), ("bf16-mixed", (4, 2, 4, 8)), ("bf16-true", (2, 0, 2, 4)), ("64-true", (8, 0, 8, 16))],
)
def test_precisions(precision: str, expected: tuple[int, ...]) -> None:
    estimate = estimate_memory(COUNT, precision=precision)
    found = (estimate.weights, estimate.casts, estimate.gradients, estimate.optimizer - 4)
    assert found == tuple(COUNT * each for each in expected)


def test_amp_and_adamw_are_18_bytes_and_extras_are_added() -> None:
    plain = estimate_memory(COUNT)
    assert plain.weights + plain.casts + plain.gradients + plain.optimizer == 18 * COUNT + 4  # and a count of steps
    assert plain.total == 20 * COUNT + 4  # when the optimizer steps, its square roots are there and casts are not
    assert estimate_memory(COUNT, extras=("ema", "sam")).extras == 8 * COUNT
    assert estimate_memory(COUNT, strategy="zero2_bf16", devices=4, extras=("ema",)).extras == COUNT
    assert estimate_memory(COUNT, strategy="ddp", devices=2).communication == 4 * COUNT


def test_frozen_tied_and_other_weights_are_counted_as_they_are() -> None:
    net = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False))
    net[1].weight = net[0].weight
    net[2].requires_grad_(False).half()
    net.register_buffer("mask", torch.zeros(50, dtype=torch.bool))
    estimate = estimate_memory(net, precision="32-true", optimizer="sgd_momentum")
    assert (estimate.weights, estimate.gradients, estimate.optimizer, estimate.buffers) == (400 + 200, 400, 400, 50)


# -- the module's own step --------------------------------------------------------------------------------------------


def test_the_module_and_random_numbers_stay_as_they_are() -> None:
    module = build()
    module.layers[1].eval()
    module.seen = []

    def step(batch: Any, batch_idx: int) -> Tensor:
        np.random.rand(), torch.rand(1)
        module.seen.append(batch)
        return Net.training_step(module, batch, batch_idx)

    module.training_step = step
    example = batch()
    before, state, numpy = weights(module), torch.get_rng_state(), np.random.get_state()[1].copy()
    attributes = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    estimate_memory(module, batch=example)
    assert_equal(weights(module), before)
    assert torch.equal(torch.get_rng_state(), state)
    assert (np.random.get_state()[1] == numpy).all()
    assert {key: value for key, value in vars(module).items() if not key.startswith("_")} == attributes
    assert module.seen == []
    assert not module.layers[1].training
    assert module.layers[0].training
    assert all(p.grad is None for p in module.parameters())
    assert "log" not in vars(module)


def test_a_step_may_log_numbers_and_check_its_loss() -> None:
    class Careful(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log_dict({"loss": loss.item()})
            if torch.isnan(loss):
                raise RuntimeError
            return {"loss": loss}

    assert estimate_memory(Careful(), batch=batch()).activations > 0


def test_metrics_count_nothing() -> None:
    class Measured(Net):
        def __init__(self) -> None:
            super().__init__()
            self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=2)
            self.all = torchmetrics.MetricCollection([torchmetrics.AUROC(task="multiclass", num_classes=2)])

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            scores = self(batch[0])
            self.log("accuracy", self.accuracy(scores, batch[1]))
            self.log_dict(self.all(scores.softmax(1), batch[1]))
            return F.cross_entropy(scores, batch[1])

    module = Measured()
    assert estimate_memory(module, batch=batch()).activations > 0
    assert module.accuracy.update_count == 0
    assert module.accuracy(torch.eye(2), torch.tensor([0, 1])) == 1


def test_attention_with_dropout_makes_its_matrix_on_the_cpu_only() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    estimates = [estimate_memory(layer, batch=torch.zeros(2, 512, 32), device=each) for each in ("cpu", "cuda")]
    assert estimates[0].activations > estimates[1].activations + 2 * 4 * 512 * 512 * 2


def test_nothing_is_allocated_for_a_model_on_meta() -> None:
    with torch.device("meta"):
        huge = nn.Sequential(*(nn.Linear(50_000, 50_000) for _ in range(20)))
    estimate = estimate_memory(huge, batch=torch.empty(1000, 50_000, device="meta"), strategy="fsdp2_bf16", devices=8)
    assert estimate.weights == 20 * (50_000 * 50_000 + 50_000) * 4 // 8
    assert estimate.activations > 20 * 1000 * 50_000 * 2
    assert estimate.largest_layer == (50_000 * 50_000 + 50_000) * 4


def test_cuda_keeps_norms_in_fp32() -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64))
    on = {
        place: estimate_memory(net, batch=torch.zeros(512, 64), device=place).activations for place in ("cpu", "cuda")
    }
    assert on["cuda"] >= on["cpu"] + 512 * 64 * 2


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[: int(x.long().sum())])


class Attached(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.trainer.max_epochs


class Manual(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layer = nn.Linear(8, 2)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        F.cross_entropy(self.layer(batch[0]), batch[1])


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        (nn.Linear(2, 2), {"precision": "bf16"}, "precision must be one of"),
        (
            nn.Linear(2, 2),
            {"precision": "32-true", "strategy": "ddp_bf16"},
            "trains in 'bf16-mixed', got precision='32",
        ),
        (nn.Linear(2, 2), {"strategy": "zero3_bf61"}, "strategy must be one of .* Did you mean 'zero3_bf16'"),
        (nn.Linear(2, 2), {"optimizer": "adamv"}, "must be one of .* got 'adamv': did you mean 'adam"),
        (nn.Linear(2, 2), {"extras": ["emma"]}, "extras must be one of 'ema', .* Did you mean 'ema'"),
        (nn.Linear(2, 2), {"devices": 0}, "devices must be at least 1"),
        (nn.Linear(2, 2), {"batch_size": 8}, "batch_size=8 needs batch="),
        (nn.Linear(2, 2), {"batch": "text"}, "batch must hold a tensor with samples"),
        (nn.Linear(2, 2), {"batch": torch.zeros(4, 3)}, "a step of Linear .* failed: RuntimeError"),
        (0, {}, "model must be at least 1"),
        (10, {"batch": torch.zeros(4, 3)}, "batch= needs a module"),
        (Counts(), {"batch": torch.zeros(4, 4)}, "reads an integer from a tensor"),
        (Attached(), {"batch": (torch.zeros(4, 8), torch.zeros(4).long())}, "without a Trainer failed"),
        (Manual(), {"batch": (torch.zeros(4, 8), torch.zeros(4).long())}, "must return a loss .* manual optimization"),
    ],
)
def test_what_cannot_be_estimated_is_said(model: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        estimate_memory(model, **arguments)


@pytest.mark.parametrize("arguments", [{"model": 3.5}, {"model": 3, "optimizer": 7}, {"model": 3, "optimizer": list}])
def test_what_is_of_another_kind_is_said(arguments: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="must"):
        estimate_memory(**arguments)
    with pytest.raises(ValueError, match="another batch size"):
        estimate_memory(3).with_batch(2)
