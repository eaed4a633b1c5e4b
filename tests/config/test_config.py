"""Config: every field checked, DeepSpeed's JSON translated or refused."""

import dataclasses
import inspect
import json
import math
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

import fzero
from fzero.config import Config
from fzero.errors import ConfigError
from fzero.functional.remat import save_only
from fzero.numerics import loss_scale
from fzero.numerics.loss_scale import LossScale
from fzero.numerics.precision import Precision
from tests.ranks import fake_ranks

# Legal values per field, and illegal ones with a word of the rule that the message must give.
LEGAL = {
    "stage": [0, 1, 2, 3],
    "accum_steps": [1, 7],
    "clip_norm": [None, 1, 0.5],
    "norm_type": [1, 2.0, math.inf],
    "precision": [None, "bf16", "fp16", Precision(param=torch.float64)],
    "loss_scale": [None, "dynamic", 128, 2.0, LossScale(window=3)],
    "has_aux": [True, False],
    "on_nonfinite": ["report", "skip", "raise"],
    "frozen": [(), ("embed.*", "*.bias")],
    "reshard_after_forward": [True, False],
    "bucket_mb": [25, 0.5],
    "layout": ["auto", "rows", "flat"],
    "prefetch": [None, 0, 1, 4],
    "gather_together": [(), ("experts.*",)],
    "opaque": [(), ("auto",), ("experts.*",)],
    "memory_limit": [None, 10**9, "12GiB", "1.5 MiB"],
    "remat": [(), {"blocks.*": "nothing"}, (("a", "dots"), ("*", save_only("b", "c")))],
    "passes": [(), (math.floor,), [math.floor, math.ceil]],
    "dynamic": [False, True],
    "cuda_graph": [False, True],
    "executor": ["traced", "eager", "inductor"],
    "donate": [True, False],
    "offload": [None, "cpu"],
    "seed": [0, 2**63 - 1],
    "timeout": [None, 30, 0.5],
}
ILLEGAL = [
    ("stage", 4, "0 .* to 3"),
    ("stage", -1, "0 .* to 3"),
    ("stage", True, "int"),
    ("stage", "3", "int"),
    ("stage", 2.0, "int"),
    ("mesh", (2, 2), "DeviceMesh"),
    ("accum_steps", 0, ">= 1"),
    ("accum_steps", 1.5, "int"),
    ("clip_norm", 0, "> 0"),
    ("clip_norm", -1.0, "> 0"),
    ("clip_norm", math.inf, "finite"),
    ("clip_norm", True, "number"),
    ("clip_norm", "1", "number"),
    ("norm_type", 0, "> 0"),
    ("norm_type", -math.inf, "> 0"),
    ("norm_type", math.nan, "> 0"),
    ("norm_type", "inf", "math.inf"),
    ("precision", "bfloat16", "Did you mean 'bf16'"),
    ("precision", torch.bfloat16, r"Did you mean Precision\(param=torch.bfloat16\)"),
    ("loss_scale", "static", "'dynamic'"),
    ("loss_scale", 0.0, "> 0"),
    ("has_aux", 1, "True or False"),
    ("on_nonfinite", "ignore", "'report', 'skip', 'raise'"),
    ("on_nonfinite", "Raise", "Did you mean 'raise'"),
    ("on_nonfinite", None, "one of"),
    ("frozen", ("a", 3), "globs"),
    ("frozen", "", "non-empty"),
    ("frozen", None, "predicate"),
    ("frozen", lambda: True, "predicate"),
    ("reshard_after_forward", None, "True or False"),
    ("bucket_mb", 0, "> 0"),
    ("bucket_mb", math.nan, "finite"),
    ("layout", "row", "Did you mean 'rows'"),
    ("layout", None, "one of 'auto', 'rows', 'flat'"),
    ("prefetch", -1, ">= 0"),
    ("gather_together", lambda name: True, "globs"),
    ("opaque", ["", "a"], "globs"),
    ("memory_limit", 0, "bytes"),
    ("memory_limit", "12 apples", "bytes"),
    ("memory_limit", True, "bytes"),
    ("memory_limit", "12", "a text with its unit"),
    ("memory_limit", "12.5", "a text with its unit"),
    ("remat", "nothing", "dict from globs"),
    ("remat", {"": "nothing"}, "dict from globs"),
    ("remat", {"a": "some"}, "'everything'"),
    ("passes", "a", "functions from"),
    ("passes", (math.floor, 3), "functions from"),
    ("dynamic", 1, "True or False"),
    ("cuda_graph", 1, "True or False"),
    ("executor", "trace", "Did you mean 'traced'"),
    ("donate", "yes", "True or False"),
    ("offload", "gpu", "None, 'cpu'"),
    ("offload", ["cpu"], "None, 'cpu'"),
    ("seed", -1, ">= 0"),
    ("seed", 2**63, "below"),
    ("timeout", 0, "> 0"),
]
# these go with the executors that have a Program, and are tried for themselves
OF_PROGRAMS = ("memory_limit", "passes", "remat", "dynamic", "cuda_graph")
configs = st.fixed_dictionaries(
    {}, optional={k: st.sampled_from(v) for k, v in LEGAL.items() if k not in OF_PROGRAMS}
)


def test_every_field_is_tried_and_explained() -> None:
    fields = {field.name for field in dataclasses.fields(Config)}
    assert LEGAL.keys() | {"mesh"} == fields
    # newer Pythons leave the indentation out by themselves
    explained = inspect.cleandoc(str(Config.__doc__)).partition("Args:")[2].partition("Raises:")[0]
    assert set(re.findall(r"^ {4}(\w+): ", explained, re.MULTILINE)) == fields
    assert {field for field, *_ in ILLEGAL} >= fields - {"mesh"}


@settings(max_examples=40)
@given(configs)
def test_a_config_is_a_value(fields) -> None:
    cfg = Config(**fields)
    assert cfg == Config(**fields)
    assert {cfg: 1}[Config(**fields)] == 1
    assert cfg.replace() == cfg
    assert pickle.loads(pickle.dumps(cfg)) == cfg
    assert cfg.describe() == Config(**fields).describe()


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field in OF_PROGRAMS for value in LEGAL[field]]
)
def test_what_is_of_programs_is_a_value_where_there_is_one(field: str, value: Any) -> None:
    cfg = Config(**{field: value})
    assert pickle.loads(pickle.dumps(cfg)) == cfg == Config().replace(**{field: value})
    assert {cfg: 1}[cfg.replace()] == 1
    assert (cfg.describe() == Config().describe()) == (not value)
    if value:
        with pytest.raises(ConfigError, match="eager"):
            cfg.replace(executor="eager")


@settings(max_examples=40)
@given(configs, configs)
def test_replace_and_describe_see_every_field(first, second) -> None:
    a, b = Config(**first), Config(**{**first, **second})
    assert a.replace(**second) == b
    assert (a == b) == (a.describe() == b.describe())


@pytest.mark.parametrize(("field", "value", "rule"), ILLEGAL)
def test_an_illegal_value_names_field_value_and_rule(field, value, rule) -> None:
    with pytest.raises(ConfigError, match=rule) as error:
        Config(**{field: value})
    message = str(error.value)
    assert f"Config.{field}={value!r}" in message
    assert isinstance(error.value, ValueError)
    with pytest.raises(ConfigError):  # a copy is checked like a new one
        Config().replace(**{field: value})


def test_defaults_are_the_documented_ones() -> None:
    cfg = Config()
    assert (cfg.stage, cfg.accum_steps, cfg.bucket_mb, cfg.seed) == (3, 1, 25, 0)
    assert cfg.prefetch is None
    assert (cfg.executor, cfg.on_nonfinite, cfg.donate) == ("traced", "report", True)
    assert cfg.reshard_after_forward
    assert cfg.frozen == cfg.gather_together == ()
    assert cfg.mesh is cfg.clip_norm is cfg.precision is cfg.loss_scale is cfg.offload is None


def test_an_unknown_field_in_replace_lists_near_ones() -> None:
    with pytest.raises(ConfigError, match=r"no field 'accum'.*'accum_steps'"):
        Config().replace(accum=2)


@pytest.mark.parametrize(
    ("make", "near"),
    [
        (lambda: Config(accum_step=2), "'accum_steps'"),  # pyright: ignore[reportCallIssue]
        (lambda: Precision(params=torch.bfloat16), "'param'"),  # pyright: ignore[reportCallIssue]
        (lambda: LossScale(windows=9), "'window'"),  # pyright: ignore[reportCallIssue]
    ],
    ids=["Config", "Precision", "LossScale"],
)
def test_an_unknown_field_lists_near_ones(make: Callable[[], object], near: str) -> None:
    with pytest.raises(ConfigError, match=rf"has no field .*Did you mean {near}.*Its fields: "):
        make()


def test_a_class_that_knows_its_fields_keeps_its_signature() -> None:
    assert next(iter(inspect.signature(Config).parameters)) == "stage"
    assert Config(2, None, 4) == Config(stage=2, accum_steps=4)  # by position as before


def test_fp16_scales_dynamically_unless_told() -> None:
    assert Config().scaling is None
    assert Config(precision="fp16").scaling == LossScale()
    assert Config(precision=Precision(autocast=torch.float16)).scaling == LossScale()
    assert Config(precision="fp16", loss_scale=8.0).scaling == LossScale(init=8.0, dynamic=False)
    assert Config(precision="bf16", loss_scale="dynamic").scaling == LossScale()
    # The default follows the precision: it isn't frozen into a copy.
    assert Config(precision="fp16").replace(precision="bf16").scaling is None


def test_a_loss_scale_always_skips() -> None:
    assert Config(on_nonfinite="raise").nonfinite_policy == "raise"
    assert Config(on_nonfinite="raise", precision="fp16").nonfinite_policy == "skip"


def test_frozen_takes_globs_or_a_predicate() -> None:
    assert Config(frozen="a.*").frozen == ("a.*",)
    assert Config(frozen=["b", "a"]).frozen == ("b", "a")
    assert Config(frozen={"b", "a"}).frozen == ("a", "b")
    cfg = Config(frozen=("embed.*", "*.bias"))
    assert [cfg.is_frozen(n) for n in ("embed.0.weight", "head.bias", "head.weight")] == [
        True,
        True,
        False,
    ]
    assert Config(frozen=str.isupper).is_frozen("A")
    assert "0x" not in Config(frozen=lambda name: True).describe()["frozen"]


def test_meshes_of_one_and_two_axes() -> None:
    with fake_ranks(8):
        for shape, names in (((8,), ("dp",)), ((2, 4), None), ((2, 4), ("replicate", "shard"))):
            cfg = Config(mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
            hash(cfg)
            assert cfg.describe()["mesh"].startswith(str(shape))
        whole = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        assert Config(mesh=whole["dp"]).mesh is not None
        for mesh in (whole, init_device_mesh("cpu", (2, 2, 2))):
            with pytest.raises(
                ConfigError, match=r"Config.mesh is an undivided mesh \(\d axes.*Slice"
            ):
                Config(mesh=mesh)


def test_what_is_no_name_is_shown_in_a_line() -> None:
    module = torch.nn.Linear(300, 300)
    wrong: list[Any] = [list(module.parameters()), module]
    for value in wrong:
        with pytest.raises(ConfigError, match=r"Config.frozen=.*'encoder\.\*'") as raised:
            Config(frozen=value)
        assert len(str(raised.value)) < 300
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "names",
    [("shard", "replicate"), ("dp_shard", "dp"), ("dp", "dp_replicate"), ("fsdp", "ddp")],
)
def test_axes_whose_names_contradict_their_places_are_refused(names: tuple[str, str]) -> None:
    with fake_ranks(8):
        right = init_device_mesh("cpu", (2, 4), mesh_dim_names=names[::-1])
        assert Config(mesh=right).mesh is right
        with pytest.raises(ConfigError, match=r"\(replicate, shard\), in this order"):
            Config(mesh=init_device_mesh("cpu", (2, 4), mesh_dim_names=names))


# --- DeepSpeed ---


def test_a_usual_zero3_configuration() -> None:
    cfg = Config.from_deepspeed(
        {
            "train_batch_size": 64,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_clipping": 1.0,
            "steps_per_print": 10,
            "wall_clock_breakdown": False,
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": 3,
                "overlap_comm": True,
                "contiguous_gradients": True,
                "reduce_bucket_size": 5e6,
                "stage3_prefetch_bucket_size": 9e6,
                "stage3_param_persistence_threshold": 1e6,
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
                "offload_param": {"device": "none"},
                "leaf_module": {"names": ["experts.0"], "name_suffixes": ["mlp"]},
            },
        },
        world_size=2,
    )
    assert cfg == Config(
        stage=3,
        accum_steps=8,
        clip_norm=1.0,
        precision="bf16",
        bucket_mb=5e6 * 2 / 2**20,
        prefetch=2,
        gather_together=("experts.0", "*mlp"),
        offload="cpu",
    )


def test_fp16_keys_become_a_loss_scale() -> None:
    fp16 = {
        "enabled": True,
        "loss_scale": 0,
        "initial_scale_power": 10,
        "loss_scale_window": 500,
        "hysteresis": 3,
        "min_loss_scale": 2,
    }
    rule = LossScale(init=1024.0, window=500, hysteresis=3, minimum=2, settle=1)
    for stage in (1, 2, 3):
        read = Config.from_deepspeed({"fp16": fp16, "zero_optimization": {"stage": stage}})
        assert read == Config(stage=stage, precision="fp16", loss_scale=rule)
    # its scaler of stage 0 backs off at each overflow, and skips at the minimum, too
    at_once = dataclasses.replace(rule, hysteresis=1, stops=False)
    unsharded = Config(stage=0, precision="fp16", loss_scale=at_once)
    assert Config.from_deepspeed({"fp16": fp16}) == unsharded
    static = Config.from_deepspeed({"fp16": {"enabled": True, "loss_scale": 128}})
    assert static.scaling == LossScale(init=128, dynamic=False)
    default = LossScale(hysteresis=1, settle=1, stops=False)
    assert Config.from_deepspeed({"fp16": {"enabled": True}}).scaling == default
    assert Config.from_deepspeed({"fp16": {**fp16, "enabled": False}}) == Config(stage=0)


def test_the_loss_scale_under_autocast_is_torchs() -> None:
    autocast = {"enabled": True, "dtype": "fp16"}
    rule = Config.from_deepspeed({"torch_autocast": autocast}).scaling
    assert rule is not None
    theirs = torch.amp.GradScaler("cpu", growth_interval=rule.window)
    x = torch.zeros(1, requires_grad=True)
    sgd, state = torch.optim.SGD([x], 0.1), loss_scale.init(rule)
    assert theirs.get_growth_interval() == torch.amp.GradScaler("cpu").get_growth_interval()
    for step in range(2200):
        finite = step % 2100 > 30  # enough to fall below 1
        theirs.scale(x.sum())
        x.grad = torch.full((1,), 1.0 if finite else float("inf"))
        theirs.step(sgd)
        theirs.update()
        state = loss_scale.update(state, torch.tensor(finite), rule)
        assert not loss_scale.exhausted(state, torch.tensor(finite), rule)
        assert state.scale.item() == theirs.get_scale(), step


def test_other_numerics() -> None:
    read = Config.from_deepspeed
    bf16 = {"enabled": True, "check_grad_overflow": True}
    assert read({"bf16": bf16}) == Config(stage=0, precision="bf16", on_nonfinite="skip")
    assert read({"bf16": {"enabled": True}, "communication_data_type": "bf16"}).dtypes == Precision(
        param=torch.bfloat16, reduce=torch.bfloat16, master=torch.float32
    )
    cast = {
        "enabled": True,
        "dtype": "bfloat16",
        "lower_precision_safe_modules": ["torch.nn.Linear"],
    }
    # without ZeRO DeepSpeed reduces all gradients in float32
    for stage, safe in ((0, ()), (1, ("torch.nn.Linear",)), (3, ("torch.nn.Linear",))):
        found = read({"torch_autocast": cast, "zero_optimization": {"stage": stage}})
        assert found.dtypes == Precision(autocast=torch.bfloat16, lower_precision_safe_modules=safe)


def test_auto_means_our_default() -> None:
    auto = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "fp16": {"enabled": "auto", "initial_scale_power": "auto"},
        "bf16": {"enabled": "auto"},
        "optimizer": "auto",
        "zero_optimization": {
            "stage": "auto",
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
        },
    }
    assert Config.from_deepspeed(auto) == Config()


def test_an_empty_configuration_shards_nothing() -> None:
    assert Config.from_deepspeed({}) == Config(stage=0)


REFUSED = {
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "scheduler": {"type": "WarmupLR"},
    "amp": {"enabled": True},
    "prescale_gradients": True,
    "gradient_predivide_factor": 2.0,
    "sparse_gradients": True,
    "activation_checkpointing": {"partition_activations": True},
    "elasticity": {"enabled": True},
    "curriculum_learning": {"enabled": True},
    "tensor_parallel": {"autotp_size": 2},
    "train_btach_size": 8,
    "zero_optimization.stage": 4,
    "zero_optimization.offload_param": {"device": "cpu"},
    "zero_optimization.offload_optimizer": {"device": "nvme", "nvme_path": "/x"},
    "zero_optimization.zero_quantized_weights": True,
    "zero_optimization.zero_hpz_partition_size": 8,
    "zero_optimization.mics_shard_size": 4,
    "zero_optimization.ignore_unused_parameters": False,
    "zero_optimization.leaf_module": {"classes": ["Experts"]},
    "fp16.consecutive_hysteresis": True,
    "fp16.hysteresis": 0,
    "bf16": {"enabled": True, "bf16_optimizer_states": True},
    "data_types.grad_accum_dtype": "bf16",
    "data_types.buffer_dtype": "bf16",
    "data_types.keep_in_fp32_modules": ["bias"],
    "data_types.param_dtype": "bf16",
    "gradient_clipping": "one",
    "gradient_accumulation_steps": 1.5,
    "communication_data_type": "int8",
    "zero_optimization": True,
}


def nested(key: str, value: object) -> dict:
    for part in reversed(key.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize("key", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_key(key) -> None:
    with pytest.raises(ConfigError) as error:
        Config.from_deepspeed(nested(key, REFUSED[key]))
    assert f"\n  {key.split('.hyst')[0]}" in str(error.value)


def test_everything_is_refused_at_once() -> None:
    keys = [key for key in REFUSED if "." not in key and key != "zero_optimization"]
    with pytest.raises(ConfigError) as error:
        Config.from_deepspeed({key: REFUSED[key] for key in keys})
    assert all(f"\n  {key} = " in str(error.value) for key in keys)
    assert "did you mean 'train_batch_size'?" in str(error.value)


def test_sections_that_ask_for_nothing_pass() -> None:
    assert Config.from_deepspeed(
        {
            "amp": {"enabled": False, "opt_level": "O1"},
            "elasticity": {"enabled": False},
            "activation_checkpointing": {
                "partition_activations": False,
                "number_checkpoints": None,
            },
            "flops_profiler": {"enabled": True, "profile_step": 5},
            "prescale_gradients": False,
            "zero_optimization": {"stage": 1, "zero_hpz_partition_size": 1},
        }
    ) == Config(stage=1)


@pytest.mark.parametrize(
    ("batches", "world", "accum"),
    [
        ((64, 4, 8), 2, 8),
        ((64, 4, None), 2, 8),
        ((64, None, 8), 2, 8),
        ((64, None, None), 2, None),
        ((None, 4, 8), 2, 8),
        ((64, 4, 8), 4, "ranks (4)"),
        ((65, 4, None), 2, "ranks (2)"),
        ((65, None, 8), 1, "train_batch_size = 65"),
    ],
)
def test_batch_sizes_must_agree(batches, world, accum) -> None:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    raw = {k: v for k, v in zip(keys, batches, strict=True) if v is not None}
    if isinstance(accum, str):
        with pytest.raises(ConfigError) as error:
            Config.from_deepspeed(raw, world_size=world)
        assert accum in str(error.value)
    else:
        assert Config.from_deepspeed(raw, world_size=world).accum_steps == (accum or 1)


def test_the_world_size_is_the_group_s() -> None:
    raw = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 1}
    with fake_ranks(8):
        assert Config.from_deepspeed(raw).accum_steps == 4


def test_masters_and_states_of_16_bits() -> None:
    read = Config.from_deepspeed
    bf16, fp16 = torch.bfloat16, torch.float16
    keys: dict[str, Any] = {"enabled": True, "bf16_master_weights_and_grads": True}
    assert read({"bf16": keys}).dtypes == Precision(bf16, bf16, bf16)
    keys["bf16_optimizer_states"] = True
    assert read({"bf16": keys}).dtypes == Precision(bf16, bf16, bf16, optimizer=bf16)
    other = {"bf16": keys, "communication_data_type": "fp32"}
    assert read(other).dtypes == Precision(bf16, torch.float32, bf16, optimizer=bf16)
    keys = {"enabled": True, "fp16_master_weights_and_grads": True}
    assert read({"fp16": keys}).dtypes == Precision(fp16, fp16, fp16)
    off = {"enabled": False, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    assert read({"bf16": off}).precision is None
    with pytest.raises(ConfigError, match=r"bf16.*Precision\.optimizer=.*Precision\.master="):
        read({"bf16": {"enabled": True, "bf16_optimizer_states": True}})


def test_bf16_and_fp16_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match=r"bf16\.enabled = true: excludes fp16.enabled"):
        Config.from_deepspeed({"bf16": {"enabled": True}, "fp16": {"enabled": True}})


def test_files(tmp_path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    assert Config.from_deepspeed(path) == Config.from_deepspeed(str(path)) == Config(stage=2)
    for text, found in (
        ("{", "Cannot read.*line 1"),
        ("[1]", "holds a list"),
        ('{"a": 1, "a": 2}', r"duplicate keys \['a'\]"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=found):
            Config.from_deepspeed(path)
    with pytest.raises(ConfigError, match="Cannot read"):
        Config.from_deepspeed(tmp_path / "missing.json")
    with pytest.raises(ConfigError, match="Cannot read"):
        Config.from_deepspeed(None)  # type: ignore[arg-type]
    path.write_text("{}")
    with path.open() as file:
        with pytest.raises(ConfigError, match="Cannot read"):
            Config.from_deepspeed(file.fileno())  # type: ignore[arg-type]
        assert file.read() == "{}"


@pytest.mark.parametrize(
    "take",
    [
        lambda cfg: fzero.Engine(torch.nn.Linear(1, 1), fzero.optim.sgd(0.1), cfg),
        lambda cfg: fzero.make_train_step(lambda params, batch: None, fzero.optim.sgd(0.1), cfg),
        lambda cfg: fzero.value_and_grad(lambda params: None, cfg),
    ],
    ids=["Engine", "make_train_step", "value_and_grad"],
)
def test_a_dict_in_its_place_is_refused_with_what_to_pass(take: Any) -> None:
    with pytest.raises(ConfigError, match=r"cfg is a dict; pass fzero.Config\(\*\*fields\)"):
        take({"stage": 3})
