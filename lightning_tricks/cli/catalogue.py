"""The tricks in the order of the README: their names, a line of yours, what it costs. Both texts are Markdown."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """Names that go together; what is ``beside`` them costs nothing."""

    names: tuple[str, ...]
    line: str
    cost: str = ""
    beside: tuple[str, ...] = ()


CATALOGUE = (
    Row(("EMA",), "callbacks=[lt.EMA(decay=0.999)]", "an fp32 copy of the weights", ("scale_ema_decay",)),
    Row(("SWA",), "callbacks=[lt.SWA(start=0.75)]", "a copy; a pass over the data"),
    Row(
        ("SAMMixin", "SAM"),
        "class Net(lt.SAMMixin, L.LightningModule): sam = lt.SAM(rho=0.3)",
        "twice a step's time, a copy of the weights",
    ),
    Row(("sharpness",), "lt.sharpness(net,loader,loss).plot()", "≤31 passes", ("Sharpness",)),
    Row(("Mixup", "CutMix", "mixup", "cutmix"), "callbacks=[lt.Mixup(alpha=0.2,stop=0.9)]", "a copy of the inputs"),
    Row(("HiddenMixup",), 'callbacks=[lt.HiddenMixup("model.classifier")]'),
    Row(
        ("HardExampleFilter", "ohem_loss"),
        "callbacks=[lt.HardExampleFilter(keep=0.5,score_scale=0.5)]",
        "[0.78](benchmarks/results/batch_tricks.json) of a step's time (ResNet-18, CPU)",
    ),
    Row(("flat_cos",), "return lt.flat_cos(optimizer, self)"),
    Row(
        (
            *("one_cycle", "cosine", "cosine_restarts", "linear", "polynomial", "inverse_sqrt", "wsd", "step_decay"),
            *("constant", "swa_tail", "reduce_on_plateau"),
        ),
        "return lt.one_cycle(optimizer,self)",
        beside=("CurveLR", "PlateauLR"),
    ),
    Row(("LRSchedule",), 'callbacks=[lt.LRSchedule("cosine",warmup=0.05)]'),
    Row(("optimizer_steps",), "lt.optimizer_steps(self.trainer)", beside=("UnknownTotalSteps",)),
    Row(("find_lr",), "lightning-tricks find-lr -c config.yaml", "100 steps", ("plot_schedule", "LRFinderResult")),
    Row(
        ("layer_decay_groups", "discriminative_groups", "no_weight_decay_groups"),
        "lt.layer_decay_groups(net,1e-3,0.75)",
    ),
    Row(("BatchSizeWarmup", "scale_lr", "scale_adam", "effective_batch_size"), "callbacks=[lt.BatchSizeWarmup(end=8)]"),
    Row(
        ("preset", "presets", "SinglePreset", "DDPPreset", "FSDP2Preset", "ZeROPreset"),
        'L.Trainer(strategy="zero3_offload_bf16",devices=8)',
    ),
    Row(("adamw", "ray_trainer"), "return lt.adamw(self,lr=3e-4)"),
    Row(
        ("estimate_memory", "suggest_strategy", "find_batch_size", "environment_report"),
        "lightning-tricks suggest timm:resnet50",
        beside=("MemoryEstimate", "Suggestion", "Hardware", "BatchSizeResult", "EnvironmentReport"),
    ),
    Row(
        ("SkipNonFinite", "TerminateOnNonFinite", "RewindOnSpike"),
        "callbacks=[lt.SkipNonFinite()]",
        "[1.1](benchmarks/results/guards.json) clipping passes a step",
    ),
    Row(
        ("AdaptiveClip", "AutoClip", "adaptive_clip_"),
        "callbacks=[lt.AutoClip(percentile=10)]",
        "a pass over the gradients",
    ),
    Row(("GradualUnfreeze", "freeze"), "callbacks=[lt.GradualUnfreeze(at=[0.2,0.5])]"),
    Row(("ActivationCheckpointing",), "callbacks=[lt.ActivationCheckpointing()]", "a forward pass more"),
    Row(
        ("Compile",),
        "callbacks=[lt.Compile()]",
        "a compilation first ([measured](benchmarks/results/speed.json))",
        ("ChannelsLast", "speed_preset"),
    ),
    Row(("Doctor", "drop_bias_before_batchnorm", "add_stochastic_depth"), "callbacks=[lt.Doctor()]"),
    Row(
        ("average_checkpoints", "greedy_soup", "consolidate", "export_weights"),
        "lightning-tricks consolidate DIR -o net.safetensors",
    ),
)
