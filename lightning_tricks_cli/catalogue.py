"""The tricks in the order of the README: their names, the line to add, what they do and cost, in Markdown."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """A row of the README's table of tricks.

    Args:
        names: Public names that belong together.
        line: The line of code to add to a training script.
        what: Their effect.
        cost: Their cost in time and memory.
        beside: Further public names of the row, which cost nothing.
    """

    names: tuple[str, ...]
    line: str
    what: str
    cost: str = ""
    beside: tuple[str, ...] = ()


CATALOGUE = (
    Row(
        ("EMA",),
        "callbacks=[lt.EMA(decay=0.999)]",
        "the exponential average of the weights is validated, saved and kept; `scale_ema_decay` for another batch size",
        "an fp32 copy of the weights",
        ("scale_ema_decay",),
    ),
    Row(
        ("SWA",),
        "callbacks=[lt.SWA(start=0.75)]",
        "the mean of the late epochs' weights, with its own BatchNorm statistics",
        "a copy; a pass over the data",
    ),
    Row(
        ("SAMMixin", "SAM"),
        "class Net(lt.SAMMixin, L.LightningModule): sam = lt.SAM(rho=0.3)",
        "the gradient is taken where the loss is worst within `rho`: flatter minima, robust to wrong labels",
        "twice a step's time, a copy of the weights",
    ),
    Row(("SAMCallback",), "callbacks=[lt.SAMCallback(rho=0.3)]", "the same for a module that a library makes"),
    Row(
        ("sharpness",),
        "lt.sharpness(net,loader,loss).plot()",
        "the Hessian's largest eigenvalue, the loss along the gradient",
        "≤31 passes",
        ("Sharpness",),
    ),
    Row(
        ("Mixup", "CutMix"),
        "callbacks=[lt.Mixup(alpha=0.2,stop=0.9)]",
        "mixes samples and losses, whatever the loss is",
        "a copy of the inputs",
        ("mixup", "cutmix"),
    ),
    Row(("HiddenMixup",), 'callbacks=[lt.HiddenMixup("model.classifier")]', "mixes representations, for text"),
    Row(
        ("SequenceLengthWarmup", "ProgressiveResizing"),
        "callbacks=[lt.ProgressiveResizing(0.5)]",
        "[inputs that grow](docs/inputs.md)",
        "less time",
    ),
    Row(
        ("BatchTransform", "CutOut", "ColOut"),
        "callbacks=[lt.BatchTransform(lt.CutOut())]",
        "any transform of samples, such as RandAugment, on the device",
        "a loop over samples",
        ("cutout", "colout"),
    ),
    Row(
        ("HardExampleFilter",),
        "callbacks=[lt.HardExampleFilter(keep=0.5,score_scale=0.5)]",
        "trains on the samples with the largest losses",
        "a scoring pass, half a backward pass",
        ("ohem_loss",),
    ),
    Row(
        ("LeanLoss", "lean_loss", "clip_loss", "info_nce", "GradCacheMixin", "min_snr_weight"),
        'callbacks=[lt.LeanLoss("model")]',
        "[large vocabularies](docs/losses.md), large [contrastive](docs/contrastive.md) batches",
    ),
    Row(("MoEBalance",), "callbacks=[lt.MoEBalance(rate=1e-3)]", "balances experts", "", ("balance_experts_",)),
    Row(("flat_cos",), "return lt.flat_cos(optimizer, self)", "warm-up, flat, then half a cosine to the floor"),
    Row(
        (
            "one_cycle",
            "cosine",
            "cosine_restarts",
            "linear",
            "polynomial",
            "inverse_sqrt",
            "wsd",
            "step_decay",
            "constant",
            "swa_tail",
            "reduce_on_plateau",
        ),
        "return lt.one_cycle(optimizer,self)",
        "other curves, in optimizer steps",
        "",
        ("CurveLR", "PlateauLR"),
    ),
    Row(("LRSchedule",), 'callbacks=[lt.LRSchedule("cosine",warmup=0.05)]', "the same curves for YAML"),
    Row(
        ("optimizer_steps",),
        "lt.optimizer_steps(self.trainer)",
        "the exact number of steps of this fit, or an error",
        "",
        ("UnknownTotalSteps",),
    ),
    Row(
        ("find_lr",),
        "lightning-tricks find-lr -c config.yaml",
        "a learning-rate sweep that changes nothing; plots",
        "100 steps",
        ("plot_schedule", "LRFinderResult"),
    ),
    Row(
        ("layer_decay_groups", "discriminative_groups", "no_weight_decay_groups"),
        "lt.layer_decay_groups(net,1e-3,0.75)",
        "parameter groups",
    ),
    Row(
        ("BatchSizeWarmup", "scale_lr", "scale_adam", "effective_batch_size"),
        "callbacks=[lt.BatchSizeWarmup(final=8)]",
        "growing batches and learning rates",
    ),
    Row(
        ("preset", "presets", "SinglePreset", "DDPPreset", "FSDP2Preset", "ZeROPreset"),
        'L.Trainer(strategy="zero3_offload_bf16",devices=8)',
        "[one string](docs/strategies.md) for strategy *and* precision",
    ),
    Row(
        ("optimizer", "optimizers", "ScheduleFree"),
        'lt.optimizer("lion",self,lr=3e-4)',
        "[34 optimizers](docs/optimizers.md) by name",
    ),
    Row(
        ("adamw", "ray_trainer"),
        "return lt.adamw(self,lr=3e-4)",
        "the strategy's fastest AdamW; presets under [torchrun, SLURM, Ray](docs/multi_node.md)",
    ),
    Row(
        ("compare",),
        'lt.compare(arms,metric="acc",mode="max",folder="runs")',
        "[honest](docs/compare.md) comparisons",
    ),
    Row(
        ("Preemption", "newest_checkpoint"),
        'callbacks=[lt.Preemption("runs/a")]',
        '[SIGTERM](docs/multi_node.md#when-a-machine-fails): one checkpoint; `ckpt_path="newest"`',
    ),
    Row(
        ("estimate_memory", "suggest_strategy", "find_batch_size", "environment_report"),
        "lightning-tricks suggest 7B --device-memory 80GB",
        "bytes per device, the fitting preset, the largest batch, what is missing",
        "",
        ("MemoryEstimate", "Suggestion", "Hardware", "BatchSizeResult", "EnvironmentReport"),
    ),
    Row(
        ("SkipNonFinite", "TerminateOnNonFinite", "RewindOnSpike"),
        "callbacks=[lt.SkipNonFinite()]",
        "skips non-finite steps on all ranks; stops before; goes back",
        "a check of the gradients",
    ),
    Row(
        ("AdaptiveClip", "AutoClip"),
        "callbacks=[lt.AutoClip(percentile=10)]",
        "clips by unit; by the history of norms",
        "a pass over the gradients",
        ("adaptive_clip_",),
    ),
    Row(
        ("GradualUnfreeze", "freeze", "LayerFreezing"),
        "callbacks=[lt.GradualUnfreeze(at=[0.2,0.5])]",
        "unfreezes from head to stem, following the schedule; [stops](docs/networks.md#layers-that-stop) early layers",
    ),
    Row(
        ("LoRA", "merge_adapters", "QAT", "quantize"),
        'callbacks=[lt.LoRA("attn.qkv",r=8,train="head")]',
        "[adapters](docs/lora.md); [few bits](docs/quantization.md)",
    ),
    Row(
        ("ActivationCheckpointing", "StepInBackward"),
        "callbacks=[lt.ActivationCheckpointing()]",
        "recomputes blocks in the backward pass; one [gradient](docs/optimizers.md#one-gradient-in-memory) at a time",
        "another forward pass",
    ),
    Row(
        ("Compile", "Float8"),
        "callbacks=[lt.Compile()]",
        "compiled, eager where that fails; [float8](docs/quantization.md#training-in-float8); faster layouts",
        "a compilation first",
        ("ChannelsLast", "speed_preset"),
    ),
    Row(
        ("LengthBuckets", "TokenBuckets", "BatchedDataset", "pack_sequences"),
        "DataLoader(data,16,sampler=lt.LengthBuckets(lengths,16))",
        "[similar lengths](docs/data.md) in a step, a token budget, packed rows",
    ),
    Row(
        ("DataWait", "find_num_workers", "Throughput", "profile_tricks"),
        "callbacks=[lt.DataWait(),lt.Throughput()]",
        "what training [waits for](docs/data.md#waiting-for-data), how fast it is, what tricks cost",
    ),
    Row(
        (
            *("Doctor", "inspect_training", "drop_bias_before_batchnorm", "add_stochastic_depth", "add_blur_pool"),
            *("add_squeeze_excite", "init_weights"),
        ),
        "callbacks=[lt.Doctor()]",
        "checks with remedies; [networks](docs/networks.md) inspected, and changed before training",
        "",
        ("InspectTraining", "TrainingInspection"),
    ),
    Row(
        ("cross_validate", "Ensemble", "soup_and_ensemble", "fit_temperature"),
        "lightning-tricks cross-validate -c config.yaml",
        "[folds](docs/evaluation.md) that go on after a crash, out-of-fold predictions; ensembles; calibration",
        "a training per fold",
        ("CrossValidation", "SoupAndEnsemble", "Temperature"),
    ),
    Row(
        ("average_checkpoints", "greedy_soup", "consolidate", "export_weights", "export_adapters"),
        "lightning-tricks consolidate DIR -o net.safetensors",
        "means of checkpoint files, one file from shards, weights for a bare `nn.Module`",
    ),
)
