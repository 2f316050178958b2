"""Runs the code of pages and cards, with what they take as given: `python -m tests.newcomer.page PAGE ...`."""

import multiprocessing
import os
import re
import sys
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

import lightning_tricks as lt
from tests.given import of_cards, of_pages


def run(page: Path) -> None:
    """In a folder of its own."""
    given = of_cards() if page.parent.name == "tricks" else of_pages()
    with TemporaryDirectory() as folder:
        os.chdir(folder)
        for code in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M):
            exec(compile(code, page.name, "exec"), given)
        os.chdir("/")


if __name__ == "__main__":
    assert "site-packages" in lt.__file__, f"{lt.__file__} is not the wheel's"
    warnings.simplefilter("ignore")  # of fits of two batches
    multiprocessing.set_start_method("fork")  # what is executed here is in no module that workers import
    for name in sys.argv[1:]:
        run(Path(name))
        print(f"{name} runs", flush=True)
