"""A release: one address everywhere, workflows that run what there is, notes, links on PyPI that lead somewhere."""

from __future__ import annotations

import re
import runpy
import subprocess
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_tricks import __version__
from lightning_tricks.core.install import REPOSITORY, SOURCE, pip_install

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = import_module(next(filter(find_spec, ("tomllib", "tomli")))).loads((ROOT / "pyproject.toml").read_text())
OWNER, NAME = REPOSITORY.removeprefix("https://github.com/").split("/")
SITE = f"https://{OWNER}.github.io/{NAME}/"
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()


def tracked() -> dict[str, str]:
    """Every text of the repository."""
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    paths = [ROOT / name for name in listed if name]
    texts = {}
    for path in paths:
        if path.suffix not in (".png", ".ckpt", ".safetensors") and path.is_file():
            texts[str(path.relative_to(ROOT))] = path.read_text(errors="ignore")
    return texts


def test_there_is_one_address() -> None:
    """Of the repository and of its site, wherever one is written."""
    assert SOURCE in ("", f" @ git+{REPOSITORY}")
    kinds = r"github\.com/|raw\.githubusercontent\.com/|colab\.research\.google\.com/github/"
    site = r"([\w-]+\.github\.io/lightning[-_]tricks)\b"
    address = re.compile(rf"(?:{kinds})([\w.-]+/lightning[-_]tricks)\b|{site}", re.IGNORECASE)
    found = {where: {one or two for one, two in address.findall(text)} for where, text in tracked().items()}
    wrong = {where: each - {f"{OWNER}/{NAME}", SITE[8:-1]} for where, each in found.items()}
    assert not {where: each for where, each in wrong.items() if each}
    assert {"README.md", "pyproject.toml", "SECURITY.md", "CITATION.cff", "notebooks/6_scaling_out.ipynb"} <= {
        where for where, each in found.items() if each
    }


def test_what_installs_from_the_repository_does_so_as_the_messages_do() -> None:
    sources = {
        where: set(re.findall(r" @ git\+[\w:/.-]+", text))
        for where, text in tracked().items()
        if not where.startswith((".ci/", "tests/"))
    }
    assert {source for each in sources.values() for source in each} == ({SOURCE} if SOURCE else set())
    assert pip_install("lora,8bit") == f"pip install 'lightning-tricks[lora,8bit]{SOURCE}'"


def test_the_metadata_say_where_and_for_which_pythons() -> None:
    project = PROJECT["project"]
    assert project["urls"] == {
        "Documentation": SITE,
        "Source": REPOSITORY,
        "Issues": f"{REPOSITORY}/issues",
        "Changes": f"{REPOSITORY}/blob/main/CHANGELOG.md",
    }
    minors = [each.split(":")[0] for each in combinations()]
    told = [each.removeprefix("Programming Language :: Python :: ") for each in project["classifiers"]]
    assert [each for each in told if re.fullmatch(r"3\.\d+", each)] == minors
    assert "Typing :: Typed" in project["classifiers"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["repository-code"], citation["url"]) == (__version__, REPOSITORY, SITE)


# -- the description on PyPI ------------------------------------------------------------------------------------------


def description() -> str:
    """README.md with the substitutions of pyproject.toml, as the build makes them."""
    text = (ROOT / "README.md").read_text()
    for each in PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(each["pattern"], each["replacement"], text)
    return text.replace("$HFPR_VERSION", __version__)


def test_the_links_of_the_description_are_absolute_and_lead_to_files() -> None:
    links = re.findall(r'\]\(([^)]+)\)|\b(?:href|src|srcset)="([^"]+)"', description())
    links = [one or two for one, two in links]
    relative = [link for link in links if not link.startswith("https://")]
    assert all(link.startswith("#") for link in relative)
    raw = REPOSITORY.replace("github.com", "raw.githubusercontent.com")
    tag = f"v{__version__}/"
    files = [link for link in links if link.startswith((f"{REPOSITORY}/blob/{tag}", f"{raw}/{tag}"))]
    assert len(files) > 40
    paths = [re.split(rf"/{re.escape(tag)}|#", link)[1] for link in files]
    assert not [path for path in paths if not (ROOT / path).exists()]
    assert {link for link in links if link.startswith(raw)} >= {f"{raw}/v{__version__}/docs/ema_curve.svg"}


# -- workflows --------------------------------------------------------------------------------------------------------


def combinations() -> list[str]:
    found: list[str] = runpy.run_path(str(ROOT / ".ci" / "test_versions.py"))["COMBINATIONS"]
    return found


def workflow(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())
    return found


def commands(found: dict[str, Any]) -> list[str]:
    return [step["run"] for job in found["jobs"].values() for step in job["steps"] if "run" in step]


def test_the_matrix_of_ci_is_that_of_make_test_versions() -> None:
    assert workflow("ci")["jobs"]["versions"]["strategy"]["matrix"]["combination"] == combinations()
    assert 'make test-versions ONLY="$COMBINATION"' in commands(workflow("ci"))
    assert "make test" in commands(workflow("ci"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_what_there_is_with_few_rights(path: Path) -> None:
    found = workflow(path.stem)
    makefile = (ROOT / "Makefile").read_text()
    for command in commands(found):
        for target in re.findall(r"\bmake ([\w./-]+)", command):
            stamp = f"$(VENV){target.removeprefix('.venv')}"
            assert re.search(rf"^{re.escape(target)}:", makefile, re.M) or stamp in makefile, target
        for script in re.findall(r"\bpython (?:repository/)?((?:\.ci|tests)/\S+\.py)", command):
            assert (ROOT / script).is_file()
        assert "${{" not in command, "what a pull request names must not become a part of a command"
    assert found["permissions"] == {"contents": "write" if path.stem == "docs" else "read"}
    assert all(job["timeout-minutes"] for job in found["jobs"].values())


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_by_commit_and_keep_no_credentials_but_to_push(path: Path) -> None:
    """A tag of an action can be moved, a commit cannot; the version beside it is what dependabot reads and renews."""
    used = re.findall(r"\buses: *(.*)", path.read_text())
    assert used
    assert not [each for each in used if not re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", each)]
    steps = [step for job in workflow(path.stem)["jobs"].values() for step in job["steps"]]
    fetched = [step for step in steps if "actions/checkout@" in step.get("uses", "")]
    kept = [step.get("with", {}).get("persist-credentials", True) for step in fetched]
    assert set(kept) <= {path.stem == "docs"}


def test_a_release_is_built_tried_and_published_without_a_password() -> None:
    jobs = workflow("release")["jobs"]
    assert (jobs["try"]["needs"], jobs["publish"]["needs"], jobs["announce"]["needs"]) == (
        "build",
        ["build", "try"],
        "publish",
    )
    rights = {name: job["permissions"] for name, job in jobs.items() if "permissions" in job}
    assert rights == {"publish": {"id-token": "write"}, "announce": {"contents": "write"}}
    (publish,) = (step for step in jobs["publish"]["steps"] if "gh-action-pypi-publish" in step["uses"])
    assert publish["with"] == {"attestations": True}
    assert "secrets." not in (ROOT / ".github" / "workflows" / "release.yml").read_text()


# -- notes ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def release() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / ".ci" / "release.py"))


def test_the_notes_are_one_page(release: dict[str, Any]) -> None:
    notes = release["notes"](__version__, CHANGELOG)
    assert 25 <= len(notes.splitlines()) <= 60
    assert "###" not in notes


def test_a_tag_that_must_not_be_released_is_refused(release: dict[str, Any]) -> None:
    problems = release["problems"]
    dated = "# Changelog\n\n## [1.2.0] - 2026-11-27\n\nNew.\n\n### Added\n\n- This.\n"
    assert problems("v1.2.0", "1.2.0", dated, "") == []
    assert release["notes"]("1.2.0", dated) == "New.\n"
    assert "the tag is v1.2.1, the version" in problems("v1.2.1", "1.2.0", dated, "")[0]
    assert "has no line '## [1.2.0] - " in problems("v1.2.0", "1.2.0", dated.replace("2026-11-27", "unreleased"), "")[0]
    assert "is not empty" in problems("v1.2.0", "1.2.0", dated, " @ git+https://x")[0]


def test_there_is_a_page_for_whoever_takes_part() -> None:
    github = ROOT / ".github"
    for name in ("bug", "trick"):
        form = yaml.safe_load((github / "ISSUE_TEMPLATE" / f"{name}.yml").read_text())
        assert {"name", "description", "body"} <= form.keys()
        assert len({field["id"] for field in form["body"]}) == len(form["body"])
    (anchor,) = re.findall(r"CONTRIBUTING\.md#([\w-]+)", (github / "pull_request_template.md").read_text())
    assert f"\n## {anchor.replace('-', ' ').capitalize()}\n" in (ROOT / "CONTRIBUTING.md").read_text()
    updates = yaml.safe_load((github / "dependabot.yml").read_text())["updates"]
    assert {update["package-ecosystem"] for update in updates} == {"github-actions", "pip"}


def test_before_a_release_the_address_of_the_documentation_leads_to_the_newest() -> None:
    missing = "mike list | grep -q latest || .venv/bin/mike set-default --push dev"
    assert missing in "\n".join(commands(workflow("docs")))
