"""Plans for many devices: the fastest preset that fits, by the simulator, with memory as estimate_memory has it."""

from __future__ import annotations

from dataclasses import replace

import pytest

import lightning_tricks as lt
from lightning_tricks.advisor.simulate.devices import DEVICES, links_of
from lightning_tricks.advisor.simulate.step import Spread, simulate_step
from tests.advisor.simulate.published import L8, L70

H100 = DEVICES["h100"]


def plan(nodes: int, **settings: object) -> lt.advisor.TrainingPlan:
    return lt.suggest_plan(L8, hardware=lt.Hardware.of("h100", devices=8, nodes=nodes), **settings)  # type: ignore[arg-type]


def test_the_first_is_the_fastest_of_all_that_fits() -> None:
    found = plan(64, batch_size=2048)
    names = [each.preset for each in found.candidates]
    assert {*names, *(each.strategy for each in found.failed)} == {"ddp_bf16", "fsdp2_bf16", "hsdp_bf16", "tp_bf16"}
    speeds = [each.step.tokens_per_second for each in found.candidates]
    assert speeds == sorted(speeds, reverse=True)
    assert found.preset == names[0]
    for each in found.candidates:
        assert each.estimate.total <= 0.9 * 80e9
    for name, estimate in ((each.strategy, each) for each in found.failed):
        assert estimate.total > 0.9 * 80e9, name


def by_hand(nodes: int, shards: int, share: int, *, checkpointing: bool, preset: str) -> float:
    """The best of all batches that fit, one after the other."""
    estimate = lt.estimate_memory(L8.parameters, strategy=preset, devices=8, nodes=nodes)
    if checkpointing:
        estimate = replace(estimate, casts=min(estimate.casts, estimate.gathered // 2))
    best = 0.0
    for micro in (number for number in range(1, share + 1) if share % number == 0):
        taken = replace(estimate, activations=round(micro * L8.activations(recompute=checkpointing)))
        if taken.total <= 0.9 * 80e9:
            spread = Spread(8 * nodes, shards=shards, micro_batch=micro, accumulate=share // micro, gather_bytes=4)
            spread = replace(spread, recompute="full" if checkpointing else "none")
            best = max(best, simulate_step(L8, spread, H100, links_of(H100)).tokens_per_second)
    return best


@pytest.mark.parametrize("nodes", [2, 512])
def test_the_batch_is_the_best_of_all(nodes: int) -> None:
    share = 4
    found = {each.preset: each.step.tokens_per_second for each in plan(nodes, batch_size=share * 8 * nodes).candidates}
    for preset, shards in (("fsdp2_bf16", 8 * nodes), ("hsdp_bf16", 8)):
        naive = max(by_hand(nodes, shards, share, checkpointing=again, preset=preset) for again in (False, True))
        assert found[preset] == pytest.approx(naive, rel=1e-9)


def test_the_batch_of_a_step_is_shared() -> None:
    found = plan(8, batch_size=512)
    first = found.candidates[0]
    assert found.effective_batch_size == 512 == first.micro_batch * first.accumulate * 64
    assert found.trainer == {
        "strategy": found.preset,
        "devices": 8,
        "num_nodes": 8,
        "accumulate_grad_batches": first.accumulate,
    }
    assert plan(8).candidates[0].accumulate == 1
    assert plan(8, batch_size=1).effective_batch_size == 64, "one sample for each device"


def test_what_is_printed_has_the_second_and_by_how_much() -> None:
    found = plan(512)
    first, second, *_ = found.candidates
    faster = first.step.tokens_per_second / second.step.tokens_per_second - 1
    text = str(found)
    assert f"{second.preset} comes second: {first.preset} is {faster:.0%} faster." in text
    assert ("callbacks=[ActivationCheckpointing()]" in text) == found.recomputes
    assert f"DataLoader(batch_size={first.micro_batch})" in text
    assert found.rows()[0][5] == f"{found.tokens_per_second:,.0f}"
    told = found.to_dict()
    assert told["strategy"] == told["candidates"][0]["strategy"] == found.preset
    assert told["candidates"][0]["share_of_peak"] == found.share_of_peak
    assert found._repr_html_().count("<tr>") == 1 + len(found.candidates) + len(found.failed)


def test_machines_decide() -> None:
    small = lt.TransformerShape.of(300_000_000, sequence=1024)
    one = lt.suggest_plan(small, hardware=lt.Hardware.of("a100", devices=8), batch_size=512)
    (copies,) = [each for each in one.candidates if each.preset == "ddp_bf16"]
    assert copies.step.tokens_per_second > 0.95 * one.candidates[0].step.tokens_per_second, (
        "nearly no traffic to wait for"
    )
    slow = lt.suggest_plan(L8, hardware=lt.Hardware.of("a100", devices=8, nodes=16, links="slow"), batch_size=128)
    fast = lt.suggest_plan(L8, hardware=lt.Hardware.of("a100", devices=8, nodes=16), batch_size=128)
    assert slow.preset == "hsdp_bf16", "weights are gathered within nodes"
    assert slow.tokens_per_second < fast.tokens_per_second
    lone = lt.suggest_plan(small, hardware=lt.Hardware.of("a100", devices=1, nodes=16))
    assert {each.preset for each in lone.candidates} == {"ddp_bf16", "fsdp2_bf16"}


def test_an_optimizer_that_a_preset_refuses_passes_it_over() -> None:
    refused = next(row["name"] for row in lt.optimizers() if not row["fsdp2"])
    small = lt.TransformerShape.of(300_000_000, sequence=1024)
    found = lt.suggest_plan(small, hardware=lt.Hardware.of("a100", devices=8), optimizer=refused)
    assert [each.preset for each in found.candidates] == ["ddp_bf16"]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Nothing fits. Nearest is tp_bf16, for which .* is missing on each device"):
        lt.suggest_plan(L70, hardware=lt.Hardware.of("a100-40gb", devices=8))
    with pytest.raises(ValueError, match=r"hardware must have a kind, one of a100-40gb, .*Hardware.of"):
        lt.suggest_plan(L8, hardware=lt.Hardware(80e9, devices=8))
    with pytest.raises(ValueError, match="kind must be"):
        lt.Hardware.of("abacus")
    with pytest.raises(TypeError, match="model must be"):
        lt.suggest_plan(8_000_000_000, hardware=lt.Hardware.of("h100"))  # type: ignore[arg-type]
