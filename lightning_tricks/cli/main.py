"""``python -m lightning_tricks.cli.main``: the same as ``python -m lightning_tricks_cli.main``, and slower to start."""

from __future__ import annotations

import sys

from lightning_tricks_cli.main import main, parser

__all__ = ["main", "parser"]

if __name__ == "__main__":
    sys.exit(main())
