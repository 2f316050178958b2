"""Fine-tuning with and without tricks runs, and what is committed of it is what its runs show."""

from __future__ import annotations

import gc
import importlib
import json
import re
import sys
from functools import partial
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

import pytest
import torch
from scipy import stats

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
RESULT = BENCHMARKS / "results" / "finetune.json"


@pytest.fixture
def finetune(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("finetune")


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("tuned")


@pytest.fixture
def small_bert(finetune: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder such as the package has, with a small network and the words of the glosses."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import BertConfig, BertModel

    from lightning_tricks.examples.glosses import read_glosses

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=500, special_tokens=["[PAD]", "[UNK]"], show_progress=False)
    tokenizer.train_from_iterator(sorted(read_glosses())[:2000], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 6}
    BertModel(BertConfig(vocab_size=600, max_position_embeddings=16, **shape)).save_pretrained(tmp_path)
    monkeypatch.setattr(finetune, "folder", lambda: tmp_path)
    for cached in (finetune.tokenized, finetune.encoder, finetune.split):
        cached.cache_clear()
    yield tmp_path
    for cached in (finetune.tokenized, finetune.encoder, finetune.split):
        cached.cache_clear()


SOME = ("EMA", "soup of three, 3 times the steps", "SAM, half the steps")


@pytest.mark.slow
@pytest.mark.parametrize("names", [SOME, None], ids=["some", "all"])
def test_tricks_are_measured(
    names: tuple[str, ...] | None, finetune: ModuleType, tuned: ModuleType, small_bert: Path, tmp_path: Path
) -> None:
    regime, scale, runs = "40% wrong labels", finetune.REDUCED, tmp_path / "runs"
    chosen = tuned.some(finetune.contenders(regime, scale), names or [], runs)
    assert [*chosen] == (["plain", *SOME] if names else [*finetune.TRICKS])
    found = tuned.measure(chosen, scale.budgets[regime], runs, metric="accuracy")
    found["curves"] = finetune.curves(runs)
    made = json.loads(json.dumps(finetune.result({regime: found}, scale)))
    assert [row["trick"] for row in made["rows"]] == [line["trick"] for line in made["machines"]] == [*chosen]
    assert made["settings"]["not measured"] == [f"{name} ({regime})" for name in finetune.TRICKS if name not in chosen]
    steps = {row["trick"]: row["steps"] for row in made["rows"]}
    assert [steps[name] for name in ("plain", *SOME[1:])] == [8, 24, 8]  # not 4
    assert all(row["peak_mib"] > 0 < row["over_plain"] for row in made["rows"])
    peaks = {row["trick"]: row["peak_mib"] for row in made["rows"]}
    assert peaks["EMA"] > peaks["plain"]
    ends = {line["trick"]: line["points"][-1][0] for line in made["curves"]}
    assert (ends["plain"], ends["soup of three, 3 times the steps"]) == (8, 24)
    assert {line["seed"] for line in made["curves"]} == {0}
    text = finetune.section(made)
    assert "; 32 draws of 15,663 definitions (40% wrong labels), of at most 8 tokens" in text
    assert "; 8 steps (0 to choose learning rates) with 2 seeds; batches of 4 samples; 0.0 million weights; 16" in text
    assert f"- **{regime}.** Plain training has " in text
    assert text.count(f"\n\n{regime}:\n\n|") == 1
    assert all(f"\n|{name}|" in text for name in chosen)
    told = [row["trick"] for row in tuned.best_rows(made) if tuned.own(row["trick"]) != "plain"]
    assert {*map(tuned.own, told)} == {*map(tuned.own, chosen)} - {"plain"}
    assert all(re.search(rf" {re.escape(name)} \*{{0,2}}[+-]\d", text) for name in told)
    assert (
        "Not measured yet: plain, 3 times the rate (40% wrong labels); plain, 10 times the rate (40" in text
    ) == bool(names)
    finetune.finetune_report.draw(tmp_path / "picture.svg", made)
    assert (tmp_path / "picture.svg").read_text().startswith("<?xml")


@pytest.mark.slow
def test_the_command_writes_its_figures(
    finetune: ModuleType, small_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finetune, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(sys, "argv", ["finetune.py", "--reduced", "--only", "EMA", "--regimes", "clean"])
    before = (BENCHMARKS / "README.md").read_text()
    finetune.main()
    gc.unfreeze()
    written, picture = sorted((tmp_path / "results" / "scratch").iterdir())  # the runs are gone
    rows = json.loads(written.read_text())["rows"]
    assert [(row["regime"], row["trick"]) for row in rows] == [("clean", "plain"), ("clean", "EMA")]
    assert picture.name == "finetune.svg"
    assert (BENCHMARKS / "README.md").read_text() == before


BEST = ("best_rates", "best_rows", "own")
LARGER = ("finetune", "finetune_images", "language_model")


def test_the_page_has_no_word_of_figures_that_are_not_there() -> None:
    page = (BENCHMARKS / "README.md").read_text()
    part = page.split("### At the size at which people train\n")[1].split("\n### ")[0]
    found = re.findall(r"`python benchmarks/(?:run\.py --device cuda )?(\w+)(?:\.py)?`", part.split("|network and")[1])
    assert len(found) == 8
    for name in found:
        assert [*BENCHMARKS.glob(f"{name}.py"), *BENCHMARKS.glob(f"gpu/{name}.py")], name
    parts = (*LARGER, "gain_scaling")
    run = [f"`{name}.py`" for name in parts if (RESULT.parent / f"{name}.json").exists()]
    assert f"Run so far, whole or in part: {', '.join(run) or 'none'}. The others" in " ".join(part.split())
    for name in parts:
        begin, end = f"<!-- {name}: written by benchmarks/{name}.py -->", f"<!-- end of {name} -->"
        block = page.split(begin)[1].split(end)[0].strip()
        assert bool(block) == (f"`{name}.py`" in run)


@pytest.mark.slow
def test_words_that_no_gloss_has_change_nothing(finetune: ModuleType, small_bert: Path) -> None:
    from transformers import BertModel

    places, _, used = finetune.tokenized(8)
    assert len(used) < 600
    whole = BertModel.from_pretrained(small_bert, add_pooling_layer=False).eval()
    mine = finetune.encoder(8).eval()
    there = (places[:4] != 0).long()
    assert torch.equal(
        mine(input_ids=places[:4], attention_mask=there).last_hidden_state,
        whole(input_ids=used[places[:4]], attention_mask=there).last_hidden_state,
    )


@pytest.mark.slow
def test_regimes_have_the_same_samples_for_validation_and_test(finetune: ModuleType, small_bert: Path) -> None:
    parts = {regime: finetune.split(regime, finetune.FULL.length, finetune.FULL.tested) for regime in finetune.REGIMES}
    clean = parts["clean"]
    for each in parts.values():
        assert all(torch.equal(*pair) for part in ("val", "test") for pair in zip(each[part], clean[part], strict=True))
    size = len(clean["train"][1])
    assert (size, len(parts["10% of the samples"]["train"][1])) == (15663, 1566)
    wrong = (parts["40% wrong labels"]["train"][1] != clean["train"][1]).float().mean()
    assert wrong == pytest.approx(0.4, abs=0.02)


def test_the_package_is_named_where_it_is_missing(finetune: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finetune, "PACKAGE", "no_such_package")
    with pytest.raises(SystemExit, match=r"python -m pip install '\.\[pretrained\]'"):
        finetune.folder()


# -- the rules of learning rates --------------------------------------------------------------------------------------


def least_squares(best: float, lr: float, steps: int, folder: Path) -> tuple[Any, ...]:
    """An arm whose validation loss is least where the learning rate is ``best``."""
    import lightning as L

    from lightning_tricks.examples.tasks import QUIET

    class Rate(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))
            self.lr = lr

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.weight.sum()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", torch.tensor(abs(lr / best - 1)))

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_loss", torch.tensor(abs(lr / best - 1)))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.zeros(2), batch_size=1)

        val_dataloader = test_dataloader = train_dataloader

    trainer = L.Trainer(max_steps=steps, limit_val_batches=1, **QUIET)
    return trainer, Rate()


@pytest.mark.slow
def test_a_rate_has_neighbours_that_are_no_better_and_others_keep_it(tuned: ModuleType, tmp_path: Path) -> None:
    budget = tuned.Budget(2, 2, 1)
    arms = {
        "plain": tuned.Contender(partial(least_squares, 0.001), lr=0.01),
        "own": tuned.Contender(partial(least_squares, 0.1), lr=0.1),
        "kept": tuned.Contender(partial(least_squares, 0.1), rate_of="own"),
        "threefold": tuned.Contender(partial(least_squares, 0.1), rate_of="own", factor=3.0),
        "as plain, longer": tuned.Contender(partial(least_squares, 0.1), length=2.0),
    }
    made = tuned.measure(arms, budget, tmp_path, metric="loss")
    assert {row["trick"]: (row["lr"], row["steps"]) for row in made["rows"]} == {
        "plain": (0.001, 2),
        "own": (0.1, 2),
        "kept": (0.1, 2),
        "threefold": (0.3, 2),
        "as plain, longer": (0.001, 4),
    }
    (plain, own) = made["sweep"]
    assert [*plain["val_loss"]] == ["0.0003", "0.001", "0.003", "0.01", "0.03"]
    assert [*own["val_loss"]] == ["0.03", "0.1", "0.3"]
    assert {run["steps"] for run in made["runs"] if run["part"] == "learning rates"} == {1}


def test_a_rate_at_the_end_of_the_ladder_is_refused(tuned: ModuleType, tmp_path: Path) -> None:
    arm = tuned.Contender(partial(least_squares, 1e-9), lr=3e-6)
    with pytest.raises(ValueError, match=r"end of the ladder.*'plain': 1e-06"):
        tuned.rates({"plain": arm, "other": tuned.Contender(arm.fit)}, tuned.Budget(1, 2, 1), tmp_path, "loss")


# -- runs that go on in another session -------------------------------------------------------------------------------


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("kept_runs").kept_runs


@pytest.mark.slow
def test_what_an_interrupted_session_has_measured_is_not_measured_again(
    kept: Any, tuned: ModuleType, tmp_path: Path
) -> None:
    fitted: list[Path] = []
    most = 4

    def arm(lr: float, steps: int, folder: Path) -> tuple[Any, ...]:
        trainer, module = least_squares(0.01, lr, steps, folder)

        def begin() -> None:
            if folder.parent.parent.name == "finals":
                if len(fitted) == most:
                    raise KeyboardInterrupt
                fitted.append(folder)

        module.on_train_start = begin
        return trainer, module

    arms = {"plain": tuned.Contender(arm, lr=0.01), **dict.fromkeys(("one", "two", "three"), tuned.Contender(arm))}
    file, budget = tmp_path / "committed" / "runs.json", tuned.Budget(2, 2, 1)

    def session(day: str, only: list[str]) -> dict[str, list[Any]]:
        with kept(tmp_path / day, file, {"batch": 4}) as runs:
            return tuned.measure(tuned.some(arms, only, runs), budget, runs, metric="loss")

    with pytest.raises((KeyboardInterrupt, SystemExit)):  # in the second seed
        session("monday", ["one", "two"])
    assert [path.name for path in fitted] == ["seed0", "seed0", "seed0", "seed1"]
    most = 6
    made = session("tuesday", ["one", "two"])
    assert [path.name for path in fitted[4:]] == ["seed1", "seed1"]
    assert [row["trick"] for row in made["rows"]] == ["plain", "one", "two"]
    most = 8
    later = session("wednesday", ["three"])
    assert {path.parent.name for path in fitted[6:]} == {"three"}
    assert later["rows"][:3] == made["rows"]
    assert later["machines"][:3] == made["machines"]
    assert [row["trick"] for row in later["rows"]] == [*arms]
    assert not (tmp_path / "wednesday").exists()


def test_runs_of_other_settings_are_refused(kept: Any, tmp_path: Path) -> None:
    with kept(tmp_path / "runs", tmp_path / "runs.json", {"batch": 4}) as runs:
        (runs / "notes.json").write_text("{}")
    before = (tmp_path / "runs.json").read_text()
    with (
        pytest.raises(ValueError, match=r"runs of other settings: {'batch': 4}, now {'batch': 8}"),
        kept(tmp_path / "runs", tmp_path / "runs.json", {"batch": 8}),
    ):
        pass
    assert (tmp_path / "runs.json").read_text() == before


def test_records_that_another_session_writes_meanwhile_stay(kept: Any, tmp_path: Path) -> None:
    file, folders = tmp_path / "runs.json", [tmp_path / name for name in ("one", "two")]
    with kept(folders[0], file, {"batch": 4}) as first, kept(folders[1], file, {"batch": 4}) as second:
        for runs, name in ((first, "plain"), (second, "EMA")):
            (runs / f"{name}.json").write_text("{}")
            (runs / "notes.json").write_text(json.dumps({name: {"peak_mib": 1.0}}))
    records = {record["file"]: record["content"] for record in json.loads(file.read_text())["records"]}
    assert [*records] == ["EMA.json", "notes.json", "plain.json"]
    assert records["notes.json"].keys() == {"plain", "EMA"}


def test_a_soup_is_the_mean_of_trainings_from_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    import lightning as L

    from lightning_tricks.examples.tasks import QUIET

    monkeypatch.syspath_prepend(BENCHMARKS)
    soup = importlib.import_module("soup").Soup(3)
    samples = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))

    class Quadratic(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.network = torch.nn.Parameter(torch.ones(4)), torch.nn.BatchNorm1d(4, affine=False)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            self.network(batch + 1.0)
            return (batch - self.weight).square().sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 0.1)

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(samples, batch_size=2)

    module = Quadratic()
    L.Trainer(max_epochs=1, callbacks=[soup], **QUIET).fit(module)
    ends = []
    for part in samples.split(8):
        weight = torch.nn.Parameter(torch.ones(4))
        optimizer = torch.optim.AdamW([weight], 0.1)
        for batch in part.split(2):
            optimizer.zero_grad()
            (batch - weight).square().sum().backward()
            optimizer.step()
        ends.append(weight.detach())
    assert torch.allclose(module.weight, torch.stack(ends).mean(0), atol=1e-6)
    assert torch.allclose(module.network.running_mean, samples.mean(0), atol=1e-6), "those of one more pass"


# -- images -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def images(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The benchmark with a file such as the package has, of weights that are drawn at random."""
    from timm import create_model

    monkeypatch.syspath_prepend(BENCHMARKS)
    images = importlib.import_module("finetune_images")
    weights = create_model("efficientnet_lite0").state_dict().values()
    torch.save({f"_{number}": weight for number, weight in enumerate(weights)}, tmp_path / "weights.pth")
    monkeypatch.setattr(images, "file", lambda: tmp_path / "weights.pth")
    images.pretrained.cache_clear()
    yield images
    images.pretrained.cache_clear()


def test_the_network_of_images_has_the_weights_of_the_file_and_a_head_of_its_own(images: Any, tmp_path: Path) -> None:
    *kept, _, _ = torch.load(tmp_path / "weights.pth", weights_only=True).values()
    first, second = images.network(), images.network()
    body, heads = [*first.state_dict().values()][:-2], [net.get_classifier().weight for net in (first, second)]
    assert all(torch.equal(*pair) for pair in zip(body, kept, strict=True))
    assert heads[0].shape == (10, 1280)
    assert not torch.equal(*heads)


def test_a_file_that_could_run_code_is_not_read(images: Any, tmp_path: Path) -> None:
    import pickle

    torch.save({"weight": Path("weights")}, tmp_path / "weights.pth")
    with pytest.raises(pickle.UnpicklingError):
        images.pretrained()


@pytest.mark.slow
def test_every_contender_of_the_images_runs(images: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(sys, "argv", ["finetune_images.py", "--reduced"])
    images.main()
    gc.unfreeze()
    written, picture = sorted((tmp_path / "results" / "scratch").iterdir())
    made = json.loads(written.read_text())
    assert [row["trick"] for row in made["rows"]] == [*images.TRICKS]
    assert f"64 pictures of 32 x 32 pixels, in {len(images.FONTS['train'])} fonts" in images.section(made)
    assert picture.read_text().startswith("<?xml")


# -- what is committed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in LARGER if (RESULT.parent / f"{name}.json").exists()])
def test_the_rows_are_those_of_the_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    benchmark = importlib.import_module(name)
    best_rates, best_rows, own = (getattr(importlib.import_module("tuned"), each) for each in BEST)
    committed = json.loads((RESULT.parent / f"{name}.json").read_text())
    assert benchmark.section(committed) in (BENCHMARKS / "README.md").read_text()
    score, best, factor = ("loss", min, -100) if name == "language_model" else ("accuracy", max, 100)
    for regime in {row.get("regime") for row in committed["rows"]}:
        runs = [run for run in committed["runs"] if run.get("regime") == regime]
        rows = {row["trick"]: row for row in committed["rows"] if row.get("regime") == regime}
        scores = {
            name: [factor * run[f"test_{score}"] for run in runs if (run["trick"], run["part"]) == (name, "finals")]
            for name in rows
        }
        assert {line["trick"] for line in committed["machines"] if line.get("regime") == regime} == {*rows}
        for trick, row in rows.items():
            assert row["mean"] == pytest.approx(abs(fmean(scores[trick])), abs=0.006)
            if trick != best_rates(runs)["plain"]:
                limits = stats.ttest_rel(scores[trick], scores[best_rates(runs)["plain"]]).confidence_interval(0.95)
                assert [row["gain"]["low"], row["gain"]["high"]] == pytest.approx([*limits], abs=0.01)
        if "LayerFreezing" in rows:
            assert rows["LayerFreezing"]["over_plain"] < 0.95, "its layers stop one by one"
        for sweep in (each for each in committed["sweep"] if each.get("regime") == regime):
            means = sweep[f"val_{score}"]
            assert rows[sweep["trick"]]["lr"] == sweep["lr"] == float(best(means, key=means.get))
            ladder = [*map(float, means)]
            assert ladder[0] < sweep["lr"] < ladder[-1]
    worse = {own(row["trick"]) for row in best_rows(committed) if row["gain"]["high"] < 0}
    assert not worse - benchmark.WHY.keys(), "what does the paper say of it?"
    measured = {row["trick"] for row in committed["rows"]}
    if name == "finetune":
        measured = {f"{row['trick']} ({row['regime']})" for row in committed["rows"]}
    assert not {*committed["settings"]["not measured"]} & measured
    kept = [json.loads(path.read_text()) for path in (RESULT.parent / "runs").glob(f"{name}*.json")]
    regimes = committed["settings"].get("regimes", {})
    for row in committed["rows"]:  # without its records a later session would measure it again
        settings = committed["settings"] | {"regime": regimes.get(row.get("regime"))}
        of_these = [each for each in kept if each["settings"].items() <= settings.items()]
        records = {record["file"] for each in of_these for record in each["records"]}
        assert {f"finals/{row['trick']}/seed{seed}.json" for seed in range(row["seeds"])} <= records


@pytest.mark.parametrize("path", sorted((RESULT.parent / "runs").glob("*.json")), ids=lambda path: path.stem)
def test_the_records_that_a_session_goes_on_from_are_whole(path: Path, tmp_path: Path, kept: Any) -> None:
    from lightning_tricks.evaluation.plan import read_record

    settings = json.loads(path.read_text())["settings"]
    with kept(tmp_path / "runs", tmp_path / path.name, settings):
        pass
    (tmp_path / path.name).write_text(path.read_text())
    with kept(tmp_path / "runs", tmp_path / path.name, settings) as runs:
        records = [*runs.glob("**/seed*.json")]
        assert records
        for record in records:
            assert read_record(record)["steps"] > 0
    assert (tmp_path / path.name).read_text() == path.read_text()
