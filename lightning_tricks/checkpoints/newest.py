"""The newest checkpoint of a run, past those that are damaged or were never finished."""

from __future__ import annotations

import io
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from typing_extensions import override

from lightning_tricks.checkpoints.files import PathLike, path_of
from lightning_tricks.core.safe_load.damage import PROGRAM, damage, is_program, unfinished, zero_tag

__all__ = ["newest_checkpoint"]

UNKNOWN = -1  # a step that is no number
_NAME = re.compile(r"(?!\.).*\.ckpt|\..*\.ckpt\.[0-9a-f]{8}\.old")  # the latter: put_in_place in atomic_folder.py


def newest_checkpoint(folder: PathLike) -> str | None:
    """Find the complete checkpoint of a run that has trained longest, to resume from after a failure.

    Looks for names that end in ``.ckpt`` in the folder and all folders in it: files, and folders of shards by FSDP2 and
    DeepSpeed ZeRO. The newest has the most optimizer steps, as it says itself; of two with the same step, the one with
    the more complete epochs, and then the one that was written last. Clocks and copies of old files therefore matter
    little. A file whose checksums are wrong and a folder whose files are missing, cut off or damaged are left out with
    a warning, and so is a file that does not say its step in a number, if there are others. Files without the states of
    optimizers, such as those of ``save_weights_only=True``, are left out, too.

    Give every run a folder of its own: another run's checkpoint that has trained longer would be the newest, and
    only one of another network is refused when it is loaded.

    Under several processes ``Preemption`` is better, since all of them then go on from what the first process finds.
    Nothing in the files is executed.

    Args:
        folder: The folder of the run on a local or shared disk; it need not exist.

    Returns:
        The path, for ``trainer.fit(ckpt_path=...)``; None if there is none, so that training starts from the beginning.

    Raises:
        TypeError: If the folder is not a path.
        ValueError: For an address, such as ``s3://...``.
        NotADirectoryError: If the folder is a file.

    Example:
        >>> path = newest_checkpoint("runs/a")  # trainer.fit(module, data, ckpt_path=path) begins or goes on
        >>> path is None  # there is no runs/a
        True
    """
    root = path_of("folder", folder)
    if "://" in str(folder):
        raise ValueError(f"folder must be on a disk, got {str(folder)!r}: copy its checkpoints to one.")
    if root.is_file():
        raise NotADirectoryError(f"{root} is one file: name the folder of the run.")
    found: list[_Found] = []
    for path in _candidates(root):
        try:
            record = _record(path)
            if "callbacks" in record:  # what Lightning leaves out of a file of weights only
                epochs = record["loops"]["fit_loop"]["epoch_progress"]["total"]["processed"]
                step, epochs = (each if type(each) is int else UNKNOWN for each in (record["global_step"], epochs))
                found.append(_Found(step, epochs, path.stat().st_mtime_ns, str(path), record["callbacks"]))
        except Exception as error:  # a damaged file can raise almost any exception
            if not path.exists():
                continue  # a link to nothing, or removed meanwhile
            told = str(error) if isinstance(error, _LeftOut) else f"it cannot be read ({type(error).__name__})"
            _warn(path, (unfinished(path) if path.is_dir() else None) or told)
    known = [each for each in found if UNKNOWN not in (each.step, each.epochs)]
    for each in found if known else ():
        if each not in known:
            _warn(Path(each.path), "its global_step and its number of epochs must be integers")
    for each in sorted(known or found, reverse=True):
        is_folder = Path(each.path).is_dir()
        reason = _folder_damage(Path(each.path), each.callbacks) if is_folder else damage(each.path)
        if reason is None:
            return each.path
        _warn(Path(each.path), reason)
    return None


class _Found(NamedTuple):
    step: int
    epochs: int
    modified: int  # nanoseconds since 1970
    path: str
    callbacks: dict[Any, Any]


class _LeftOut(ValueError):
    """Says why a file is left out."""


def _warn(path: Path, reason: str) -> None:
    warnings.warn(f"{path} is left out: {reason}.", stacklevel=3)


def _candidates(root: Path) -> Iterator[Path]:
    """What is named as a checkpoint; folders that are one, and hidden ones, are not searched."""
    for parent, folders, files in os.walk(root):
        yield from (Path(parent, name) for name in (*folders, *files) if _NAME.fullmatch(name))
        folders[:] = [name for name in folders if not name.startswith(".") and not _NAME.fullmatch(name)]


def _record(path: Path) -> dict[str, Any]:
    """The plain values in a checkpoint, among them step and progress; in place of everything else are stubs."""
    if not path.is_dir():
        return _plain(path)
    if (path / "latest").is_file():
        return _plain(sorted(zero_tag(path).glob("*_model_states.pt"))[0])
    return _plain(path / "meta.pt")


def _folder_damage(folder: Path, callbacks: dict[Any, Any]) -> str | None:
    """Why a checkpoint folder cannot be loaded; None if it can."""
    if reason := unfinished(folder):
        return reason
    try:
        if missing := _missing_averages(folder, callbacks):
            return f"it has no averages of {missing}: saving was interrupted"
        if (folder / "latest").is_file():
            _check_zero(zero_tag(folder))
        if (folder / "meta.pt").is_file():
            _require_intact(folder / "meta.pt", "meta.pt")
        for shards in sorted({file.parent for file in folder.rglob("*.distcp")}):  # weights of FSDP2, and averages
            _check_shards(shards)
    except Exception as error:  # a damaged file can raise almost any exception
        return str(error) if isinstance(error, ValueError) else type(error).__name__
    return None


def _missing_averages(folder: Path, callbacks: dict[Any, Any]) -> str | None:
    """The callback whose averages are to be in a folder of their own, which a stock strategy writes last."""
    for key, state in callbacks.items():
        of_average = isinstance(key, str) and key.startswith(("EMA(", "SWA("))
        if of_average and "raw" not in state and not (folder / "averages" / key / ".metadata").is_file():
            return key
    return None


def _check_shards(folder: Path) -> None:
    """Raise unless all values that ``.metadata`` names are there with their checksums."""
    from lightning_tricks.checkpoints.folders import require_full_size
    from lightning_tricks.core.safe_load.metadata import read_metadata

    metadata = read_metadata(folder / ".metadata")
    require_full_size(folder, metadata)
    for place in metadata.storage_data.values():
        with (folder / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            _require_intact(io.BytesIO(file.read(place.length)), place.relative_path)


def _check_zero(tag: Path) -> None:
    """Raise unless the files of all ranks are there with their checksums."""
    from lightning_tricks.checkpoints.zero_folder import OPTIMIZER, by_rank, model_files, require_all_ranks

    for file in sorted(tag.glob("*.pt")):
        _require_intact(file, file.name)
    optimizers = [_plain(file)["optimizer_state_dict"] for file in by_rank(tag, OPTIMIZER)]
    require_all_ranks(optimizers)
    model_files(tag, optimizers)


def _require_intact(file: Path | io.BytesIO, name: str) -> None:
    if not zipfile.is_zipfile(file):
        raise ValueError(f"{name} is cut off")
    if reason := damage(file):
        raise ValueError(f"{name}: {reason}")


def _plain(file: Path) -> dict[str, Any]:
    """What ``torch.save`` wrote, without tensors and objects, none of which is imported, called or read.

    torch itself would run an archive of TorchScript. The headers of all records are read, whose damage would be found
    only when it is too late otherwise.
    """
    if not file.is_file():  # opening a pipe would wait forever
        raise _LeftOut("it is no file")
    if is_program(file):
        raise _LeftOut(PROGRAM)
    with zipfile.ZipFile(file) as archive:
        for record in archive.infolist():
            archive.open(record).close()
        (pickled,) = [name for name in archive.namelist() if re.fullmatch("[^/]+/data.pkl", name)]
        if archive.getinfo(pickled).compress_type != zipfile.ZIP_STORED:
            raise _LeftOut("its records are compressed")
        with archive.open(pickled) as opened:
            loaded = _Unpickler(opened).load()
    return loaded if isinstance(loaded, dict) else {}


class _Unpickler(pickle.Unpickler):
    """Makes stubs in place of tensors and objects, of a new class for every name: a pickle can change a class."""

    @override
    def find_class(self, module: str, name: str) -> Any:
        return type(name, (_Stub,), {})

    @override
    def persistent_load(self, pid: Any) -> Any:
        return _Stub()


class _Stub:
    """Takes whatever a pickle does with an object."""

    def __new__(cls, *_: Any, **__: Any) -> Any:
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def _ignore(self, *_: Any) -> None:
        pass

    append = extend = add = __setstate__ = _ignore
