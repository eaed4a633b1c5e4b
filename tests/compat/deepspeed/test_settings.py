"""A whole DeepSpeed configuration."""

from pathlib import Path
from typing import Any

import pytest

from fzero.compat.deepspeed.settings import Section, settings
from fzero.errors import ConfigError


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("accum", [1, 2])
@pytest.mark.parametrize("leave_out", ["total", "micro", "accum", None])
def test_batch_sizes_are_worked_out(
    world: int, micro: int, accum: int, leave_out: str | None
) -> None:
    raw = {
        "total": ("train_batch_size", micro * accum * world),
        "micro": ("train_micro_batch_size_per_gpu", micro),
        "accum": ("gradient_accumulation_steps", accum),
    }
    found = settings({k: v for what, (k, v) in raw.items() if what != leave_out}, world)
    assert (found.micro_batch, found.config.accum_steps) == (micro, accum)


def test_sections_are_read_and_auto_is_not_said() -> None:
    raw: dict[str, Any] = {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "eps": 1e-6}},
        "scheduler": {"type": "WarmupLR"},
    }
    with pytest.warns(UserWarning, match=r"optimizer\.params\.lr: 'auto'.*default of AdamW counts"):
        found = settings(raw, 1)
    assert found.optimizer == Section("AdamW", {"eps": 1e-6})
    assert found.scheduler == Section("WarmupLR", {})


def test_gradients_are_clipped_unless_it_says_otherwise() -> None:
    assert settings({}, 1).config.clip_norm == 1.0
    assert settings({"gradient_clipping": "auto"}, 1).config.clip_norm == 1.0
    assert settings({"gradient_clipping": 0.0}, 1).config.clip_norm is None


@pytest.mark.parametrize("wrong", [{"optimizer": "adam"}, {"scheduler": {"params": {}}}])
def test_a_section_of_another_shape_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        settings(wrong, 1)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("activation_checkpointing", "partition_activations", True),
        ("activation_checkpointing", "no_such", 1),
        ("checkpoint", "load_universal", True),
        ("checkpoint", "use_node_local_storage", True),
        ("checkpoint", "tag_validation", "foo"),
    ],
)
def test_what_a_section_asks_for_in_vain_is_refused(section: str, key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{section}\.{key}"):
        settings({section: {key: value}}, 1)


def test_what_asks_for_nothing_is_taken() -> None:
    nothing = {"partition_activations": False, "profile": True, "number_checkpoints": 4}
    settings({"activation_checkpointing": nothing, "checkpoint": {"tag_validation": "Warn"}}, 1)


def test_names_of_stage_3_may_lack_their_prefix() -> None:
    zero = {"stage": 3, "param_persistence_threshold": 0, "max_live_parameters": 1}
    assert settings({"zero_optimization": zero}, 1).config.stage == 3


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        ({}, ("mean", None)),
        ({"gradient_allreduce_op": "sum"}, ("sum", None)),
        ({"gradient_predivide_factor": 2.0}, ("mean", 2.0)),
        ({"prescale_gradients": True}, ("mean", 4.0)),
        ({"prescale_gradients": True, "gradient_allreduce_op": "sum"}, ("sum", 1.0)),
    ],
)
def test_gradients_are_a_mean_or_a_sum_divided_before_or_after(
    raw: dict[str, Any], found: tuple[str, float | None]
) -> None:
    got = settings(raw, 4)
    assert (got.reduction, got.predivide) == found


@pytest.mark.parametrize("key", ["gradient_allreduce_op", "gradient_predivide_factor"])
def test_another_reduction_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        settings({key: "max"}, 1)


def test_a_file_that_says_a_key_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"train_batch_size": 2, "gradient_clipping": 1.0, "gradient_clipping": 0.0}')
    with pytest.raises(ConfigError, match="gradient_clipping"):
        settings(str(file), 1)
    file.write_text('{"train_batch_size": 2 # a comment\n}')
    with pytest.raises(ConfigError, match="Hjson"):
        settings(str(file), 1)
