"""The shape of the package: who imports what, and that nothing of a trick is forgotten."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from lightning.pytorch.callbacks import Callback

import lightning_tricks as lt
from lightning_tricks.core.trick import Trick
from lightning_tricks_cli.cards import every_name
from tests import fresh
from tests.conformance.matrix import NO_ROW
from tests.conformance.settings import SETTINGS
from tests.conformance.trick import public_name
from tests.public import KINDS
from tests.test_clients import left_out, tried

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "lightning_tricks"
COMMAND = ROOT / "lightning_tricks_cli"
MATRIX = json.loads((COMMAND / "matrix.json").read_text())["tricks"]
FILES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))
SOURCES = [file for file in FILES if not file.endswith("__init__.py") and file != "functional.py"]
HEAVY = {
    *("bitsandbytes", "deepspeed", "jsonargparse", "matplotlib", "peft", "pytorch_optimizer", "ray", "rich"),
    *("schedulefree", "skimage", "sklearn", "timm", "torchao", "transformers"),
}

# The floors. What stands on one imports nothing from above it.
STANDARD_LIBRARY = ("core/call_stack.py", "core/checks.py", "core/install.py", "schedules/curves.py")
NO_TRAINER = re.compile(
    r"core/(selection|figures|adapters/\w+|mixed_targets/\w+|safe_load/\w+|batches/(cutting|form|paths)"
    r"|weights/(tensors|local|fsdp2|zero)|averaging/(averages|transfer))\.py"
)
ON_TOP = {"advisor", "examples"}  # may import every kind
MAY_IMPORT = {  # the kinds that a kind may import besides itself and core
    "callbacks": {"checkpoints", "losses", "modules", "schedules"},  # Preemption, LeanLoss, SAMCallback, LRSchedule
    "checkpoints": set(),
    "core": set(),
    "data": set(),
    "evaluation": {"checkpoints"},  # ensembles are made of checkpoint files
    "losses": set(),
    "modules": set(),
    "optimizers": {"schedules"},  # groups of parameters, of which the schedules give each its learning rate
    "schedules": set(),
    "strategies": set(),
}


class Import(NamedTuple):
    module: str
    name: str | None
    at_module_level: bool


@cache
def imports(file: str) -> list[Import]:
    return list(_imports(ast.parse((PACKAGE / file).read_text()), True))


def _imports(node: ast.AST, at_module_level: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, None, at_module_level) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            yield from (Import(str(child.module), alias.name, at_module_level) for alias in child.names)
        for_type_checkers = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or for_type_checkers
        yield from _imports(child, at_module_level and not later)


def top_levels(file: str) -> set[str]:
    return {found.module.split(".")[0] for found in imports(file)}


def ours(file: str, *, at_module_level: bool = False) -> set[str]:
    """The files of the package that a file imports."""
    found = set()
    for module, name, early in imports(file):
        if module.split(".")[0] == PACKAGE.name and (early or not at_module_level):
            paths = ["/".join([*module.split(".")[1:], str(name)]), "/".join(module.split(".")[1:])]
            places = [f"{path}{end}" for path in paths for end in (".py", "/__init__.py")]
            found |= {next(place for place in places if place in FILES)} if places[-1] != "/__init__.py" else set()
    return found


# -- floors -----------------------------------------------------------------------------------------------------------


def test_the_lowest_floor_needs_the_standard_library_only() -> None:
    for file in STANDARD_LIBRARY:
        assert top_levels(file) <= set(sys.stdlib_module_names), file


def test_the_torch_floor_sees_no_trainer() -> None:
    floor = {file for file in FILES if NO_TRAINER.fullmatch(file)}
    assert len(floor) > 15
    allowed = {*sys.stdlib_module_names, "torch", "typing_extensions", "lightning_tricks", *HEAVY}
    for file in floor:
        modules = {found.module for found in imports(file)} - {"lightning.pytorch.utilities.exceptions"}
        assert {module.split(".")[0] for module in modules} <= allowed, file
        assert ours(file) <= {*floor, *STANDARD_LIBRARY}, file


def test_no_kind_imports_another() -> None:
    for file in SOURCES:
        kind = file.split("/")[0]
        imported = {each.split("/")[0] for each in ours(file)}
        assert kind in ON_TOP or imported <= {kind, "core", *MAY_IMPORT[kind]}, file


def test_no_trick_imports_another() -> None:
    """Each file or sub-package of these kinds is a trick."""
    for file in SOURCES:
        kind, trick = file.removesuffix(".py").split("/")[:2]
        if kind in ("callbacks", "modules"):
            others = {each.removesuffix(".py").split("/")[1] for each in ours(file) if each.startswith(f"{kind}/")}
            assert others <= {trick}, file


def test_no_imports_go_in_a_circle() -> None:
    files = {file: ours(file, at_module_level=True) for file in FILES}
    rooms: dict[str, set[str]] = {}
    for file, found in files.items():
        if file.startswith("core/"):
            rooms.setdefault(room(file), set()).update({room(each) for each in found} - {room(file)})
    for graph in (files, rooms):
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            raise AssertionError(f"imports in a circle: {' <- '.join(error.args[1])}") from None


def test_a_file_with_one_importer_says_why_it_is_apart_from_it() -> None:
    """What only one other file needs is read with that file, and is in it unless a reason speaks against it."""
    importers: dict[str, set[str]] = {file: set() for file in FILES}
    for file in FILES:
        for found in ours(file):
            importers[found].add(file)
    for file in (file for file in SOURCES if file.split("/")[0] != "examples" and len(importers[file]) == 1):
        (only,) = importers[file]
        reason = re.search(r"; apart from [^,]+, \w+", (PACKAGE / file).read_text().partition("\n")[0])
        assert reason or only.endswith("__init__.py"), f"{file} is imported by {only} alone: merge them, or say why not"


def room(file: str) -> str:
    """A sub-package of core, or a file beside them."""
    return "/".join(file.split("/")[:2])


def test_what_is_heavy_is_imported_where_it_is_used() -> None:
    for file in FILES:
        found = {each.module.split(".")[0] for each in imports(file) if each.at_module_level}
        assert not found & HEAVY, file


def test_lightning_is_imported_in_one_style() -> None:
    folders = ("lightning_tricks", "lightning_tricks_cli", "benchmarks", "notebooks", "configs", "docs", "tests")
    other = ("tests/clients", "tests/pytorch_lightning")  # as users import it, and the other name of Lightning
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md")]
    files = [path for path in files if not path.relative_to(ROOT).as_posix().startswith(other)]
    assert not [path for path in files if re.search(r"^import lightning\.\w+ as", path.read_text(), re.M)]


def test_only_lightning_pytorch_is_imported() -> None:
    for file in FILES:
        assert "pytorch_lightning" not in top_levels(file), f"{file}: its classes are not those of lightning.pytorch"


FRAMES = {  # what reads stack frames, as functions of sys and inspect give them
    "core/call_stack.py": "the objects and the arguments of the calls that led to one",
    "advisor/non_finite.py": "the line of the user's code that a report names",
}
CTYPES = {
    "core/safe_load/atomic_folder.py": "renameat2 exchanges two names in one step, which Python cannot do",
    "advisor/environment.py": "where the system's libaio is",
}


def test_stack_frames_and_c_functions_are_used_in_few_places() -> None:
    reads = {"sys._getframe", "sys._current_frames", "inspect.currentframe", "inspect.stack"}
    by_name = {name.split(".")[1] for name in reads}
    frames, c_functions = set(), set()
    for file in FILES:
        tree = ast.parse((PACKAGE / file).read_text())
        called = {ast.unparse(call.func) for _, call in calls(tree)}
        if called & reads or {found.name for found in imports(file)} & by_name:
            frames.add(file)
        if "ctypes" in top_levels(file):
            c_functions.add(file)
    assert frames == FRAMES.keys()
    assert c_functions == CTYPES.keys()


def test_a_parser_needs_the_standard_library_only() -> None:
    for path in [COMMAND / "main.py", *(COMMAND / "commands").glob("*.py")]:
        found = _imports(ast.parse(path.read_text()), True)
        loaded = {each.module.split(".")[0] for each in found if each.at_module_level}
        assert loaded <= {*sys.stdlib_module_names, COMMAND.name}, f"{path}: a command's run imports what it needs"


# -- nothing forgotten ------------------------------------------------------------------------------------------------


def test_a_trick_has_all_that_it_needs() -> None:
    """One message names everything that is missing, for every public name of a source file."""
    spec = importlib.util.spec_from_file_location("exports", ROOT / ".ci" / "exports.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(exports := importlib.util.module_from_spec(spec))
    missing = [f"- {found.name} ({found.module}): {what}" for found in exports.public_names() for what in lacks(found)]
    run = [sys.executable, str(ROOT / ".ci" / "exports.py"), "--check"]
    done = subprocess.run(run, capture_output=True, text=True)
    missing += [f"- {done.stderr.strip()}"] if done.returncode else []
    assert not missing, "\nCONTRIBUTING.md says what a trick needs. This is missing:\n" + "\n".join(missing)


def lacks(found: Any) -> Iterator[str]:
    """What a public name lacks, as a list of things to do."""
    name, thing = found.name, getattr(importlib.import_module(found.module), found.name)
    documentation = inspect.getdoc(thing) or ""
    if not documentation.split("\n")[0].endswith("."):
        yield "a docstring whose first line is a sentence that ends with a full stop"
    if "Example:" not in documentation or ">>>" not in documentation:
        yield "an Example: with >>> in its docstring, which runs as a doctest"
    if found.on_top and name not in words("CHANGELOG.md"):
        yield "a line in CHANGELOG.md"
    folder = ROOT / "tests" / found.kind
    if found.on_top and name not in NO_ROW and not any(name in words(str(file)) for file in folder.rglob("test_*.py")):
        yield f"a test in tests/{found.kind}/"
    if found.on_top and name not in every_name():
        yield "its card in lightning_tricks_cli/cards/, whose front matter is its row in lists"
    is_callback = inspect.isclass(thing) and issubclass(thing, Callback)
    if found.on_top and (is_callback or found.kind == "modules") and name not in tried() | left_out():
        yield "a test in tests/clients/of_*.py, or in its entry no_client=, why not (a function: in LEFT_OUT)"
    enrolled = any(public_name(entry) == name for entry in SETTINGS)
    if needs_settings(name, thing) and not enrolled:
        yield "an entry in SETTINGS of tests/conformance/settings.py, which enrols it in every regime"
    if found.on_top and not needs_settings(name, thing) and not enrolled and name not in NO_ROW:
        yield "a line in NO_ROW of tests/conformance/matrix.py, which says where it is tested"
    for entry in (entry for entry in SETTINGS if public_name(entry) == name):
        if SETTINGS[entry].naive is None and not SETTINGS[entry].neutral:
            yield "a naive form, naive=, in its entry in SETTINGS (or neutral=True, if it changes no weights)"
        if entry not in MATRIX:
            yield "a row in the compatibility matrix: run `make matrix`"


@cache
def words(file: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", (ROOT / file).read_text()))


def test_every_name_has_a_row_in_the_matrix_or_a_test_that_is_named() -> None:
    """A row of the conformance suite covers all regimes; ``NO_ROW`` says what has none, and where it is tested."""
    rows = {public_name(row) for row in SETTINGS}
    assert sorted(rows | NO_ROW.keys()) == sorted(lt.__all__)
    assert not rows & NO_ROW.keys()
    assert not [name for name, path in NO_ROW.items() if name not in words(f"tests/{path}")]


def needs_settings(name: str, thing: object) -> bool:
    """Whether it changes how a module trains: callbacks, mixins and schedules."""
    if inspect.isclass(thing):
        return issubclass(thing, Callback) or name.endswith("Mixin")
    return inspect.isfunction(thing) and thing.__annotations__.get("return") == "Schedule"


def test_a_hook_calls_that_of_the_base_class() -> None:
    """``Trick`` and the bases of the kinds do their part in hooks of Lightning, which a subclass must not leave out."""
    for trick in subclasses(Trick):
        for name, method in vars(trick).items():
            bases = [base for base in trick.__mro__[1:] if base.__module__.startswith(f"{PACKAGE.name}.")]
            if hasattr(Callback, name) and callable(method) and any(name in vars(base) for base in bases):
                tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
                calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
                assert f"super().{name}" in calls, f"{trick.__name__}.{name} must call super().{name}(...)"


def subclasses(kind: type) -> Iterator[type]:
    """All subclasses in the package, also of subclasses."""
    for file in SOURCES:
        importlib.import_module(".".join([PACKAGE.name, *Path(file).with_suffix("").parts]))
    for child in kind.__subclasses__():
        yield from (child, *subclasses(child))


def test_every_test_file_is_where_its_package_is() -> None:
    for folder in (ROOT / "tests").iterdir():
        if folder.name in {*KINDS, "core", "examples"}:
            for path in folder.rglob("test_*.py"):
                assert (PACKAGE / path.relative_to(ROOT / "tests").parent).is_dir(), path


# -- prose ------------------------------------------------------------------------------------------------------------

UNCLEAR = (  # what a reader has to read twice
    r"\w: If (it|they) (?!is not clear)",  # a line of Raises: which of the things above?
    r"\binside of\b",
    r"\bfor ever\b",
    r"^ *[])}]+:?  # (?!fmt: skip)",  # a comment that the formatter has torn off its line
)
WORDS = {  # what this package is not to say, and the word of the field for it
    r"\blayers? (right )?behind\b": "after",
    r"\b(runs?|called|comes?|done|loaded|saved) behind\b": "after",
    r"\b(not|cannot be) told apart\b": "inconclusive",
    r"\bdata-?loading\b": "data loading",
    r"\b[Qq]uantis": "quantization",
    r"\b(throws?|thrown|an exception is given|gives an error)\b": "raises",
    r"\b(lr|LR|learning[- ]rate) (falls?|drops?|annealing)\b": "learning-rate decay",
    r"\b(validation|validating|test) passes\b": "evaluation",
    r"\b(has no meaning|makes no sense|is pointless)\b": "not applicable",
}


def test_no_text_says_what_a_reader_has_to_read_twice() -> None:
    unclear = re.compile("|".join(UNCLEAR))
    found = []
    for path in [*PACKAGE.rglob("*.py"), *COMMAND.rglob("*.py")]:
        lines = path.read_text().splitlines()
        found += [f"{path}:{number}: {line.strip()}" for number, line in enumerate(lines, 1) if unclear.search(line)]
    assert not found, "\n".join(found)


def test_what_a_user_reads_has_the_words_of_the_field() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), *(COMMAND / "cards").glob("*.md")]
    found = []
    for path in [*PACKAGE.rglob("*.py"), *COMMAND.rglob("*.py"), *pages]:
        text = re.sub(r"\s+", " ", path.read_text())
        found += [
            f"{path}: {text[max(hit.start() - 40, 0) : hit.end() + 40]!r}: say {word!r}"
            for pattern, word in WORDS.items()
            for hit in re.finditer(pattern, text)
        ]
    assert not found, "\n".join(found)


# -- devices ----------------------------------------------------------------------------------------------------------

MAKERS = {  # torch's functions that make a tensor in host memory unless they are told the device
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "normal"),
    *("ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "sparse_coo_tensor", "tensor", "zeros"),
    *("tril_indices", "triu_indices"),
}
HOST = {  # where tensors without a device are right, by file or folder, or by function
    "advisor/memory/": "estimates compute with fake tensors, outside of a fit",
    "checkpoints/": "files are read into host memory",
    "data/": "samplers and data sets are those of the host",
    "evaluation/": "predictions and figures are gathered in host memory",
    "examples/": "data sets are those of the host",
    "schedules/plot.py": "the stand-ins of weights, for an optimizer that no device has",
    "strategies/fsdp2/checkpoint_files.py": "files are read into host memory",
    "core/lightning/fit_sampler.py checked_lengths": "samplers are those of the host",
    "schedules/lr_finder.py Sweep": "a sum that begins at zero and moves to the device of the first loss",
    "callbacks/data_wait.py DataWait.on_train_epoch_end": "a logged number is in host memory already",
    "callbacks/rewind_on_spike.py RewindOnSpike._rewind": "a logged number is in host memory already",
    "callbacks/skip_non_finite.py SkipNonFinite.on_before_optimizer_step": "a logged number is in host memory already",
    "callbacks/mixup.py Mixup._mix": "numbers drawn on the host, moved to the device of the inputs",
    "callbacks/transforms/cutout.py CutOut.of_batch": "numbers drawn on the host, moved to the device of the images",
    "core/lightning/trainer.py log_metrics": "a logged number is in host memory already",
}


def test_a_tensor_is_made_where_it_is_used() -> None:
    """What is made without ``device=`` is in host memory, and raises where it meets a tensor of a CUDA device."""
    found = {place: call for file in FILES for place, call in made_on_the_host(file)}
    assert not {place: call for place, call in found.items() if not any(place.startswith(known) for known in HOST)}
    assert not [known for known in HOST if not any(place.startswith(known) for place in found)], "no longer needed"


def made_on_the_host(file: str) -> Iterator[tuple[str, str]]:
    """The calls that make tensors and name neither a device nor a generator, which has one; with their places."""
    for function, call in calls(ast.parse((PACKAGE / file).read_text())):
        owner, _, name = ast.unparse(call.func).rpartition(".")
        told = {argument.arg for argument in call.keywords} & {"device", "generator"}
        if owner == "torch" and name in MAKERS and not told:
            yield f"{file} {function}", ast.unparse(call)


def calls(node: ast.AST, function: str = "") -> Iterator[tuple[str, ast.Call]]:
    """The calls in a tree, with the names of the classes and functions that they are in."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            yield function, child
        name = f"{function}.{child.name}".strip(".") if isinstance(child, ast.ClassDef | ast.FunctionDef) else function
        yield from calls(child, name)


# -- in a fresh interpreter -------------------------------------------------------------------------------------------

FRESH = """
import json, sys
import lightning as L
from lightning.pytorch.strategies import StrategyRegistry
strategies = set(StrategyRegistry.available_strategies())
modules = set(sys.modules)
import lightning_tricks
added = sorted(set(StrategyRegistry.available_strategies()) - strategies)
print(json.dumps({"strategies": added, "modules": sorted(set(sys.modules) - modules)}))
"""


def test_importing_registers_the_presets_and_loads_nothing_heavy() -> None:
    """Of this process, whose conftest.py has imported Lightning and then the package."""
    assert not fresh.PYTESTS & {"lightning", "lightning_tricks", *HEAVY}, "nothing would be seen of these"
    assert sorted(fresh.STRATEGIES) == sorted(row["name"] for row in lt.presets())
    assert not fresh.MODULES & HEAVY
    assert {*sys.stdlib_module_names, "lightning_tricks", "lightning", "torch", "torchmetrics"} >= fresh.MODULES


@pytest.mark.slow
def test_so_it_does_in_a_fresh_interpreter() -> None:
    run = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, check=True, cwd=ROOT)
    added = json.loads(run.stdout)
    assert added["strategies"] == sorted(row["name"] for row in lt.presets())
    packages = {name.split(".")[0] for name in added["modules"]}
    assert not packages & HEAVY
    assert "torch.distributed.checkpoint" not in added["modules"], "it takes a tenth of a second"
    assert packages <= {*sys.stdlib_module_names, "lightning_tricks", "lightning", "torch", "torchmetrics"}


def test_the_map_of_the_tests_has_every_folder() -> None:
    tests = ROOT / "tests"
    folders = {path.name for path in tests.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    text = (tests / "README.md").read_text()
    assert folders == set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\|(`.*?)\|", text, re.M))))
    assert all((tests / name).is_file() for name in re.findall(r"`(\w+\.py)`", text))
