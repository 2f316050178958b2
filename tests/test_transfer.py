"""docs/transfer.md and the adapters of docs/lora.md: each program runs, and what it exports is what it trained."""

from __future__ import annotations

import os
import re
import sys
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

import lightning_tricks as lt
from tests.nets import assert_equal, weights
from tests.ranks import run_cases

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),  # peft asks transformers 5
    pytest.mark.filterwarnings("ignore:Could not find a config file in"),  # peft 0.18, of models that are made here
    pytest.mark.filterwarnings("ignore:Precision bf16-mixed is not supported by the model summary"),  # Lightning
]
DOCS = Path(__file__).parent.parent / "docs"
IMAGES, TEXT, LANGUAGE, SHARDED = re.findall(r"```python\n(.*?)```", (DOCS / "transfer.md").read_text(), re.S)
PEFT = re.findall(r"## Other adapters of peft.*?```python\n(.*?)```", (DOCS / "lora.md").read_text(), re.S)[0]


def run(program: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The names of a program after it ran by itself in a folder."""
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {"__name__": "program"}
    exec(program, names)
    return names


# -- docs/transfer.md -------------------------------------------------------------------------------------------------


def test_an_image_classifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = run(IMAGES, tmp_path, monkeypatch)
    trained, exported = names["trainer"].lightning_module.model, names["vit"]()
    exported.load_state_dict(torch.load("classifier.pt", weights_only=True))
    best = names["Classifier"].load_from_checkpoint(names["best"].best_model_path)
    assert_equal(weights(exported), weights(best.model))
    rates = {
        id(parameter): group["initial_lr"]
        for group in names["trainer"].optimizers[0].param_groups
        for parameter in group["params"]
    }
    blocks = [rates[id(block.attn.qkv.weight)] for block in trained.blocks]
    assert rates[id(trained.head.weight)] == pytest.approx(1e-3)
    assert [low / high for low, high in pairwise(blocks)] == pytest.approx([0.65] * 3)


def test_the_layers_of_the_image_classifier_join_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[set[str]] = []

    def watch(module: Any, *_: Any) -> None:
        seen.append({name.split(".")[1] for name, p in module.named_parameters() if p.requires_grad})

    monkeypatch.setattr(L.LightningModule, "on_before_zero_grad", watch)
    run(IMAGES, tmp_path, monkeypatch)
    assert seen[:2] == [{"head"}] * 2
    assert seen[2:4] == [{"head", "norm", "blocks"}] * 2
    assert seen[4:] == [{"head", "norm", "blocks", "patch_embed", "cls_token", "pos_embed"}] * 4


def test_a_text_classifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = run(TEXT, tmp_path, monkeypatch)
    plain = names["BertForSequenceClassification"].from_pretrained("sentiment").eval()
    inputs = {name: x for name, x in next(iter(names["sentences"])).items() if name != "labels"}
    with torch.no_grad():
        torch.testing.assert_close(plain(**inputs).logits, names["net"].eval().model(**inputs).logits)
    trained = {name for name, p in names["net"].named_parameters() if p.requires_grad and "lora_" not in name}
    assert trained == {"model.classifier.weight", "model.classifier.bias"}


def test_a_language_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = run(LANGUAGE, tmp_path, monkeypatch)
    assert "Params4bit" in {type(p).__name__ for p in names["net"].parameters()}
    assert_only_adapted(torch.load("merged.pt", weights_only=True), weights(names["llama"]()))


def assert_only_adapted(merged: dict[str, Tensor], base: dict[str, Tensor]) -> None:
    moved = {name for name, value in merged.items() if not torch.equal(value, base[name])}
    assert moved == {name for name in base if re.search("q_proj|v_proj", name)}


PAGE = "zero3_offload_bf16", '[lt.LoRA("q_proj|v_proj", base="keep")]'
WORKS = (
    PAGE,
    ("zero2_offload_bf16", '[lt.LoRA("q_proj|v_proj"), lt.LeanLoss("model")]'),
    ("ddp_bf16", '[lt.LoRA("q_proj|v_proj", base="nf4"), lt.LeanLoss("model")]'),
)
REFUSED = {
    "LoRA(base='nf4')": ("zero3_offload_bf16", '[lt.LoRA("q_proj", base="nf4")]'),
    "LeanLoss": ("zero3_offload_bf16", '[lt.LeanLoss("model")]'),
}


def sharded(case: tuple[str, str], folder: str) -> str | None:
    """Run the function of the page with another preset and other callbacks: the error, or checkpoints."""
    os.environ["PATH"] += os.pathsep + os.path.dirname(sys.executable)  # where pip puts ninja
    program = SHARDED.replace("devices=devices", "devices=2, accelerator='cpu'")
    for written, other in zip(PAGE, case, strict=True):
        assert written in program
        program = program.replace(written, other)
    os.makedirs(f"{folder}/{os.environ['RANK']}", exist_ok=True)
    os.chdir(f"{folder}/{os.environ['RANK']}")  # each has a base.pt
    names: dict[str, Any] = {"__name__": "program"}
    exec(LANGUAGE.split("callbacks =")[0] + program, names)
    os.makedirs(f"{folder}/{case[0]}", exist_ok=True)
    os.chdir(f"{folder}/{case[0]}")
    try:
        names["train_sharded"](2)
    except MisconfigurationException as error:
        return str(error)
    return None


@pytest.mark.slow  # compiles DeepSpeed's cpu_adam for a minute, unless it has been
def test_a_language_model_in_shards(tmp_path: Path) -> None:
    cases = run_cases(sharded, [*REFUSED.values(), *WORKS], str(tmp_path), timeout=500)
    for name, case in REFUSED.items():
        assert all(f"{name} works under" in told and "ZeRO-3" in told for told in cases[case])
    base = tmp_path / "0" / "base.pt"
    before = {name.removeprefix("model."): weight for name, weight in torch.load(base, weights_only=True).items()}
    for case in WORKS:
        assert cases[case] == [None, None]
        trained, merged = tmp_path / case[0] / "sharded.ckpt", tmp_path / case[0] / "merged.pt"
        lt.export_weights(trained, merged, merge=True, base=base, strip_prefix="model.")
        assert_only_adapted(torch.load(merged, weights_only=True), before)


# -- docs/lora.md -----------------------------------------------------------------------------------------------------

KINDS = ("ia3", "prompt", "prefix")
Trainer = partial(L.Trainer, accelerator="cpu", logger=False, max_epochs=1, enable_checkpointing=False)


@cache
def definitions() -> dict[str, Any]:
    """What the program of the page defines, without its fits."""
    names: dict[str, Any] = {"lt": lt, "L": L, "Trainer": Trainer, "torch": torch, "__name__": "program"}
    exec(PEFT.split("for name")[0], names)
    return names


def tuned(kind: str, *callbacks: Any, tokens: Any = None, **settings: Any) -> Any:
    """The module of the page after a fit."""
    names = definitions()
    torch.manual_seed(1)
    module = names["Tuned"](names["configs"][kind])
    run = Trainer(callbacks=[*callbacks], enable_progress_bar=False, enable_model_summary=False, **settings)
    run.fit(module, Tokens.loader(4) if tokens is None else tokens)
    return module


class Tokens(Dataset[Tensor]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(100, (12,), generator=torch.Generator().manual_seed(index))

    @staticmethod
    def loader(batch_size: int) -> DataLoader[Tensor]:
        return DataLoader(Tokens(), batch_size=batch_size)


@pytest.mark.parametrize("kind", KINDS)
def test_peft_trains_its_adapter_alone_and_saves_it(kind: str, tmp_path: Path) -> None:
    names, module = definitions(), tuned(kind)
    start = names["Tuned"](names["configs"][kind])
    before = dict(start.named_parameters())
    for name, parameter in module.named_parameters():
        adapter = "ia3_l" in name or "prompt_encoder" in name
        assert parameter.requires_grad == adapter == (not torch.equal(parameter, before[name])), name
    module.model.save_pretrained(tmp_path)
    again = names["peft"].PeftModel.from_pretrained(names["llama"](), tmp_path).eval()
    x = {"input_ids": next(iter(Tokens.loader(4)))}
    with torch.no_grad():
        trained = module.eval().model(**x).logits
        assert torch.equal(again(**x).logits, trained)
        assert (trained[:, -12:] - names["llama"]().eval()(**x).logits).abs().max() > 1e-3
        if kind == "ia3":
            torch.testing.assert_close(module.model.merge_and_unload()(**x).logits, trained)
    assert (tmp_path / "adapter_model.safetensors").stat().st_size < 4 * sum(p.numel() for p in before.values()) / 20


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", KINDS)
def test_tricks_at_their_limit_change_nothing_beside_peft(kind: str) -> None:
    plain = weights(tuned(kind))
    recomputes = [lt.ActivationCheckpointing("LlamaDecoderLayer", policy=name) for name in ("full", "selective")]
    for callback in (lt.EMA(decay=0.0), lt.LeanLoss("model"), *recomputes):
        assert_equal(weights(tuned(kind, callback)), plain)


def test_what_does_not_go_beside_peft() -> None:
    with pytest.raises(MisconfigurationException, match="has other adapters already"):
        tuned("ia3", lt.LoRA("q_proj"))
    names = definitions()
    prompt = dict(tuned("prompt", lt.LoRA("q_proj", train="prompt_encoder")).named_parameters())
    start = dict(names["Tuned"](names["configs"]["prompt"]).named_parameters())
    encoder = "model.prompt_encoder.default.embedding.weight"
    assert not torch.equal(prompt[encoder], start[encoder])
    with pytest.raises(KeyError):
        names["peft"].get_peft_model(names["llama"](), names["peft"].PromptTuningConfig(num_virtual_tokens=4))


def on_ranks(kind: str) -> dict[str, Any]:
    tokens = DataLoader(Subset(Tokens(), range(int(os.environ["RANK"]), 16, 2)), batch_size=4)
    module = tuned(kind, tokens=tokens, strategy="ddp", devices=2, use_distributed_sampler=False)
    return {name: p.detach().numpy() for name, p in module.named_parameters() if p.requires_grad}


@pytest.mark.slow
def test_two_ranks_train_peft_as_one_process() -> None:
    cases = run_cases(on_ranks, KINDS)
    for kind in KINDS:
        alone = dict(tuned(kind, tokens=Tokens.loader(8)).named_parameters())
        first, second = cases[kind]
        for name, value in first.items():
            assert (value == second[name]).all()
            torch.testing.assert_close(torch.from_numpy(value), alone[name].detach(), atol=1e-4, rtol=1e-4)
