"""The configuration of DeepSpeed: ours, the user's merged over it, and no contradictions."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from lightning_tricks.strategies.zero.config import zero_config

ALL = [
    {"stage": stage, "offload": offload, "precision": precision}
    for stage in (1, 2, 3)
    for offload in ("none", "cpu", "nvme")
    for precision in ("bf16-mixed", "16-mixed", "32-true")
    if offload != "nvme" or stage == 3
]


@pytest.mark.parametrize("arguments", ALL, ids=str)
def test_deepspeed_understands_it(arguments: dict[str, Any]) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    path = "/nvme" if arguments["offload"] == "nvme" else None
    config = DeepSpeedConfig(zero_config(**arguments, nvme_path=path))
    zero = config.zero_config
    assert (zero.stage, zero.overlap_comm) == (arguments["stage"], True)
    devices = [part.device if part else "none" for part in (zero.offload_optimizer, zero.offload_param)]
    assert devices == [arguments["offload"], arguments["offload"] if arguments["stage"] == 3 else "none"]
    assert config.bfloat16_config.enabled == (arguments["precision"] == "bf16-mixed")
    assert config.float16_config.enabled == (arguments["precision"] == "16-mixed")


def test_the_users_config_is_merged_key_by_key_and_not_written_to() -> None:
    config = {
        "zero_optimization": {"overlap_comm": False, "offload_optimizer": {"ratio": 0.5}},
        "fp16": {"initial_scale_power": 4},
        "comms_logger": {"enabled": False},
    }
    given = deepcopy(config)
    merged = zero_config(offload="cpu", precision="16-mixed", config=config)
    assert merged["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True, "ratio": 0.5}
    assert merged["zero_optimization"]["overlap_comm"] is False
    assert merged["zero_optimization"]["stage"] == 3
    assert merged["fp16"] == {"enabled": True, "initial_scale_power": 4}
    assert merged["comms_logger"] is not config["comms_logger"]
    merged["comms_logger"]["enabled"] = merged["zero_optimization"]["offload_optimizer"]["ratio"] = None
    assert config == given


def test_weights_may_stay_while_optimizer_states_leave() -> None:
    zero = zero_config(offload="cpu", config={"zero_optimization": {"offload_param": {"device": "none"}}})
    assert zero["zero_optimization"]["offload_param"]["device"] == "none"
    assert zero["zero_optimization"]["offload_optimizer"]["device"] == "cpu"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"zero_optimization": {"stage": 2}}, "stage 2, but stage= gives 3"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            "offload_optimizer device 'cpu', but offload= .*",
        ),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, "offload_param device 'cpu', but offload= .*"),
        ({"bf16": {"enabled": False}}, "bf16 enabled False, but precision= gives True"),
        ({"fp16": {"enabled": True}}, "fp16 enabled True, but precision= gives False"),
        ({"gradient_accumulation_steps": 2}, r"got 2. Use Trainer\(accumulate_grad_batches=...\) instead"),
        ({"gradient_clipping": 1.0}, r"contain 'gradient_clipping', got 1.0. Use Trainer\(gradient_clip_val=...\)"),
        ({"train_batch_size": 32}, "the batch size of the training loader"),
        ({"optimizer": {"type": "Adam"}}, "configure_optimizers"),
        ({"torch_autocast": {"enabled": True}}, "precision="),
    ],
    ids=str,
)
def test_a_contradiction_is_refused_with_value_and_remedy(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        zero_config(config=config)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stage": 4}, "stage must be 1, 2 or 3, got 4"),
        ({"stage": True}, "stage must be 1, 2 or 3, got True"),
        ({"offload": "disk"}, "offload must be one of 'none', 'cpu', 'nvme', got 'disk'"),
        ({"offload": "nvme", "stage": 2, "nvme_path": "/nvme"}, "needs stage=3, got stage=2"),
        ({"offload": "nvme"}, "got offload='nvme' and nvme_path=None. Pass both"),
        ({"offload": "cpu", "nvme_path": "/nvme"}, "got offload='cpu' and nvme_path='/nvme'"),
    ],
    ids=str,
)
def test_an_argument_out_of_range_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        zero_config(**arguments)


@pytest.mark.parametrize(("config", "message"), [("ds.json", "must be a dict"), ({"bf16": True}, r"'bf16'\] must be")])
def test_a_config_of_another_type_is_refused(config: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        zero_config(config=config)
