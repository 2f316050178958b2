"""An hour with one GPU and no network: the tests marked ``gpu``, then benchmarks, in calls of at most nine minutes.

It needs the Python that is there and nothing of ``make``: torch, either Lightning, and pytest for the tests. What is
missing is named at once, and what can run without is run. Each call goes on where the last one ended or was killed.
What was found goes to benchmarks/results/gpu.json and docs/gpu.md, figures to benchmarks/results/*_cuda.json.

    python .ci/gpu.py                                       go on, for nine minutes
    python .ci/gpu.py tests/device/test_tricks.py ema       these alone; what is complete is run anew
    python .ci/gpu.py --simulate --minutes 60               all without a GPU, into a temporary folder
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from tests.device.record import Record  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "gpu.md"
LATE, EXIT = "killed at the end of the call", "exit code"  # how a process ends
PROCESS = "the process"  # the unit of one that ends before it begins a test
PATIENCE = 240  # seconds in which nothing new is noted or printed, after which a test is taken to hang

TESTS = (
    # What no simulation has: compilers, kernels of other libraries, the allocator, events, NCCL.
    *("callbacks/test_compile", "advisor/memory/test_estimate", "callbacks/test_activation_checkpointing"),
    *("core/replay/test_recompute", "callbacks/test_data_wait", "advisor/test_batch_size", "callbacks/test_float8"),
    "callbacks/test_lora",
    *("strategies/ddp/test_preset", "strategies/fsdp2/test_preset", "strategies/test_single"),
    *("strategies/zero/test_preset", "optimizers/test_adamw"),
    # What the simulation relies on, and every trick.
    *("device/test_simulation", "device/test_tricks"),
    # What passes on the simulated device.
    *("core/averaging/test_transfer", "core/averaging/test_batchnorm", "callbacks/test_ema", "callbacks/test_swa"),
    *("callbacks/test_step_in_backward", "callbacks/test_hard_examples", "callbacks/test_cutmix"),
    *("callbacks/test_hidden_mixup", "modules/sam/test_mixin", "modules/test_sharpness", "core/replay/test_rerun"),
    *("core/lightning/test_trainer", "core/test_device", "callbacks/test_adaptive_clip", "callbacks/test_auto_clip"),
    *("advisor/test_choose", "advisor/test_environment", "advisor/test_profile"),
    # What needs several devices, and is skipped on one.
    *("strategies/ddp/test_compression", "device/test_collectives", "device/test_ranks"),
)
BENCHMARKS = (
    *("ema", "sam", "mixup", "guards", "memory", "lean_loss", "optimizers", "lora", "speed", "hard_examples"),
    *("networks", "checkpoints", "grad_cache", "together", "length_buckets", "data_wait", "scaling", "step_scaling"),
    "single",
)
LARGER = ("lora_7b", "resnet18", "gpt", "vit_small")  # of benchmarks/gpu: last, since they take an hour
ON_THE_CPU = ("import_time", "schedules", "ranks", "many_ranks", "async_save")  # measure nothing of one device
LIGHTNINGS = ("lightning", "pytorch_lightning")
NEEDED = ("torch", "torchmetrics", "tqdm", "typing_extensions")
OPTIONAL = ("pytest", "timm", "torchvision", "transformers", "peft", "torchao", "deepspeed")
OPTIONAL += ("bitsandbytes", "pytorch_optimizer", "schedulefree", "ema_pytorch", "sklearn", "matplotlib")
REPORTED = ("torch", "lightning", "pytorch-lightning", "transformers", "timm", "peft", "torchao", "deepspeed", "pytest")
OUTCOMES = ("passed", "failed", "skipped")
NOTHING = "**Nothing of this package has run on a real GPU yet**, neither tests nor benchmarks."
DEVICE = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"


class Slice(NamedTuple):
    """What one process runs: a file of tests, which notes them itself, or a benchmark, the unit of the same name."""

    name: str
    command: list[str]
    benchmark: bool = False


def absences() -> list[str]:
    return [name for name in OPTIONAL if find_spec(name) is None]


def checked(simulate: bool) -> dict[str, str]:
    """The device and the versions that are here; raises if nothing can run, and prints what else is missing."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    missing += [] if any(map(find_spec, LIGHTNINGS)) else [" or ".join(LIGHTNINGS)]
    if missing:
        sys.exit(f"error: {sys.executable} has no {', '.join(missing)}: nothing can run without")
    if absent := absences():
        print("not installed, so that what needs them is left out and says so:", ", ".join(absent), flush=True)
    device = "simulated" if simulate else subprocess.check_output([sys.executable, "-c", DEVICE], text=True).strip()
    if not device:
        sys.exit("error: torch finds no CUDA device; --simulate runs everything without one")
    where = {"device": device, "python": platform.python_version()}
    for name in REPORTED:
        with suppress(PackageNotFoundError):
            where[name] = version(name)
    return where


def slices(folder: Path, simulate: bool) -> dict[str, Slice]:
    """All that can run here, by name, in their order: what most likely breaks comes first."""
    renamed = find_spec("lightning") is None
    options = ["-o", "addopts=", "-o", "filterwarnings=default", "-p", "no:cacheprovider", "-q"]
    options += ["-p", "tests.pytorch_lightning.namespace"] if renamed else []
    options += ["-m", "not gpu and not slow", "-k", "simulated or device"] if simulate else ["-m", "gpu"]
    options += ["-p", "tests.device.record", "--record", str(folder / "gpu.json"), "--missing", *absences()]
    files = [f"tests/{name}.py" for name in TESTS] if find_spec("pytest") else []
    found = [Slice(file, ["-m", "pytest", *options, "--slice", file, file]) for file in files]
    command = [*([".ci/renamed.py"] if renamed else []), "benchmarks/run.py", "--without-peers"]
    command += ["--device", "cpu" if simulate else "cuda"]
    reduced = [*command, "--reduced", "--output", str(folder / "scratch")]
    found += [Slice(f"{name}-reduced", [*reduced, name], True) for name in (*BENCHMARKS, *LARGER)]
    if not simulate:
        found += [Slice(name, [*command, "--output", str(folder), name], True) for name in (*BENCHMARKS, *LARGER)]
    return {each.name: each for each in found}


def attempt(command: list[str], log: Path, record: Path, deadline: float, patience: float) -> str:
    """Run Python in a process group of its own, of which nothing is left behind, and say how it ended."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    variables = {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=variables, stdout=out, stderr=out, start_new_session=True
        )
        try:
            while process.poll() is None:
                if time.monotonic() > deadline:
                    return LATE
                if time.time() - max(each.stat().st_mtime for each in (log, record)) > patience:
                    return f"killed after {patience:.0f} s without news"
                time.sleep(0.1)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return f"{EXIT} {process.returncode}"


def said(log: Path, passed: bool) -> str:
    """What a benchmark says of rows without figures, or of one that failed the last line."""
    lines = log.read_text(errors="replace").strip().splitlines() or ["nothing"]
    rows = dict.fromkeys(re.findall(r"\|((?:failed|skipped): [^|]*)\|", "\n".join(lines)))
    return "; ".join(rows) or ("" if passed else lines[-1])


def work(part: Slice, where: dict[str, str], folder: Path, deadline: float, whole: bool) -> bool:
    """Try a slice until it is done; False if the call's time was over before.

    Args:
        part: The slice.
        where: The device and the versions.
        folder: Where the record is.
        deadline: When the call's time is over.
        whole: Whether the slice has the whole call. Else, what the deadline ends is not counted as a try.
    """
    path, log = folder / "gpu.json", folder / "scratch" / f"{part.name.replace('/', '.')}.log"
    patience = math.inf if part.benchmark else PATIENCE
    record = Record(path)
    record.of(part.name)["where"] = where
    settle(record, part, "killed with the call")
    while not record.of(part.name)["done"]:
        before = progress(record.of(part.name))
        if part.benchmark:
            record.begin(part.name, part.name)
        began = time.monotonic()
        end = attempt(part.command, log, path, deadline, patience)
        record, seconds = Record(path), time.monotonic() - began
        known = record.of(part.name)
        known["seconds"] = round(known.get("seconds", 0) + seconds)
        if end == LATE and not whole:
            for unit in known["units"].values():
                unit["tries"] -= "outcome" not in unit
        elif part.benchmark and end.startswith(EXIT):
            passed = end == f"{EXIT} 0"
            record.end(part.name, part.name, "passed" if passed else "failed", said(log, passed), seconds)
        elif not known["done"] and progress(known) == before:
            record.begin(part.name, PROCESS)
        settle(record, part, end)
        if end == LATE:
            break
        whole = False
    return record.of(part.name)["done"]


def settle(record: Record, part: Slice, end: str) -> None:
    """Fail what has been tried often enough; a slice is done if that is the benchmark or the process itself."""
    known = record.of(part.name)
    record.give_up(part.name, end)
    known["done"] |= any("outcome" in known["units"].get(unit, {}) for unit in (part.name, PROCESS))
    record.write()


def progress(known: dict[str, Any]) -> int:
    """A number that grows with each test that begins or ends."""
    return sum(unit["tries"] + ("outcome" in unit) for unit in known["units"].values())


def line(known: dict[str, Any]) -> list[str]:
    """How many units of a slice have each outcome, and its seconds."""
    found = Counter(unit.get("outcome", "left") for unit in known["units"].values())
    return [*(str(found[outcome]) for outcome in OUTCOMES), str(known.get("seconds", 0))]


def page(record: dict[str, dict[str, Any]]) -> str:
    """docs/gpu.md."""
    machines = list(dict.fromkeys(", ".join(map(" ".join, known["where"].items())) for known in record.values()))
    lines = [
        "# On a GPU",
        "",
        "What has run on a real GPU, and what became of it." if record else NOTHING,
        "",
        f"`make gpu` needs one GPU and no network, for an hour: it runs the {len(TESTS)} files of tests marked `gpu`,",
        "those first that have no twin on a simulated device, then each benchmark that measures a device, reduced and",
        "in full. A call works for nine minutes, and the next one goes on where it ended or was killed. It takes the",
        "Python that is there, with torch and either Lightning, and names what is missing. A test amid which two",
        "processes end has failed. The record is `benchmarks/results/gpu.json`, figures are in",
        "`benchmarks/results/*_cuda.json`, and what was printed in `benchmarks/results/scratch/`.",
        "",
        "`make gpu SIMULATE=1` is the dry run, on a machine without a GPU. Of the same files it runs the tests on a",
        "simulated device (tensors in host memory that are said to be on a GPU, so that what mixes devices raises and",
        "what waits is counted), and the same benchmarks, reduced, on the CPU. It has no kernels, streams, numerics or",
        "collectives of a GPU. What it finds goes to a temporary folder, not to this page.",
    ]
    if record:
        lines += ["", "| |" + "|".join([*OUTCOMES, "seconds", "on"]) + "|", "|---" * (len(OUTCOMES) + 3) + "|"]
    for name, known in record.items():
        number = 1 + machines.index(", ".join(map(" ".join, known["where"].items())))
        begun = "" if known["done"] else " (not complete)"
        lines.append("|" + "|".join([f"`{name}`{begun}", *line(known), str(number)]) + "|")
    if record:
        lines += ["", *(f"{number}. {machine}" for number, machine in enumerate(machines, 1))]
    measured = (*BENCHMARKS, *LARGER)
    names = [*(f"tests/{name}.py" for name in TESTS), *(f"{name}-reduced" for name in measured), *measured]
    if record and (waiting := [f"`{name}`" for name in names if name not in record]):
        lines += ["", "## Not run yet", "", ", ".join(waiting)]
    units = [
        (f"`{name}`" if unit == name else f"`{name}` `{unit}`", of)
        for name, known in record.items()
        for unit, of in known["units"].items()
    ]
    found = {
        "What failed": [f"{name}: {code(of['why'])}" for name, of in units if of.get("outcome") == "failed"],
        "Rows of benchmarks without figures": [
            f"{name}: {code(of['why'])}" for name, of in units if of.get("outcome") == "passed" and "why" in of
        ],
        "What was skipped": counted(Counter(of["why"] for _, of in units if of.get("outcome") == "skipped")),
        "Warnings": counted(sum((Counter(known["warnings"]) for known in record.values()), Counter())),
    }
    for title, what in found.items():
        lines += ["", f"## {title}", "", *(f"- {each}" for each in what)] if what else []
    return "\n".join(lines) + "\n"


def counted(reasons: Counter[str]) -> list[str]:
    return [f"{count}: {code(why)}" for why, count in reasons.most_common()]


def code(text: str) -> str:
    """A text of whatever kind, as code in Markdown."""
    return f"`{text.replace('`', chr(39))}`"


def main() -> None:
    """Check, run, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="SLICE", help="run these alone, anew if they are complete")
    parser.add_argument("--minutes", type=float, default=9.0, help="how long this call works, 9 by default")
    parser.add_argument("--simulate", action="store_true", help="the tests' twins and reduced benchmarks, on the CPU")
    parser.add_argument("--folder", type=Path, help="of the record; benchmarks/results, or if simulated a new one")
    args = parser.parse_args()
    deadline = time.monotonic() + 60 * args.minutes
    folder = (args.folder or (Path(tempfile.mkdtemp(prefix="gpu-")) if args.simulate else RESULTS)).resolve()
    known = slices(folder, args.simulate)
    if unknown := [name for name in args.names if name not in known]:
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(known)}")
    where = checked(args.simulate)
    if args.simulate:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    print(", ".join(map(" ".join, where.items())), "->", folder, flush=True)
    (folder / "scratch").mkdir(parents=True, exist_ok=True)
    path = folder / "gpu.json"
    record = Record(path)
    for name in args.names:  # a complete one anew
        record.slices = {key: of for key, of in record.slices.items() if key != name or not of["done"]}
    record.write()
    waiting = [name for name in args.names or known if not record.slices.get(name, {}).get("done")]
    for number, name in enumerate(waiting):
        done = work(known[name], where, folder, deadline, whole=number == 0)
        record = Record(path)
        told = zip(line(record.of(name)), (*OUTCOMES, "seconds"), strict=True)
        print(f"{name}:", ", ".join(map(" ".join, told)), flush=True)
        if folder == RESULTS:
            PAGE.write_text(page(record.slices))
        if not done:
            print(f"The time of this call is over, {len(waiting) - number} are left: run it again.", flush=True)
            break
    failed = [name for name, of in record.slices.items() if int(line(of)[1])]
    sys.exit(f"failed: {', '.join(failed)}; the reasons are in {path} and {folder / 'scratch'}" if failed else 0)


def stopped(*_: Any) -> None:
    """At SIGTERM: an exception, so that no process is left behind."""
    sys.exit("error: terminated")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stopped)
    main()
