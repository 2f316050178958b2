"""Average the weights of checkpoint files."""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_tricks_cli.commands.target import add_output


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser of the command."""
    average = commands.add_parser(
        "average",
        help="average the weights of checkpoint files",
        description="Average the weights of checkpoints of one model: Lightning checkpoints, files with a state_dict,"
        " .safetensors. The average of Lightning checkpoints is for testing and deployment, not for resuming. With"
        " --posthoc the files are snapshots of PostHocEMA, and the average is of any length; several lengths write"
        " OUT with the length after its name.",
        epilog="examples:\n"
        "  lightning-tricks average epoch=8.ckpt epoch=9.ckpt -o mean.ckpt --weights 0.3 0.7\n"
        "  lightning-tricks average --posthoc runs/ema --sigma-rel 0.05 0.08 0.13 -o ema.safetensors",
    )
    average.add_argument("checkpoints", type=Path, nargs="*", metavar="CKPT", help="the files to average")
    average.add_argument(
        "--weights", type=float, nargs="+", metavar="W", help="relative weights, one per file (default: equal)"
    )
    average.add_argument("--posthoc", type=Path, metavar="FOLDER", help="a folder of PostHocEMA, in place of files")
    average.add_argument(
        "--sigma-rel", type=float, nargs="+", metavar="S", help="lengths of the average, as shares of training"
    )
    average.add_argument(
        "--step", type=int, metavar="N", help="the optimizer step at which it ends (default: the last)"
    )
    add_output(average)


def run(options: argparse.Namespace) -> None:
    """Run the command."""
    if options.posthoc is None and not options.checkpoints:
        options.parser.error("the following arguments are required: CKPT (or --posthoc with --sigma-rel)")
    if options.posthoc is None and (options.sigma_rel or options.step is not None):
        options.parser.error("--sigma-rel and --step are for the snapshots of --posthoc")
    if options.posthoc is not None:
        if options.checkpoints or options.weights or not options.sigma_rel:
            options.parser.error("--posthoc needs --sigma-rel, and takes no CKPT and no --weights")
        _post_hoc(options)
        return
    from lightning_tricks.checkpoints import average_checkpoints

    average_checkpoints(options.checkpoints, options.output, options.weights, force=options.force)
    print(f"wrote {options.output}")


def _post_hoc(options: argparse.Namespace) -> None:
    from lightning_tricks.checkpoints.files import check_output, save
    from lightning_tricks.checkpoints.post_hoc import averages_of, check_length

    out = options.output
    outputs = [out] if len(options.sigma_rel) == 1 else [_with(out, length) for length in options.sigma_rel]
    for output in outputs:
        check_output(output, force=options.force)
    for length in options.sigma_rel:
        check_length("sigma_rel", length)
    for output, average in zip(outputs, averages_of(options.posthoc, options.sigma_rel, options.step), strict=True):
        save(average, output, force=options.force)
        print(f"wrote {output}")


def _with(output: Path, length: float) -> Path:
    """The name of the file of one of several lengths."""
    return output.with_name(f"{output.stem}-{length:g}{output.suffix}")
