"""The loss without logits equals the plain one: transformers models, loops by hand, precisions; and what is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

import lightning_tricks as lt
import lightning_tricks.losses.linear_cross_entropy as chunks
from lightning_tricks.losses.lean_loss import Logits
from lightning_tricks.losses.linear_cross_entropy import linear_cross_entropy
from tests.conformance.engines import cpu_deepspeed
from tests.conformance.runs import ShardedNet
from tests.nets import PlainNet, assert_close, build, fit, rank_loader
from tests.ranks import run_ranks


@pytest.fixture(autouse=True)
def in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small logits, too."""
    monkeypatch.setattr(chunks, "BYTES", 1)


# -- the function of tensors ------------------------------------------------------------------------------------------


def gradients(loss: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    value = loss(*leaves)
    (value * torch.linspace(1, 2, value.numel()).view_as(value)).sum().backward()
    return [value.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[list-item]


@pytest.mark.parametrize("rows", [1, 5, 23, 100])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("case", ["indices", "ignored", "smooth", "weighted", "probabilities"])
def test_losses_and_gradients_are_those_of_the_logits(case: str, reduction: str, rows: int) -> None:
    torch.manual_seed(0)
    hidden, weight, bias, y = torch.randn(23, 8), torch.randn(11, 8), torch.randn(11), torch.randint(11, (23,))
    settings: dict[str, Any] = {"reduction": reduction}
    if case == "ignored":
        y[::3], settings["ignore_index"] = 4, 4
    if case == "smooth":
        settings["label_smoothing"] = 0.1
    class_weight = torch.rand(11) if case in ("weighted", "smooth") else None
    if case == "weighted":
        y[::3] = -100
    target = torch.randn(23, 11).softmax(1) if case == "probabilities" else y

    def plain(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight, bias), target, weight=class_weight, **settings)

    def lean(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, target, bias, class_weight=class_weight, rows=rows, **settings)

    expected = gradients(plain, hidden, weight, bias)
    for found, right in zip(gradients(lean, hidden, weight, bias), expected, strict=True):
        torch.testing.assert_close(found, right)


def test_derivatives_are_those_of_finite_differences() -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(5, 3).double().requires_grad_(), torch.randn(4, 3).double().requires_grad_()]
    target = torch.tensor([0, 3, -100, 1, 2])
    assert torch.autograd.gradcheck(lambda h, w: linear_cross_entropy(h, w, target, rows=2), leaves)


def test_second_derivatives_raise_and_are_never_left_out() -> None:
    hidden = torch.randn(6, 4, requires_grad=True)
    loss = linear_cross_entropy(hidden, torch.randn(9, 4), torch.arange(6), rows=4)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize("targets", [5, 3])
def test_another_number_of_targets_is_told_of_all_rows(targets: int) -> None:
    with pytest.raises(ValueError, match=f"each of 6 rows of logits, got {targets}"):
        linear_cross_entropy(torch.randn(6, 4), torch.randn(9, 4), torch.arange(targets), rows=2)


def test_a_frozen_head_and_frozen_inputs_get_no_gradients() -> None:
    hidden, weight = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4)
    linear_cross_entropy(hidden, weight, torch.arange(6), rows=4).backward()
    assert hidden.grad is not None
    weight.requires_grad_()
    linear_cross_entropy(hidden.detach(), weight, torch.arange(6), rows=4).backward()
    assert weight.grad is not None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_scaled_loss_keeps_small_gradients_in_16_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    hidden, weight, y = torch.randn(64, 16), torch.randn(4000, 16) / 4, torch.randint(4000, (64,))
    low = [tensor.to(dtype) for tensor in (hidden, weight)]
    scale = 2.0**14
    exact = gradients(lambda h, w: F.cross_entropy(F.linear(h, w), y) * scale, *(tensor.float() for tensor in low))
    found = gradients(lambda h, w: linear_cross_entropy(h, w, y, rows=7) * scale, *low)
    plain = gradients(lambda h, w: F.cross_entropy(F.linear(h, w).float(), y) * scale, *low)
    for own, other, right in zip(found[1:], plain[1:], exact[1:], strict=True):
        errors = [(each.float() - right).norm() / right.norm() for each in (own, other)]
        assert errors[0] <= 1.05 * errors[1] + 1e-3


@pytest.mark.skipif(not hasattr(torch.nn, "LinearCrossEntropyOptions"), reason="torch has none before 2.13")
def test_small_fp16_gradients_that_a_scale_does_not_reach_are_zero_in_torchs_own() -> None:
    torch.manual_seed(0)
    hidden, weight, y = torch.randn(64, 16), torch.randn(4000, 16) / 64, torch.randint(4000, (64,))
    low = [hidden.half(), weight.half()]

    def zeros(loss: Callable[..., Tensor], scale: float) -> int:
        found = gradients(lambda h, w: loss(h, w) * scale, *low)[2]
        return int((found == 0).sum())

    def torchs(h: Tensor, w: Tensor) -> Tensor:
        loss: Tensor = F.linear_cross_entropy(h / 256, w, y, options=torch.nn.LinearCrossEntropyOptions())  # type: ignore[attr-defined, unused-ignore]
        return loss

    def own(h: Tensor, w: Tensor) -> Tensor:
        return linear_cross_entropy(h / 256, w, y, rows=7)

    assert zeros(torchs, 2.0**14) == zeros(torchs, 1.0) > 10_000  # of 64,000
    assert zeros(own, 2.0**14) == 0


def test_few_logits_exist_at_a_time() -> None:
    hidden, weight = (torch.randn(rows, 8, requires_grad=True) for rows in (512, 2000))
    y, largest = torch.arange(512), [0]

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            sizes = [each.numel() for each in torch.utils._pytree.tree_leaves(out) if isinstance(each, Tensor)]
            largest[0] = max(largest[0], *sizes, 0)
            return out

    with Sizes():
        linear_cross_entropy(hidden, weight, y, rows=16).backward()
    assert largest[0] == 16 * 2000 == 2 * weight.numel()


# -- transformers -----------------------------------------------------------------------------------------------------

SIZES: dict[str, Any] = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES["intermediate_size"] = 48
SMALL = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32}
CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SMALL),
    "tied": ("Llama", {**SMALL, "tie_word_embeddings": True}),
    "mistral": ("Mistral", SMALL),
    "qwen": ("Qwen2", SMALL),
    "qwen3": ("Qwen3", SMALL),
    "gemma": ("Gemma", {**SMALL, "pad_token_id": 0}),
    "gemma2": ("Gemma2", {**SMALL, "pad_token_id": 0, "final_logit_softcapping": None}),
    "phi": ("Phi", {key: SMALL[key] for key in SMALL if key != "head_dim"}),  # its head has a bias
    "gpt2": ("GPT2LMHead", {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4}),
}
SOME = ("llama", "gpt2", "gemma", "qwen")


def causal(name: str, **settings: Any) -> nn.Module:
    import transformers

    prefix, arguments = CONFIGURATIONS[name]
    torch.manual_seed(0)
    configuration = getattr(transformers, f"{prefix.removesuffix('LMHead')}Config")(**{**arguments, **settings})
    kind = f"{prefix}Model" if prefix.endswith("LMHead") else f"{prefix}ForCausalLM"
    return getattr(transformers, kind)(configuration)


def tokens() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 97, (3, 12), generator=generator)
    labels = ids.clone()
    labels[:, :3], labels[2, 8:] = -100, -100
    return {"input_ids": ids, "labels": labels}


def trained(model: nn.Module, **inputs: Any) -> dict[str, Tensor]:
    model.train().zero_grad()
    torch.manual_seed(5)
    loss = model(**tokens(), **inputs).loss
    loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return {"loss": loss.detach(), **{name: gradient.clone() for name, gradient in gradients.items()}}


@pytest.mark.parametrize("name", [n if n in SOME else pytest.param(n, marks=pytest.mark.slow) for n in CONFIGURATIONS])
def test_models_of_transformers_train_as_with_logits(name: str) -> None:
    model = causal(name)
    expected, counted = trained(model), trained(model, num_items_in_batch=torch.tensor(50))
    assert lt.lean_loss(model) is model
    assert_close(trained(model), expected, 1e-5)
    assert_close(trained(model, num_items_in_batch=torch.tensor(50)), counted, 1e-5)
    model(**tokens()).loss.backward()  # accumulates
    logits = model(**tokens()).logits
    assert isinstance(logits, Logits)
    assert "nan" not in str(logits)
    assert logits.shape == (3, 12, 97)


def test_evaluation_and_generation_have_logits() -> None:
    model = causal("llama")
    before = model.eval()(**tokens())
    lt.lean_loss(model)
    after = model(**tokens())
    assert torch.equal(after.logits, before.logits)
    assert torch.equal(after.loss, before.loss)
    ids = tokens()["input_ids"][:, :4]
    model.train()
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape == (3, 7)
    with torch.no_grad():
        assert type(model(**tokens()).logits) is Tensor
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other(**tokens()).logits) is Tensor


def test_masked_language_models_train_the_same() -> None:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    model = BertForMaskedLM(BertConfig(**SIZES))
    expected = trained(model)
    assert_close(trained(lt.lean_loss(model)), expected, 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_gives_the_same_to_its_precision(dtype: torch.dtype) -> None:
    model = causal("llama")
    exact = trained(model)
    with torch.autocast("cpu", dtype):
        plain = trained(model)
        lean = trained(lt.lean_loss(model))
    assert lean["loss"].dtype == plain["loss"].dtype
    for name, right in exact.items():
        errors = [float((each[name].float() - right).norm() / right.norm()) for each in (lean, plain)]
        assert errors[0] < 1.3 * errors[1] + 1e-4, name


def test_autocast_leaves_double_precision_as_it_is() -> None:
    plain, x, y = nn.Linear(8, 11).double(), torch.randn(6, 8).double(), torch.arange(6)
    lean = lt.lean_loss(copy.deepcopy(plain))
    with torch.autocast("cpu", torch.bfloat16):
        assert lean(x).dtype == plain(x).dtype
        for head in (plain, lean):
            F.cross_entropy(head(x), y).backward()
    assert torch.equal(lean.weight.grad, plain.weight.grad)


# -- losses that a module computes itself -----------------------------------------------------------------------------

FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "flat": lambda logits, y: F.cross_entropy(logits.view(-1, 11), y.view(-1)),
    "shifted": lambda logits, y: F.cross_entropy(
        logits[..., :-1, :].contiguous().view(-1, logits.size(-1)), y[..., 1:].flatten()
    ),
    "class": lambda logits, y: nn.CrossEntropyLoss(label_smoothing=0.1)(logits.flatten(0, 1).float(), y.flatten()),
    "masked": lambda logits, y: F.cross_entropy(logits[y > 3], y[y > 3], reduction="sum"),
    "sliced": lambda logits, y: F.cross_entropy(logits[:, 1:].reshape(-1, logits.shape[-1]), y[:, 1:].reshape(-1)),
    "last": lambda logits, y: F.cross_entropy(logits[:, -1], y[:, -1]),
    "weighted": lambda logits, y: F.cross_entropy(
        logits.flatten(0, 1), y.flatten(), weight=logits.new_tensor([0.5, *[1.0] * 10])
    ),
    "named": lambda logits, y: F.cross_entropy(input=logits.flatten(0, 1), target=y.flatten()),
    "ignored": lambda logits, y: F.cross_entropy(logits.flatten(0, 1), 0 * y.flatten() - 100).nan_to_num(7.0),
    "none": lambda logits, y: (
        F.cross_entropy(logits.to(torch.float64).reshape(-1, 11), y.reshape(-1), reduction="none").square().mean()
    ),
    "metric": lambda logits, y: (
        F.cross_entropy(logits.view(-1, 11), y.view(-1))
        + (logits.argmax(-1) == y).float().mean()
        + logits.detach().softmax(-1).max()
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_loss_by_hand_is_the_same(form: str) -> None:
    torch.manual_seed(0)
    head, hidden, y = nn.Linear(8, 11), torch.randn(4, 6, 8), torch.randint(11, (4, 6))
    results = []
    for each in (copy.deepcopy(head), lt.lean_loss(copy.deepcopy(head))):
        x = hidden.clone().requires_grad_()
        loss = FORMS[form](each(x), y)
        loss.backward()
        results.append({"loss": loss.detach(), "x": x.grad, "weight": each.weight.grad, "bias": each.bias.grad})
    assert_close(*results, 1e-6)  # type: ignore[arg-type]


# -- what is refused --------------------------------------------------------------------------------------------------


def test_logits_that_are_capped_before_the_loss_are_refused() -> None:
    model = lt.lean_loss(causal("gemma2", final_logit_softcapping=30.0)).train()
    with pytest.raises(MisconfigurationException, match=r"needed for \w*div\w*\(Logits, float\)"):
        model(**tokens())


def test_scales_are_refused_where_a_model_has_them() -> None:
    from transformers import CohereConfig, CohereForCausalLM

    model = CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.5, pad_token_id=0))
    with pytest.raises(MisconfigurationException, match=r"needed for mul\(Logits, float\)"):
        lt.lean_loss(model).train()(**tokens())


@pytest.mark.parametrize(
    "use",
    [
        lambda logits, y: F.nll_loss(logits.log_softmax(-1), y),
        lambda logits, y: F.cross_entropy(logits / 2, y),
        lambda logits, y: F.cross_entropy(logits[:, :5], y % 5),
        lambda logits, y: F.cross_entropy(logits[:, torch.arange(11).flip(0)], y),
        lambda logits, y: F.cross_entropy(logits.view(2, 2, 11).transpose(1, 2), y.view(2, 2)),
        lambda logits, y: F.cross_entropy(logits, y, size_average=True),
        lambda logits, y: F.cross_entropy(torch.cat([logits, logits]), torch.cat([y, y])),
        lambda logits, y: logits.logsumexp(-1).sum(),
    ],
)
@pytest.mark.parametrize("width", [8, 11])  # of as many inputs as classes an index might be taken for the other's
def test_what_needs_logits_raises_and_never_computes_something_else(use: Any, width: int) -> None:
    with pytest.raises(MisconfigurationException, match=r"logits\.detach\(\)"):
        use(lt.lean_loss(nn.Linear(width, 11))(torch.randn(4, width)), torch.arange(4))


class Twice(torch.autograd.Function):
    """An operation of which torch does not tell tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


def test_a_function_that_torch_does_not_tell_of_raises_in_the_backward_pass() -> None:
    loss = F.cross_entropy(Twice.apply(lt.lean_loss(nn.Linear(8, 11))(torch.randn(4, 8))), torch.arange(4))
    with pytest.raises(MisconfigurationException, match=r"autograd\.Function"):
        loss.backward()


def test_who_asks_for_the_base_on_one_device_is_not_told_of_shards() -> None:
    logits = lt.lean_loss(nn.Linear(8, 11))(torch.randn(4, 8))
    with pytest.raises(MisconfigurationException, match=r"they are needed for _base\(Logits\)"):
        logits._base  # noqa: B018


def test_logits_are_not_written() -> None:
    logits = lt.lean_loss(nn.Linear(8, 11))(torch.randn(4, 8))
    for write in (lambda: logits.mul_(2), lambda: logits.__setitem__(0, 0.0)):
        with torch.no_grad(), pytest.raises(MisconfigurationException, match=r"logits\.detach\(\)"):
            write()


def sharded(strategy: str) -> str:
    def make(module: Any) -> None:
        ShardedNet.__init__(module)
        lt.lean_loss(module.layers[-1])

    shards = cpu_deepspeed() if strategy == "ZeRO-3" else ModelParallelStrategy(2, 1)
    net = type("Net", (ShardedNet if strategy == "FSDP2" else PlainNet,), {"__init__": make})
    with pytest.raises(MisconfigurationException) as caught:
        fit(build(net), train=rank_loader(), strategy=shards, devices=2, use_distributed_sampler=False)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["FSDP2", "ZeRO-3"])
def test_a_head_that_was_cut_since_is_refused(strategy: str) -> None:
    for told in run_ranks(sharded, strategy):
        assert f"needs the weights of the head in one piece until the loss is there, and {strategy} gives" in told


def test_heads_that_are_no_linear_layers_are_refused() -> None:
    class Scaled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 2

    with pytest.raises(ValueError, match="whose forward pass is another one"):
        lt.lean_loss(Scaled(4, 8))
    with pytest.raises(ValueError, match="whose forward pass is another one"):
        lt.lean_loss(lt.lean_loss(nn.Linear(4, 8)))
    with pytest.raises(ValueError, match=r"get_output_embeddings.*got Sequential"):
        lt.lean_loss(nn.Sequential(nn.Linear(4, 8)))
    with pytest.raises(ValueError, match="one plain tensor"):
        lt.lean_loss(lt.quantize(nn.Linear(4, 8)))
    peft = pytest.importorskip("peft")
    model = causal("llama")
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["lm_head"]), model)
    with pytest.raises(ValueError, match="no plain"):
        lt.lean_loss(model)
