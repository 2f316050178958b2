"""Train and evaluate with a LightningCLI configuration: fit, validate, test, predict."""

from __future__ import annotations

import argparse

METHODS = {
    "fit": "train with a LightningCLI configuration",
    "validate": "run the validation of a LightningCLI configuration",
    "test": "run the test of a LightningCLI configuration",
    "predict": "run the prediction of a LightningCLI configuration",
}
EXAMPLES = """examples:
  lightning-tricks {0} -c config.yaml --trainer.callbacks+=EMA
  lightning-tricks {0} -c config.yaml -c overlay.yaml --ckpt_path last.ckpt
  lightning-tricks {0} -c config.yaml --trainer.strategy ddp_bf16 --trainer.devices 2
  lightning-tricks {0} -c config.yaml --print_config
  lightning-tricks {0} --trainer.callbacks.help EMA"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parsers of the four commands."""
    for name, what in METHODS.items():
        method = commands.add_parser(
            name,
            help=what,
            usage=f"lightning-tricks {name} [-c CONFIG ...] [any other argument of LightningCLI]",
            description="Run LightningCLI with lightning_tricks imported: short names (EMA) and strategy presets"
            " (ddp_bf16) work, also in YAML, and classes of the current folder are found. Later configurations override"
            " earlier ones; `callbacks+:` adds to the earlier callbacks.",
            epilog=EXAMPLES.format(name),
            allow_abbrev=False,
        )
        method.add_argument("--help-all", action="store_true", help="show every argument of LightningCLI and exit")


def run(options: argparse.Namespace) -> None:
    """Run the command."""
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    import lightning_tricks  # noqa: F401  Registers short names and presets.
    from lightning_tricks_cli.runs.lightning import Prepared

    prepared = Prepared(args=[options.command, *(["--help"] if options.help_all else options.others)])
    try:
        prepared.run()
    except MisconfigurationException:
        raise
    except Exception:
        options.debug = True  # The user's own code has failed and needs the traceback.
        raise
    if options.command == "fit":
        print(prepared.what_is_next(options.others), end="")
