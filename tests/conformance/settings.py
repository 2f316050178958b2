"""How each public trick is switched on and brought to its no-op limit: one entry enrols a trick in every regime."""

from __future__ import annotations

from functools import partial

import lightning_tricks as lt
from tests.conformance.trick import Trick, guard, neutral, schedule, terminator

SETTINGS: dict[str, Trick] = {
    "AdaptiveClip": Trick(
        callbacks={"on": lambda: [lt.AdaptiveClip(0.02)], "off": lambda: [lt.AdaptiveClip(1e9)]},
        yaml={"trainer": {"callbacks": [{"class_path": "AdaptiveClip", "init_args": {"clip_factor": 0.02}}]}},
        refused=("DeepSpeed",),
    ),
    "AutoClip": Trick(
        callbacks={"on": lambda: [lt.AutoClip(10)], "off": lambda: [lt.AutoClip(100)]},
        yaml={"trainer": {"callbacks": ["AutoClip"]}},
        refused=("DeepSpeed",),
    ),
    "ActivationCheckpointing": neutral(
        lambda: lt.ActivationCheckpointing("layers"),
        {"class_path": "ActivationCheckpointing", "init_args": {"blocks": "layers"}},
    ),
    "Compile": neutral(
        lambda: lt.Compile("layers", backend="aot_eager"),
        {"class_path": "Compile", "init_args": {"modules": "layers", "backend": "aot_eager"}},
    ),
    "ChannelsLast": neutral(lt.ChannelsLast, "ChannelsLast", net="ConvNet", convolutions=True),
    "CutMix": Trick(
        callbacks={"on": lambda: [lt.CutMix()], "off": lambda: [lt.CutMix(prob=0.0)]},
        images=True,
        by_batches=True,
        yaml={
            "trainer": {"callbacks": ["CutMix"]},
            "model": {"class_path": "tests.conformance.yaml_nets.ImagesNet"},
        },
    ),
    "Doctor": neutral(lt.Doctor, "Doctor"),
    "EMA": Trick(
        callbacks={"on": lambda: [lt.EMA(0.9)], "off": lambda: [lt.EMA(0)]},
        yaml={"trainer": {"callbacks": [{"class_path": "EMA", "init_args": {"decay": 0.9}}]}},
    ),
    "GradualUnfreeze": Trick(
        callbacks={
            "on": lambda: [lt.GradualUnfreeze([3], groups=[r"^layers\.0"], lr_factor=0.5)],
            "off": lambda: [lt.GradualUnfreeze([0], groups=[r"^layers\.0"])],
        },
        yaml={
            "trainer": {
                "callbacks": [
                    {
                        "class_path": "GradualUnfreeze",
                        "init_args": {"at": [3], "groups": [r"^layers\.0"], "lr_factor": 0.5},
                    }
                ]
            }
        },
        refused=("DeepSpeed",),
    ),
    "HardExampleFilter": Trick(
        callbacks={"on": lambda: [lt.HardExampleFilter()], "off": lambda: [lt.HardExampleFilter(1.0)]},
        by_batches=True,
        yaml={"trainer": {"callbacks": ["HardExampleFilter"]}},
        refused=("manual",),
    ),
    'HardExampleFilter(mode="loss")': Trick(
        callbacks={
            "on": lambda: [lt.HardExampleFilter(mode="loss")],
            "off": lambda: [lt.HardExampleFilter(1.0, mode="loss")],
        },
        by_batches=True,
        yaml={"trainer": {"callbacks": [{"class_path": "HardExampleFilter", "init_args": {"mode": "loss"}}]}},
    ),
    "HiddenMixup": Trick(
        callbacks={"on": lambda: [lt.HiddenMixup("layers.1")], "off": lambda: [lt.HiddenMixup("layers.1", alpha=0)]},
        by_batches=True,
        yaml={"trainer": {"callbacks": [{"class_path": "HiddenMixup", "init_args": {"layer": "layers.1"}}]}},
    ),
    "LRSchedule": Trick(
        callbacks={
            "on": lambda: [lt.LRSchedule("cosine", warmup=2)],
            "off": lambda: [lt.LRSchedule("cosine", floor=1.0)],
        },
        yaml={"trainer": {"callbacks": [{"class_path": "LRSchedule", "init_args": {"curve": "cosine", "warmup": 2}}]}},
        refused=("DeepSpeed", "manual"),
    ),
    "Mixup": Trick(
        callbacks={"on": lambda: [lt.Mixup()], "off": lambda: [lt.Mixup(alpha=0)]},
        by_batches=True,
        yaml={"trainer": {"callbacks": [{"class_path": "Mixup", "init_args": {"alpha": 0.2}}]}},
    ),
    "Mixup(per_sample=True)": Trick(
        callbacks={
            "on": lambda: [lt.Mixup(per_sample=True)],
            "off": lambda: [lt.Mixup(per_sample=True, prob=0.0)],
        },
        by_batches=True,
        yaml={"trainer": {"callbacks": [{"class_path": "Mixup", "init_args": {"per_sample": True}}]}},
    ),
    "RewindOnSpike": guard(
        lambda: lt.RewindOnSpike(every_n_steps=3),
        {"class_path": "RewindOnSpike", "init_args": {"every_n_steps": 3}},
        "DeepSpeed",
        "manual",
    ),
    "SAMMixin": Trick(
        sam={"on": 0.1, "off": 0.0},
        yaml={"model": {"class_path": "tests.conformance.yaml_nets.SharpNet", "init_args": {"sam": {"rho": 0.1}}}},
        refused=("DeepSpeed",),
    ),
    "SWA": Trick(
        callbacks={
            "on": lambda: [lt.SWA(start=3)],
            "off": lambda: [lt.SWA(start=1.0, recalibrate_batchnorm=False)],  # the last weights alone
        },
        yaml={"trainer": {"callbacks": [{"class_path": "SWA", "init_args": {"start": 3}}]}},
    ),
    "BatchSizeWarmup": Trick(
        callbacks={
            "on": lambda: [lt.BatchSizeWarmup(1, end=2, over=1)],
            "off": lambda: [lt.BatchSizeWarmup(1, end=1)],
        },
        yaml={"trainer": {"callbacks": [{"class_path": "BatchSizeWarmup", "init_args": {"end": 2, "over": 1}}]}},
        refused=("DeepSpeed", "accumulate", "manual"),
    ),
    "SkipNonFinite": guard(lt.SkipNonFinite, "SkipNonFinite", "DeepSpeed"),
    "TerminateOnNonFinite": terminator(lt.TerminateOnNonFinite, "TerminateOnNonFinite"),
    "constant": Trick(schedule={"on": partial(lt.constant, warmup=3), "off": lt.constant}),
    "cosine": schedule(lt.cosine),
    "cosine_restarts": schedule(lt.cosine_restarts),
    "flat_cos": schedule(lt.flat_cos),
    "inverse_sqrt": schedule(lt.inverse_sqrt),
    "linear": schedule(lt.linear),
    "one_cycle": schedule(lt.one_cycle, start=1.0),
    "polynomial": schedule(lt.polynomial),
    "reduce_on_plateau": Trick(
        schedule={
            # no epoch is as much better than the one before: after the second one the rate falls with each
            "on": partial(lt.reduce_on_plateau, warmup=3, factor=0.5, patience=0, threshold=0.9),
            "off": lt.reduce_on_plateau,
        }
    ),
    "step_decay": schedule(lt.step_decay),
    "swa_tail": Trick(
        schedule={
            "on": lambda o, m=None, **total: lt.swa_tail(lt.cosine(o, m, **total), start=0.5, swa_lr=0.05),
            "off": lambda o, m: lt.swa_tail(lt.cosine(o, m, floor=1.0), swa_lr=0.1),
        }
    ),
    "wsd": schedule(lt.wsd),
}

EXEMPT: dict[str, str] = {
    "CurveLR": "what the factories return; tests/schedules/test_scheduler.py",
    "SAM": "the settings of SAMMixin",
    "Sharpness": "what sharpness gives",
    "sharpness": "measures and changes nothing; tests/modules/test_sharpness.py",
    "UnknownTotalSteps": "an error; tests/core/test_steps.py",
    "adamw": "an optimizer; tests/strategies/test_optimizers.py",
    "adaptive_clip_": "a pure function; tests/callbacks/test_adaptive_clip.py",
    "add_stochastic_depth": "changes a network before training; tests/modules/test_stochastic_depth.py",
    "average_checkpoints": "works on files; tests/checkpoints/test_average.py",
    "Hardware": "what suggest_strategy is told",
    "MemoryEstimate": "what estimate_memory gives",
    "Suggestion": "what suggest_strategy gives",
    "estimate_memory": "looks at a model and trains nothing; tests/advisor/test_memory.py",
    "suggest_strategy": "looks at numbers; tests/advisor/test_choose.py",
    "find_batch_size": "measures and restores everything; tests/advisor/test_batch_size.py has its regimes",
    "BatchSizeResult": "what find_batch_size gives",
    "environment_report": "looks at the machine; tests/advisor/test_environment.py",
    "EnvironmentReport": "what environment_report gives",
    "DDPPreset": "a strategy, so itself a regime; tests/conformance/test_presets.py",
    "FSDP2Preset": "a strategy, so itself a regime; tests/conformance/test_presets.py",
    "SinglePreset": "a strategy, so itself a regime; tests/conformance/test_presets.py",
    "ZeROPreset": "a strategy, so itself a regime; tests/conformance/test_presets.py",
    "LRFinderResult": "what find_lr gives",
    "PlateauLR": "what reduce_on_plateau returns; tests/schedules/test_plateau.py",
    "consolidate": "works on folders; tests/checkpoints/test_consolidate.py",
    "cutmix": "a pure function; tests/callbacks/test_cutmix.py",
    "discriminative_groups": "groups for an optimizer; tests/schedules/test_param_groups.py",
    "drop_bias_before_batchnorm": "changes a network before training; tests/modules/test_bias_before_batchnorm.py",
    "effective_batch_size": "counts; tests/schedules/test_scaling.py has its regimes",
    "freeze": "a pure function; tests/callbacks/test_freeze.py",
    "find_lr": "measures and restores everything; tests/schedules/test_lr_finder.py has its regimes",
    "layer_decay_groups": "groups for an optimizer; tests/schedules/test_param_groups.py",
    "no_weight_decay_groups": "groups for an optimizer; tests/schedules/test_param_groups.py",
    "plot_schedule": "draws; tests/schedules/test_plot.py",
    "ray_trainer": "needs Ray's workers; tests/strategies/test_ray.py",
    "scale_adam": "a formula; tests/schedules/test_scaling.py",
    "scale_lr": "a formula; tests/schedules/test_scaling.py",
    "export_weights": "works on files; tests/checkpoints/test_export.py",
    "greedy_soup": "works on files; tests/checkpoints/test_soup.py",
    "mixup": "a pure function; tests/callbacks/test_mixup.py",
    "ohem_loss": "a pure function; tests/callbacks/test_hard_examples.py",
    "scale_ema_decay": "a formula; tests/callbacks/test_ema.py",
    "speed_preset": "arguments of the Trainer; tests/callbacks/test_speed.py",
    "optimizer_steps": "counts and changes nothing; tests/core/test_steps.py has its regimes",
    "preset": "a strategy, so itself a regime; tests/strategies/test_presets.py",
    "presets": "a list",
}
