"""Every method of Lightning, torch and DeepSpeed that is wrapped, and every private name of theirs that is used.

``wrap_method`` refuses what is not in ``WRAPPED``. ``tests/core/lightning/test_patch_points.py`` compares both tables
with the installed versions, names the tricks that would break, and finds private names that are missing here,
but not those inside of strings: ``core/replay/recompute.py`` has names of torch's private operations in ``_KEPT``, and
leaves out those that the installed version lacks.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class WrappedMethod(NamedTuple):
    """A method that is wrapped while a trick is active.

    Args:
        owner: The class that declares the method, as ``module.Class``.
        name: The name of the method, or its beginning if it ends in an underscore.
        parameters: The parameters that wrappers rely on, in order, without ``self``.
        users: The tricks that wrap the method.
        reason: The purpose, and why there is no public way.
    """

    owner: str
    name: str
    parameters: str
    users: str
    reason: str


class PrivateName(NamedTuple):
    """A private name that the package reads, calls, sets or overrides.

    Args:
        owner: The owner, as ``module`` or ``module.Class`` (for an attribute of the class or of its instances).
        name: The private name.
        users: The tricks that use it.
        reason: The purpose, and why there is no public way.
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
_CONNECTORS = "lightning.pytorch.trainer.connectors"
_DATA = f"{_CONNECTORS}.data_connector"
_CONNECTOR = f"{_CONNECTORS}.accelerator_connector"
_LOADER = "lightning.pytorch.utilities.CombinedLoader"

WRAPPED = (
    WrappedMethod(
        _STRATEGY,
        "batch_to_device",
        "batch, device, dataloader_idx",
        "Mixup, CutMix, HiddenMixup, HardExampleFilter",
        "the one place after all batch hooks of module and data module, and before the training step",
    ),
    WrappedMethod(
        _STRATEGY,
        "training_step",
        "args, kwargs",
        "SAM, GradCacheMixin, Mixup, CutMix, HiddenMixup, HardExampleFilter, EMA, SWA, ScheduleFree, LoRA,"
        " find_non_finite, SkipNonFinite, TerminateOnNonFinite, Throughput",
        "the step with the module's batch, under autocast and DDP; its loss, before anything is computed from it; the"
        " first point behind the module's own hooks, which may write weights and run after those of callbacks",
    ),
    WrappedMethod(
        _MODULE,
        "on_before_batch_transfer",
        "batch, dataloader_idx",
        "find_non_finite",
        "a kept batch, which the hook has changed already",
    ),
    WrappedMethod(
        _MODULE,
        "on_after_batch_transfer",
        "batch, dataloader_idx",
        "find_non_finite",
        "a kept batch, which the hook has changed already",
    ),
    WrappedMethod(
        _MODULE,
        "training_step",
        "args, kwargs",
        "GradCacheMixin, HardExampleFilter, SAM, SWA, ScheduleFree, TokenMean",
        "a chunk is embedded again under the autocast and in the forward pass of DDP or FSDP2 that a step has;"
        " gradients inside of a step that DDP runs without any",
    ),
    WrappedMethod(
        _STRATEGY,
        "optimizer_step",
        "optimizer, closure, model, kwargs",
        "SkipNonFinite, RewindOnSpike, TerminateOnNonFinite, BatchSizeWarmup, TokenMean, clips",
        "no hook runs around an optimizer step, and none can leave it out",
    ),
    WrappedMethod(
        _STRATEGY,
        "optimizer_state",
        "optimizer",
        "EMA, SWA, MoEBalance, SkipNonFinite, RewindOnSpike, TerminateOnNonFinite, BatchSizeWarmup, clips",
        "to save an optimizer without states under FSDP2, torch steps it with zero gradients: that step does not count",
    ),
    WrappedMethod(
        "lightning.pytorch.plugins.precision.Precision",
        "clip_grad_by_norm",
        "optimizer, clip_val",
        "FSDP2Preset",
        "torch's norm takes gradients of one mesh, and under tensor parallelism there are two",
    ),
    WrappedMethod(
        _STRATEGY,
        "process_dataloader",
        "dataloader",
        "BatchSizeWarmup, find_batch_size, Preemption",
        "the loaders with distributed samplers, before they are read and start their workers",
    ),
    WrappedMethod(
        _STRATEGY,
        "setup",
        "trainer",
        "GradualUnfreeze, LayerFreezing",
        "after configure_model, before the module is wrapped and the optimizers are made",
    ),
    WrappedMethod(
        _STRATEGY,
        "setup_optimizers",
        "trainer",
        "GradualUnfreeze, LayerFreezing",
        "parameters that are frozen at first, or were in a checkpoint, are trainable while configure_optimizers runs",
    ),
    WrappedMethod(
        _STRATEGY,
        "load_checkpoint",
        "checkpoint_path, weights_only",
        "GradualUnfreeze, LayerFreezing, LoRA",
        "torch skips the optimizer state of frozen parameters, so shards are loaded again; a checkpoint of adapters is"
        " compared with the module before its weights are loaded",
    ),
    WrappedMethod(
        _STRATEGY,
        "lightning_module_state_dict",
        "",
        "ChannelsLast, LoRA",
        "checkpoints hold contiguous weights, and none that are frozen beside adapters",
    ),
    WrappedMethod(
        _TRAINER,
        "save_checkpoint",
        "filepath, weights_only, storage_options",
        "EMA, SWA, SAM, StepInBackward",
        "the module must hold the weights to save in every save, also with save_weights_only=True",
    ),
    WrappedMethod(
        _EPOCH_LOOP,
        "update_lr_schedulers",
        "interval, update_plateau_schedulers",
        "SkipNonFinite, RewindOnSpike",
        "schedules must not count a step that was left out",
    ),
    WrappedMethod(
        _FIT_LOOP, "on_run_start", "", "the fit", "begins when checkpoint and loaders are there, before hooks"
    ),
    WrappedMethod(
        _FIT_LOOP,
        "_load_combined_loader_states",
        "",
        "ExactResume, Preemption",
        "the one place where the loaders are made and processed, a checkpoint is restored, and nothing is read yet",
    ),
    WrappedMethod(
        _FIT_LOOP,
        "on_advance_start",
        "",
        "ExactResume, Preemption",
        "before the hooks of an epoch, which has another number of batches than the one that was gone on with",
    ),
    WrappedMethod(
        _EPOCH_LOOP,
        "on_run_start",
        "data_fetcher",
        "ExactResume, Preemption",
        "where Lightning begins to read an epoch, but for the first of a fit, which it begins before the hooks",
    ),
    WrappedMethod(_STRATEGY, "teardown", "", "the fit", "the one call at the end of every fit, failed ones included"),
    WrappedMethod(
        _EPOCH_LOOP, "_on_before_fetch", "", "DataWait", "no hook runs between the end of a step and the next batch"
    ),
    WrappedMethod(_EPOCH_LOOP, "_on_after_fetch", "", "DataWait", "as above, once the batch is there"),
    WrappedMethod(
        _EPOCH_LOOP,
        "on_advance_end",
        "data_fetcher",
        "Preemption",
        "the one place behind all hooks of a batch, where all that a checkpoint holds belongs to the same step",
    ),
    WrappedMethod(
        f"{_CONNECTORS}.signal_connector._SignalConnector",
        "register_signal_handlers",
        "",
        "Preemption",
        "Lightning's handlers save and broadcast amid a step, and ranks that are in different places wait for ever",
    ),
    WrappedMethod(
        f"{_CONNECTORS}.checkpoint_connector._CheckpointConnector",
        "resume_start",
        "checkpoint_path, weights_only",
        "Preemption",
        'ckpt_path="newest": the processes agree on a path, or on none, when there is a process group',
    ),
    WrappedMethod(
        "lightning.pytorch.loops.evaluation_loop._EvaluationLoop",
        "run",
        "",
        'EMA(validate="both"), SWA(validate="both"), Preemption',
        "a validation of the raw weights before the one that callbacks see; the random numbers before one that runs"
        " again",
    ),
    WrappedMethod(
        "lightning.pytorch.callbacks.Callback",
        "on_validation_",
        "",
        'EMA(validate="both"), SWA(validate="both")',
        "callbacks must not see the validation of the raw weights",
    ),
    WrappedMethod(
        _MODULE,
        "log",
        "name, value",
        'Doctor, SAMCallback, EMA(validate="both"), SWA, HardExampleFilter, find_lr, find_batch_size',
        "a trial or a second run of a step must not log; a second validation logs under other names",
    ),
    WrappedMethod(
        _MODULE,
        "backward",
        "loss, args, kwargs",
        "SAMCallback, StepInBackward",
        "the one place where the loss of a step is at hand and its gradient is not yet in .grad",
    ),
    WrappedMethod(
        _MODULE,
        "on_load_checkpoint",
        "checkpoint",
        "EMA, SWA, ScheduleFree",
        "the checkpoint as it was saved: what the hook does to its weights is done to the second copy of them as well",
    ),
    WrappedMethod(
        _MODULE,
        "configure_optimizers",
        "",
        "LRSchedule(replace=True), LoRA",
        "optimizers are seen when they are made, before a scheduler has changed their learning rates",
    ),
    WrappedMethod(
        _MODULE,
        "setup",
        "stage",
        "LoRA",
        "layers that this hook makes are there, and no strategy has sharded them or restored their weights",
    ),
    WrappedMethod(_MODULE, "configure_model", "", "LoRA", "as setup, for layers that this hook makes"),
    WrappedMethod(
        "torch.optim.Optimizer",
        "add_param_group",
        "param_group",
        "LRSchedule(replace=True)",
        "a OneCycleLR overwrites the learning rate of a group, and nothing public keeps it",
    ),
    WrappedMethod(
        "lightning.pytorch.plugins.precision.Precision",
        "clip_gradients",
        "optimizer, clip_val, gradient_clip_algorithm",
        "zero presets",
        "Lightning's does nothing under DeepSpeed, and the plugin may be one that the user gave",
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
        "which tensors a step gathers; the other ranks would wait for one that has run out of memory",
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
        "ActivationCheckpointing, Compile, Float8, LeanLoss, QAT, fsdp2 presets",
        "a wrapping module would change names in the state_dict",
    ),
    WrappedMethod(
        "torch.optim.Optimizer",
        "step",
        "closure",
        "EMA, SWA",
        "the only sign that an optimizer without torch's hooks stepped",
    ),
    WrappedMethod(
        "torch.optim.lr_scheduler.LRScheduler",
        "step",
        "epoch",
        "LRSchedule",
        "a schedule that the module steps itself, which no hook tells",
    ),
    WrappedMethod(
        "torch.Tensor",
        "data",
        "",
        "SAM, GradCacheMixin, HardExampleFilter, ActivationCheckpointing, Compile, SkipNonFinite, TerminateOnNonFinite",
        "an attribute: writes through it raise no version, and a second run of a step would do them again",
    ),
    WrappedMethod(
        "deepspeed.runtime.checkpoint_engine.checkpoint_engine.CheckpointEngine",
        "save",
        "state_dict, path",
        "zero presets",
        "the other ranks would wait for ever when a rank cannot write its file",
    ),
)

PRIVATE = (
    # Lightning
    PrivateName(
        _TRAINER,
        "_accelerator_connector",
        "DDPPreset, Preemption",
        "keeps the loaders' samplers when DDP finds that it runs alone; no public name sets it that late. Also the"
        " cluster, which strategies of one device do not name",
    ),
    PrivateName(_TRAINER, "_signal_connector", "Preemption", "whose handlers of signals are left out"),
    PrivateName(_TRAINER, "_checkpoint_connector", "Preemption", "which restores a checkpoint"),
    PrivateName(_TRAINER, "_detect_anomaly", "conflicts", "whether the backward pass raises at a NaN"),
    PrivateName(
        _FIT_LOOP,
        "_combined_loader",
        "optimizer_steps, BatchSizeWarmup, find_batch_size, SWA, LengthBuckets, ExactResume",
        "the loaders, and how they combine",
    ),
    PrivateName(_FIT_LOOP, "_data_source", "optimizer_steps", "the loaders, before the fit loop has set them up"),
    PrivateName(
        _FIT_LOOP,
        "_data_fetcher",
        "BatchSizeWarmup, LengthBuckets, TokenBuckets, ExactResume",
        "a new iterator in an epoch that is resumed, and whether it is the fit that reads",
    ),
    PrivateName(
        "lightning.pytorch.loops.progress",
        "_BaseProgress",
        "the fit",
        "a count of a loop, which is in every checkpoint and restored with the loop",
    ),
    PrivateName(
        "lightning.pytorch.loops.progress",
        "_ProcessedTracker",
        "LengthBuckets, TokenBuckets",
        "a count whose subclass Lightning saves with its own fields, and of which it restores all that was saved",
    ),
    PrivateName(
        _FIT_LOOP, "_should_accumulate", "zero presets, Preemption", "whether the optimizer steps after this batch"
    ),
    PrivateName(
        "lightning.pytorch.loops.loop",
        "_Loop",
        "presets, Preemption",
        "sets ``restarting``, which the fit loop's own setter leaves on in a fit with max_steps, also between epochs",
    ),
    PrivateName(
        _EPOCH_LOOP,
        "_is_training_done",
        "Preemption, ExactResume",
        "whether a batch was the last of its epoch or of all",
    ),
    PrivateName(_EPOCH_LOOP, "_batches_that_stepped", "logged metrics", "the step number that Lightning logs with"),
    PrivateName(
        _MODULE,
        "_current_fx_name",
        "batch tricks, add_blur_pool, add_squeeze_excite, init_weights",
        "whether a loop moves its batch to the device now, or a hook runs before the optimizers are made",
    ),
    PrivateName(_MODULE, "_on_before_batch_transfer", "SWA", "the hook of the module or of the data module"),
    PrivateName("lightning.pytorch.trainer.call", "_call_strategy_hook", "SWA", "names a batch's move to the device"),
    PrivateName(
        _DATA,
        "_parse_num_batches",
        "optimizer_steps, BatchSizeWarmup, find_batch_size",
        "limit_train_batches applied to a length",
    ),
    PrivateName(_DATA, "_process_dataloader", "optimizer_steps", "a loader with its distributed sampler"),
    PrivateName(_DATA, "_request_dataloader", "optimizer_steps", "the loaders without starting their workers"),
    PrivateName(_DATA, "_resolve_overfit_batches", "optimizer_steps", "the loaders under overfit_batches"),
    PrivateName(
        _LOADER,
        "_mode",
        "optimizer_steps, BatchSizeWarmup, find_batch_size, ExactResume",
        "how loaders of different lengths combine",
    ),
    PrivateName(
        "lightning.fabric.utilities.data",
        "_auto_add_worker_init_fn",
        "Preemption",
        "Lightning's seeds of a loader's workers, which it gives only to loaders that start theirs in no other way",
    ),
    PrivateName(
        "os",
        "_exit",
        "Preemption, cross_validate",
        "a worker that ends at the parent's signal as it does without the trick, or when its parent was killed",
    ),
    PrivateName(_LOADER, "_state_dicts", "SWA, ExactResume", "the state of stateful loaders, to go on from"),
    PrivateName(_LOADER, "_load_state_dicts", "SWA, ExactResume", "the state of stateful loaders, to go on from"),
    PrivateName(
        "lightning.pytorch.utilities.combined_loader",
        "_SUPPORTED_MODES",
        "ExactResume",
        "how a combined loader iterates, for its length before the passes of a resumed fit begin",
    ),
    PrivateName(
        "lightning.pytorch.utilities.combined_loader._MaxSizeCycle",
        "_consumed",
        "ExactResume",
        "which loaders were read to their end, after which the epoch of loaders without a length ends",
    ),
    PrivateName(
        "lightning.pytorch.loops.fetchers",
        "_PrefetchDataFetcher",
        "ExactResume",
        "whether batches are fetched before they are needed, as those of loaders without a length are",
    ),
    PrivateName(
        _FIT_LOOP,
        "_combined_loader_states_to_load",
        "ExactResume",
        "a state of an epoch's end, which Lightning would load to begin the next epoch",
    ),
    PrivateName(
        "lightning.fabric.utilities.distributed",
        "_DatasetSamplerWrapper",
        "ExactResume",
        "the sampler of the user inside of the one that Lightning puts in its place",
    ),
    PrivateName("lightning.fabric.utilities.distributed._DatasetSamplerWrapper", "_sampler", "ExactResume", "as above"),
    PrivateName(_CONNECTOR, "_AcceleratorConnector", "presets", "the constructor with the user's precision"),
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
        "the full name of the user's precision",
    ),
    PrivateName(
        "lightning.pytorch.strategies.launchers",
        "_MultiProcessingLauncher",
        "find_lr, find_batch_size",
        "whether a fit runs in processes that this one starts",
    ),
    PrivateName(_STRATEGY, "_precision_plugin", "presets", "the setter's own attribute: a preset brings its precision"),
    PrivateName(_DDP, "_ddp_kwargs", "conflicts", "whether static_graph=True was passed"),
    PrivateName(
        _DDP, "_ddp_comm_state", "guards, GradualUnfreeze, LayerFreezing", "whether a communication hook keeps state"
    ),
    PrivateName(_DDP, "_setup_model", "DDPPreset", "Strategy.setup wraps the module by it"),
    PrivateName(_MODEL_PARALLEL, "_data_parallel_size", "FSDP2Preset", '"auto" would be the number of nodes'),
    PrivateName(_MODEL_PARALLEL, "_process_group_backend", "FSDP2Preset", "gloo beside nccl, for host memory"),
    PrivateName(_MODEL_PARALLEL, "_layer_sync", "FSDP2Preset", "Trainer(sync_batchnorm=True)"),
    PrivateName(
        _MODEL_PARALLEL,
        "_save_distributed_checkpoint",
        "averages, fsdp2 presets",
        "whether checkpoints are folders",
    ),
    PrivateName(_DEEPSPEED, "_config_initialized", "ZeROPreset", "the configuration is written anew for each run"),
    PrivateName(_DEEPSPEED, "_parallel_devices", "ZeROPreset, SinglePreset", "devices of CPU processes have numbers"),
    PrivateName(
        "lightning.pytorch.strategies.SingleDeviceStrategy",
        "_root_device",
        "SinglePreset",
        "the device, known only when the Trainer has its accelerator",
    ),
    # torch
    PrivateName(
        "torch",
        "_C",
        "mixed targets, replay, SAM, Throughput",
        "DisableTorchFunctionSubclass, as torch's documentation has it; DispatchKey; ConcreteModuleType",
    ),
    PrivateName(
        "torch._C",
        "_current_graph_task_id",
        "StepInBackward",
        "whether a backward pass runs inside of another, with gradients that are not complete",
    ),
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
        "weights that change and come back bit for bit, as in a checkpoint saved between forward and backward",
    ),
    PrivateName("torch.Tensor", "_backward_hooks", "SAM", "whether hooks run in the backward pass"),
    PrivateName("torch.Tensor", "_post_accumulate_grad_hooks", "SAM", "whether hooks run in the backward pass"),
    PrivateName("torch.Tensor", "_version", "SAM, guards, offloading", "whether something wrote into a tensor"),
    PrivateName("torch.jit.ScriptModule", "_c", "replay", "attributes of a TorchScript module, which are kept in C++"),
    PrivateName("torch._C.ScriptModule", "_type", "replay", "the names of those attributes"),
    PrivateName(
        "torch.Tensor",
        "_base",
        "mixed targets, LeanLoss",
        "a property that torch.compile reads of every input, and FSDP2 of every output",
    ),
    PrivateName("torch.Tensor", "_is_view", "mixed targets", "whether a tensor shares memory with a larger one"),
    PrivateName("torch.Tensor", "_values", "guards", "the values of a sparse tensor that is not coalesced"),
    PrivateName("torch.nn.Module", "_buffers", "guards, replay, averages", "buffers by name, to replace the tensors"),
    PrivateName(
        "torch.nn.Module",
        "_parameters",
        "averages, replay, FSDP2Preset, LoRA",
        "parameters by name, where they are registered",
    ),
    PrivateName(
        "torch.nn.Module", "_modules", "guards, replay, Doctor, LoRA", "children, also those that are there twice"
    ),
    PrivateName(
        "torch.nn.Module",
        "_forward_hooks",
        "Compile, add_stochastic_depth, FSDP2Preset",
        "whether there are hooks; a copy of a layer without them",
    ),
    PrivateName(
        "torch.nn.Module",
        "_forward_pre_hooks",
        "Compile, drop_bias_before_batchnorm, FSDP2Preset",
        "whether there are hooks; a copy of a layer without them",
    ),
    PrivateName("torch.nn.Module", "_backward_hooks", "Compile", "whether there are hooks"),
    PrivateName("torch.nn.Module", "_backward_pre_hooks", "Compile", "whether there are hooks"),
    PrivateName("torch.nn.Module", "_non_persistent_buffers_set", "EMA, SWA", "buffers that are not saved"),
    PrivateName("timm.optim.Lookahead", "_base_optimizer", "optimizer", "the states of the optimizer inside"),
    PrivateName(
        "torch.utils._python_dispatch",
        "is_traceable_wrapper_subclass",
        "RewindOnSpike, LoRA",
        "whether a tensor, such as a state or a weight of 4 bits, holds other tensors",
    ),
    PrivateName("torch.nn.modules.batchnorm", "_BatchNorm", "SWA, freeze", "the base class of all BatchNorm layers"),
    PrivateName(
        "torch.optim.Optimizer", "_optimizer_step_post_hooks", "EMA, SWA, schedules", "whether it calls step hooks"
    ),
    PrivateName(
        "torch.optim.Optimizer",
        "_patch_step_function",
        "optimizer, schedules",
        "puts the hooks around the step of a wrapper that does not call Optimizer.__init__, before its first step",
    ),
    PrivateName(
        "torch.optim.Optimizer",
        "hooked",
        "StepInBackward",
        "an attribute of its step: whether that is one with hooks around the optimizer's own",
    ),
    PrivateName(
        "torch.optim.Adam",
        "_step_supports_amp_scaling",
        "clips, guards",
        "whether a fused optimizer unscales gradients in its own step; only such an optimizer has it",
    ),
    PrivateName("torch.optim.lr_scheduler.LRScheduler", "_last_lr", "GradualUnfreeze, PlateauLR", "a rate a group"),
    PrivateName(
        "torch.optim.lr_scheduler.LRScheduler", "_step_count", "CurveLR", "torch uses it for a warning after a resume"
    ),
    PrivateName("torch.optim.lr_scheduler.SequentialLR", "_schedulers", "GradualUnfreeze", "the schedulers inside"),
    PrivateName("torch.optim.lr_scheduler.ReduceLROnPlateau", "_reset", "PlateauLR", "a resume with another mode"),
    PrivateName(
        "torch.utils.data.DataLoader",
        "_iterator",
        "BatchSizeWarmup, find_num_workers, ExactResume",
        "the iterator of persistent workers",
    ),
    PrivateName("torch.nn.Module", "_compiled_call_impl", "Throughput", "whether module.compile() was called"),
    PrivateName(
        "torch._dynamo", "OptimizedModule", "find_lr, find_batch_size, zero presets", "whether the module was compiled"
    ),
    PrivateName(
        "torch._dynamo.OptimizedModule",
        "_orig_mod",
        "find_lr, find_batch_size, FSDP2Preset",
        "the module inside, and in names of parameters",
    ),
    PrivateName("torch._dynamo.exc", "TorchDynamoException", "Compile", "an error of the compiler, not of the module"),
    PrivateName("torch._functorch", "config", "Compile", "the backward pass is compiled with the forward pass"),
    PrivateName("torch._subclasses.fake_tensor", "FakeTensorMode", "estimate_memory", "tensors without memory"),
    PrivateName("torch.utils._python_dispatch", "TorchDispatchMode", "estimate_memory", "counts bytes by operation"),
    PrivateName(
        "torch.utils._pytree", "tree_leaves", "estimate_memory, find_non_finite", "tensors in arguments of operations"
    ),
    PrivateName("torch.utils._pytree", "tree_map", "estimate_memory", "tensors in arguments of operations"),
    PrivateName("torch.utils._pytree", "tree_map_only", "estimate_memory", "tensors in arguments of operations"),
    PrivateName("torch.ops.aten", "_local_scalar_dense", "estimate_memory", "the operation behind .item()"),
    PrivateName("torch.ops.aten", "_to_copy", "estimate_memory", "the operation behind .to()"),
    PrivateName("torch.UntypedStorage", "_cdata", "estimate_memory", "whether two tensors share memory"),
    PrivateName(
        "torch.distributed._composable_state",
        "_module_state_mapping",
        "find_lr, LeanLoss",
        "lets fully_shard shard a module again after a trial; whether FSDP2 shards a head",
    ),
    PrivateName(
        "torch.nn.parallel.distributed",
        "_DDPSink",
        "mixed targets",
        "a node in the graph of an output that is no function of the user's, though it is an autograd.Function",
    ),
    PrivateName(
        "torch.nn.parallel.DistributedDataParallel",
        "require_forward_param_sync",
        "SWA, HardExampleFilter",
        "buffers are exchanged before each forward pass, which DDP stops behind one without gradients",
    ),
    PrivateName(
        "torch.nn.parallel.DistributedDataParallel",
        "_ddp_params_and_buffers_to_ignore",
        'DDPPreset, LoRA(base="nf4")',
        "read by DDP from the module that it wraps; packed weights cannot be copied between ranks",
    ),
    # DeepSpeed
    PrivateName(
        "deepspeed.utils.mixed_precision_linkage",
        "_hp_mapping",
        "averages under ZeRO-1 and 2, ZeROPreset(load_full_weights=True)",
        "of a parameter: the fragment of its fp32 weight",
    ),
    PrivateName(
        "deepspeed.runtime.zero.stage3",
        "_z3_optimizer",
        "averages under ZeRO-3, ZeROPreset(load_full_weights=True)",
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
    PrivateName("argparse.ArgumentParser", "_actions", "completion", "a parser lists its flags nowhere else"),
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
