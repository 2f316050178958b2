"""Collectives and bubbles are those of rings and schedules that are played step by step."""

from __future__ import annotations

import pytest

from lightning_tricks.advisor.simulate.traffic import Links, all_reduce, gather, pipeline_bubble


def played_ring(size: float, nodes: int, per_node: int, links: Links) -> float:
    """As many rings as devices of a node, each with a share of the bytes, through each node and then to the next."""
    devices, seconds = nodes * per_node, 0.0
    held = [{number} for number in range(devices)]  # the parts that a device has
    newest = list(range(devices))
    while any(len(parts) < devices for parts in held):
        newest = [newest[(number - 1) % devices] for number in range(devices)]
        for number, part in enumerate(newest):
            held[number].add(part)
        part = size / devices
        inside = part / links.inside if per_node > 1 else 0.0  # all rings leave a device by its links
        between = part / per_node / links.between if nodes > 1 else 0.0  # each ring leaves a node by another card
        seconds += max(inside, between)
    return seconds


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 8), (8, 1), (4, 8), (2, 2)])
@pytest.mark.parametrize("between", [1e7, 1e10])
def test_a_gather_is_a_ring(nodes: int, per_node: int, between: float) -> None:
    links = Links(1e9, between, 0, 0)
    naive, found = played_ring(1e9, nodes, per_node, links), gather(1e9, per_node, nodes, links)
    if nodes == 1 or per_node == 1 or between == 1e10:
        assert found == pytest.approx(naive)
    else:  # what devices of a node have they send once to the other nodes
        assert found == pytest.approx(naive * (1 - 1 / nodes) / (1 - 1 / nodes / per_node))
    assert all_reduce(1e9, per_node, nodes, links) == 2 * found


def test_each_step_of_a_ring_has_its_latency() -> None:
    links = Links(1e18, 1e18, 1.0, 100.0)
    assert gather(1, 8, 4, links) == pytest.approx(3 * 100 + 28)
    assert gather(1, 1, 1, links) == 0


def played_pipeline(stages: int, micro_batches: int, forward: float, backward: float) -> float:
    """All forward passes, then all backward passes, each as soon as its input and its stage are there."""
    free = [0.0] * stages
    for order, seconds in ((range(stages), forward), (range(stages - 1, -1, -1), backward)):
        ready = [max(free) if seconds == backward else 0.0] * micro_batches
        for stage in order:
            for number in range(micro_batches):
                free[stage] = ready[number] = max(free[stage], ready[number]) + seconds
    return max(free)


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 4), (4, 4), (4, 12), (8, 3)])
def test_a_bubble_is_that_of_a_schedule(stages: int, micro_batches: int) -> None:
    busy, whole = micro_batches * 3.0, played_pipeline(stages, micro_batches, 1.0, 2.0)
    bubble = pipeline_bubble(stages, micro_batches)
    assert busy * (1 + bubble) == pytest.approx(whole)
    assert bubble / (1 + bubble) == pytest.approx((stages - 1) / (micro_batches + stages - 1))
    assert pipeline_bubble(stages, micro_batches, chunks=3) == pytest.approx(bubble / 3)
