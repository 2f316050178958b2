"""The code of docs/your_library.md, as it stands there."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent.parent / "docs" / "your_library.md"


def run(library: str, **names: Any) -> dict[str, Any]:
    """Execute the block of a library beside what it takes for given, and hand back its names."""
    (section,) = re.findall(rf"^## {re.escape(library)}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.S | re.M)
    (block,) = re.findall(r"^```python\n(.*?)^```", section, re.S | re.M)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what others warn of is not tested
        exec(block, names)
    return names
