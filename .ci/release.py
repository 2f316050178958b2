"""``python .ci/release.py v0.1.0``: whether the tag may be released; prints its notes, which CHANGELOG.md has.

A tag may be released if it names the package's version, CHANGELOG.md has that version with a date, and messages install
from PyPI. CONTRIBUTING.md says what to do before.
"""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def problems(tag: str, version: str, changelog: str, source: str) -> list[str]:
    """Why the tag must not be released."""
    found = []
    if tag != f"v{version}":
        found.append(f"the tag is {tag}, the version in lightning_tricks/__init__.py {version}")
    if not re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE):
        found.append(f"CHANGELOG.md has no line '## [{version}] - YYYY-MM-DD'")
    if source:
        found.append(f"SOURCE in lightning_tricks/core/install.py is not empty, but {source!r}")
    return found


def notes(version: str, changelog: str) -> str:
    """What CHANGELOG.md says of a version before the first heading of a part."""
    _, _, rest = changelog.partition(f"## [{version}]")
    return re.split(r"^##", rest.partition("\n")[2], maxsplit=1, flags=re.MULTILINE)[0].strip() + "\n"


if __name__ == "__main__":
    package = (ROOT / "lightning_tricks" / "__init__.py").read_text()
    (number,) = re.findall(r'^__version__ = "(.+)"$', package, re.MULTILINE)
    changes = (ROOT / "CHANGELOG.md").read_text()
    installed = runpy.run_path(str(ROOT / "lightning_tricks" / "core" / "install.py"))["SOURCE"]
    if wrong := problems(sys.argv[1], number, changes, installed):
        sys.exit("".join(f"error: {each}\n" for each in wrong))
    print(notes(number, changes), end="")
