"""The benchmarks for larger networks, on the CPU in a reduced form: those of ``gpu/``, and the language model."""

from __future__ import annotations

import gc
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
NAMES = sorted(path.stem for path in (BENCHMARKS / "gpu").glob("[!_]*.py"))

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


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_runs(name: str) -> None:
    benchmark = part("run").discovered("gpu")[name]
    result = part("run").measured(benchmark, part("settings").Settings("tiny"))
    assert result["benchmark"] == name
    assert not [row["note"] for row in result["rows"] if row["note"].startswith("failed")]
    cases = {row["case"] for row in result["rows"]}
    assert cases & {"peak memory", "peak memory, with weights"}
    for row in result["rows"]:
        assert row["median"] is None or row["min"] <= row["median"] <= row["max"]
    assert json.loads(part("rows").written(result)) == json.loads(json.dumps(result))


def test_the_networks_are_of_the_sizes_that_are_named() -> None:
    with torch.device("meta"):
        sizes = {
            "resnet18": part("gpu.resnet18").network(1.0),
            "vit_small": part("gpu.vit_small").network(32, 384, 12),
            "gpt": part("language_model").Network(part("language_model").Shape(12, 768, 12, 1024, 50257)),
            "language model": part("language_model").Network(part("language_model").FULL.shape),
        }
        llama = part("gpu.lora_7b").Llama(4096, 32, 32000)
        llama.configure_model()
    counts = {name: sum(weight.numel() for weight in net.parameters()) for name, net in sizes.items()}
    millions = {name: round(count / 1e6, 1) for name, count in counts.items()}
    assert millions == {"resnet18": 11.2, "vit_small": 21.4, "gpt": 124.4, "language model": 1.1}
    assert 6.7e9 < sum(weight.numel() for weight in llama.parameters()) < 6.8e9
    for name, count in millions.items():
        if name != "language model":
            page = part(f"gpu.{name}").__doc__
            assert f"{count:.0f} million weights" in page or f"{count} million weights" in page


def test_one_on_a_cpu_is_refused_unless_reduced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "gpt"])
    with pytest.raises(SystemExit) as ended:
        part("run").main()
    assert ended.value.code == 2
    assert "gpt would take days on a CPU: add --device cuda, or --reduced" in capsys.readouterr().err


def test_a_machine_has_the_versions_of_what_is_installed_under_whatever_name_it_is_imported() -> None:
    found = part("machine").machine("scikit-learn", "pytorch-optimizer", "no-such-package")
    assert {"scikit-learn", "pytorch-optimizer", "torch"} <= found.keys()
    assert "no-such-package" not in found


# -- data -------------------------------------------------------------------------------------------------------------


def test_glyphs_are_the_same_every_time_and_the_test_has_other_fonts() -> None:
    glyphs = part("glyphs")
    first, again = (glyphs.load_glyphs.__wrapped__(16, 40, 20) for _ in range(2))
    for name, (images, labels) in first.items():
        assert torch.equal(images, again[name][0])
        assert torch.equal(labels, again[name][1])
        assert images.shape == (40 if name == "train" else 20, 3, 16, 16)
        assert images.std() == pytest.approx(1.1, abs=0.4)
    assert not {*glyphs.FONTS["train"]} & {*glyphs.FONTS["test"]}


def test_documentation_is_read_and_not_run(tmp_path: Path) -> None:
    corpus = part("corpus")
    (tmp_path / "a.py").write_text('"""One."""\nraise SystemExit\n\ndef f():\n    """Two."""\n')
    (tmp_path / "b.py").write_text("print 'of another Python'\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "c.py").write_text('"""Left out."""\n')
    assert [*corpus.documented(tmp_path)] == ["One.", "Two."]


def test_a_byte_is_predicted_from_those_before_it() -> None:
    inputs, following = part("corpus").byte_sequences("abcdefgh", 3)
    assert [bytes(row) for row in inputs.tolist()] == [b"abc", b"def"]
    assert [bytes(row) for row in following.tolist()] == [b"bcd", b"efg"]


@pytest.mark.slow
def test_the_documentation_of_what_is_installed_is_read() -> None:
    texts = part("corpus").load_documentation(30)
    parts = [{*text.split("\n\n")} for text in texts.values()]
    assert sum(map(len, texts.values())) > 1000
    assert all(parts)


# -- the language model -----------------------------------------------------------------------------------------------


def test_the_language_model_sees_no_byte_that_it_predicts() -> None:
    language = part("language_model")
    network = language.Network(language.REDUCED.shape).eval()
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    before = network(tokens)
    tokens[:, 10:] = 0
    assert torch.allclose(network(tokens)[:, :10], before[:, :10], atol=1e-5)
    assert not torch.allclose(network(tokens)[:, 10:], before[:, 10:], atol=1e-2)


@pytest.mark.slow
def test_a_post_hoc_average_is_that_of_the_length_with_the_lowest_validation_loss(tmp_path: Path) -> None:
    import lightning as L

    import lightning_tricks as lt

    language = part("language_model")
    weights = {}
    for name in ("plain", "chosen"):
        L.seed_everything(0, verbose=False)
        folder = tmp_path / name / "seed1"
        trainer, module, data = language.contenders(language.REDUCED)["PostHocEMA"].fit(1e-2, 8, folder)
        if name == "plain":
            trainer.callbacks = [each for each in trainer.callbacks if not isinstance(each, language.PostHocLength)]
        trainer.fit(module, data)
        weights[name] = {key: value.clone() for key, value in module.state_dict().items()}
    assert not (tmp_path / "chosen" / "seed1" / "snapshots").exists()

    def score(average: dict[str, torch.Tensor]) -> float:
        module.load_state_dict(average, strict=False)
        (found,) = trainer.validate(module, data, verbose=False)
        return found["val_loss"]

    snapshots = tmp_path / "plain" / "seed1" / "snapshots"
    best = lt.post_hoc_sweep(snapshots, score, mode="min").best
    expected = lt.post_hoc_average(snapshots, sigma_rel=best)
    assert all(torch.equal(weights["chosen"][key], value.to(weights["chosen"][key])) for key, value in expected.items())
    assert any(not torch.equal(weights["plain"][key], value) for key, value in expected.items())


@pytest.mark.slow
def test_every_contender_of_the_language_model_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    language = part("language_model")
    monkeypatch.setattr(language, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["language_model.py", "--reduced"])
    language.main()
    gc.unfreeze()
    (written, picture) = sorted((tmp_path / "scratch").iterdir())  # the runs are gone
    found = json.loads(written.read_text())
    assert [row["trick"] for row in found["rows"]] == [*language.TRICKS]
    assert {curve["trick"] for curve in found["curves"]} == {*language.TRICKS}
    for curve in found["curves"]:
        steps, seconds, losses = zip(*curve["points"], strict=True)
        assert list(steps) == sorted(steps)
        assert list(seconds) == sorted(seconds)
        assert all(0 < loss < 10 for loss in losses)
    assert picture.read_text().startswith("<?xml")
    assert "AdEMAMix" in picture.read_text()


@pytest.mark.parametrize("samples", [5, 12])
def test_an_epoch_is_as_long_as_the_run_asks(samples: int) -> None:
    sampler = part("tuned").shuffled(range(samples), 2, SimpleNamespace(limit_train_batches=4))
    drawn = [*sampler]
    assert len(drawn) == max(samples, 8)
    counts = {drawn.count(each) for each in range(samples)}
    assert counts <= ({1, 2} if samples == 5 else {1})


def test_what_has_a_cosine_is_compared_with_the_best_cosine_seed_by_seed() -> None:
    language = part("language_model")
    again = ", 3 times the rate"
    losses = {"plain": (2.0, 2.1), "cosine": (2.2, 2.4), "cosine" + again: (2.0, 2.2), "cosine, EMA": (2.3, 2.5)}
    losses |= {"EMA": (1.0, 1.0), "cosine, Lion": (1.2, 1.4), "cosine, Lion" + again: (1.6, 1.5)}
    runs = [
        {"part": "finals", "trick": trick, "seed": seed, "val_loss": loss, "test_loss": loss}
        for trick, of in losses.items()
        for seed, loss in enumerate(of)
    ]
    assert {name: gain["points"] for name, gain in language.over_cosine({"runs": runs}).items()} == {
        "cosine, Lion": pytest.approx(80),
        "cosine, EMA": pytest.approx(-30),
    }
    assert language.told_over_cosine({"runs": runs}) == (
        "- **Over AdamW with the best cosine.** Lion **+80.0** (+80.0 to +80.0); EMA **-30.0** (-30.0 to -30.0)."
    )
    alone = [run for run in runs if "cosine" not in run["trick"]]
    assert language.told_over_cosine({"runs": alone}) == ""


def test_the_headline_is_the_best_in_as_many_steps_and_tells_what_longer_training_gains() -> None:
    most = part("finetune_report").most

    def row(trick: str, points: float, steps: int = 8) -> dict[str, Any]:
        gain = {"points": points, "low": points - 1, "high": points + 1}
        return {"trick": trick, "steps": steps, "gain": gain, "over_plain": 1.5}

    none = "no contender is better than plain training in as many steps"
    plain, twice = row("plain, 3 times the rate", 0), row("plain, twice the steps", 9, 16)
    assert most([plain], "points") == none
    assert most([plain, twice], "points") == f"{none} (plain training, twice the steps: **+9.0** (+8.0 to +10.0))"
    assert most([plain, row("SAM", 0.5)], "points") == none
    found = most([plain, twice, row("SAM", 2), row("EMA", 3), row("soup", 8, 24)], "points")
    assert found.startswith(
        "the best of 2 with no more steps is *EMA*, **+3.0** (+2.0 to +4.0) points over plain training, in"
    )
    assert found.endswith("in 1.5 times its time (plain training, twice the steps: **+9.0** (+8.0 to +10.0))")


@pytest.mark.parametrize("name", ["language_model", "finetune", "finetune_images", "gain_scaling"])
def test_the_best_of_several_rates_lies_between_others(name: str) -> None:
    """Or it is the one that shorter training has chosen between others, for it or for the one whose rate it has."""
    tuned = part("tuned")
    scores: dict[tuple[Any, ...], dict[float, list[float]]] = {}
    swept: dict[tuple[Any, ...], float] = {}
    for run in json.loads((BENCHMARKS / "results" / f"{name}.json").read_text())["runs"]:
        if run["part"] == "finals":
            where = *tuned.cell(run), tuned.own(run["trick"])
            scores.setdefault(where, {}).setdefault(run["lr"], []).append(
                -run["val_loss"] if "val_loss" in run else run["val_accuracy"]
            )
            if run["trick"] == where[-1]:
                swept[where] = run["lr"]
    for where, of in scores.items():
        best = max(of, key=lambda lr, of=of: sum(of[lr]))
        assert min(of) < best < max(of) or best == swept[where], where
    assert any(len(of) > 1 for of in scores.values())


def test_a_card_has_larger_networks_in_its_forest_and_says_what_has_a_cosine() -> None:
    evidence, tuned = part("evidence"), part("tuned")
    found = evidence.gains()
    assert found["EMA"]["EMA"][:27] == evidence.of_quality()["EMA"]["EMA"]
    for name, network in evidence.NETWORKS.items():
        made = json.loads((BENCHMARKS / "results" / f"{name}.json").read_text())
        over = part("language_model").over_cosine(made)
        gains = [
            over.get(row["trick"], row["gain"]) if card != "optimizer" else row["gain"]
            for row in tuned.best_rows(made)
            for card, tricks in evidence.TRAINED.items()
            if tuned.own(row["trick"]) in tricks
        ]
        lines = [row for of in found.values() for rows in of.values() for row in rows]
        drawn = [row for row in lines if row["setting"].startswith(f"{network}, ")]
        assert sorted(row["points"] for row in drawn) == sorted(gain["points"] for gain in gains)
    (muon,) = (row for row in found["optimizer"]["Muon"] if row["setting"].startswith("GPT"))
    assert muon["setting"] == "GPT, 1,000 steps, beside a cosine, 3 seeds"
    plain, both = (row["setting"] for row in found["EMA"]["EMA"] if row["setting"].startswith("GPT"))
    assert (plain, both) == ("GPT, 1,000 steps, 3 seeds", "GPT, 1,000 steps, both beside a cosine, 3 seeds")


@pytest.mark.slow
def test_gains_are_measured_with_more_data_and_more_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scaling = part("gain_scaling")
    monkeypatch.setattr(scaling, "RESULTS", tmp_path)
    some = {"sequences": scaling.CELLS["sequences"][1:], "weights": scaling.CELLS["weights"][:2]}
    monkeypatch.setattr(scaling, "CELLS", some)
    monkeypatch.setattr(sys, "argv", ["gain_scaling.py", "--reduced"])
    scaling.main()
    gc.unfreeze()
    written, picture = sorted((tmp_path / "scratch").iterdir())
    rows = json.loads(written.read_text())["rows"]
    assert [row["trick"] for row in rows] == 4 * [*scaling.SOME]
    less, more, smaller, larger = rows[:: len(scaling.SOME)]
    assert less["sequences"] == pytest.approx(more["sequences"] / 4, abs=1)
    assert (less["weights"], smaller["sequences"]) == (more["weights"], larger["sequences"])
    assert smaller["weights"] < larger["weights"]
    assert picture.read_text().startswith("<?xml")
    made = json.loads(written.read_text())
    for run in made["runs"]:  # a gain that is that of the weights, but for what all seeds share
        lower = run["weights"] * 1e-5 + 0.1 * run["seed"] if scaling.own(run["trick"]) != "plain" else 0.0
        run["test_loss"] = run["seed"] - lower
    named = ", ".join(f"*{name}*" for name in dict.fromkeys(map(scaling.own, scaling.SOME)) if name != "plain")
    text = scaling.section(made)
    told = (
        "- With more **{}** the difference from plain training rises: {}; falls: none; shows no trend: {}; better than"
    )
    assert told.format("sequences", "none", named) in text
    assert told.format("weights", named, "none") in text
    assert f"|{smaller['weights']:,}: " in text


def test_what_the_readme_says_of_the_scaling_is_in_the_figures() -> None:
    if (file := BENCHMARKS / "results" / "gain_scaling.json").exists():
        scaling, committed = part("gain_scaling"), json.loads(file.read_text())
        assert scaling.section(committed) in (BENCHMARKS / "README.md").read_text()
        worse = {scaling.own(row["trick"]) for row in scaling.best_rows(committed) if row["gain"]["high"] < 0}
        assert worse <= scaling.WHY.keys()
        for sweep in committed["sweep"]:
            ladder = [*map(float, sweep["val_loss"])]
            assert ladder[0] < sweep["lr"] < ladder[-1]


def test_each_network_of_the_scaling_has_about_four_times_the_weights_of_the_one_before() -> None:
    scaling, language = part("gain_scaling"), part("language_model")
    shapes = [scaling.shape_of(language.FULL, width) for width in scaling.WIDTHS]
    sizes = [
        sum(weight.numel() for weight in language.Network(shape).model.transformer.h.parameters()) for shape in shapes
    ]
    assert sizes[1] / sizes[0] == pytest.approx(4, abs=0.2)
    assert sizes[2] / sizes[1] == pytest.approx(4, abs=0.2)
