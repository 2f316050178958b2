"""One file for all slices: what a plain Trainer writes and reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.nets import PlainNet, SaveAt, assert_close, assert_equal, build, weights
from tests.ranks import run_ranks
from tests.strategies.sharded import Stateless, Transformer, evaluated, one, resumed, two, whole

FILE = {"save_distributed_checkpoint": False}
KINDS = {"Stateless": Stateless, "Transformer": Transformer}


def files(folder: str, name: str) -> dict[str, Any]:
    kind, path = KINDS[name], f"{folder}/half.ckpt"
    first, _ = two(kind, FILE, callbacks=[SaveAt(path, epoch=0)])
    again, _ = two(kind, FILE, ckpt_path=path)
    assert_equal(whole(again), whole(first))
    other, _ = two(kind, ckpt_path=f"{folder}/plain.ckpt")
    return {"first": whole(first), "from plain": whole(other)}


@pytest.fixture(scope="module", params=["Stateless", pytest.param("Transformer", marks=pytest.mark.slow)])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The module's kind, the weights of an uninterrupted fit, what two ranks found, and where the files are."""
    folder, kind = tmp_path_factory.mktemp("wholes"), KINDS[request.param]
    plain, _ = one(kind, callbacks=[SaveAt(f"{folder}/plain.ckpt", epoch=0)])
    return kind, weights(plain), run_ranks(files, str(folder), request.param), folder


def test_a_resumed_fit_ends_as_in_one_process(runs: Any) -> None:
    _, expected, ranks, _ = runs
    for found in ranks:
        assert_close(found["first"], expected, 1e-5)


def test_the_file_of_a_plain_trainer_is_resumed(runs: Any) -> None:
    _, expected, ranks, _ = runs
    for found in ranks:
        assert_close(found["from plain"], expected, 1e-5)


def test_a_plain_trainer_resumes_from_the_file(runs: Any) -> None:
    kind, expected, _, folder = runs
    module, _ = one(kind, ckpt_path=folder / "half.ckpt")
    assert_close(weights(module), expected, 1e-5)


class Larger(PlainNet):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.layers[0] = torch.nn.Linear(8, 17)


def everything(folder: str) -> Any:
    with pytest.raises(RuntimeError, match="size mismatch for layers"):
        two(Larger, FILE, ckpt_path=f"{folder}/plain.ckpt")
    return resumed({**FILE, "offload": True}, f"{folder}/x.ckpt")


@pytest.mark.slow
def test_from_host_memory_with_an_average_too(tmp_path: Path) -> None:
    one(PlainNet, callbacks=[SaveAt(f"{tmp_path}/plain.ckpt", epoch=0)])
    for trained, loaded in run_ranks(everything, str(tmp_path)):
        assert trained["scores"] == loaded["scores"]
        assert torch.equal(trained["predicted"], loaded["predicted"])


def validated(folder: str) -> Any:
    module = build(Transformer)
    _, run = two(Transformer, max_steps=1)
    return evaluated(run, module, f"{folder}/plain.ckpt")


def test_the_file_of_a_plain_trainer_is_validated_tested_and_predicted(tmp_path: Path) -> None:
    plain, run = one(Transformer, max_epochs=1)
    run.save_checkpoint(tmp_path / "plain.ckpt")
    expected = evaluated(run, plain)
    for found in run_ranks(validated, str(tmp_path)):
        assert found["scores"] == pytest.approx(expected["scores"], abs=1e-6)
        torch.testing.assert_close(found["predicted"], expected["predicted"])
