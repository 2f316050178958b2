"""Several machines, all of them this one: by the variables of torchrun, by its agents and by those of SLURM."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

import lightning_tricks as lt
from tests.nets import PlainNet, assert_close, assert_equal, build, fit, loader, weights
from tests.ranks import _free_port, run_ranks
from tests.strategies.spy import Spy, facts

FOLDER = Path(__file__).parent.parent.parent / "configs" / "multi_node"
STEPS = 4
QUIET = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.logger=false"]


def on_nodes(name: str, num_nodes: int, devices: int, folder: str) -> dict[str, Any]:
    """Train, save, resume and validate."""
    settings = {"devices": devices, "num_nodes": num_nodes, "strategy": name}
    module, first, resumed = (build(Spy) for _ in range(3))
    found = facts(fit(module, **settings), module)
    fit(first, max_epochs=1, **settings).save_checkpoint(f"{folder}/1.ckpt")
    run = fit(resumed, ckpt_path=f"{folder}/1.ckpt", **settings)
    return {
        **found,
        "resumed": weights(resumed),
        "rank": (run.node_rank, run.local_rank, run.global_rank),
        "validated": run.validate(resumed, loader(48), verbose=False),
    }


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["ddp_bf16", "fsdp2_bf16"])
def test_two_nodes_train_as_one_with_two_devices(name: str, tmp_path: Path) -> None:
    here = run_ranks(on_nodes, name, 1, 2, str(tmp_path))
    apart = run_ranks(on_nodes, name, 2, 1, str(tmp_path), nodes=2)
    assert [found.pop("rank") for found in here] == [(0, 0, 0), (0, 1, 1)]
    assert [found.pop("rank") for found in apart] == [(0, 0, 0), (1, 0, 1)]
    for one, two in zip(here, apart, strict=True):
        for key in ("weights", "resumed"):
            assert_equal(two.pop(key), one.pop(key))
        assert one == two


class Watching(Callback):
    """The weights of this rank after each step."""

    def __init__(self) -> None:
        self.steps: list[Tensor] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.steps.append(pl_module.layers[0].weight.detach().clone())


def local_sgd_on_two_nodes() -> list[Tensor]:
    watching = Watching()
    arguments = {"compression": "local_sgd", "local_sgd_period": 2, "precision": "32-true"}
    strategy = lt.preset("ddp_compressed_bf16", **arguments)
    fit(build(PlainNet), devices=2, num_nodes=2, max_steps=3, callbacks=[watching], train=loader(96), **strategy)
    return watching.steps


def test_local_sgd_averages_gradients_within_a_node_and_weights_between_nodes() -> None:
    ranks = run_ranks(local_sgd_on_two_nodes, nprocs=4, nodes=2)
    first = [steps[0] for steps in ranks]
    assert torch.equal(first[0], first[1])
    assert torch.equal(first[2], first[3])
    assert not torch.equal(first[0], first[2])
    for step in (1, 2):  # the second by the period, the third is the last
        assert all(torch.equal(steps[step], ranks[0][step]) for steps in ranks)


# -- the scripts of configs/multi_node --------------------------------------------------------------------------------


def started(command: list[str], folder: Path, scripts: Path = FOLDER, **variables: str) -> subprocess.Popen[str]:
    path = f"{Path(sys.executable).parent}:{folder}:{os.environ['PATH']}"  # torchrun and python; srun
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(FOLDER.parent.parent), **variables}
    options = [*QUIET, f"--trainer.max_steps={STEPS}", f"--trainer.default_root_dir={folder}"]
    return subprocess.Popen(
        ["bash", command[0], *options, *command[1:]],
        env=environment,
        cwd=scripts,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finished(processes: list[subprocess.Popen[str]]) -> list[str]:
    try:
        outputs = [process.communicate(timeout=180)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(outputs)
    return outputs


def checkpoint_of(folder: Path) -> dict[str, Any]:
    (path,) = folder.rglob("*.ckpt")
    return torch.load(path, weights_only=True)


def by_the_cli(folder: str) -> None:
    from lightning.pytorch.cli import LightningCLI

    options = [*QUIET, f"--trainer.max_steps={STEPS}", f"--trainer.default_root_dir={folder}"]
    LightningCLI(args=["fit", "-c", str(FOLDER / "digits.yaml"), *options, "--trainer.devices=2"])


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The checkpoint of the same training on one machine with two devices."""
    folder = tmp_path_factory.mktemp("expected")
    run_ranks(by_the_cli, str(folder))
    return checkpoint_of(folder)


@pytest.mark.slow
def test_two_agents_of_torchrun_train_as_one_machine(expected: dict[str, Any], tmp_path: Path) -> None:
    variables = {"NODES": "2", "DEVICES": "1", "HEAD": "localhost", "PORT": str(_free_port())}
    variables["RUN"] = str(tmp_path / "run")
    outputs = finished([started(["torchrun.sh"], tmp_path, **variables) for _ in range(2)])
    assert "GLOBAL_RANK: 1, MEMBER: 2/2" in "".join(outputs)
    found = checkpoint_of(tmp_path)
    assert found["global_step"] == expected["global_step"] == STEPS
    assert_close(found["state_dict"], expected["state_dict"], 1e-6)


# There is no SLURM here: its part is a task a node, each told who it is, and to end them when the job is queued again.
SRUN = """#!/usr/bin/env bash
for task in 0 1; do
    SLURM_PROCID=$task SLURM_NODEID=$task SLURM_LOCALID=0 "$@" &
    tasks+=($!)
done
echo "${tasks[@]}" > "$TASKS"
for task in "${tasks[@]}"; do wait "$task" || exit 1; done
"""
SCONTROL = """#!/usr/bin/env bash
[ "$*" = "requeue $SLURM_JOB_ID" ] && kill -KILL $(cat "$TASKS")
"""


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The variables of a job, its commands and a copy of the folder in which it writes."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    shutil.copytree(FOLDER, tmp_path / "here")
    variables = {"SLURM_NNODES": "2", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_JOB_NAME": "digits"}
    variables |= {"SLURM_JOB_ID": str(_free_port()), "SLURM_NODELIST": "localhost"}
    return {**variables, "TASKS": str(tmp_path / "tasks")}


@pytest.mark.slow
def test_the_script_for_slurm_trains_as_one_machine(
    expected: dict[str, Any], tmp_path: Path, slurm: dict[str, str]
) -> None:
    (output,) = finished([started(["slurm.sh"], tmp_path, tmp_path / "here", **slurm)])
    assert "GLOBAL_RANK: 1, MEMBER: 2/2" in output
    found = torch.load(tmp_path / "here/checkpoints" / slurm["SLURM_JOB_ID"] / "last.ckpt", weights_only=True)
    assert found["global_step"] == STEPS
    assert_close(found["state_dict"], expected["state_dict"], 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp_bf16", "fsdp2_bf16"])
def test_a_slurm_job_at_its_time_limit_saves_and_goes_on(name: str, tmp_path: Path, slurm: dict[str, str]) -> None:
    options = ["slurm.sh", f"--trainer.strategy={name}", "--trainer.max_epochs=-1"]
    job = started([*options, "--trainer.max_steps=100000"], tmp_path, tmp_path / "here", **slurm)
    run, tasks = tmp_path / "here/checkpoints" / slurm["SLURM_JOB_ID"], Path(slurm["TASKS"])
    deadline = time.monotonic() + 120
    while not (run / "last.ckpt").exists() and job.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    for task in tasks.read_text().split():
        os.kill(int(task), signal.SIGUSR1)
    job.communicate(timeout=300)
    (path,) = run.glob("preempted-step=*.ckpt")
    saved = int(re.findall(r"\d+", path.name)[0])
    again = started([*options, f"--trainer.max_steps={saved + STEPS}"], tmp_path, tmp_path / "here", **slurm)
    (output,) = finished([again])
    assert f"Restored all states from the checkpoint at {path.relative_to(tmp_path / 'here')}" in output
    last = run / "last.ckpt"
    found = torch.load(last / "meta.pt" if last.is_dir() else last, weights_only=True)
    assert found["global_step"] == saved + STEPS


def test_the_page_names_what_there_is() -> None:
    page = (FOLDER.parent.parent / "docs" / "multi_node.md").read_text()
    for file in re.findall(r"[\w/.]+\.(?:py|sh|yaml)\b", page):
        assert (FOLDER / file).exists(), file
    names = set(re.findall(r"\b(?:single|ddp|fsdp2|zero\d)_\w+", page))
    assert names <= {row["name"] for row in lt.presets()}
    options = set(re.findall(r"--trainer\.(\w+)", page))
    assert options <= set(inspect.signature(L.Trainer).parameters)
    assert len(page.splitlines()) <= 180
