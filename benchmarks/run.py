"""Run the benchmarks of ``cost/``: what tricks cost, beside their peers and their physical floors.

``python benchmarks/run.py [NAMES]`` measures those named, or all, prints tables and writes a JSON file for each into
``--output``. Those of ``gpu/`` train networks of a size for a GPU: they run by name, on a CPU with ``--reduced`` alone.
Only a full run on a CPU into the folder of the committed figures also renews the tables and the pictures. A
benchmark that fails leaves a record that says so, beside committed figures in ``scratch/``, so that these stay; the
others are run, and the exit code is 1.
In every round all contenders of a case take their turn, shuffled, in one process; figures are medians with the least
and the most, ratios medians of the ratios within a round, since the load of a machine drifts.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import scaling
import torch
from machine import lent, prepare
from picture import draw
from rows import Row, written
from settings import SEED, Settings
from tables import markdown, renew

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
CRASHED = "the benchmark"  # the case of a row


def discovered(folder: str = "cost") -> dict[str, ModuleType]:
    """The benchmarks by name: each has NAME, PEERS, ``run(settings) -> rows`` and ``targets(rows)``."""
    modules = [import_module(f"{folder}.{path.stem}") for path in sorted((HERE / folder).glob("[!_]*.py"))]
    return {module.NAME: module for module in modules}


def measured(benchmark: ModuleType, settings: Settings) -> dict[str, Any]:
    """The result of one benchmark, as it is written; of one that fails, the reason."""
    torch.manual_seed(SEED)
    try:
        rows = benchmark.run(settings)
        targets = benchmark.targets(rows)
    except Exception as error:  # whatever it is, the others' figures are not lost
        traceback.print_exc()
        rows = [Row(CRASHED, benchmark.NAME, "", None, note=f"failed: {type(error).__name__}: {error}")]
        targets = []
    gc.collect()
    return {
        "benchmark": benchmark.NAME,
        "machine": lent(settings.device, *benchmark.PEERS),
        "settings": settings.noted,
        "rows": [row._asdict() for row in rows],
        "targets": targets,
    }


def main() -> None:
    """Measure, print, write."""
    costs, larger = discovered(), discovered("gpu")
    benchmarks = {**costs, **larger}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", metavar="NAMES", help=f"of {', '.join(benchmarks)}; all of cost/ by default"
    )
    parser.add_argument("--reduced", action="store_true", help="fewer rounds and sizes, to see that it works")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--without-peers", action="store_true", help="where one is not installed its rows say so")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="1 on a machine that others use")
    parser.add_argument("--output", type=Path, help=f"the folder; {RESULTS}, or if reduced scratch/ beside it")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in benchmarks]:
        parser.error(f"there is no benchmark {', '.join(unknown)}; there are {', '.join(benchmarks)}")
    if not args.reduced and args.device == "cpu" and (slow := [name for name in args.names if name in larger]):
        parser.error(f"{', '.join(slow)} would take days on a CPU: add --device cuda, or --reduced")
    torch.set_num_threads(args.threads)
    output = args.output or (RESULTS / "scratch" if args.reduced else RESULTS)
    output.mkdir(parents=True, exist_ok=True)
    names = args.names or list(costs)
    prepare([] if args.without_peers else sorted({peer for name in names for peer in benchmarks[name].PEERS}))
    failed = []
    for name in names:
        begin = time.perf_counter()
        result = measured(benchmarks[name], Settings("reduced" if args.reduced else "full", args.device))
        crashed = result["rows"][0]["case"] == CRASHED
        folder = output / "scratch" if crashed and output.resolve() == RESULTS else output
        folder.mkdir(exist_ok=True)
        (folder / f"{name}{'' if args.device == 'cpu' else '_cuda'}.json").write_text(written(result))
        print(f"{markdown(result)}\n({time.perf_counter() - begin:.0f} s)\n", flush=True)
        failed += [name] if crashed else []
    if output.resolve() == RESULTS and args.device == "cpu" and not args.reduced:
        renew(list(costs))
        draw(RESULTS)
        scaling.draw(RESULTS)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}; the reasons are above")


if __name__ == "__main__":
    main()
