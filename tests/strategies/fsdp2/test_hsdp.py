"""Copies of a sharded model (HSDP) on four real processes, two nodes of two, against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import lightning_tricks as lt
from lightning_tricks.checkpoints.consolidate import consolidate
from tests.nets import PlainNet, assert_close, build, weights
from tests.ranks import run_ranks
from tests.strategies.fsdp2.split_nets import Own
from tests.strategies.fsdp2.test_preset import CLIPPED, SAMTransformer
from tests.strategies.sharded import Manual, Transformer, local_bytes, one, resumed, two, whole

NODES = {"replicas": "nodes"}
CASES: dict[str, tuple[type[PlainNet], dict[str, Any], dict[str, Any]]] = {  # module, of the preset, of the Trainer
    "transformer": (Transformer, NODES, {}),
    "clipped": (Transformer, NODES, CLIPPED),
    "offload": (Transformer, {**NODES, "offload": True}, CLIPPED),
    "four copies": (Transformer, {"replicas": 4}, CLIPPED),
    "manual": (Manual, NODES, {}),
    "sam": (SAMTransformer, NODES, {}),
    "EMA": (Transformer, NODES, {"callbacks": [lt.EMA(0.9)]}),
    "AutoClip": (Transformer, NODES, {"callbacks": [lt.AutoClip(10)]}),
    "own layers": (Own, NODES, CLIPPED),
    "own layers, SAM and EMA": (Own, NODES, {"callbacks": [lt.SAMCallback(0.05), lt.EMA(0.9)]}),
    "own layers, LoRA": (Own, NODES, {"callbacks": [lt.LoRA("[qkv]$"), lt.EMA(0.9)]}),
}


def run_cases(cases: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for case in cases:
        kind, arguments, settings = CASES[case]
        module, run = two(kind, arguments, num_nodes=2, **settings)
        states = [t for state in run.optimizers[0].state.values() for t in state.values() if t.ndim]
        found[case] = whole(module)
        found["bytes"] = [local_bytes(tensors) for tensors in (module.parameters(), states)]
    try:
        two(PlainNet, {"replicas": 3}, num_nodes=2)
    except MisconfigurationException as error:
        found["three copies"] = str(error)
    return found


def in_depth(folder: str) -> dict[str, Any]:
    nodes: dict[str, Any] = {"num_nodes": 2}
    found = run_cases([case for case in CASES if case != "clipped"])
    clip = lt.AdaptiveClip(0.01)
    found["AdaptiveClip"] = whole(two(Transformer, NODES, **nodes, callbacks=[clip])[0])
    found["AdaptiveClip, no copies"] = whole(two(Transformer, {}, **nodes, callbacks=[lt.AdaptiveClip(0.01)])[0])
    folder = f"{folder}/saved"
    found["evaluated"] = resumed(NODES, folder, **nodes)
    found["other copies"] = [
        whole(two(Transformer, arguments, **nodes, ckpt_path=f"{folder}.end", max_epochs=2)[0])
        for arguments in (NODES, {}, {"replicas": 4})
    ]
    found["saved"] = f"{folder}.end"
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(run_cases, ["clipped"], nprocs=4, nodes=2)


@pytest.fixture(scope="module")
def more_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(in_depth, str(tmp_path_factory.mktemp("hsdp")), nprocs=4, nodes=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [case if case == "clipped" else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_four_ranks_equal_one_process_on_their_batches(request: pytest.FixtureRequest, case: str) -> None:
    kind, _, settings = CASES[case]
    module, _ = one(kind, **settings)
    for rank in request.getfixturevalue("ranks" if case == "clipped" else "more_ranks"):
        assert_close(rank[case], weights(module), 1e-5)


@pytest.mark.slow
def test_a_rank_holds_half_of_a_copy(ranks: list[dict[str, Any]]) -> None:
    module, run = one(Transformer, **CLIPPED)
    states = [t for state in run.optimizers[0].state.values() for t in state.values() if t.ndim]
    for number, tensors in enumerate((list(module.parameters()), states)):
        held = [rank["bytes"][number] for rank in ranks]
        assert sum(held) == 2 * sum(tensor.nbytes for tensor in tensors)
        assert max(held) < 1.2 * min(held)


@pytest.mark.slow
def test_norms_of_weights_and_gradients_count_each_shard_once(more_ranks: list[dict[str, Any]]) -> None:
    module, _ = one(Transformer, callbacks=[lt.AdaptiveClip(0.01)])
    for rank in more_ranks:
        assert_close(rank["AdaptiveClip"], weights(module), 1e-5)


@pytest.mark.slow
def test_a_resumed_fit_is_exact_and_a_folder_serves_any_number_of_copies(more_ranks: list[dict[str, Any]]) -> None:
    for rank in more_ranks:
        ended, loaded = rank["evaluated"]
        assert loaded["scores"] == ended["scores"]
        assert torch.equal(loaded["predicted"], ended["predicted"])
        for other in rank["other copies"][1:]:
            assert_close(other, rank["other copies"][0], 1e-6)


@pytest.mark.slow
def test_the_folder_becomes_one_file_of_the_plain_module(more_ranks: list[dict[str, Any]], tmp_path: Path) -> None:
    consolidate(more_ranks[0]["saved"], tmp_path / "one.pt")
    module = build(Transformer)
    module.load_state_dict(torch.load(tmp_path / "one.pt"))
    expected, _ = one(Transformer, max_epochs=1)
    assert_close(weights(module), weights(expected), 1e-5)


def test_copies_that_do_not_divide_the_processes_are_refused(ranks: list[dict[str, Any]]) -> None:
    assert all("replicas=3 for 4 processes" in rank["three copies"] for rank in ranks)
    with pytest.raises(ValueError, match="replicas"):
        lt.FSDP2Preset(replicas=0)


def test_one_node_has_one_copy() -> None:
    assert lt.preset("hsdp_bf16")["strategy"].replicas == "nodes"
