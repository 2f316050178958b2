"""``pytest -p tests.pytorch_lightning.namespace``: the tests themselves with ``pytorch_lightning`` in their imports.

They are loaded as ``pytorch_lightning_tricks`` is, here and in the processes of ``tests.ranks``; without pytest's own
rewriting, so that an ``assert`` that fails tells only its line.
"""

from __future__ import annotations

import multiprocessing
import sys
from importlib import import_module

from pytorch_lightning_tricks.loader import Finder

sys.meta_path.insert(0, Finder("tests"))
import_module("tests.ranks")  # which has a list of its own of what a process loads first
multiprocessing.set_forkserver_preload([__name__, "tests.ranks_preload"])
