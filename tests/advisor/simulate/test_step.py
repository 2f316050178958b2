"""The parts of a simulated step, and published steps within 15%."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest

from lightning_tricks.advisor.simulate.devices import DEVICES, links_of
from lightning_tricks.advisor.simulate.step import Spread, Step, simulate_step
from tests.advisor.simulate.published import L8, L70, ROWS, SOURCES

LIMIT = 0.15
# What the simulator does not know, as docs/scaling.md has it.
BEYOND = {
    "torchtitan, async TP: Llama 3.1 8B, 64 devices, FSDP, async TP",
    "torchtitan, async TP: Llama 3.1 8B, 64 devices, FSDP, float8, TP",
    "torchtitan, async TP: Llama 3.1 8B, 64 devices, FSDP, float8, async TP",
    "llm-foundry: MPT 30b, 8 h100, 8192 tokens, 1 samples at a time",
    "llm-foundry: MPT 13b, 64 h100, 2048 tokens, 2 samples at a time",
    "llm-foundry: MPT 13b, 8 h100, 2048 tokens, 2 samples at a time",
    "llm-foundry: MPT 70b, 64 a100-40gb, 2048 tokens, 2 samples at a time",
    "Megatron-LM, H100: GPT 70B, 768 devices",
    "ZeRO-3 of 2021: GPT-3 175B, 384 devices",
    "ZeRO-3 of 2021: GPT-3 175B, 1536 devices",
}


def test_published_steps_are_simulated() -> None:
    assert {row.source for row in ROWS} == set(SOURCES)
    beyond = {f"{row.source}: {row.what}" for row in ROWS if abs(row.error()) > LIMIT}
    assert beyond == BEYOND
    checked = ROWS[1::2]  # constants were fitted on the others
    assert sum(abs(row.error()) <= LIMIT for row in checked) / len(checked) >= 0.85
    assert median(abs(row.error()) for row in checked) < 0.07


H100 = DEVICES["h100"]


def step(spread: Spread, links: str = "fast") -> Step:
    return simulate_step(L8, spread, H100, links_of(H100, spread.per_node, links))  # type: ignore[arg-type]


def test_a_single_device_computes_and_steps() -> None:
    one = step(Spread(1, per_node=1))
    assert (one.tensor, one.data, one.bubble) == (0, 0, 0)
    assert one.seconds == one.compute + one.optimizer
    assert 0 < one.share_of_peak(H100) < H100.products
    assert one.tokens_per_second == 8192 / one.seconds
    twice = step(Spread(1, per_node=1, micro_batch=2, accumulate=3))
    assert twice.compute == pytest.approx(6 * one.compute)


def test_what_is_computed_again_takes_time() -> None:
    plain, selective, full = (step(Spread(8, shards=8, recompute=r)).compute for r in ("none", "selective", "full"))  # type: ignore[arg-type]
    assert plain < selective < full < 4 / 3 * plain


def test_traffic_hides_behind_products_until_it_takes_longer() -> None:
    fast, slow = (step(Spread(64, shards=64, gather_bytes=4), links) for links in ("fast", "slow"))
    assert fast.data < 0.1 * fast.compute
    assert slow.data > slow.compute
    bare = step(Spread(64, shards=64, gather_bytes=4, overlap=False))
    assert bare.data == pytest.approx(10 * fast.data)
    more = step(Spread(64, shards=64, gather_bytes=4, micro_batch=8), "slow")
    assert more.tokens_per_second > 2 * slow.tokens_per_second


def test_shards_of_a_node_send_less_between_nodes() -> None:
    whole, nodes = (step(Spread(4096, shards=n, gather_bytes=4, overlap=False)) for n in (4096, 8))
    assert nodes.data < whole.data, "rings of thousands of devices wait for their latency"
    copies = step(Spread(64, overlap=False)), step(Spread(64, overlap=False, accumulate=4))
    assert copies[0].data == copies[1].data, "gradients of whole copies are summed once"
    shards = step(Spread(64, shards=64, overlap=False)), step(Spread(64, shards=64, overlap=False, accumulate=4))
    assert shards[1].data == pytest.approx(4 * shards[0].data)


def test_a_pipeline_is_idle_and_layers_are_shared_for_their_sums() -> None:
    staged = step(Spread(64, pipeline=8, accumulate=8))
    assert staged.bubble == pytest.approx(7 / 8 * (staged.compute + staged.tensor))
    assert step(Spread(64, pipeline=8, accumulate=8, chunks=2)).bubble == pytest.approx(staged.bubble / 2)
    shared = step(Spread(64, tensor=8))
    assert shared.compute == pytest.approx(step(Spread(8)).compute / 8)
    assert shared.tensor == pytest.approx(2 * step(Spread(64, tensor=8, async_tensor=True)).tensor)
    assert simulate_step(L70, Spread(64, tensor=8), H100, links_of(H100)).tensor > shared.tensor


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"shards": 3}, "devices must be a multiple of tensor . pipeline . shards, got devices=8"),
        ({"tensor": 16, "devices": 16}, "tensor must divide per_node, got tensor=16"),
        ({"recompute": "some"}, "recompute must be"),
        ({"micro_batch": 0}, "micro_batch must be"),
    ],
)
def test_what_cannot_be_is_refused(wrong: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(Spread(8), **wrong)
