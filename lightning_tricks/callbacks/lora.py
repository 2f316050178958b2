"""Low-rank adapters: a large network is fine-tuned by few weights, and checkpoints hold those alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial, wraps
from pathlib import Path
from pickle import UnpicklingError
from types import NoneType
from typing import Any, Literal, TypeVar, final

import lightning as L
import torch
from lightning.pytorch.plugins import BitsandbytesPrecision
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from typing_extensions import override

from lightning_tricks.core.adapters.base import is_quantized, quantize, weights_checksum
from lightning_tricks.core.adapters.inject import (
    Settings,
    adapted_layers,
    adapter_parameters,
    frozen_linear,
    inject,
    require_peft,
    select,
    transposed,
)
from lightning_tricks.core.adapters.record import (
    Record,
    checksums_of,
    found_in,
    frozen_weights,
    is_part,
    leave_frozen_out,
    local_parts,
    record_in,
)
from lightning_tricks.core.checks import check_choice, check_count, check_range, check_type, some
from lightning_tricks.core.conflicts import Conflict
from lightning_tricks.core.lightning.engine import TORCH, UNSHARDED, Engine, engine_of, require_engine
from lightning_tricks.core.lightning.next_step import around_next_step
from lightning_tricks.core.lightning.optimizer_groups import recorded_groups
from lightning_tricks.core.lightning.patching import wrap_method
from lightning_tricks.core.lightning.trainer import callbacks_of, extremes, is_fitting, launches_processes, saves_folder
from lightning_tricks.core.replay.undone_fit import is_trial
from lightning_tricks.core.selection import check_patterns
from lightning_tricks.core.trick import Trick
from lightning_tricks.core.weights.stages import StagedCallback
from lightning_tricks.schedules.split_groups import split_groups

__all__ = ["LoRA"]

_OF_PEFT = {  # arguments of peft's LoraConfig, and what they are here
    "target_modules": "modules=, regular expressions searched in names",
    "target_parameters": "modules=, the layers that have them",
    "lora_alpha": "alpha=",
    "lora_dropout": "dropout=",
    "modules_to_save": "train=, regular expressions searched in the names of parameters",
    "use_dora": 'variant="dora"',
    "use_rslora": 'variant="rslora"',
    "loraplus_lr_ratio": "lr_ratio=",
    "init_lora_weights": "nothing: A is drawn and B begins at zero, beside weights that stay as they are",
    "rank_pattern": "one r= for all layers",
    "alpha_pattern": "one alpha= for all layers",
    "exclude_modules": "modules= that select the others alone",
    "layers_to_transform": "modules= with the numbers of the layers",
    "bias": "train= with the names of biases",
    "task_type": "nothing: the module computes its loss",
}
Init = TypeVar("Init", bound=Callable[..., None])


def _answering_peft(init: Init) -> Init:
    """A constructor that says what to pass in the place of peft's arguments."""

    @wraps(init)
    def answering(self: Any, *args: Any, **kwargs: Any) -> None:
        if told := [f"{name}= of peft is {ours}" for name, ours in _OF_PEFT.items() if name in kwargs]:
            raise TypeError(f"LoRA does not take arguments of peft: {'; '.join(told)}.")
        init(self, *args, **kwargs)

    return answering  # type: ignore[return-value]


@final
class LoRA(Trick):
    """Low-rank adapters; only they get gradients and are saved: ``W' = W + scale * B @ A``.

    W (out, in) is frozen, and A (r, in) and B (out, r) train, ``scale = alpha / r``. "rslora" has
    ``scale = alpha / sqrt(r)``. "dora" also trains a length m for each output: ``m * W' / norm(W')``. B starts at zero,
    so the network starts as it was. All else is frozen but what ``train`` selects; statistics of BatchNorm still
    change. Layers are replaced by peft's before the optimizers are made and before a strategy shards the module; those
    that ``configure_model`` makes are replaced after it.

    A checkpoint holds adapters, trained parts, buffers and optimizer states, and the checksum of the other weights. It
    loads into the same network with the same ``LoRA``, for ``fit``, ``validate``, ``test`` and ``predict``, and is
    refused beside other weights. Without this callback torch refuses to load it, with ``strict=False``, too:
    ``merge_adapters`` and ``lightning-tricks export --merge`` make weights for the class as it was.

    Args:
        modules: The layers to adapt: regular expressions searched in submodules' names, or names of classes
            ("Linear"); one or a sequence. Linear layers, embeddings and convolutions that these select get an adapter.
            "all-linear" selects all linear layers, without the output layer of a language model and what ``train``
            selects.
        r: The rank, at least 1.
        alpha: The numerator of the scale, above 0; None for ``2 * r``.
        dropout: The probability of dropout in front of A, in [0, 1).
        train: Parameters that train as a whole, such as a new head: patterns as in ``modules``, for parameters.
        variant: "lora", "dora" or "rslora".
        base: "keep" for frozen weights as they are; "nf4" (4 bits, by bitsandbytes) or "int8" (by torchao) for those
            of linear layers with several inputs, but a language model's head, on a single device or under DDP. The
            checkpoint has the checksum of the weights before.
        lr_ratio: LoRA+: the learning rate of B is that of A times this number, at least 1; 16 is the paper's. Those of
            embeddings' adapters stay equal.
        save: "adapter" for checkpoints without the frozen weights, "all" for all weights.

    Raises:
        TypeError: For a value of the wrong type, and peft's names of arguments, with those of this class.
        ValueError: For a value out of range.
        ModuleNotFoundError: At setup, if peft (bitsandbytes, torchao) is missing, with the extra to install.
        MisconfigurationException: At setup, if a pattern selects nothing or a layer that cannot have an adapter, the
            module is sharded already or has other adapters; for a checkpoint of other weights or other settings; when
            the optimizers are made, if they lack an adapter, or have schedules whose groups cannot be split for
            ``lr_ratio``; when training starts, if something else was unfrozen;
            before the first step and when a checkpoint is saved, if something has changed frozen weights.

    Example:
        >>> trainer = L.Trainer(callbacks=[LoRA("attn.qkv", r=8, train="head")], accelerator="cpu", logger=False)

    References:
        Hu et al., arXiv 2106.09685; "dora": Liu et al., arXiv 2402.09353; "rslora": Kalajdzievski, arXiv 2312.03732;
        LoRA+: Hayou et al., arXiv 2402.12354.
    """

    changes_network = True
    conflicts = (
        Conflict(
            ("LoRA",),
            "each would freeze the adapters of the other",
            "Name all layers in modules= of one; r and alpha are the same for all of them",
        ),
        Conflict(
            ("GradualUnfreeze", "BaseFinetuning"),
            "the one unfreezes weights that the other keeps frozen and leaves out of checkpoints",
            "Remove one of them, or name in LoRA(train=...) what trains beside the adapters",
        ),
        Conflict(
            ("WeightAveraging", "StochasticWeightAveraging"),
            "the one copies the module before the other gives it adapters",
            "Use lightning_tricks.EMA or lightning_tricks.SWA",
        ),
    )

    @_answering_peft
    def __init__(
        self,
        modules: str | Sequence[str],
        *,
        r: int = 8,
        alpha: float | None = None,
        dropout: float = 0.0,
        train: str | Sequence[str] = (),
        variant: Literal["lora", "dora", "rslora"] = "lora",
        base: Literal["keep", "nf4", "int8"] = "keep",
        save: Literal["adapter", "all"] = "adapter",
        lr_ratio: float = 1.0,
    ) -> None:
        check_patterns("modules", modules)
        check_count("r", r)
        check_type("alpha", alpha, int, float, NoneType)
        if alpha is not None and not 0 < alpha <= sys.float_info.max:
            raise ValueError(f"alpha must be above 0, got {alpha!r}: it is the numerator of the scale, alpha / r.")
        check_range("dropout", dropout, 0.0, 1.0, below=True)
        if not isinstance(train, tuple | list) or train:  # jsonargparse makes a list of the default
            check_patterns("train", train)
        check_choice("variant", variant, ("lora", "dora", "rslora"))
        check_choice("base", base, ("keep", "nf4", "int8"))
        check_choice("save", save, ("adapter", "all"))
        check_range("lr_ratio", lr_ratio, 1.0, sys.float_info.max)
        if save == "all" and base != "keep":
            raise ValueError(f"save='all' needs base='keep', got base={base!r}: quantized weights are not saved.")
        super().__init__()
        self.modules = modules
        self.r = r
        self.alpha = alpha
        self.dropout = dropout
        self.train = train
        self.variant = variant
        self.base = base
        self.save = save
        self.lr_ratio = lr_ratio
        self._record: Record | None = None  # of the module that runs, or ran last
        self._saves: Any = None  # the wrapped method of the strategy that saves
        self._begun_with = ""  # the checksum of this rank's frozen weights when the fit began

    # -- injection ----------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._begun_with = ""
        engine = require_engine(trainer, "LoRA", *TORCH, Engine.ZERO1, Engine.ZERO2, Engine.ZERO3)
        if self.base != "keep":
            require_engine(trainer, f"LoRA(base={self.base!r})", *UNSHARDED, why="where quantized weights stay whole")
        if launches_processes(trainer):
            raise MisconfigurationException(
                "LoRA changes the module in the process that trains, got a strategy that starts others and loads their"
                ' weights into a module without adapters (spawn, fork, notebook): use strategy="ddp", or one device.'
            )
        if isinstance(trainer.precision_plugin, BitsandbytesPrecision):
            raise MisconfigurationException(
                "LoRA: BitsandbytesPrecision would quantize the adapters, too: leave the plugin out."
            )
        strategy: Any = trainer.strategy
        # Lightning's ModelParallelStrategy has configure_model shard the module, ours shards later.
        shards_itself = engine is Engine.FSDP2 and not hasattr(strategy, "strategy_name")
        first = shards_itself or not is_overridden("configure_model", pl_module)
        for hook in ("setup",) if first else ("configure_model",):
            self._wrap(pl_module, hook, partial(self._inject_after, trainer, pl_module))
        self._wrap(pl_module, "configure_optimizers", partial(self._require_held, pl_module))
        self._wrap(strategy, "load_checkpoint", partial(self._load, trainer))
        if self.lr_ratio != 1 and is_fitting(trainer):
            require_engine(trainer, f"LoRA(lr_ratio={self.lr_ratio})", *TORCH, why="whose optimizers keep their groups")
            self._wrap(strategy, "setup_optimizers", self._split_groups)
        if strategy.lightning_module_state_dict is not self._saves:
            # Stays after the fit: trainer.save_checkpoint then leaves the frozen weights out, too.
            wrap_method(strategy, "lightning_module_state_dict", partial(self._saved, trainer))
            self._saves = strategy.lightning_module_state_dict
        if self.save == "adapter":
            self._undo.callback(setattr, pl_module, "strict_loading", pl_module.strict_loading)
            pl_module.strict_loading = False  # names are compared in _load
            if engine.is_deepspeed:
                strategy.exclude_frozen_parameters = True

    def _inject_after(
        self, trainer: L.Trainer, module: L.LightningModule, hook: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run the module's own hook, then give its layers their adapters."""
        output = hook(*args, **kwargs)
        settings = {name: getattr(self, name) for name in _SETTINGS}
        found: Any = getattr(module, "lightning_tricks_lora", None)  # an attribute goes with a copy of the module
        if found is None:
            found = settings, self._injected(trainer, module)
            module.lightning_tricks_lora = found
        earlier, self._record = found
        if told := [f"{name}={earlier[name]!r}" for name in _SETTINGS if earlier[name] != settings[name]]:
            raise MisconfigurationException(
                f"{type(module).__name__} has adapters from an earlier LoRA({', '.join(told)}), got"
                f" {self.written()}: use the same settings, or a new module."
            )
        if [*adapted_layers(module)] != self._record.layers:
            raise MisconfigurationException(
                f"LoRA: {type(module).__name__} has lost adapters since its last run: its hooks setup and"
                " configure_model must not make layers again that are there."
            )
        return output

    def _injected(self, trainer: L.Trainer, module: L.LightningModule) -> Record:
        name = type(module).__name__
        if adapters := adapted_layers(module):
            raise MisconfigurationException(
                f"LoRA: {name} has other adapters already, in {some(adapters)}: leave them out, or LoRA."
            )
        if any(hasattr(parameter, "placements") or hasattr(parameter, "ds_id") for parameter in module.parameters()):
            raise MisconfigurationException(
                f"LoRA: {name} is sharded already, and adapters must be there before: make the layers in __init__ or"
                " setup, or leave the sharding to the strategy."
            )
        if any(parameter.is_meta for parameter in module.parameters()):
            raise MisconfigurationException(
                f"LoRA: {name} has weights on the meta device, and adapters need those that they are made for: make"
                " the layers on a real device."
            )
        require_peft()
        try:
            selected, trained = select(module, self.modules, self.train)
        except ValueError as error:
            raise MisconfigurationException(f"LoRA on {name}: {error}") from error
        checksum = self._checksum(trainer, module, trained) if self.save == "adapter" else ""
        if self.base != "keep":
            if not (linear := frozen_linear(module, trained)):
                raise MisconfigurationException(
                    f"LoRA(base={self.base!r}) quantizes frozen nn.Linear layers, and {name} has none but output layers"
                    " and those that share weights or have one input: use base='keep'."
                )
            if any(layer.weight.dtype == torch.float64 for _, _, layer in linear):
                raise MisconfigurationException(
                    f"LoRA(base={self.base!r}) quantizes weights of 16 or 32 bits, got torch.float64: use base='keep',"
                    " or another precision."
                )
            for owner, key, layer in linear:
                setattr(owner, key, quantize(layer, self.base))
        layers = inject(module, selected, trained, self.settings)
        packed = [f"{path}.weight" for path, layer in module.named_modules() if is_quantized(layer)]
        if packed:  # which DDP does not copy
            wrapped: Any = module
            ignored = getattr(wrapped, "_ddp_params_and_buffers_to_ignore", ())
            wrapped._ddp_params_and_buffers_to_ignore = [*ignored, *packed]
        return Record(
            r=self.r,
            alpha=self.settings.alpha,
            variant=self.variant,
            scale=self.settings.scale,
            layers=layers,
            transposed=transposed(module),
            trained=list(trained),
            base=self.base,
            checksum=checksum,
        )

    def _checksum(self, trainer: L.Trainer, module: nn.Module, trained: Mapping[str, nn.Parameter]) -> str:
        """The checksum of what will be frozen; all ranks take part."""
        trains = {id(parameter) for parameter in trained.values()}
        named = module.named_parameters(remove_duplicate=False)
        checksum = weights_checksum({name: parameter for name, parameter in named if id(parameter) not in trains})
        smallest, largest = extremes(trainer, int(checksum, 16))
        if smallest != largest and self.base != "keep":  # else the strategy copies the weights of rank 0
            raise MisconfigurationException(
                f"LoRA(base={self.base!r}): the ranks have different weights before quantizing, which no strategy makes"
                " equal: load the same weights on all, or L.seed_everything(...) before the module is made."
            )
        return trainer.strategy.broadcast(checksum)

    @property
    def settings(self) -> Settings:
        """What the adapters are made of."""
        return Settings(self.r, 2 * self.r if self.alpha is None else self.alpha, self.dropout, self.variant)

    # -- what trains --------------------------------------------------------------------------------------------------

    def _require_held(self, module: L.LightningModule, configure: Callable[[], Any]) -> Any:
        """Make the optimizers; raise if they do not have all that trains."""
        with recorded_groups() as made:
            optimizers = configure()
        held = {id(parameter) for group, _ in made for parameter in group["params"]}
        lost = [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in held]
        if lost and optimizers is not None:
            raise MisconfigurationException(
                f"LoRA: the optimizers that {type(module).__name__}.configure_optimizers makes lack {some(lost)}, which"
                " would never train: make them there, of self.parameters()."
            )
        return optimizers

    def _split_groups(self, set_up: Callable[[L.Trainer], None], trainer: L.Trainer) -> None:
        """Let the optimizers be made, and give B its own learning rate."""
        set_up(trainer)
        layers = adapted_layers(trainer.lightning_module).values()
        later = [p for layer in layers for name, p in adapter_parameters(layer).items() if name.startswith("lora_B.")]
        if not later:
            raise MisconfigurationException(
                f"LoRA(lr_ratio={self.lr_ratio}) is for linear layers and convolutions, got adapters of embeddings"
                " alone: leave lr_ratio out."
            )
        for optimizer in trainer.optimizers:
            schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
            mine = [schedule for schedule in schedules if schedule.optimizer is optimizer]
            if not mine and any("initial_lr" in group for group in optimizer.param_groups):
                raise MisconfigurationException(
                    f"LoRA(lr_ratio={self.lr_ratio}): configure_optimizers has made a schedule that it does not return,"
                    " whose groups are split here: return it."
                )
            try:
                split_groups(optimizer, mine, [(later, self.lr_ratio)])
            except TypeError as error:
                raise MisconfigurationException(f"LoRA(lr_ratio={self.lr_ratio}): {error}") from error

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        if self.save == "adapter" and not self._compares(trainer, self._running):
            self._begun_with, _ = checksums_of(self._running, local_parts(frozen_weights(pl_module)))

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if self.save == "adapter":
            around_next_step(trainer, self._undo, partial(self._of_the_same_base, trainer, pl_module))
        record = self._running
        staged = callbacks_of(trainer, StagedCallback)  # type: ignore[type-abstract]
        stopped = {name for callback in staged for name in callback.state_dict()["frozen"]}
        trains = {name: record.is_trained(name) and name not in stopped for name, _ in pl_module.named_parameters()}
        changed = [name for name, p in pl_module.named_parameters() if p.requires_grad != trains[name]]
        if changed:
            raise MisconfigurationException(
                f"LoRA decides what trains, and requires_grad of {some(changed)} was changed since: name in"
                " LoRA(train=...) what trains beside the adapters."
            )

    @contextmanager
    def _of_the_same_base(self, trainer: L.Trainer, module: L.LightningModule) -> Iterator[None]:
        """Raise if hooks of the module, such as ``on_train_start``, have replaced frozen weights."""
        self._require_unchanged(trainer, self._running, frozen_weights(module))
        yield

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        if engine_of(trainer) is Engine.ZERO3 or is_trial(trainer):
            return  # under ZeRO-3 a rank holds only a shard; a trial takes too few steps
        unused = [name for name, layer in adapted_layers(pl_module).items() if not _moves(layer)]
        if unused and trainer.global_step:
            rank_zero_warn(
                f"LoRA: the adapters of {some(unused)} are as they were before training. A network that reads a layer's"
                " weight without calling the layer does not use its adapter: name other layers in modules=."
            )

    @property
    def _running(self) -> Record:
        assert self._record is not None, "made after setup"
        return self._record

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def _saved(self, trainer: L.Trainer, state_dict: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The state for a checkpoint: without frozen weights, and with placeholders that no other module loads."""
        state, module = state_dict(), trainer.lightning_module
        if not state or not hasattr(module, "lightning_tricks_lora"):
            return state  # of another module, or on a rank that saves nothing
        record: Record = vars(module)["lightning_tricks_lora"][1]
        if self.save == "adapter":
            frozen = frozen_weights(module)
            self._require_unchanged(trainer, record, frozen)
            state = {name: value for name, value in state.items() if not is_part(name, frozen)}
        return state if saves_folder(trainer) else {**state, **record.placeholders()}

    def _require_unchanged(self, trainer: L.Trainer, record: Record, frozen: Mapping[str, Tensor]) -> None:
        """Raise if frozen weights, which no checkpoint has, differ from those that the adapters were made for.

        Where they are quantized, sharded, or were cast after the adapters were made, they are compared with those that
        the fit began with.
        """
        if self._compares(trainer, record):
            changed = record.checksum not in checksums_of(record, frozen)
        else:  # a rank looks at its shards alone
            changed = bool(self._begun_with) and self._begun_with not in checksums_of(record, local_parts(frozen))
            changed = trainer.strategy.reduce_boolean_decision(changed, all=False)
        if changed:
            raise MisconfigurationException(
                "LoRA: frozen weights have changed since the adapters were made, and a checkpoint leaves them out: load"
                " or draw weights before the first run, in __init__ or setup, name in LoRA(train=...) what else"
                " changes, or pass save='all'."
            )

    def _compares(self, trainer: L.Trainer, record: Record) -> bool:
        """Whether frozen weights can be compared with those of before the adapters."""
        whole = record.base == "keep" and engine_of(trainer) in UNSHARDED
        return whole and trainer.precision in ("32-true", "16-mixed", "bf16-mixed")

    def _load(self, trainer: L.Trainer, load: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint; raise unless it belongs to this module with these settings."""
        meta = Path(path) / "meta.pt"  # the part of a folder by FSDP2 that is not sharded
        if meta.is_file():
            with suppress(UnpicklingError):  # other objects in it, as the hyperparameters; it is compared below
                self._require_same(record_in(torch.load(meta, map_location="cpu", weights_only=True)))
        module = trainer.lightning_module
        with ExitStack() as undo:
            if self.save == "adapter":  # a folder by FSDP2 must have all that the module's state_dict asks for
                undo.callback(module.register_state_dict_post_hook(leave_frozen_out).remove)
            checkpoint = load(path, *args, **kwargs)
        self._require_same(record_in(checkpoint))
        saved = (checkpoint.get("callbacks") or {}).get(self.state_key, {}).get("lr_ratio", 1.0)
        if is_fitting(trainer) and saved != self.lr_ratio:
            raise MisconfigurationException(
                f"LoRA: the checkpoint was saved with lr_ratio={saved}, whose learning rates its optimizers have, got"
                f" lr_ratio={self.lr_ratio}: use that it was saved with."
            )
        state = checkpoint.get("state_dict")
        if state is not None and not saves_folder(trainer):
            weights = {name: value for name, value in state.items() if found_in(value) is None}
            if self.save == "adapter":
                self._require_complete(module, weights)
            checkpoint["state_dict"] = weights
        return checkpoint

    def _require_same(self, record: Record | None) -> None:
        if record is None:
            raise MisconfigurationException(
                "LoRA: the checkpoint was saved without LoRA. To train adapters for its weights, load them into the"
                " module before the fit, and leave ckpt_path= out."
            )
        if bool(record.checksum) != bool(self._running.checksum):
            kinds = {True: "'adapter'", False: "'all'"}
            raise MisconfigurationException(
                f"LoRA: the checkpoint was saved with save={kinds[bool(record.checksum)]}, got save={self.save!r}: use"
                " the settings that it was saved with."
            )
        if told := record.differences(self._running):
            raise MisconfigurationException(
                f"LoRA: the checkpoint has adapters of other settings or for other weights: {'; '.join(told)}."
                f"{_OTHER_BASE if record.checksum != self._running.checksum else ''} Use the settings and the"
                " weights that it was saved with."
            )

    def _require_complete(self, module: nn.Module, weights: Mapping[str, Any]) -> None:
        """Raise unless a checkpoint has exactly what the module would save."""
        frozen = frozen_weights(module)
        expected = {name for name in module.state_dict() if not is_part(name, frozen)}
        if wrong := sorted(expected ^ weights.keys()):
            raise MisconfigurationException(
                f"LoRA: the checkpoint and {type(module).__name__} differ in {some(wrong)}: load it into the module"
                " that it was saved from."
            )

    @override
    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        # With a state_dict the Trainer itself would refuse a second LoRA, with another reason than that of conflicts.
        if self._record is not None:
            checkpoint["callbacks"][self.state_key] = {**self._record.state(), "lr_ratio": self.lr_ratio}


_SETTINGS = ("modules", "r", "alpha", "dropout", "train", "variant", "base", "save")
_OTHER_BASE = " The checksum is that of the frozen weights, which the checkpoint leaves out."


def _moves(layer: nn.Module) -> bool:
    """Whether the adapter of a layer changes its output: one of its two matrices begins as zeros."""
    return all(bool(p.any()) for name, p in adapter_parameters(layer).items() if "_A" in name or "_B" in name)
