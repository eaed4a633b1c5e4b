"""Precision: what casts, what is copied, what is refused."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fzero import precision
from fzero.errors import ConfigError
from fzero.precision import Precision

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
dtypes = st.sampled_from([*FLOATS, torch.int32, torch.int64, torch.bool, torch.complex64])
trees = st.dictionaries(st.text("abc", min_size=1), dtypes, max_size=4)


@settings(max_examples=30, deadline=None)
@given(leaves=trees, dtype=st.sampled_from([*FLOATS, None]))
def test_cast_changes_floating_leaves_only(leaves, dtype) -> None:
    tree = {name: torch.ones(2, dtype=d) for name, d in leaves.items()}
    out = precision.cast(tree, dtype)
    for name, leaf in tree.items():
        if dtype is not None and leaf.is_floating_point():
            assert out[name].dtype == dtype
        else:
            assert out[name] is leaf


def test_cast_is_differentiable_back_into_the_leaf_s_dtype() -> None:
    grads = torch.func.grad(lambda p: precision.cast(p, torch.bfloat16)["w"].float().sum())(
        {"w": torch.ones(3)}
    )
    assert grads["w"].dtype == torch.float32
    assert torch.equal(grads["w"], torch.ones(3))


@settings(max_examples=30, deadline=None)
@given(leaves=trees, preset=st.sampled_from(["bf16", "fp16"]))
def test_masters_are_full_copies_in_float32(leaves, preset) -> None:
    leaves = {k: d for k, d in leaves.items() if d != torch.float64}
    tree = {name: torch.ones(2, dtype=d) for name, d in leaves.items()}
    out = precision.masters(tree, precision.resolve(preset))
    floating = [name for name, leaf in tree.items() if leaf.is_floating_point()]
    if not floating:
        assert out is None
    for name in floating:
        assert out is not None
        assert out[name].dtype == torch.float32
        assert out[name].data_ptr() != tree[name].data_ptr()


def test_no_masters_where_the_parameters_will_do() -> None:
    tree = {"w": torch.ones(2)}
    assert precision.masters(tree, Precision()) is None
    assert precision.masters(tree, Precision(master=torch.float32)) is None
    assert precision.masters({"w": torch.ones(2).bfloat16()}, Precision(master=torch.float32))


def test_a_master_narrower_than_a_leaf_is_refused_by_path() -> None:
    with pytest.raises(ConfigError, match=r"params\['w'\] is torch.float32.*Precision.master"):
        precision.masters({"w": torch.ones(2)}, Precision(master=torch.bfloat16))


@pytest.mark.parametrize(("param", "master"), list(itertools.product(FLOATS, FLOATS)))
def test_a_master_holds_what_param_computes_with(param, master) -> None:
    holds = {
        torch.float64: {torch.float64},
        torch.float32: {torch.float64, torch.float32},
        torch.bfloat16: {torch.float64, torch.float32, torch.bfloat16},
        torch.float16: {torch.float64, torch.float32, torch.float16},
    }
    if master in holds[param]:
        assert Precision(param=param, master=master).keeps_master == (param != master)
    else:
        with pytest.raises(ConfigError, match=r"Precision\.master=.*Precision\.param="):
            Precision(param=param, master=master)


@pytest.mark.parametrize(
    ("fields", "both"),
    [
        ({"param": torch.bfloat16, "reduce": torch.float16}, ("reduce", "param")),
        ({"param": torch.float16, "reduce": torch.bfloat16}, ("reduce", "param")),
        ({"autocast": torch.bfloat16, "param": torch.bfloat16}, ("autocast", "param")),
        ({"autocast": torch.bfloat16, "reduce": torch.bfloat16}, ("autocast", "reduce")),
        ({"autocast": torch.bfloat16, "master": torch.float64}, ("autocast", "master")),
        (
            {"lower_precision_safe_modules": (torch.nn.Linear,)},
            ("lower_precision_safe_modules", "autocast"),
        ),
    ],
)
def test_an_illegal_combination_names_both_fields(fields, both) -> None:
    with pytest.raises(ConfigError) as error:
        Precision(**fields)
    assert all(field in str(error.value) for field in both)


@pytest.mark.parametrize(
    ("field", "value", "hint"),
    [
        ("param", torch.int32, "one of"),
        ("param", "bf16", "Did you mean torch.bfloat16"),
        ("reduce", "float32", "Did you mean torch.float32"),
        ("master", torch.complex64, "one of"),
        ("output", 16, "one of"),
        ("autocast", torch.float32, "one of torch.bfloat16"),
        ("autocast", True, "one of"),
        ("lower_precision_safe_modules", (3,), "neither a module class"),
    ],
)
def test_a_bad_field_is_named(field, value, hint) -> None:
    fields = {"autocast": torch.bfloat16} if field == "lower_precision_safe_modules" else {}
    with pytest.raises(ConfigError, match=hint) as error:
        Precision(**{**fields, field: value})
    assert f"Precision.{field}" in str(error.value)


def test_presets_and_what_users_write() -> None:
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        found = precision.resolve(name)
        assert found == Precision(dtype, torch.float32, torch.float32)
        assert found.keeps_master
        assert found.needs_loss_scale == (name == "fp16")
    assert Precision(autocast=torch.float16).needs_loss_scale
    for bad in ("bfloat16", "fp8", torch.bfloat16, 16):
        with pytest.raises(ConfigError, match="precision="):
            precision.resolve(bad)
    with pytest.raises(ConfigError, match="Did you mean 'bf16'"):
        precision.resolve("bfloat16")


def test_is_a_key() -> None:
    first = Precision(autocast=torch.bfloat16, lower_precision_safe_modules=[torch.nn.Linear])  # type: ignore[arg-type]
    second = Precision(autocast=torch.bfloat16, lower_precision_safe_modules=(torch.nn.Linear,))
    assert {first: 1}[second] == 1
