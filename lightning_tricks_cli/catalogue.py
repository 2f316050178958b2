"""The tricks, a row for each card: their names, the line to add, what they do and what they cost."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """Names that share a card.

    Args:
        names: Public names that belong together; the first one is the name of the card.
        group: The heading under which lists have the card.
        line: The line of code to add to a training script.
        what: What they do, in one sentence of at most 74 characters, so that a list fits 100 columns.
        cost: Their cost in time and memory; empty where there is none to speak of.
        beside: Further public names of the card, which cost nothing.
    """

    names: tuple[str, ...]
    group: str
    line: str
    what: str
    cost: str = ""
    beside: tuple[str, ...] = ()


CATALOGUE = (
    Row(
        ("EMA",),
        "Better weights",
        "callbacks=[lt.EMA(decay=0.999)]",
        "Validates, saves and keeps an exponential average of the weights.",
        "an fp32 copy of the weights",
        ("scale_ema_decay",),
    ),
    Row(
        ("PostHocEMA", "post_hoc_average", "post_hoc_sweep"),
        "Better weights",
        'callbacks=[lt.PostHocEMA("runs/ema")]',
        "Makes an exponential average of any length after training.",
        "two fp32 copies of the weights; 128 bytes a weight on the disk",
        ("PostHocSweep", "power_decay"),
    ),
    Row(
        ("SWA",),
        "Better weights",
        "callbacks=[lt.SWA(start=0.75)]",
        "Validates, saves and keeps the mean weights of the late epochs.",
        "a copy of the weights; one more pass over the data if there is BatchNorm",
    ),
    Row(
        ("SAMMixin", "SAM", "SAMCallback"),
        "Better weights",
        "class Net(lt.SAMMixin, L.LightningModule): sam = lt.SAM(rho=0.05)",
        "Takes the gradient where the loss is worst nearby, for flatter minima.",
        "twice the time of a step; a copy of the weights",
    ),
    Row(
        ("sharpness",),
        "Better weights",
        "lt.sharpness(net, loader, loss).plot()",
        "Measures how sharp a minimum is.",
        "at most 31 passes over the data",
        ("Sharpness",),
    ),
    Row(
        ("Mixup", "CutMix"),
        "Samples",
        "callbacks=[lt.Mixup(alpha=0.2, stop=0.9)]",
        "Trains on mixtures of two samples, with any loss.",
        "a copy of the inputs",
        ("mixup", "cutmix"),
    ),
    Row(
        ("HiddenMixup",),
        "Samples",
        'callbacks=[lt.HiddenMixup("model.classifier")]',
        "Mixes hidden representations; meant for text.",
    ),
    Row(
        ("NEFTune",),
        "Samples",
        "callbacks=[lt.NEFTune()]",
        "Adds noise to the embeddings of tokens, for fine-tuning.",
        "random numbers for each number of the embeddings",
    ),
    Row(
        ("BatchTransform", "CutOut", "ColOut"),
        "Samples",
        "callbacks=[lt.BatchTransform(lt.CutOut())]",
        "Augments samples on the device: RandAugment, CutOut or your own.",
        "a loop over the samples of a batch",
        ("cutout", "colout"),
    ),
    Row(
        ("SequenceLengthWarmup", "ProgressiveResizing"),
        "Samples",
        "callbacks=[lt.ProgressiveResizing(0.5)]",
        "Starts with short sequences or small images, and lets them grow.",
        "none; it saves time",
    ),
    Row(
        ("HardExampleFilter",),
        "Samples",
        "callbacks=[lt.HardExampleFilter(keep=0.5, score_scale=0.5)]",
        "Trains on the samples with the largest losses only.",
        "a scoring pass; it saves half of the backward pass",
        ("ohem_loss",),
    ),
    Row(
        ("LeanLoss", "lean_loss"),
        "Losses",
        'callbacks=[lt.LeanLoss("model")]',
        "Trains a large vocabulary without holding its logits in memory.",
        "one more product of the head",
    ),
    Row(
        ("GradCacheMixin", "clip_loss", "info_nce"),
        "Losses",
        "class Net(lt.GradCacheMixin, L.LightningModule): chunk = 32",
        "Contrastive losses over all devices, and batches larger than memory.",
        "a second forward pass",
    ),
    Row(
        ("TokenMean",),
        "Losses",
        "callbacks=[lt.TokenMean()]",
        "Makes accumulated and distributed batches count by their targets.",
        "a pass over the gradients of an accumulated step",
    ),
    Row(
        ("LogitAdjustment", "logit_adjustment"),
        "Losses",
        "callbacks=[lt.LogitAdjustment()]",
        "Balances a classifier whose classes are rare and frequent.",
        "a pass over the training loader before the first step",
    ),
    Row(
        ("Distill", "Teacher"),
        "Losses",
        "callbacks=[lt.Distill(teacher, weight=0.5, temperature=4.0)]",
        "Trains on what another model, or an average of this one, says.",
        "a forward pass of the teacher; an average takes the memory of the weights",
        ("distillation_loss",),
    ),
    Row(
        ("min_snr_weight",),
        "Losses",
        "loss = (lt.min_snr_weight(alphas_cumprod, t) * error).mean()",
        "Weights the timesteps of a diffusion loss.",
    ),
    Row(
        ("MoEBalance",),
        "Losses",
        "callbacks=[lt.MoEBalance(rate=1e-3)]",
        "Balances a mixture of experts without a balancing loss.",
        "",
        ("balance_experts_",),
    ),
    Row(
        ("flat_cos",),
        "Schedules",
        "return lt.flat_cos(optimizer, self)",
        "Learning rate: warm-up, flat, then half a cosine to the floor.",
    ),
    Row(
        (
            *("one_cycle", "cosine", "cosine_restarts", "linear", "polynomial", "inverse_sqrt", "wsd"),
            *("step_decay", "constant", "swa_tail", "reduce_on_plateau"),
        ),
        "Schedules",
        "return lt.one_cycle(optimizer, self)",
        "Eleven other learning-rate curves, counted in optimizer steps.",
        "",
        ("CurveLR", "PlateauLR"),
    ),
    Row(
        ("LRSchedule",),
        "Schedules",
        'callbacks=[lt.LRSchedule("cosine", warmup=0.05)]',
        "The same curves as a callback, for YAML and for modules of a library.",
    ),
    Row(
        ("optimizer_steps",),
        "Schedules",
        "lt.optimizer_steps(self.trainer)",
        "Counts the optimizer steps of this fit exactly, or says why it cannot.",
        "",
        ("UnknownTotalSteps",),
    ),
    Row(
        ("find_lr", "plot_schedule"),
        "Schedules",
        "lightning-tricks find-lr -c config.yaml",
        "Finds a learning rate by a sweep that changes nothing; draws schedules.",
        "100 steps",
        ("LRFinderResult",),
    ),
    Row(
        ("BatchSizeWarmup", "scale_lr", "scale_adam", "effective_batch_size"),
        "Schedules",
        "callbacks=[lt.BatchSizeWarmup(final=8)]",
        "Lets the batch grow; scales learning rates with the batch size.",
    ),
    Row(
        ("optimizer", "optimizers"),
        "Optimizers",
        'return lt.optimizer("lion", self, lr=3e-4)',
        "34 optimizers by name, with the parameter groups that they need.",
    ),
    Row(
        ("ScheduleFree",),
        "Optimizers",
        "callbacks=[lt.ScheduleFree()]",
        "Validates and saves the averaged weights of schedule-free optimizers.",
    ),
    Row(
        ("adamw",),
        "Optimizers",
        "return lt.adamw(self, lr=3e-4)",
        "The fastest AdamW that the strategy allows.",
    ),
    Row(
        ("layer_decay_groups", "discriminative_groups", "no_weight_decay_groups"),
        "Optimizers",
        "lt.layer_decay_groups(net, 1e-3, 0.75)",
        "Learning rates by layer, and no weight decay on biases and norms.",
    ),
    Row(
        ("SkipNonFinite", "TerminateOnNonFinite", "find_non_finite"),
        "Stability",
        "callbacks=[lt.SkipNonFinite()]",
        "Skips steps with NaN or infinity, or stops and finds what made them.",
        "a check of the gradients",
        ("NonFiniteOrigin",),
    ),
    Row(
        ("RewindOnSpike",),
        "Stability",
        "callbacks=[lt.RewindOnSpike()]",
        "Returns to the last snapshot when the loss jumps.",
        "a copy of the training state in host memory",
    ),
    Row(
        ("AdaptiveClip", "AutoClip"),
        "Stability",
        "callbacks=[lt.AutoClip(percentile=10)]",
        "Clips gradients by the size of the weights, or by past gradient norms.",
        "a pass over the gradients",
        ("adaptive_clip_",),
    ),
    Row(
        ("GradualUnfreeze", "freeze"),
        "Fine-tuning",
        'callbacks=[lt.GradualUnfreeze(at=[0.2, 0.5], parameters=["^body", "^stem"])]',
        "Unfreezes a pretrained network part by part, from head to stem.",
    ),
    Row(
        ("LayerFreezing",),
        "Fine-tuning",
        "callbacks=[lt.LayerFreezing(0.5)]",
        "Freezes the first layers late in training, so that steps get cheaper.",
        "none; it saves time",
    ),
    Row(
        ("LoRA", "merge_adapters", "export_adapters"),
        "Fine-tuning",
        'callbacks=[lt.LoRA("attn.qkv", r=8, train="head")]',
        "Trains small adapters on top of frozen weights.",
    ),
    Row(
        ("QAT", "quantize"),
        "Fine-tuning",
        'callbacks=[lt.QAT("int4")]',
        "Rounds weights to 8 or 4 bits, and trains for it.",
        "rounding in every forward pass",
    ),
    Row(
        ("ActivationCheckpointing",),
        "Memory and speed",
        "callbacks=[lt.ActivationCheckpointing()]",
        "Recomputes activations in the backward pass instead of keeping them.",
        "another forward pass",
    ),
    Row(
        ("StepInBackward",),
        "Memory and speed",
        "callbacks=[lt.StepInBackward()]",
        "Holds one gradient at a time in memory.",
    ),
    Row(
        ("find_batch_size",),
        "Memory and speed",
        "lt.find_batch_size(trainer, net, datamodule=data, effective=256)",
        "Finds the largest batch that fits, and the accumulation for it.",
        "a few steps for each size that is tried",
        ("BatchSizeResult",),
    ),
    Row(
        ("Compile", "ChannelsLast", "speed_preset"),
        "Memory and speed",
        "callbacks=[lt.Compile()]",
        "torch.compile that falls back to eager mode; faster layouts.",
        "a compilation at the first step",
    ),
    Row(
        ("Float8",),
        "Memory and speed",
        "callbacks=[lt.Compile(), lt.Float8()]",
        "Computes linear layers in 8-bit floating point.",
    ),
    Row(
        ("LengthBuckets", "TokenBuckets", "BatchedDataset"),
        "Data",
        "DataLoader(data, 16, sampler=lt.LengthBuckets(lengths, 16))",
        "Batches of similar lengths, so that little is padding.",
    ),
    Row(
        ("pack_sequences",),
        "Data",
        "DataLoader(data, 16, collate_fn=lt.pack_sequences)",
        "Packs sequences into one row without padding.",
    ),
    Row(
        ("DataWait", "find_num_workers"),
        "Data",
        "callbacks=[lt.DataWait()]",
        "Shows how long training waits for data, and how many workers to use.",
    ),
    Row(
        ("preset", "presets", "SinglePreset", "DDPPreset", "FSDP2Preset", "ZeROPreset"),
        "Scale",
        'L.Trainer(strategy="fsdp2_bf16", devices=8)',
        "One string for strategy and precision: DDP, FSDP2, ZeRO, offloading.",
    ),
    Row(
        ("estimate_memory", "suggest_strategy"),
        "Scale",
        "print(lt.estimate_memory(net, batch=batch))",
        "Estimates the memory of training, and suggests a strategy that fits.",
        "",
        ("MemoryEstimate", "Suggestion", "Hardware"),
    ),
    Row(
        ("Preemption", "newest_checkpoint"),
        "Scale",
        'callbacks=[lt.Preemption("runs/a")]',
        "Saves when the job is preempted, and resumes from there.",
    ),
    Row(
        ("ExactResume",),
        "Scale",
        "callbacks=[lt.ExactResume()]",
        "Resumes within an epoch bit for bit, also on other numbers of devices.",
    ),
    Row(
        ("ray_trainer",),
        "Scale",
        'trainer = lt.ray_trainer("ddp_bf16", max_epochs=3)',
        "The presets in workers of Ray Train.",
    ),
    Row(
        ("Doctor",),
        "Checks",
        "callbacks=[lt.Doctor()]",
        "Warns of likely mistakes when training starts, and how to fix them.",
    ),
    Row(
        ("inspect_training",),
        "Checks",
        "print(lt.inspect_training(trainer, net, loader))",
        "Shows gradients, updates and dead units by layer.",
        "",
        ("InspectTraining", "TrainingInspection"),
    ),
    Row(
        ("LabelErrors", "label_report"),
        "Checks",
        'callbacks=[lt.LabelErrors("runs/labels")]',
        "Finds samples whose labels are probably wrong.",
        "56 bytes a sample in host memory",
        ("LabelReport",),
    ),
    Row(
        ("GradientStats",),
        "Checks",
        "callbacks=[lt.GradientStats()]",
        "Logs the norms of gradients, weights and updates of each group of layers.",
        "a copy of the weights and three passes over them, in one of 50 steps",
    ),
    Row(
        ("Throughput", "profile_tricks"),
        "Checks",
        "callbacks=[lt.Throughput()]",
        "Logs samples, tokens and FLOPs per second; times each trick.",
    ),
    Row(
        ("environment_report",),
        "Checks",
        "print(lt.environment_report())",
        "Shows what this machine can run, and what is missing.",
        "",
        ("EnvironmentReport",),
    ),
    Row(
        ("add_stochastic_depth", "add_blur_pool", "add_squeeze_excite", "drop_bias_before_batchnorm", "init_weights"),
        "Networks",
        'lt.add_stochastic_depth(net, 0.1, modules="mlp$")',
        "Changes a network in place before training.",
    ),
    Row(
        ("compare",),
        "Evaluation",
        'lt.compare(arms, metric="val_accuracy", mode="max", folder="runs")',
        "Trains with and without a trick over seeds; shows what is significant.",
        "a training for each arm and seed",
    ),
    Row(
        ("cross_validate",),
        "Evaluation",
        "lightning-tricks cross-validate -c config.yaml",
        "Cross-validation that resumes after a crash.",
        "a training for each fold",
        ("CrossValidation",),
    ),
    Row(
        ("Ensemble", "soup_and_ensemble"),
        "Evaluation",
        'lt.Ensemble.from_checkpoints(["a.ckpt", "b.ckpt"], Net)',
        "Several trained modules as one.",
        "the forward passes of all members",
        ("SoupAndEnsemble",),
    ),
    Row(
        ("fit_temperature",),
        "Evaluation",
        "lt.fit_temperature(net, loader).apply(net)",
        "Calibrates the probabilities of a classifier.",
        "a pass over held-out data",
        ("Temperature",),
    ),
    Row(
        ("average_checkpoints", "greedy_soup"),
        "Checkpoints",
        'lt.average_checkpoints(["a.ckpt", "b.ckpt"], "mean.ckpt")',
        "Averages the weights of checkpoint files.",
    ),
    Row(
        ("consolidate", "export_weights"),
        "Checkpoints",
        "lightning-tricks consolidate DIR -o net.safetensors",
        "One file from shards; plain weights for a bare nn.Module.",
    ),
)
