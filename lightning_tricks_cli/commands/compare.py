"""Fit a LightningCLI configuration with and without tricks, over seeds."""

from __future__ import annotations

import argparse
from pathlib import Path


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser of the command."""
    compare = commands.add_parser(
        "compare",
        help="fit a configuration with and without tricks, over seeds, and tell whether they help",
        description="Fit a LightningCLI configuration as it is (base) and with changes, all of them with the same"
        " seeds, and print the differences of a metric with their 95% intervals, the verdict, and the ratio of times."
        " Finished runs are kept in the folder of the output: the same command goes on where it was interrupted.",
        epilog="examples:\n"
        "  lightning-tricks compare -c config.yaml --with EMA --with sam.yaml --metric val_accuracy --mode max\n"
        "  lightning-tricks compare -c config.yaml --without EMA --seeds 3 --metric val_loss --mode min",
    )
    compare.set_defaults(run=run)
    compare.add_argument(
        *("-c", "--config"),
        type=Path,
        action="append",
        required=True,
        metavar="YAML",
        help="the configuration that fit takes; later ones override earlier ones",
    )
    compare.add_argument(
        "--with",
        dest="added",
        action="append",
        default=[],
        metavar="TRICK",
        help="a change to the configuration: another file (.yaml), or a callback with its defaults, such as EMA",
    )
    compare.add_argument(
        "--without",
        dest="removed",
        action="append",
        default=[],
        metavar="CALLBACK",
        help="a callback to take out of the configuration, by its class",
    )
    compare.add_argument("--metric", required=True, metavar="NAME", help="a metric logged in validation or test")
    compare.add_argument("--mode", required=True, choices=("max", "min"), help="whether more or less of it is better")
    compare.add_argument("--seeds", type=int, default=5, metavar="N", help="number of seeds (default: 5)")
    compare.add_argument(
        "--output", type=Path, default=Path("compare"), metavar="FOLDER", help="folder of the runs (default: compare)"
    )
    compare.add_argument(
        "--checkpoint",
        choices=("last", "best"),
        default="last",
        help="the weights that are measured: of the end, or those that ModelCheckpoint calls best (default: last)",
    )
    compare.add_argument(
        "--equal-time", action="store_true", help="fit the base also for as long as a change of another time takes"
    )
    compare.add_argument("--plot", type=Path, metavar="OUT", help="write a picture of the differences")
    compare.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> None:
    """Run the command."""
    from lightning_tricks_cli.runs.compare import compare_of

    compare_of(
        options.config,
        added=options.added,
        removed=options.removed,
        plot=options.plot,
        as_json=options.json,
        metric=options.metric,
        mode=options.mode,
        seeds=options.seeds,
        folder=options.output,
        checkpoint=options.checkpoint,
        equal_time=options.equal_time,
    )
