"""Runs that go on in another session: the records that ``compare`` keeps of them, in a file that is committed.

Benchmarks of many hours are run bit by bit. Before one begins, the records in its file are put where ``compare`` looks
for them, and in the end, however that comes, the file has all that there are, beside those it has by then. ``compare``
refuses records of other versions of torch and Lightning, and of other initial weights, modules, data and callbacks;
``kept_runs`` refuses those of other settings of the benchmark.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rows import written

NOTES = "notes.json"  # of what was measured beside the runs, once for each contender


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
    for name, content in (_records(file, settings) if file else {}).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    try:
        yield folder
    finally:
        if file:
            _write(folder, file, settings)
    shutil.rmtree(folder)


def _records(file: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The records in the file by their names, none if there is no file."""
    if not file.exists():
        return {}
    kept, now = json.loads(file.read_text()), json.loads(json.dumps(settings))
    if kept["settings"] != now:
        raise ValueError(
            f"{file} has runs of other settings: {kept['settings']}, now {now}. Run with those again, or remove the"
            " file, and all is measured anew."
        )
    return {record["file"]: record["content"] for record in kept["records"]}


def _write(folder: Path, file: Path, settings: Mapping[str, Any]) -> None:
    paths = [path for path in sorted(folder.rglob("*.json")) if not _unfinished(path.parent)]
    mine = {path.relative_to(folder).as_posix(): json.loads(path.read_text()) for path in paths}
    kept = _records(file, settings)  # what another checkout has put into the file stays
    notes = {name: kept.get(name, {}) | mine[name] for name in mine if Path(name).name == NOTES}
    records = kept | mine | notes
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [{"file": name, "content": records[name]} for name in sorted(records, key=Path)]
    file.write_text(written({"settings": settings, "records": lines}))


def _unfinished(run: Path) -> bool:
    """Whether this is the folder of a run that has no record."""
    return run.name.startswith("seed") and not run.with_suffix(".json").exists()
