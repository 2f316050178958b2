"""What each trick logs: the names of its metrics, and what they are."""

from __future__ import annotations

LOGGED: dict[str, dict[str, str]] = {
    "AutoClip": {
        "tricks/grad_norm": "the norm of the gradients before clipping",
        "tricks/clip_value": "the norm that they are clipped to",
    },
    "DataWait": {"tricks/data_wait": "the share of the time in which training waits for the next batch"},
    "Distill": {"tricks/distill_loss": "the distance from the teacher, before its weight"},
    "EMA": {
        "tricks/ema_decay": "the decay of the last update",
        "tricks/ema_distance": "the distance of the averages from the weights, over the norm of the weights",
    },
    "FitsMemory": {"tricks/micro_batch_size": "the samples of a part, once a batch did not fit"},
    "GradientStats": {
        "tricks/gradient_norm": "the norm of the gradients, before Lightning's clipping",
        "tricks/weight_norm": "the norm of the weights before the step",
        "tricks/update_norm": "the norm of what the step has added to the weights",
        "tricks/update_ratio": "the update's norm over the weights' norm",
    },
    "HardExampleFilter": {
        "tricks/kept_fraction": "the share of the samples that are trained on",
        "tricks/loss_threshold": "the smallest loss among them",
    },
    "RewindOnSpike": {"tricks/rewinds": "the number of returns to a snapshot so far"},
    "SAMCallback": {"tricks/sam_grad_norm": "the norm of the gradient that perturbs the weights"},
    "SAMMixin": {"tricks/sam_grad_norm": "the norm of the gradient that perturbs the weights"},
    "SWA": {"tricks/swa_distance": "the distance of the averages from the weights, over the norm of the weights"},
    "ScheduleFree": {
        "tricks/schedulefree_distance": "the distance of the averages from the weights, over the norm of the weights"
    },
    "SkipNonFinite": {"tricks/skipped_steps": "the number of skipped steps so far"},
    "Throughput": {
        "tricks/samples_per_second": "the samples of all devices per second",
        "tricks/tokens_per_second": "their tokens, where batches have some",
        "tricks/teraflops": "the floating-point operations of all devices per second, in 10^12",
        "tricks/mfu": "the share of what the devices can do, where that is known",
    },
}
