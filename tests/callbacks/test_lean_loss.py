"""LeanLoss in a fit: the weights of a fit with logits, in every precision and on two ranks; and what is refused."""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_tricks as lt
from tests.losses.test_lean_loss import causal, in_chunks  # noqa: F401
from tests.nets import PlainNet, assert_close, assert_equal, build, fit, loader, trainer, weights
from tests.ranks import Cases, run_cases


class Language(L.LightningModule):
    """A causal language model of transformers, as its users write it."""

    def __init__(self, name: str = "llama") -> None:
        super().__init__()
        self.model = causal(name)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch, labels=batch).loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        out = self.model(input_ids=batch, labels=batch)
        assert type(out.logits) is Tensor
        self.log("val_loss", out.loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def batches(size: int = 12, batch_size: int = 2) -> DataLoader[Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 97, (size, 10), generator=generator)
    return DataLoader(ids, batch_size)  # type: ignore[arg-type]


def trained(*callbacks: Any, kind: Any = Language, **settings: Any) -> dict[str, Tensor]:
    module = kind()
    fit(module, train=batches(), val=batches(4), callbacks=[*callbacks], **settings)
    return weights(module)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "settings",
    [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, {"precision": "bf16-mixed"}],
    ids=["plain", "accumulate", "bf16"],
)
def test_a_fit_gives_the_weights_of_one_with_logits(settings: dict[str, Any]) -> None:
    tolerance = 2e-2 if "precision" in settings else 1e-5
    assert_close(trained(lt.LeanLoss(), **settings), trained(**settings), tolerance)


def test_it_works_beside_other_tricks() -> None:
    others: Any = lambda: [lt.EMA(0.9), lt.SAMCallback(0.05), lt.ActivationCheckpointing("layers")]  # noqa: E731
    assert_close(trained(lt.LeanLoss(), *others()), trained(*others()), 1e-5)


@pytest.mark.few(2)
@pytest.mark.parametrize("base", ["keep", "nf4", "int8"])
def test_it_works_beside_adapters(base: Any) -> None:
    found, expected = (
        {name: weight for name, weight in trained(lt.LoRA("q_proj|v_proj", base=base), *lean).items() if "lora" in name}
        for lean in ([lt.LeanLoss()], [])
    )
    assert found
    assert_close(found, expected, 1e-5)


def test_the_head_is_as_before() -> None:
    fit(module := Language(), train=batches(), val=batches(4), callbacks=[lt.LeanLoss("model.lm_head")], max_epochs=1)
    assert "forward" not in vars(module.model.lm_head)


@pytest.mark.slow  # the conformance tests compile a network beside it, too
def test_a_compiled_network_trains_the_same() -> None:
    compiled = lt.Compile("model.model", backend="aot_eager")
    assert_close(trained(lt.LeanLoss(), compiled, max_epochs=1), trained(max_epochs=1), 1e-5)


class Outputs(Language):
    """Hands everything on, as some modules do."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return dict(self.model(input_ids=batch, labels=batch))


def test_outputs_with_logits_are_handed_on() -> None:
    seen: list[Any] = []

    class Reads(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(outputs["logits"].detach().float().exp().sum(-1))

    found = trained(lt.LeanLoss(), Reads(), kind=Outputs)
    assert_close(found, trained(), 1e-5)
    assert seen[0].shape == (2, 10)
    assert not seen[0].isnan().any()


# -- what is refused --------------------------------------------------------------------------------------------------


class Elsewhere(PlainNet):
    """With a head that no loss comes from."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(2, 2)


def test_mistakes_are_named_before_the_first_step() -> None:
    for arguments, error in (
        (("network",), r"LeanLoss\(module='network'\).*no attribute `network`"),
        (("model.model",), "needs a model with an output layer"),
    ):
        module = Language()
        with pytest.raises(MisconfigurationException, match=error):
            fit(module, train=batches(), val=batches(4), callbacks=[lt.LeanLoss(*arguments)])
    run = trainer(callbacks=[lt.LeanLoss()])
    with pytest.raises(MisconfigurationException, match="saved nothing"):
        run.fit(module := build(Elsewhere), loader(), loader())
    assert run.global_step == 0
    assert "forward" not in vars(module.model)
    with pytest.raises(TypeError, match="module"):
        lt.LeanLoss(nn.Linear(2, 2))  # type: ignore[arg-type]


class Mixed(PlainNet):
    """A classifier, whose head is a large one."""

    def __init__(self) -> None:
        super().__init__()
        self.model = self.layers[-1]


@pytest.mark.parametrize("other", [lt.Mixup, lambda: lt.HardExampleFilter(0.5, mode="loss"), lt.QAT])
def test_what_changes_targets_or_the_head_is_refused(other: Any) -> None:
    for callbacks in ([lt.LeanLoss(), other()], [other(), lt.LeanLoss()]):
        module = build(Mixed)
        before = weights(module)
        with pytest.raises(MisconfigurationException, match=r"LeanLoss|lean_loss|forward is another one"):
            fit(module, callbacks=callbacks)
        assert_equal(weights(module), before)


# -- ranks ------------------------------------------------------------------------------------------------------------


def on_ranks(strategy: str) -> Any:
    settings = {"strategy": "ddp"} if strategy == "ddp" else lt.preset(strategy, precision="32-true")
    module = Language()
    run = trainer(devices=2, callbacks=[lt.LeanLoss()], use_distributed_sampler=False, **settings)
    mine = DataLoader(batches().dataset[int(os.environ["RANK"]) :: 2], 1)  # type: ignore[index]
    try:
        run.fit(module, mine, batches(4))
    except MisconfigurationException as error:
        assert run.global_step == 0
        return str(error)
    return weights(module)


REFUSED = ("fsdp2_bf16", "zero3_bf16")


@pytest.fixture(scope="module")
def two_ranks() -> Cases:
    return run_cases(on_ranks, ["ddp", "zero2_bf16", *REFUSED])


@pytest.mark.parametrize("strategy", ["ddp", "zero2_bf16", *REFUSED])
def test_two_ranks_equal_one_process_or_are_refused(strategy: str, two_ranks: Cases) -> None:
    for found in two_ranks[strategy]:
        if strategy in REFUSED:
            assert found.startswith("LeanLoss works under")
        else:
            module = Language()
            trainer().fit(module, batches(), batches(4))
            assert_close(found, weights(module), 1e-5)
