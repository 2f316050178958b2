"""Every method of Lightning, torch and DeepSpeed that is wrapped, and every private name of theirs that is used.

``wrap_method`` refuses what is not in ``WRAPPED``. ``tests/core/lightning/test_patch_points.py`` compares both tables
with the installed versions, names the tricks that would break, and finds private names that are missing here.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class WrappedMethod(NamedTuple):
    """A method that is wrapped while a trick works.

    Args:
        owner: The class that declares it, as ``module.Class``.
        name: Its name.
        parameters: The names of its parameters that wrappers rely on, in order, without ``self``.
        users: Who wraps it.
        reason: Why there is no public way.
    """

    owner: str
    name: str
    parameters: str
    users: str
    reason: str


class PrivateName(NamedTuple):
    """A private name that the package reads, calls, sets or overrides.

    Args:
        owner: Where it is: ``module`` or ``module.Class`` (an attribute of the class, or of its instances).
        name: The name.
        users: Who uses it.
        reason: What it is for, and why nothing public serves.
    """

    owner: str
    name: str
    users: str
    reason: str


_STRATEGY = "lightning.pytorch.strategies.Strategy"
_MODULE = "lightning.pytorch.LightningModule"
_TRAINER = "lightning.pytorch.Trainer"
_FIT_LOOP = "lightning.pytorch.loops.fit_loop._FitLoop"
_EPOCH_LOOP = "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop"
_DDP = "lightning.pytorch.strategies.DDPStrategy"
_MODEL_PARALLEL = "lightning.pytorch.strategies.ModelParallelStrategy"
_DEEPSPEED = "lightning.pytorch.strategies.DeepSpeedStrategy"
_DATA = "lightning.pytorch.trainer.connectors.data_connector"
_CONNECTOR = "lightning.pytorch.trainer.connectors.accelerator_connector"
_LOADER = "lightning.pytorch.utilities.CombinedLoader"

WRAPPED = (
    WrappedMethod(
        _STRATEGY,
        "batch_to_device",
        "batch, device, dataloader_idx",
        "Mixup, CutMix, HiddenMixup, HardExampleFilter",
        "the one place behind every batch hook of module and data module, before the training step",
    ),
    WrappedMethod(
        _STRATEGY,
        "training_step",
        "args, kwargs",
        "SAM",
        "the step with the batch as the module gets it, under autocast and DDP",
    ),
    WrappedMethod(
        _STRATEGY,
        "optimizer_step",
        "optimizer, closure, model, kwargs",
        "SkipNonFinite, RewindOnSpike, BatchSizeWarmup, clips",
        "no hook runs around a step of an optimizer, and none can leave it out",
    ),
    WrappedMethod(
        _STRATEGY,
        "process_dataloader",
        "dataloader",
        "BatchSizeWarmup, find_batch_size",
        "the loaders with distributed samplers injected, before they are read",
    ),
    WrappedMethod(
        _STRATEGY,
        "setup",
        "trainer",
        "GradualUnfreeze",
        "behind configure_model, before the module is wrapped and the optimizers are made",
    ),
    WrappedMethod(
        _STRATEGY,
        "setup_optimizers",
        "trainer",
        "GradualUnfreeze",
        "parameters that are frozen at first are trainable while configure_optimizers runs",
    ),
    WrappedMethod(
        _STRATEGY,
        "load_checkpoint",
        "checkpoint_path, weights_only",
        "GradualUnfreeze",
        "torch leaves out the optimizer state of what is frozen, so that shards are loaded once more",
    ),
    WrappedMethod(
        _STRATEGY,
        "lightning_module_state_dict",
        "",
        "ChannelsLast",
        "checkpoints hold contiguous weights",
    ),
    WrappedMethod(
        _TRAINER,
        "save_checkpoint",
        "filepath, weights_only, storage_options",
        "EMA, SWA, SAM",
        "the module holds the weights to save while anybody saves, also with save_weights_only=True",
    ),
    WrappedMethod(
        _EPOCH_LOOP,
        "update_lr_schedulers",
        "interval, update_plateau_schedulers",
        "SkipNonFinite, RewindOnSpike",
        "schedules wait for a step that was left out",
    ),
    WrappedMethod(
        "lightning.pytorch.loops.evaluation_loop._EvaluationLoop",
        "run",
        "",
        'EMA(validate="both")',
        "a validation of the raw weights before the one that callbacks see",
    ),
    WrappedMethod(
        "lightning.pytorch.callbacks.Callback",
        "on_validation_",
        "",
        'EMA(validate="both")',
        "callbacks stay out of the validation of the raw weights",
    ),
    WrappedMethod(
        _MODULE,
        "log",
        "name, value",
        'Doctor, SAMCallback, EMA(validate="both"), HardExampleFilter, find_lr, find_batch_size',
        "what a trial or a second run of a step logs is dropped; a second validation logs under other names",
    ),
    WrappedMethod(
        _MODULE,
        "backward",
        "loss, args, kwargs",
        "SAMCallback",
        "the one place where the loss of a step is at hand and its gradient is not yet in .grad",
    ),
    WrappedMethod(
        _MODULE,
        "configure_optimizers",
        "",
        "LRSchedule(replace=True)",
        "optimizers are seen when they are made, before a scheduler has changed their learning rates",
    ),
    WrappedMethod(
        "torch.optim.Optimizer",
        "add_param_group",
        "param_group",
        "LRSchedule(replace=True)",
        "a OneCycleLR overwrites the learning rate of a group, and nothing public keeps it",
    ),
    WrappedMethod(
        _MODULE,
        "lr_scheduler_step",
        "scheduler, metric",
        "LRSchedule",
        "a module that ships another kind of scheduler steps it in its own way",
    ),
    WrappedMethod(
        _MODULE,
        "all_gather",
        "data, group, sync_grads",
        "Doctor, find_batch_size",
        "which tensors a step gathers; a rank that has run out of memory would be waited for",
    ),
    WrappedMethod(
        _MODULE,
        "configure_callbacks",
        "",
        "find_lr, find_batch_size",
        "a trial runs without callbacks",
    ),
    WrappedMethod(
        "torch.nn.Module",
        "forward",
        "input",
        "ActivationCheckpointing, Compile, fsdp2 presets",
        "names in the state_dict stay, which a wrapping module would change",
    ),
    WrappedMethod(
        "torch.optim.Optimizer",
        "step",
        "closure",
        "EMA, SWA",
        "an optimizer without torch's hooks tells in no other way that it stepped",
    ),
    WrappedMethod(
        "deepspeed.runtime.checkpoint_engine.checkpoint_engine.CheckpointEngine",
        "save",
        "state_dict, path",
        "zero presets",
        "the other ranks wait for the rest of the saving when one file cannot be written",
    ),
)

PRIVATE = (
    # Lightning
    PrivateName(
        _TRAINER,
        "_accelerator_connector",
        "DDPPreset",
        "leaves the loaders their samplers when DDP has found that it runs alone; no public name sets it later",
    ),
    PrivateName(_TRAINER, "_detect_anomaly", "conflicts", "whether the backward pass raises at a NaN"),
    PrivateName(_FIT_LOOP, "_combined_loader", "optimizer_steps", "the loaders, and how they combine"),
    PrivateName(_FIT_LOOP, "_data_source", "optimizer_steps", "the loaders, before the fit loop has set them up"),
    PrivateName(_FIT_LOOP, "_data_fetcher", "BatchSizeWarmup", "a new iterator in an epoch that is resumed"),
    PrivateName(_FIT_LOOP, "_should_accumulate", "zero presets", "whether the optimizer steps after this batch"),
    PrivateName(_EPOCH_LOOP, "_batches_that_stepped", "logged metrics", "the step number that Lightning logs with"),
    PrivateName(_MODULE, "_current_fx_name", "batch tricks", "whether a loop moves its batch to the device now"),
    PrivateName(_MODULE, "_on_before_batch_transfer", "SWA", "the hook of the module or of the data module"),
    PrivateName(_DATA, "_parse_num_batches", "optimizer_steps", "limit_train_batches applied to a length"),
    PrivateName(_DATA, "_process_dataloader", "optimizer_steps", "a loader with its distributed sampler"),
    PrivateName(_DATA, "_request_dataloader", "optimizer_steps", "the loaders without starting their workers"),
    PrivateName(_DATA, "_resolve_overfit_batches", "optimizer_steps", "the loaders under overfit_batches"),
    PrivateName(_LOADER, "_mode", "optimizer_steps", "how loaders of different lengths combine"),
    PrivateName(_LOADER, "_state_dicts", "SWA", "the state of stateful loaders, to go on from"),
    PrivateName(_LOADER, "_load_state_dicts", "SWA", "the state of stateful loaders, to go on from"),
    PrivateName(_CONNECTOR, "_AcceleratorConnector", "presets", "the constructor that has the asked precision"),
    PrivateName(
        f"{_CONNECTOR}._AcceleratorConnector",
        "_precision_plugin_flag",
        "presets",
        "a precision plugin that the user gave",
    ),
    PrivateName(
        "lightning.fabric.connector",
        "_convert_precision_to_unified_args",
        "presets",
        "the asked precision, spelled out",
    ),
    PrivateName(
        "lightning.pytorch.strategies.launchers",
        "_MultiProcessingLauncher",
        "find_lr, find_batch_size",
        "whether a fit runs in processes that this one starts",
    ),
    PrivateName(_STRATEGY, "_precision_plugin", "presets", "the setter's own attribute: a preset brings its precision"),
    PrivateName(_DDP, "_ddp_kwargs", "conflicts", "whether static_graph=True was passed"),
    PrivateName(_DDP, "_ddp_comm_state", "guards, GradualUnfreeze", "whether a communication hook keeps state"),
    PrivateName(_DDP, "_setup_model", "DDPPreset", "Strategy.setup wraps the module by it"),
    PrivateName(_MODEL_PARALLEL, "_data_parallel_size", "FSDP2Preset", '"auto" would be the number of nodes'),
    PrivateName(_MODEL_PARALLEL, "_process_group_backend", "FSDP2Preset", "gloo beside nccl, for host memory"),
    PrivateName(_MODEL_PARALLEL, "_layer_sync", "FSDP2Preset", "Trainer(sync_batchnorm=True)"),
    PrivateName(_MODEL_PARALLEL, "_save_distributed_checkpoint", "averages", "whether checkpoints are folders"),
    PrivateName(_DEEPSPEED, "_config_initialized", "ZeROPreset", "the configuration is written anew for each run"),
    PrivateName(_DEEPSPEED, "_parallel_devices", "ZeROPreset, SinglePreset", "devices of CPU processes have numbers"),
    PrivateName(
        "lightning.pytorch.strategies.SingleDeviceStrategy",
        "_root_device",
        "SinglePreset",
        "the device, known only when the Trainer has its accelerator",
    ),
    # torch
    PrivateName("torch", "_C", "mixed targets", "DisableTorchFunctionSubclass, as torch's documentation has it"),
    PrivateName("torch", "_foreach_abs", "SAM", "one kernel for all tensors"),
    PrivateName("torch", "_foreach_add_", "SAM", "one kernel for all tensors"),
    PrivateName("torch", "_foreach_addcmul_", "SAM", "one kernel for all tensors, without a temporary"),
    PrivateName("torch", "_foreach_copy_", "averages, SAM, DDPPreset", "one kernel for all tensors"),
    PrivateName("torch", "_foreach_div", "FSDP2 norms", "one kernel for all tensors"),
    PrivateName("torch", "_foreach_lerp_", "EMA, SWA", "one kernel for all tensors"),
    PrivateName("torch", "_foreach_mul", "SAM", "one kernel for all tensors"),
    PrivateName("torch", "_foreach_mul_", "SAM, clips, DDPPreset", "one kernel for all tensors"),
    PrivateName("torch", "_foreach_norm", "SAM, clips, guards", "one kernel for all tensors"),
    PrivateName("torch", "_foreach_sub", "EMA, SWA", "one kernel for all tensors"),
    PrivateName(
        "torch.autograd",
        "_unsafe_preserve_version_counter",
        "EMA, SWA, SAM, sharpness",
        "a checkpoint saved between forward and backward: the weights change and come back bit for bit",
    ),
    PrivateName("torch.Tensor", "_version", "SAM, offloaded averages", "whether something wrote into a tensor"),
    PrivateName("torch.Tensor", "_is_view", "mixed targets", "whether a tensor shares memory with a larger one"),
    PrivateName("torch.Tensor", "_values", "guards", "the values of a sparse tensor that is not coalesced"),
    PrivateName("torch.nn.Module", "_buffers", "guards, replay, averages", "buffers by name, to replace the tensors"),
    PrivateName("torch.nn.Module", "_parameters", "averages, replay", "parameters by name, where they are registered"),
    PrivateName("torch.nn.Module", "_modules", "guards, replay, Doctor", "children, also those that stand twice"),
    PrivateName("torch.nn.Module", "_forward_hooks", "Compile, add_stochastic_depth", "whether there are hooks"),
    PrivateName("torch.nn.Module", "_forward_pre_hooks", "Compile, drop_bias_before_batchnorm", "whether there are"),
    PrivateName("torch.nn.Module", "_backward_hooks", "Compile", "whether there are hooks"),
    PrivateName("torch.nn.Module", "_backward_pre_hooks", "Compile", "whether there are hooks"),
    PrivateName("torch.nn.Module", "_non_persistent_buffers_set", "EMA, SWA", "buffers that are not saved"),
    PrivateName("torch.nn.modules.batchnorm", "_BatchNorm", "SWA, freeze", "the base class of all BatchNorm layers"),
    PrivateName("torch.optim.Optimizer", "_optimizer_step_post_hooks", "EMA, SWA", "whether it calls step hooks"),
    PrivateName("torch.optim.Optimizer", "_optimizer_step_pre_hooks", "guards, clips", "whether it calls step hooks"),
    PrivateName(
        "torch.optim.Adam",
        "_step_supports_amp_scaling",
        "clips, guards",
        "whether a fused optimizer unscales gradients in its own step; only such an optimizer has it",
    ),
    PrivateName("torch.optim.lr_scheduler.LRScheduler", "_last_lr", "GradualUnfreeze, PlateauLR", "a rate a group"),
    PrivateName("torch.optim.lr_scheduler.LRScheduler", "_step_count", "CurveLR", "torch warns by it after a resume"),
    PrivateName("torch.optim.lr_scheduler.SequentialLR", "_schedulers", "GradualUnfreeze", "the schedulers inside"),
    PrivateName("torch.optim.lr_scheduler.ReduceLROnPlateau", "_reset", "PlateauLR", "a resume with another mode"),
    PrivateName("torch.utils.data.DataLoader", "_iterator", "BatchSizeWarmup", "the iterator of persistent workers"),
    PrivateName("torch._dynamo", "OptimizedModule", "find_lr, find_batch_size, zero presets", "compiled as a whole"),
    PrivateName("torch._dynamo.OptimizedModule", "_orig_mod", "find_lr, find_batch_size", "the module inside"),
    PrivateName("torch._dynamo.exc", "TorchDynamoException", "Compile", "an error of the compiler, not of the module"),
    PrivateName("torch._functorch", "config", "Compile", "the backward pass is compiled with the forward pass"),
    PrivateName("torch._subclasses.fake_tensor", "FakeTensorMode", "estimate_memory", "tensors without memory"),
    PrivateName("torch.utils._python_dispatch", "TorchDispatchMode", "estimate_memory", "counts bytes by operation"),
    PrivateName("torch.utils._pytree", "tree_leaves", "estimate_memory", "tensors in arguments of operations"),
    PrivateName("torch.utils._pytree", "tree_map", "estimate_memory", "tensors in arguments of operations"),
    PrivateName("torch.utils._pytree", "tree_map_only", "estimate_memory", "tensors in arguments of operations"),
    PrivateName("torch.ops.aten", "_local_scalar_dense", "estimate_memory", "the operation behind .item()"),
    PrivateName("torch.ops.aten", "_to_copy", "estimate_memory", "the operation behind .to()"),
    PrivateName("torch.UntypedStorage", "_cdata", "estimate_memory", "whether two tensors share memory"),
    PrivateName(
        "torch.distributed._composable_state",
        "_module_state_mapping",
        "find_lr",
        "lets fully_shard shard a module again after a trial",
    ),
    PrivateName(
        "torch.nn.parallel.DistributedDataParallel",
        "_ddp_params_and_buffers_to_ignore",
        "DDPPreset",
        "read by DDP from the module that it wraps",
    ),
    # DeepSpeed
    PrivateName(
        "deepspeed.utils.mixed_precision_linkage",
        "_hp_mapping",
        "averages under ZeRO-1 and 2",
        "of a parameter: the fragment of its fp32 weight",
    ),
    PrivateName(
        "deepspeed.runtime.zero.stage3",
        "_z3_optimizer",
        "averages under ZeRO-3",
        "of a parameter: the optimizer with its fp32 weight",
    ),
    PrivateName(
        "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3",
        "_get_fp32_opt_state_partition",
        "averages under ZeRO-3",
        "the fp32 weight itself: the public function copies it where it is offloaded",
    ),
    PrivateName(
        "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer",
        "_restore_from_bit16_weights",
        "ZeROPreset",
        "loading without weights asks the optimizer for it, and not all have it",
    ),
    PrivateName("deepspeed.ops", "__compatible_ops__", "ZeROPreset", "an operator that would be compiled on a CPU"),
)


def require_patch_point(owner: Any, name: str) -> None:
    """Raise unless the table has a method of one of the owner's classes.

    Raises:
        LookupError: If it has not.
    """
    classes = {kind.__name__ for kind in type(owner).__mro__}
    for entry in WRAPPED:
        known = entry.name == name or (entry.name.endswith("_") and name.startswith(entry.name))
        if known and (entry.owner.rpartition(".")[2] in classes or entry.name in ("forward", "step")):
            return  # an optimizer, or something that is called as a module, may be of any class
    raise LookupError(f"{type(owner).__name__}.{name} is wrapped, but core/lightning/patch_points.py does not list it.")
