"""Reading the model and the example batch of ``memory`` and ``suggest``."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_tricks.advisor.simulate.transformer import TransformerShape
from lightning_tricks.core.install import required

COUNT = re.compile(r"(\d+(?:\.\d+)?(?:e1?\d)?)([kmbt]?)", re.IGNORECASE)
THOUSANDS = {"": 0, "k": 3, "m": 6, "b": 9, "t": 12}


class Target(NamedTuple):
    """A module or a number of parameters, and an example batch; None without one."""

    model: nn.Module | int
    batch: Any


def read_target(options: argparse.Namespace) -> Target:
    """Make the model that TARGET names, on the meta device if possible, and an example batch.

    Raises:
        ValueError: If TARGET is in no known format, or there is no such model.
        FileNotFoundError: If there is no such file.
        ImportError: If timm or transformers is missing.
    """
    name, path = options.target, Path(options.target)
    if name.startswith("timm:"):
        return _timm(name.removeprefix("timm:"))
    if match := COUNT.fullmatch(name):
        return Target(_count(match), None)
    if path.suffix not in (".yaml", ".yml", ".json"):
        raise ValueError(
            f"{name!r} is not a model: pass a LightningCLI configuration (.yaml), a transformers configuration (.json),"
            " timm:NAME, or a number of parameters such as 7B or 7e9."
        )
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    return _transformers(path, options.sequence_length) if path.suffix == ".json" else _lightning(path)


def _count(match: re.Match[str]) -> int:
    return round(float(match[1]) * 10 ** THOUSANDS[match[2].lower()])


def read_shape(options: argparse.Namespace) -> TransformerShape:
    """The shape of the transformer that TARGET names.

    Raises:
        ValueError: If TARGET is neither a number of parameters nor a transformers configuration of a decoder.
        FileNotFoundError: If there is no such file.
        ImportError: If transformers is missing.
    """
    if match := COUNT.fullmatch(options.target):
        return TransformerShape.of(_count(match), sequence=options.sequence_length or 4096)
    if not options.target.endswith(".json"):
        raise ValueError(
            f"{options.target!r} has no shape of a transformer: with device={options.device}, pass a number of"
            " parameters such as 7B, or a transformers configuration (.json)."
        )
    model: Any = read_target(options).model
    config, weights = model.config, sum(weight.numel() for weight in model.parameters())
    try:
        sizes: dict[str, Any] = {
            "layers": config.num_hidden_layers,
            "width": config.hidden_size,
            "heads": config.num_attention_heads,
            "vocabulary": config.vocab_size,
            "sequence": options.sequence_length or min(config.max_position_embeddings, 4096),
        }
    except AttributeError as error:
        raise ValueError(f"{options.target} is not a configuration of a text model: {error}.") from error
    sizes |= {
        "key_heads": getattr(config, "num_key_value_heads", None),
        "hidden": getattr(config, "intermediate_size", None),
        "tied": bool(config.tie_word_embeddings),
    }
    shapes = [TransformerShape(**sizes, gated=gated) for gated in (False, True)]
    return min(shapes, key=lambda shape: abs(shape.parameters - weights))


def _lightning(path: Path) -> Target:
    from lightning_tricks_cli.runs.config import read_model

    cli = read_model([path])
    return Target(cli.model, next(iter(train_loader_of(cli))))


def train_loader_of(cli: Any) -> Any:
    """The training loader of a LightningCLI's data module, or of its model."""
    source = cli.model if cli.datamodule is None else cli.datamodule
    source.prepare_data()
    source.setup("fit")
    return source.train_dataloader()


def _timm(name: str) -> Target:
    with required(f"timm:{name} needs timm", "vision"):
        import timm
    if not timm.is_model(name):
        near = ", ".join(timm.list_models(f"*{name.split('_')[0]}*")[:5])
        raise ValueError(f"timm has no model {name!r}." + (f" It has {near}." if near else ""))
    with torch.device("meta"):
        model = timm.create_model(name)
        return Target(model, torch.empty(2, *timm.data.resolve_model_data_config(model)["input_size"]))


def _transformers(path: Path, sequence_length: int | None) -> Target:
    with required(f"{path} needs transformers", "text"):
        import transformers
    try:
        values = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict) or "model_type" not in values:
        raise ValueError(f"{path} is not a configuration of transformers: it has no model_type.")
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    kind = getattr(transformers, (config.architectures or [""])[0], None)
    if kind is not None and not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise ValueError(f"{path} names {config.architectures[0]!r} among its architectures, which is no model.")
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config) if kind is None else kind(config)
        return Target(model, _example(config, kind, sequence_length))


def _example(config: Any, kind: type[nn.Module] | None, sequence_length: int | None) -> dict[str, Any]:
    """A batch of two samples, with labels if the model computes a loss from them."""
    name = "" if kind is None else kind.__name__
    if (size := getattr(config, "image_size", None)) is not None:
        height, width = (size, size) if isinstance(size, int) else size
        batch = {"pixel_values": torch.empty(2, getattr(config, "num_channels", 3), height, width)}
        return {**batch, "labels": torch.empty(2, dtype=torch.long)} if name.endswith("Classification") else batch
    length = sequence_length or min(getattr(config, "max_position_embeddings", 512), 512)
    tokens = torch.empty(2, length, dtype=torch.long)
    if name.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")):
        return {"input_ids": tokens, "labels": tokens}
    if name.endswith("ForSequenceClassification"):
        return {"input_ids": tokens, "labels": torch.empty(2, dtype=torch.long)}
    return {"input_ids": tokens}
