"""Other tools beside our callbacks, each of them real: Optuna, Jupyter. Pages in docs/integrations run in test_docs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna_integration import PyTorchLightningPruningCallback

import lightning_tricks as lt
from lightning_tricks.advisor.inspect_training import TrainingInspection
from lightning_tricks.advisor.layer_statistics import LayerStatistics
from lightning_tricks.core.report import Tabled
from tests.nets import NormNet, assert_equal, build, fit, weights


class Stop(optuna.pruners.BasePruner):
    """Prunes every trial after its second epoch."""

    def prune(self, study: Any, trial: Any) -> bool:
        return trial.last_step == 1


class Sharp(lt.SAMMixin, NormNet):
    sam = lt.SAM(0.05)


@pytest.mark.few(1)
@pytest.mark.parametrize("validate", ["averaged", "both"])
def test_a_pruned_trial_leaves_the_raw_weights_and_the_next_one_is_as_the_first(validate: Any) -> None:
    """Optuna raises in ``on_validation_end``, while the module may hold the averages."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    raw = build(Sharp)
    fit(raw)  # two epochs
    averaged = build(Sharp)
    expected = fit(averaged, callbacks=[lt.EMA(0.9, validate=validate)]).callback_metrics
    ema, seen = lt.EMA(0.9, validate=validate), []

    def objective(trial: optuna.Trial) -> float:
        net = build(Sharp)
        monitor = "val_loss_raw" if validate == "both" else "val_loss"
        callbacks = [PyTorchLightningPruningCallback(trial, monitor), ema]
        try:
            fit(net, max_epochs=9, callbacks=callbacks)
        finally:
            seen.append((weights(net), trial.study.trials[-1].intermediate_values[1], monitor))
        return 0.0

    study = optuna.create_study(pruner=Stop())
    study.optimize(objective, n_trials=2)
    assert [trial.state for trial in study.trials] == [optuna.trial.TrialState.PRUNED] * 2
    for found, score, monitor in seen:
        assert_equal(found, weights(raw))
        assert score == pytest.approx(float(expected[monitor]))


def outputs(folder: Path, *cells: str) -> list[list[dict[str, Any]]]:
    """What a real kernel shows of cells."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, kernel_name="python3", resources={"metadata": {"path": str(folder)}}).execute()
    return [cell.outputs for cell in notebook.cells]


@pytest.mark.slow
def test_a_notebook_shows_bars_as_widgets_and_results_as_tables(tmp_path: Path) -> None:
    # A bar is removed at its end; what it has shown until then stays in the notebook's widgets.
    bar, estimate, table = outputs(
        tmp_path,
        """
import lightning_tricks as lt, torch
from lightning_tricks.core.report import progress
bar = progress(range(3), "counting")
print(type(bar).__mro__[1].__name__, bar.disable, [*bar])
""",
        "lt.estimate_memory(torch.nn.Linear(64, 64), batch=torch.zeros(4, 64))",
        """
from lightning_tricks.evaluation import SoupAndEnsemble
SoupAndEnsemble({"best": [{"a<b": 1.0}, {"a<b": 2.0}], "soup": [{"a<b": 2.0}, {"a<b": 3.0}]}, overlap=0.0)
""",
    )
    assert "tqdm_notebook False [0, 1, 2]" in "".join(each.get("text", "") for each in bar)
    assert any("application/vnd.jupyter.widget-view+json" in each.get("data", {}) for each in bar)
    shown = [each["data"] for each in (*estimate, *table) if each["output_type"] == "execute_result"]
    html = [data["text/html"] for data in shown]
    assert all(re.fullmatch(r"(<p>.*</p>)*<table>.*</table>(<p>.*</p>)*", text, re.DOTALL) for text in html)
    assert "<tr><td>weights</td><td>16.6 kB</td></tr>" in html[0]
    assert "<td>a&lt;b</td>" in html[1]


def test_every_table_is_html_too() -> None:
    """Also where a name has letters that HTML means otherwise."""
    inspection = TrainingInspection(0, 20, (LayerStatistics("a<b", 1.0, 0.25, 0.0, 1.0),))
    html = inspection._repr_html_()
    assert html.startswith("<p>20 optimizer steps from step 0 on</p><table><thead><tr><th>layer</th>")
    assert "</tr></thead><tbody><tr><td>a&lt;b</td><td>" in html
    assert html.endswith(
        "</table><p>a&lt;b: an update is 25% of the weights. Its learning rate is probably too high.</p>"
    )
    assert {kind.__name__ for kind in Tabled.__subclasses__()} == {
        *(
            "Comparison",
            "LabelReport",
            "MemoryEstimate",
            "SoupAndEnsemble",
            "TrainingInspection",
            "TrainingPlan",
            "TricksProfile",
        )
    }
