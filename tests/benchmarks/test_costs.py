"""The benchmarks of what tricks cost run; tables and targets are those of committed figures. No time is asserted."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
RESULTS = BENCHMARKS / "results"
NAMES = sorted(path.stem for path in (BENCHMARKS / "cost").glob("*.py"))
QUICK = ("hard_examples", "schedules")
ROW = ["case", "what", "unit", "median", "min", "max", "floor", "over_floor", "note"]

pytestmark = pytest.mark.filterwarnings("ignore")  # of the peers


@pytest.fixture(autouse=True)
def _found(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # other tests run beside
    yield
    torch.set_num_threads(threads)


def part(name: str) -> Any:
    return importlib.import_module(name)


def committed(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def check(result: dict[str, Any]) -> None:
    assert list(result) == ["benchmark", "machine", "settings", "rows", "targets"]
    assert {"cpu", "cores", "threads", "load", "torch", "lightning"} <= result["machine"].keys()
    assert {"effort", "device", "seed"} <= result["settings"].keys()
    assert result["rows"]
    for row in result["rows"]:
        assert list(row) == ROW
        assert (row["median"] is None) == row["note"].startswith(("failed", "skipped")), "nothing is silently missing"
        if row["max"] is not None:
            assert row["min"] <= row["median"] <= row["max"]
        assert (row["floor"] is None) == (row["over_floor"] is None)
    module = part(f"cost.{result['benchmark']}")
    assert module.targets(part("rows").read(result)) == result["targets"]
    assert all(list(each) == ["what", "limit", "measured", "met"] for each in result["targets"])


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_a_benchmark_runs(name: str) -> None:
    run, benchmarks = part("run"), part("run").discovered()
    result = run.measured(benchmarks[name], part("settings").Settings("tiny"))
    check(result)
    assert result["benchmark"] == name
    assert not [row for row in result["rows"] if row["note"].startswith("failed")]
    assert json.loads(part("rows").written(result)) == json.loads(json.dumps(result))


@pytest.mark.few(12)
@pytest.mark.parametrize("name", NAMES)
def test_the_committed_figures_are_whole(name: str) -> None:
    check(committed(name))


def test_the_tables_are_those_of_the_figures() -> None:
    tables = part("tables")
    text = tables.README.read_text()
    inside = text.split(tables.BEGIN)[1].split(tables.END)[0]
    assert inside.strip() == tables.section(NAMES)
    assert all(f"### {name}\n" in inside for name in NAMES)


@pytest.mark.slow
def test_the_picture_is_drawn(tmp_path: Path) -> None:
    for name in NAMES:
        shutil.copy(RESULTS / f"{name}.json", tmp_path)
    part("picture").draw(tmp_path)
    assert (tmp_path / "overhead.png").read_bytes().startswith(b"\x89PNG")
    assert (RESULTS / "overhead.png").exists()


# -- figures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("measured", "sign", "met"),
    [(1.0, "<=", True), (1.1, "<=", False), (1.0, ">=", True), (0.9, ">=", False), (None, "<=", None)],
)
def test_a_target_is_judged_by_its_limit(measured: float | None, sign: str, met: bool | None) -> None:
    assert part("rows").target("it", measured, sign, 1.0)["met"] is met


def test_ratios_are_those_within_a_round() -> None:
    rows, timing = part("rows"), part("timing")
    measured = timing.Measured({"floor": [1.0, 10.0, 100.0], "ours": [2.0, 30.0, 200.0]}, {})
    floor, ours = rows.rows_of("a case", measured, "floor")
    assert (floor.over_floor, ours.over_floor, ours.median, ours.min, ours.max) == (1.0, 2.0, 30.0, 2.0, 200.0)
    (added,) = rows.added_rows("a case", measured, "floor")
    assert (added.median, added.min, added.max) == (20.0, 1.0, 100.0)


def test_who_fails_is_told_and_the_others_are_measured() -> None:
    def broken() -> None:
        raise AttributeError("renamed")

    rows, timing = part("rows"), part("timing")
    made = {"ours": lambda: lambda: None, "made": broken, "run": lambda: broken}
    found = rows.rows_of("a case", timing.in_turns(timing.works(made, "cpu"), 2), "ours")
    assert [(row.what, row.note) for row in found] == [
        ("ours", ""),
        ("made", "failed: AttributeError: renamed"),
        ("run", "failed: AttributeError: renamed"),
    ]
    assert found[0].median is not None


@pytest.mark.slow
def test_the_rounds_are_counted_without_those_that_warm_up() -> None:
    timing, calls = part("timing"), list[str]()
    turns = timing.works({name: lambda name=name: lambda: calls.append(name) for name in "ab"}, "cpu")
    assert {name: len(each) for name, each in timing.in_turns(turns, 5).times.items()} == {"a": 5, "b": 5}
    assert calls.count("a") == calls.count("b") == 1 + timing.WARM_UP + 5


@pytest.mark.slow
def test_what_needs_too_much_memory_is_skipped_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    scaling = part("cost.scaling")
    monkeypatch.setattr(scaling, "available", lambda device: 10**6)
    found = scaling.run(part("settings").Settings("tiny"))
    assert [row.what for row in found] == list(scaling.MEASURES)
    assert all(row.note.startswith("skipped: memory") for row in found)


@pytest.mark.slow
def test_memory_is_counted_beside_tensors_that_have_none() -> None:
    lazy = torch.nn.LazyLinear(2)
    taken, held = part("space").memory(lambda: torch.ones(256), "cpu", 1024)
    assert (taken, lazy.in_features) == ({"peak": 1.0, "kept": 1.0}, 0)
    assert isinstance(held, torch.Tensor)


@pytest.mark.slow
def test_a_missing_peer_and_an_unknown_name_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, machine = part("run"), part("machine")
    with monkeypatch.context() as patch:
        patch.setattr(machine, "find_spec", lambda name: None)
        patch.setattr(sys, "argv", ["run.py", "ema"])
        with pytest.raises(SystemExit, match=r"missing: ema-pytorch, timm. Run: python -m pip install '.\[bench\]'"):
            run.main()
    monkeypatch.setattr(sys, "argv", ["run.py", "emma"])
    with pytest.raises(SystemExit):
        run.main()
    assert "there is no benchmark emma; there are checkpoints, data_wait, ema," in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["run", "targets"])
def test_a_crash_leaves_a_record_and_the_others_are_measured(
    broken: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run, row = part("run"), part("rows").Row("a case", "it", "us", 1.0)
    for name in ("ema", "schedules"):
        monkeypatch.setattr(part(f"cost.{name}"), "run", lambda settings: [row])
        monkeypatch.setattr(part(f"cost.{name}"), "targets", lambda rows: [])
    monkeypatch.setattr(part("cost.ema"), broken, lambda _: [][0])
    monkeypatch.setattr(sys, "argv", ["run.py", "ema", "schedules", "--threads", "1", "--output", str(tmp_path)])
    with pytest.raises(SystemExit, match="failed: ema;"):
        run.main()
    notes = [json.loads((tmp_path / f"{name}.json").read_text())["rows"][0]["note"] for name in ("ema", "schedules")]
    assert notes == ["failed: IndexError: list index out of range", ""]
    for name in set(NAMES) - {"ema", "schedules"}:
        shutil.copy(RESULTS / f"{name}.json", tmp_path)
    if broken == "run":  # the figures are the same
        part("picture").draw(tmp_path)  # without them
    assert "failed: IndexError" in part("tables").markdown(json.loads((tmp_path / "ema.json").read_text()))


@pytest.mark.slow
def test_a_crash_leaves_committed_figures_as_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run, drawn = part("run"), list[str]()
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    monkeypatch.setattr(run, "renew", lambda names: drawn.append("tables"))
    monkeypatch.setattr(run, "draw", lambda folder: drawn.append("costs"))
    monkeypatch.setattr(run.scaling, "draw", lambda folder: drawn.append("growth"))
    monkeypatch.setattr(part("cost.ema"), "run", lambda settings: [][0])
    monkeypatch.setattr(sys, "argv", ["run.py", "ema", "--threads", "1"])
    before = (RESULTS / "ema.json").read_text()
    (tmp_path / "ema.json").write_text(before)
    with pytest.raises(SystemExit, match="failed: ema;"):
        run.main()
    assert (tmp_path / "ema.json").read_text() == before
    assert json.loads((tmp_path / "scratch" / "ema.json").read_text())["rows"][0]["note"].startswith("failed: Index")
    assert drawn == ["tables", "costs", "growth"]


@pytest.mark.slow
def test_a_peer_that_fails_costs_its_own_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = part("cost.checkpoints")
    monkeypatch.setitem(checkpoints.CALLBACKS, checkpoints.LIGHTNING, lambda: 1 // 0)
    rows = checkpoints.run(part("settings").Settings("tiny"))
    assert {row.what for row in rows if row.note} == {checkpoints.LIGHTNING}
    assert [each["met"] for each in checkpoints.targets(rows)] == [None] * 3
    assert {"size, tiny", "save, tiny", "resume, tiny"} == {row.case for row in rows if row.median is not None}


@pytest.mark.parametrize("what", ["reduced", "cuda"])
def test_no_other_run_touches_the_committed_tables(what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = part("run")
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    monkeypatch.setattr(run, "measured", lambda *_: {**committed("ema"), "benchmark": "ema"})
    for name in ("renew", "draw"):
        monkeypatch.setattr(run, name, lambda *_: pytest.fail("renewed"))
    option = ["--reduced"] if what == "reduced" else ["--device", "cuda"]
    monkeypatch.setattr(sys, "argv", ["run.py", "ema", "--threads", "1", *option, "--output", str(tmp_path)])
    run.main()
    assert (tmp_path / ("ema.json" if what == "reduced" else "ema_cuda.json")).exists()


# -- contenders do the same work --------------------------------------------------------------------------------------


def weights_with_gradients() -> list[torch.Tensor]:
    weights = [torch.nn.Parameter(torch.randn(3)) for _ in range(4)]
    for weight in weights:
        weight.grad = torch.randn(3)
    return weights


@pytest.mark.parametrize("name", ["floor", "ours", "peer"])
def test_sam_restores_the_weights(name: str) -> None:
    weights = weights_with_gradients()
    before = [weight.detach().clone() for weight in weights]
    getattr(part("cost.sam"), name)(weights)()
    assert all(torch.equal(old, weight) for old, weight in zip(before, weights, strict=True))


@pytest.mark.parametrize("kind", ["SharpNet", "PeerNet"])
def test_a_sam_step_has_two_passes(kind: str) -> None:
    sam, fitted, passes = part("cost.sam"), part("fitted"), list[int]()
    network = fitted.tiny()
    network.register_forward_hook(lambda *_: passes.append(1))
    fitted.fit(getattr(sam, kind)(network), fitted.drawn((4, 32), 4, "cpu"), 3, every=1)
    assert len(passes) == 2 * 3


@pytest.mark.parametrize("name", ["our", "lightning"])
def test_a_swap_shows_other_weights_and_gives_them_back(name: str) -> None:
    ema, fitted = part("cost.ema"), part("fitted")
    module = fitted.Net(fitted.tiny())
    show, hide = getattr(ema, f"{name}_swap")(module, "cpu").values()
    with torch.no_grad():
        module.net[0].weight += 1
    before = module.net[0].weight.detach().clone()
    show()
    assert not torch.equal(module.net[0].weight, before)
    hide()
    assert torch.equal(module.net[0].weight, before)


@pytest.mark.parametrize("kind", ["Mixup", "Mixup(per_sample)", "CutMix"])
def test_mixing_does_the_work_that_timm_does(kind: str) -> None:
    mixup = part("cost.mixup")
    make, settings = mixup.KINDS[kind]
    callback, (x, y, _), logits = make(), mixup.drawn((6, 3, 8, 8), "cpu"), torch.randn(6, 1000)
    before = x.clone()
    mixed, target = mixup.our_mixed(callback)(x, y)
    assert torch.equal(x, before)
    assert not torch.equal(mixed, x)
    lam, index = torch.as_tensor(callback.drawn.lam).reshape(-1, 1), callback.drawn.index
    lam = lam if kind != "CutMix" or lam >= 0.5 else 1 - lam  # else the target's first label is the partner's
    first, second = (y, y[index]) if torch.equal(target.branches[0], y) else (y[index], y)
    dense = lam * F.one_hot(first, 1000) + (1 - lam) * F.one_hot(second, 1000)
    torch.testing.assert_close(F.cross_entropy(logits, target), F.cross_entropy(logits, dense.float()))
    theirs, soft = mixup.timm_mixed(1000, "cpu", **settings)(x, y)
    assert theirs is x
    torch.testing.assert_close(soft.sum(1), torch.ones(6))


def test_a_turn_takes_its_steps() -> None:
    schedules = part("cost.schedules")
    for what, kind in schedules.SCHEDULERS.items():
        lrs = []

        def spied(optimizer: Any, kind: Any = kind, lrs: list[float] = lrs) -> Any:
            step = kind(optimizer)
            return lambda: (step(), lrs.append(optimizer.param_groups[2]["lr"]))

        schedules.steps_of(spied, 3)()
        assert len(lrs) == schedules.STEPS, what


def test_a_guards_step_calls_the_hooks_of_a_step() -> None:
    called: list[str] = []

    class Notes:
        def __getattr__(self, name: str) -> Any:
            return lambda *_: called.append(name)

    fake = type("Fake", (), {"optimizers": [None], "device": "cpu"})
    part("cost.guards").step_of(Notes(), fake, fake, None)
    assert called == ["on_train_batch_start", "on_before_backward", "on_before_optimizer_step", "on_train_batch_end"]
