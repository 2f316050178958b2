"""Runs that go on in another session: the records that ``compare`` keeps of them, in a file that is committed.

Benchmarks of many hours are run bit by bit. Before one begins, the records in its file are put where ``compare`` looks
for them, and in the end, however that comes, the file has all that there are. ``compare`` refuses records of other
versions of torch and Lightning, and of other initial weights, modules, data and callbacks; ``kept_runs`` refuses those
of other settings of the benchmark.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rows import written


@contextmanager
def kept_runs(folder: Path, file: Path | None, settings: Mapping[str, Any]) -> Iterator[Path]:
    """A folder of runs with those in a file, for as long as a benchmark runs.

    Args:
        folder: The folder; it is removed in the end, and left after an error, to go on from it.
        file: The file with the records of finished runs; None for none.
        settings: What the runs depend on, the same for all.

    Raises:
        ValueError: For a file with runs of other settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if file and file.exists():
        _read(folder, file, settings)
    try:
        yield folder
    finally:
        if file:
            _write(folder, file, settings)
    shutil.rmtree(folder)


def _read(folder: Path, file: Path, settings: Mapping[str, Any]) -> None:
    kept, now = json.loads(file.read_text()), json.loads(json.dumps(settings))
    if kept["settings"] != now:
        raise ValueError(
            f"{file} has runs of other settings: {kept['settings']}, now {now}. Run with those again, or remove the"
            " file, and all is measured anew."
        )
    for record in kept["records"]:
        path = folder / record["file"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record["content"]))


def _write(folder: Path, file: Path, settings: Mapping[str, Any]) -> None:
    paths = [path for path in sorted(folder.rglob("*.json")) if not _unfinished(path.parent)]
    records = [{"file": path.relative_to(folder).as_posix(), "content": json.loads(path.read_text())} for path in paths]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(written({"settings": settings, "records": records}))


def _unfinished(run: Path) -> bool:
    """Whether this is the folder of a run that has no record."""
    return run.name.startswith("seed") and not run.with_suffix(".json").exists()
