"""The training in a process of its own, which can be killed; without pytest, which a child would have to import."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from fsspec.implementations.local import LocalFileOpener
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import LambdaCallback

from tests.faults.runs import train
from tests.ranks import _context as processes  # its forkserver has imported torch and Lightning

PAUSE = 0.001  # s between two pieces of a file, so that kills find files half written
TIMEOUT = 120


class TellingIO(TorchCheckpointIO):
    """Tells when a save begins and ends."""

    def __init__(self, parent: Connection) -> None:
        self.parent = parent

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.parent.send("saving")
        super().save_checkpoint(*args, **kwargs)
        self.parent.send("saved")


def write_slowly(file: Any, content: bytes) -> None:
    size = len(content) // 4 + 1
    for start in range(0, len(content), size):
        file.write(content[start : start + size])
        file.flush()
        time.sleep(PAUSE)


def slow_disk(temporary: Path, across: bool) -> None:
    """Make this process write checkpoints slowly, with its temporary files on another file system if ``across``.

    Lightning writes into the folder for temporary files and moves the file from there, which is a rename within one
    file system and a copy onto the final name across two.
    """

    def refuse(source: Any, target: Any, **_: Any) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    def copy(source: Any, target: Any, **_: Any) -> Any:
        with Path(target).open("wb") as file:
            write_slowly(file, Path(source).read_bytes())
        return target

    temporary.mkdir(parents=True, exist_ok=True)
    tempfile.tempdir = str(temporary)
    LocalFileOpener.write = lambda self, content: write_slowly(self.f, content)
    if across:
        os.rename, shutil.copyfile = refuse, copy


def child(
    folder: Path, ckpt_path: Path | None, across: bool, trained: Callable[..., L.Trainer], parent: Connection
) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # "Checkpoint directory exists and is not empty"
    torch.set_num_threads(1)
    slow_disk(folder.parent / "tmp", across)
    started = LambdaCallback(on_train_start=lambda *_: parent.send("training"))
    try:
        train(folder, ckpt_path, keep=2, trained=trained, callbacks=(started,), plugins=[TellingIO(parent)])
    except BaseException:
        parent.send(traceback.format_exc())
        raise


class Ended(NamedTuple):
    last: str  # what the process said last: "training", "saving" or "saved"
    killed: bool
    seconds: float  # since it said "training"


def train_in_child(
    folder: Path, ckpt_path: Path | None, across: bool, trained: Callable[..., L.Trainer], delay: float = TIMEOUT
) -> Ended:
    """Train in a process that is killed ``delay`` seconds after it began to."""
    receiver, sender = processes.Pipe(duplex=False)
    process = processes.Process(target=child, args=(folder, ckpt_path, across, trained, sender))
    process.start()
    sender.close()
    try:
        receiver.poll(TIMEOUT)
        start = time.perf_counter()
        process.join(delay)
        seconds = time.perf_counter() - start
    finally:
        process.kill()
        process.join()
    code, heard = process.exitcode, ["nothing", *messages(receiver)]
    receiver.close()
    process.close()
    assert code in (0, -signal.SIGKILL), heard[-1]
    assert heard[-1] in ("nothing", "training", "saving", "saved"), heard[-1]
    return Ended(heard[-1], code != 0, seconds)


def messages(receiver: Connection) -> Iterator[str]:
    while True:
        try:
            yield receiver.recv()
        except EOFError:
            return
