"""suggest_strategy: the decision tree, case by case, on hardware that need not be here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_tricks.advisor import Hardware, estimate_memory, suggest_strategy
from lightning_tricks.advisor.choose import candidates
from lightning_tricks.advisor.memory import estimate as memory
from lightning_tricks.advisor.memory.activations import measure
from lightning_tricks.callbacks.lora import LoRA
from lightning_tricks.core.report import readable
from lightning_tricks.strategies import presets
from tests.device.devices import CUDA, device

MB, GB = 1e6, 1e9
SMALL, MIDDLE, LARGE, HUGE = 10**8, 7 * 10**9, 30 * 10**9, 10**13


def big_layer() -> nn.Module:
    """Small, apart from one layer of 20 GB in bf16."""
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(100_000, 100_000), nn.Linear(100_000, 10))


CASES: list[tuple[Any, dict[str, Any], str | None]] = [
    # one device: fits; its optimizer does not; nor do its weights; nor the host's memory
    (SMALL, {}, "single_bf16"),
    (SMALL, {"links": "slow"}, "single_bf16"),
    (MIDDLE, {}, "zero2_offload_bf16"),
    (LARGE, {"host_memory": 1000 * GB}, "zero3_offload_bf16"),
    (LARGE, {"nvme": 2000 * GB}, "zero3_nvme_bf16"),
    (LARGE, {}, None),
    (big_layer, {"device_memory": 16 * GB}, None),
    # one node
    (SMALL, {"devices": 8}, "ddp_bf16"),
    (SMALL, {"devices": 8, "links": "slow"}, "ddp_compressed_bf16"),
    (MIDDLE, {"devices": 8}, "fsdp2_bf16"),
    (MIDDLE, {"devices": 8, "links": "slow", "device_memory": 50 * GB}, "zero1_bf16"),
    (MIDDLE, {"devices": 8, "links": "slow", "device_memory": 40 * GB}, "zero2_bf16"),
    (MIDDLE, {"devices": 8, "links": "slow"}, "fsdp2_bf16"),
    (LARGE, {"devices": 4, "host_memory": 1000 * GB}, "zero3_offload_bf16"),
    (LARGE, {"devices": 4, "nvme": 2000 * GB}, "zero3_nvme_bf16"),
    (big_layer, {"devices": 8, "device_memory": 16 * GB}, None),
    # several nodes
    (SMALL, {"devices": 8, "nodes": 4}, "ddp_bf16"),
    (SMALL, {"devices": 8, "nodes": 4, "links": "slow"}, "ddp_compressed_bf16"),
    (LARGE, {"devices": 8, "nodes": 8}, "fsdp2_bf16"),
    (LARGE, {"devices": 8, "nodes": 8, "links": "slow"}, "fsdp2_bf16"),
    (HUGE, {"devices": 8, "nodes": 4}, None),
    (big_layer, {"devices": 8, "nodes": 4, "links": "slow", "device_memory": 16 * GB}, None),
    # no bf16
    (SMALL, {"bf16": False}, "single_fp16"),
    (SMALL, {"bf16": False, "devices": 8}, "ddp_fp16"),
    (MIDDLE, {"bf16": False}, "zero2_offload_fp16"),
    (MIDDLE, {"bf16": False, "devices": 8}, "zero3_fp16"),
    (MIDDLE, {"bf16": False, "devices": 8, "device_memory": 40 * GB}, "zero2_fp16"),
]


@pytest.mark.few(5)
@pytest.mark.parametrize(("model", "hardware", "expected"), CASES)
def test_the_tree(model: Any, hardware: dict[str, Any], expected: str | None) -> None:
    machines = Hardware(**{"device_memory": 24 * GB, "host_memory": 256 * GB, **hardware})
    model = model() if callable(model) else model
    if expected is None:
        with pytest.raises(ValueError, match=r"Nothing fits. Nearest is .* missing.* Use more devices"):
            suggest_strategy(model, hardware=machines)
        return
    suggestion = suggest_strategy(model, hardware=machines)
    assert suggestion.preset == expected
    assert suggestion.preset in {row["name"] for row in presets()}
    assert suggestion.estimate.total <= 0.9 * machines.device_memory
    assert suggestion.reasons[-1].startswith(f"{expected} takes ")


def test_a_layer_that_fits_nowhere_is_to_be_tiled() -> None:
    with pytest.raises(
        ValueError, match=r"largest layer alone takes 20 GB: split it among devices .*TiledLinear.*scaling.md"
    ):
        suggest_strategy(big_layer(), hardware=Hardware(16 * GB, host_memory=10_000 * GB))


def test_what_was_passed_over_is_told_with_numbers() -> None:
    suggestion = suggest_strategy(2 * 10**9, hardware=Hardware(33 * GB, devices=2))
    plain = estimate_memory(2 * 10**9, strategy="ddp_bf16", devices=2)
    more = f"{(plain.total - 0.9 * 33 * GB) / GB:.3g} GB more on each device"
    assert suggestion.reasons[0] == f"ddp_bf16 needs {more}, even without activations."
    few_bits = suggest_strategy(2 * 10**9, hardware=suggestion.hardware, optimizer="adamw8bit")
    assert few_bits.preset == "ddp_bf16"
    expected = ("optimizer='adamw8bit'", "ddp_bf16", few_bits.estimate.total, True)
    assert suggestion.alternatives[0] == expected
    text = f"With optimizer='adamw8bit', ddp_bf16 takes {readable(expected[2])} on each device: fits."
    assert text in str(suggestion)
    assert suggestion.to_dict()["alternatives"][0]["change"] == "optimizer='adamw8bit'"
    assert not few_bits.alternatives, "the fastest preset fits"


def test_adapters_are_told_with_numbers_even_if_they_do_not_fit() -> None:
    on_one = suggest_strategy(MIDDLE, hardware=Hardware(24 * GB, host_memory=256 * GB))
    assert [(each.strategy, each.fits) for each in on_one.alternatives] == [
        ("single_bf16", False),  # 8-bit states
        ("single_bf16", False),  # adapters on fp32 weights
        ("single_bf16", True),  # on 4-bit weights
    ]
    lora = LoRA(".", r=8, base="nf4")
    assert on_one.alternatives[2].total == estimate_memory(MIDDLE, strategy="single_bf16", lora=lora).total
    sharded = suggest_strategy(LARGE, hardware=Hardware(40 * GB, devices=8, host_memory=1000 * GB))
    assert sharded.preset == "zero3_offload_bf16"
    change = "LoRA(r=8) on all linear layers and ActivationCheckpointing()"
    assert sharded.alternatives[1][:2] == (change, "fsdp2_bf16")
    with pytest.raises(ValueError, match=r"With LoRA\(r=8, base='nf4'\) on all linear layers, single_bf16 .*: fits\."):
        suggest_strategy(MIDDLE, hardware=Hardware(24 * GB))


def test_host_memory_that_was_assumed_limits_nothing() -> None:
    assumed = Hardware(80 * GB, host_memory=16 * GB, host_is_assumed=True)
    suggestion = suggest_strategy(MIDDLE, hardware=assumed)
    assert suggestion.preset == "zero2_offload_bf16"
    assert "host memory of 16 GB was assumed and is too little" in suggestion.reasons[-1]
    enough = suggest_strategy(MIDDLE, hardware=Hardware(80 * GB, host_memory=256 * GB, host_is_assumed=True))
    assert enough.reasons[-1] == "This machine's host memory of 256 GB was assumed (host_memory=)."
    with pytest.raises(ValueError, match="Nothing fits"):
        suggest_strategy(MIDDLE, hardware=Hardware(80 * GB, host_memory=16 * GB))


def test_over_slow_links_each_node_has_a_copy_where_one_fits() -> None:
    nodes: dict[str, Any] = {"devices": 8, "links": "slow"}
    assert suggest_strategy(MIDDLE, hardware=Hardware(15 * GB, nodes=4, **nodes)).preset == "fsdp2_bf16"
    assert suggest_strategy(MIDDLE, hardware=Hardware(21 * GB, nodes=2, **nodes)).preset == "hsdp_bf16"
    assert suggest_strategy(MIDDLE, hardware=Hardware(21 * GB, **nodes)).preset == "fsdp2_bf16"
    copy = estimate_memory(MIDDLE, strategy="hsdp_bf16", devices=8, nodes=2)
    assert copy.total == estimate_memory(MIDDLE, strategy="fsdp2_bf16", devices=8).total


def test_fsdp2_is_taken_with_activation_checkpointing_where_its_copies_do_not_fit() -> None:
    machines: dict[str, Any] = {"devices": 8, "nodes": 4}
    tight = suggest_strategy(10 * MIDDLE, hardware=Hardware(80 * GB, **machines))
    roomy = suggest_strategy(10 * MIDDLE, hardware=Hardware(300 * GB, **machines))
    assert tight.preset == roomy.preset == "fsdp2_bf16"
    needs = "fsdp2_bf16 needs callbacks=[ActivationCheckpointing()]: "
    assert [any(text.startswith(needs) for text in each.reasons) for each in (tight, roomy)] == [True, False]
    assert [each.estimate.recomputes for each in (tight, roomy)] == [True, False]
    assert roomy.estimate.casts == 2 * 10 * MIDDLE
    assert tight.estimate.casts == tight.estimate.gathered // 2


@pytest.mark.slow
def test_activations_are_measured_where_activation_checkpointing_is_needed() -> None:
    net = nn.Sequential(*(nn.Sequential(nn.Linear(1000, 1000), nn.Tanh()) for _ in range(20)))
    batch = torch.zeros(2, 1000)
    plain = estimate_memory(net, strategy="fsdp2_bf16", devices=8, batch=batch).with_batch(1)
    suggestion = suggest_strategy(net, hardware=Hardware(plain.total, devices=8), batch=batch)
    assert suggestion.preset == "fsdp2_bf16"
    assert suggestion.estimate.recomputes
    assert suggestion.estimate.casts < plain.casts
    assert suggestion.micro_batch_size is not None
    assert suggestion.estimate.total <= 0.9 * plain.total


def test_presets_that_refuse_the_optimizer_are_not_suggested() -> None:
    hardware = Hardware(24 * GB, devices=8, host_memory=10_000 * GB)
    assert suggest_strategy(7 * 10**9, hardware=hardware).preset == "fsdp2_bf16"
    assert suggest_strategy(7 * 10**9, hardware=hardware, optimizer="sgd_momentum").preset == "fsdp2_bf16"
    assert suggest_strategy(7 * 10**9, hardware=hardware, optimizer="adagrad").preset == "fsdp2_bf16"
    with pytest.raises(
        ValueError, match=r"fsdp2_bf16, zero3_bf16, zero2_offload_bf16, .* refuse optimizer='adamw8bit'"
    ):
        suggest_strategy(7 * 10**9, hardware=hardware, optimizer="adamw8bit")


def test_8_bit_states_fit_where_those_of_adamw_do_not() -> None:
    count = 10**9  # 8.08 GB of states, gradients and weights, and 2 GB of casts
    assert suggest_strategy(count, hardware=Hardware(14 * GB, host_memory=100 * GB)).alternatives[0].fits
    assert not suggest_strategy(count, hardware=Hardware(11 * GB, host_memory=100 * GB)).alternatives[0].fits


def test_weights_over_slow_links_are_warned_of() -> None:
    hardware = Hardware(80 * GB, devices=8, nodes=4, links="slow")
    assert "Over slow links the weights are sent" in " ".join(suggest_strategy(70 * 10**9, hardware=hardware).advice)
    assert "or a pipeline, which sends activations" in " ".join(suggest_strategy(70 * 10**9, hardware=hardware).advice)
    on_a_node = suggest_strategy(MIDDLE, hardware=Hardware(80 * GB, devices=8, links="slow"))
    assert "pipeline" not in " ".join(on_a_node.advice)
    whole = suggest_strategy(SMALL, hardware=hardware)
    assert "slow links" not in " ".join(whole.advice)
    with pytest.raises(ValueError, match=r"Use more devices.* or a pipeline, which sends activations"):
        suggest_strategy(HUGE, hardware=hardware)


def test_split_layers_and_pipelines_are_told_with_numbers() -> None:
    several = Hardware(40 * GB, devices=8, host_memory=1000 * GB)
    split, pipeline = suggest_strategy(LARGE, hardware=several).alternatives[-2:]
    assert split[1:] == ("tp_bf16", estimate_memory(LARGE, strategy="tp_bf16", devices=8).total, False)
    assert split.change == "a plan for its layers (docs/scaling.md)"
    total = estimate_memory(LARGE, strategy="single_bf16").total // 8
    assert pipeline == ("a pipeline of 8 stages (docs/scaling.md)", "ModelParallelStrategy", total, False)
    slow = suggest_strategy(LARGE, hardware=Hardware(40 * GB, devices=8, nodes=4, links="slow", host_memory=1e12))
    assert [each.strategy for each in slow.alternatives[-2:]] == ["ddp_compressed_bf16", "ModelParallelStrategy"]
    alone = suggest_strategy(MIDDLE, hardware=Hardware(24 * GB, host_memory=256 * GB))
    assert all("LoRA" in each.change or "adamw8bit" in each.change for each in alone.alternatives)


def test_what_is_missing_is_told_with_activation_checkpointing_where_that_is_not_enough() -> None:
    large = 70 * 10**9
    said = suggest_strategy(large, hardware=Hardware(80 * GB, devices=8, nodes=2, host_memory=1e12)).reasons
    least = estimate_memory(large, strategy="fsdp2_bf16", devices=8, nodes=2)
    assert "fsdp2_bf16 needs 18.3 GB more" in said[1]
    assert said[1].endswith("and with ActivationCheckpointing().")
    assert least.total - 72 * GB > 18.3 * GB  # without it
    enough = Hardware(98 * GB, devices=8, nodes=2, host_memory=1e12)
    assert suggest_strategy(large, hardware=enough).preset == "zero3_bf16"


def test_the_table_of_the_page_is_the_order_of_the_presets() -> None:
    page = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text()
    rows = re.findall(r"^\| (.*?) ?\| (.*?) \| (.*) \|$", page.split("## What memory holds")[0], re.MULTILINE)
    takes: dict[str, list[str]] = {}
    place = ""
    for you_have, _, take in rows:
        place = you_have or place
        takes.setdefault(place, []).extend(re.findall(r"`(\w+_bf16)`", take))
    fast, slow = (names for have, names in takes.items() if "links" in have)
    offloaded = takes["any"]
    assert candidates(Hardware(GB, devices=8, nodes=2)) == fast + offloaded
    assert candidates(Hardware(GB, devices=8, nodes=2, links="slow")) == slow + offloaded
    assert candidates(Hardware(GB)) == [*takes["one device"], offloaded[-1]]


def test_diloco_is_named_where_links_between_nodes_are_slow() -> None:
    said = "strategy='ddp_diloco_bf16' sends weights every 100 steps, for 40 MB more on each device."
    for nodes, links, told in ((2, "slow", True), (1, "slow", False), (2, "fast", False)):
        hardware = Hardware(80 * GB, devices=8, nodes=nodes, links=links)
        assert any(said in text for text in suggest_strategy(5_000_000, hardware=hardware).advice) is told


def test_links_that_are_taken_to_be_fast_are_said() -> None:
    said = "Links are taken to be fast (NVLink, InfiniBand): for PCIe or Ethernet, set links='slow'."
    assert said in suggest_strategy(SMALL, hardware=Hardware(80 * GB, devices=8)).advice
    assert said not in suggest_strategy(SMALL, hardware=Hardware(80 * GB, devices=8, links="slow")).advice
    assert said not in suggest_strategy(SMALL, hardware=Hardware(80 * GB)).advice


def test_float8_is_told_of_where_products_are_large() -> None:
    def told(model: Any, **machines: Any) -> bool:
        return "Float8()" in str(suggest_strategy(model, hardware=Hardware(40 * GB, host_memory=1e12, **machines)))

    assert told(MIDDLE, devices=8)
    assert not told(SMALL, devices=8)
    assert not told(LARGE, devices=1)  # ZeRO-3 refuses it
    assert not told(MIDDLE, devices=8, bf16=False)


def test_host_memory_that_is_missing_is_what_to_add() -> None:
    with pytest.raises(ValueError, match=r"54.4 GB of host memory .* more host memory, or an NVMe disk"):
        suggest_strategy(MIDDLE, hardware=Hardware(24 * GB, host_memory=64 * GB))


def test_a_batch_that_is_asked_for_is_made_or_said() -> None:
    net, batch = nn.Linear(10, 10), torch.zeros(2, 10)
    four = Hardware(GB, devices=4, links="slow")  # of fast links it says that they were assumed
    made = suggest_strategy(net, hardware=four, batch=batch, batch_size=64)
    assert (made.effective_batch_size, made.advice) == (64, ())
    more = suggest_strategy(net, hardware=four, batch=batch, batch_size=2)
    assert "share 4 samples per step evenly, not 2: 2 devices are enough." in more.advice[0]
    assert "with 1 sample at a time" in more.reasons[0]
    with pytest.raises(ValueError, match="batch_size=64 needs batch="):
        suggest_strategy(SMALL, hardware=Hardware(24 * GB), batch_size=64)


def test_what_cannot_fit_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    monkeypatch.setattr(memory, "measure", lambda *args: measured.append(1) or measure(*args))
    net, batch = nn.Linear(1000, 1000), torch.zeros(2, 1000)
    hardware = Hardware(14 * MB, devices=8)
    assert suggest_strategy(net, hardware=hardware, batch=batch).preset == "fsdp2_bf16"
    assert len(measured) == 2  # FSDP2, and DDP with states of 8 bits: both fit


@pytest.mark.few(3)
@pytest.mark.parametrize(("batch_size", "devices"), [(256, 1), (256, 4), (100, 3), (2, 4), (None, 2)])
def test_batch_size_and_accumulation(batch_size: int | None, devices: int) -> None:
    net = nn.Sequential(nn.Linear(1000, 4000), nn.ReLU(), nn.Linear(4000, 1000))
    strategy = "single_bf16" if devices == 1 else "ddp_bf16"
    fixed = estimate_memory(net, strategy=strategy, batch=torch.zeros(2, 1000), optimizer="sgd").with_batch(20).total
    hardware = Hardware(fixed / 0.9, devices=devices)
    suggestion = suggest_strategy(
        net, hardware=hardware, batch=torch.zeros(2, 1000), batch_size=batch_size, optimizer="sgd"
    )
    micro, effective = suggestion.micro_batch_size, suggestion.effective_batch_size
    assert micro is not None
    assert effective is not None
    assert suggestion.estimate.batch_size == micro
    assert suggestion.estimate.total <= fixed
    if batch_size is None:
        assert micro == 16
        assert suggestion.accumulate_grad_batches == 1
    else:
        assert 0 <= effective - batch_size < devices * suggestion.accumulate_grad_batches
        assert suggestion.accumulate_grad_batches == -(-max(1, -(-batch_size // devices)) // 20)
    assert f"strategy={suggestion.preset!r}" in str(suggestion)
    assert suggestion.to_dict()["micro_batch_size"] == micro


def test_this_machine_needs_a_device_or_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="No CUDA device is seen here: pass device_memory="):
        Hardware.detect()
    assert Hardware.detect(device_memory=24 * GB).host_memory > GB
    assert Hardware.detect(device_memory=24 * GB).host_is_assumed
    assert not Hardware.detect(device_memory=24 * GB, host_memory=GB).host_is_assumed


@pytest.mark.parametrize("on", CUDA)
def test_this_machine_is_seen(on: str) -> None:
    with device(on):
        found = Hardware.detect()
        assert found.devices == torch.cuda.device_count()
        assert found.device_memory > GB


@pytest.mark.parametrize(
    "wrong", [{"devices": 0}, {"nodes": 0}, {"links": "nvlink"}, {"device_memory": -1}, {"host_memory": -1}]
)
def test_wrong_hardware_is_said(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Hardware(**{"device_memory": 1.0, **wrong})
