"""Precision: what casts, what is copied, what is refused."""

import contextlib
import itertools
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fzero.errors import ConfigError
from fzero.numerics import casts, precision
from fzero.numerics.precision import Precision, resolve
from fzero.state.masters import LeafDtypes, plan_leaf_dtypes

BF16 = torch.bfloat16
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
dtypes = st.sampled_from([*FLOATS, torch.int32, torch.int64, torch.bool, torch.complex64])
trees = st.dictionaries(st.text("abc", min_size=1), dtypes, max_size=4)


@settings(max_examples=30)
@given(leaves=trees, dtype=st.sampled_from([*FLOATS, None]))
def test_cast_changes_floating_leaves_only(leaves, dtype) -> None:
    tree = {name: torch.ones(2, dtype=d) for name, d in leaves.items()}
    out = casts.cast(tree, dtype)
    for name, leaf in tree.items():
        if dtype is not None and leaf.is_floating_point():
            assert out[name].dtype == dtype
        else:
            assert out[name] is leaf


def test_cast_is_differentiable_back_into_the_leaf_s_dtype() -> None:
    grads = torch.func.grad(lambda p: casts.cast(p, torch.bfloat16)["w"].float().sum())(
        {"w": torch.ones(3)}
    )
    assert grads["w"].dtype == torch.float32
    assert torch.equal(grads["w"], torch.ones(3))


def kept(leaves: dict[str, torch.dtype], precision: Precision, **how: Any) -> LeafDtypes:
    """What is kept of leaves of these dtypes, all of them trained."""
    tensors = [torch.ones(2, dtype=dtype) for dtype in leaves.values()]
    paths = [f"['{name}']" for name in leaves]
    return plan_leaf_dtypes(tensors, paths, precision, **{"trained": [True] * len(leaves), **how})


@settings(max_examples=30)
@given(leaves=trees, preset=st.sampled_from(["bf16", "fp16"]), apart=st.booleans())
def test_presets_keep_float32_masters_of_floating_leaves(leaves, preset, apart) -> None:
    leaves = {k: d for k, d in leaves.items() if d != torch.float64}
    given = resolve(preset)
    floating = [dtype.is_floating_point for dtype in leaves.values()]
    masters = tuple(torch.float32 if d.is_floating_point else d for d in leaves.values())
    low = tuple(given.param or d if d.is_floating_point else d for d in leaves.values())
    assert kept(leaves, given, sharded=True) == LeafDtypes(masters, None)
    expected = masters if apart or any(floating) else None
    assert kept(leaves, given, sharded=False, apart=apart) == LeafDtypes(low, expected)
    assert kept(leaves, given, sharded=True, apart=True) == LeafDtypes(low, masters)


def test_no_masters_where_the_parameters_will_do() -> None:
    single, half = {"w": torch.float32}, {"w": torch.bfloat16}
    for plain in (Precision(), Precision(master=torch.float32)):
        for sharded in (True, False):
            assert kept(single, plain, sharded=sharded) == LeafDtypes((torch.float32,), None)
    for sharded in (True, False):  # bfloat16 through and through: every stage keeps the same
        low = Precision(param=torch.bfloat16, master=torch.bfloat16)
        assert kept(single, low, sharded=sharded) == LeafDtypes((torch.bfloat16,), None)
    raised = kept(half, Precision(master=torch.float32), sharded=False)
    assert raised == LeafDtypes((torch.bfloat16,), (torch.float32,))


def test_what_is_not_trained_needs_no_master() -> None:
    for sharded in (True, False):
        found = kept({"w": torch.float32}, resolve("bf16"), sharded=sharded, trained=[False])
        assert found == LeafDtypes((torch.bfloat16,), None)


@pytest.mark.parametrize("sharded", [True, False])
def test_a_master_narrower_than_a_leaf_is_refused_by_path(sharded: bool) -> None:
    with pytest.raises(ConfigError, match=r"params\['w'\] is torch.float32.*Precision.master"):
        kept({"w": torch.float32}, Precision(master=torch.bfloat16), sharded=sharded)


@pytest.mark.parametrize(("param", "master"), list(itertools.product(FLOATS, FLOATS)))
def test_a_master_holds_what_param_computes_with(param, master) -> None:
    holds = {
        torch.float64: {torch.float64},
        torch.float32: {torch.float64, torch.float32},
        torch.bfloat16: {torch.float64, torch.float32, torch.bfloat16},
        torch.float16: {torch.float64, torch.float32, torch.float16},
    }
    if master in holds[param]:
        assert Precision(param=param, master=master).kept == master
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
        ({"param": torch.bfloat16, "master": torch.float16}, ("param", "master")),
        ({"param": torch.float16, "master": torch.bfloat16}, ("param", "master")),
        ({"param": BF16, "master": torch.float32, "optimizer": BF16}, ("optimizer", "master")),
        ({"param": torch.float16, "optimizer": BF16}, ("optimizer", "param")),
        ({"optimizer": BF16}, ("optimizer", "master")),
        ({"master": torch.float64, "optimizer": torch.float32}, ("optimizer", "master")),
        ({"autocast": BF16, "optimizer": BF16}, ("optimizer", "master")),
        (
            {"param": BF16, "master": torch.float32, "stochastic_rounding": True},
            ("stochastic_rounding", "master"),
        ),
        ({"stochastic_rounding": True}, ("stochastic_rounding", "master")),
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
        ("optimizer", torch.float16, "one of torch.float32, torch.bfloat16"),
        ("stochastic_rounding", 1, "True or False"),
        ("lower_precision_safe_modules", (3,), "neither a module class"),
        ("lower_precision_safe_modules", (int,), "neither a module class"),
        ("lower_precision_safe_modules", ("torch.nn.Liner",), "Did you mean 'torch.nn.Linear'"),
        ("lower_precision_safe_modules", ("torch.nn.functional.linear",), "neither a module"),
        ("lower_precision_safe_modules", ("Linear",), "neither a module class"),
        ("lower_precision_safe_modules", ("no_such_package.Linear",), "neither a module class"),
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
        assert found.kept == torch.float32
        assert found.state is None  # as the optimizer makes it, which is as what it updates
        assert found.needs_loss_scale == (name == "fp16")
    assert Precision(autocast=torch.float16).needs_loss_scale
    for bad in ("bfloat16", "fp8", torch.bfloat16, 16):
        with pytest.raises(ConfigError, match="precision="):
            precision.resolve(bad)
    with pytest.raises(ConfigError, match="Did you mean 'bf16'"):
        precision.resolve("bfloat16")


def test_is_a_key() -> None:
    first = Precision(autocast=torch.bfloat16, lower_precision_safe_modules=[torch.nn.Linear])  # type: ignore[arg-type]
    second = Precision(autocast=torch.bfloat16, lower_precision_safe_modules=("torch.nn.Linear",))
    assert {first: 1}[second] == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_states_beside_masters_of_16_bits_are_float32_unless_told(dtype: torch.dtype) -> None:
    assert Precision(param=dtype).state == Precision(param=dtype, master=dtype).state
    assert Precision(param=dtype, master=dtype).state == torch.float32
    assert Precision(param=BF16, master=BF16, optimizer=BF16).state == BF16


def test_safe_modules_are_exact_classes() -> None:
    default = Precision(autocast=torch.bfloat16).safe_modules
    assert default == {
        "torch.nn.modules.linear.Linear",
        *(f"torch.nn.modules.conv.Conv{n}d" for n in (1, 2, 3)),
    }
    given = Precision(autocast=torch.bfloat16, lower_precision_safe_modules=("torch.nn.Bilinear",))
    assert given.safe_modules == {"torch.nn.modules.linear.Bilinear"}
    assert not Precision(autocast=torch.bfloat16, lower_precision_safe_modules=()).safe_modules


class Output(NamedTuple):
    logits: torch.Tensor
    ids: torch.Tensor


def test_output_casts_floating_outputs_while_in_force() -> None:
    out = Output(torch.ones(2), torch.ones(2, dtype=torch.int64))
    with casts.in_force(Precision(output=torch.bfloat16), "cpu"):
        cast = casts.as_output(out)
        with casts.edges_in(casts.Edges()):  # inside a model that is called by a model
            assert casts.as_output(out) is out
    assert isinstance(cast, Output)
    assert (cast.logits.dtype, cast.ids.dtype) == (torch.bfloat16, torch.int64)
    assert casts.as_output(out) is out


def test_autocast_is_in_force_inside_only() -> None:
    x = torch.ones(2, 2)
    with contextlib.suppress(KeyError), casts.in_force(Precision(autocast=BF16), "cpu"):
        assert (x @ x).dtype == torch.bfloat16
        raise KeyError
    assert (x @ x).dtype == torch.float32
