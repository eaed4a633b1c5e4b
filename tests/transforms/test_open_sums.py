"""What follows a reduction over a dim that is split is that of the whole leaf's reduction."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fzero
from fzero.distributed.mesh import resolve_mesh
from fzero.distributed.ragged import is_supported
from fzero.errors import ShardError
from fzero.transforms.whole import WholeLeaves
from tests.ranks import run_ranks

DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex128),
)
# Their sums and halves are exact. Ranks' shares cancel, wrap around as bytes, overflow as halves.
# So are the 2-norms of the first three, of the last two and of all: a last bit is the processor's.
VALUES = (
    [1.0, 2.0, 2.0, -4.0, 0.0],
    [3.0, 0.0, 0.0, 0.0, 4.0],
    [150.0, 0.0, 0.0, 200.0, 0.0],
    [30000.0, 0.0, 0.0, 40000.0, 0.0],
    [float("inf"), 1.0, 0.0, 1.0, 3.0],
)

REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(),
    "sum of rows": lambda x: x.sum(0),
    "sum in its dtype": lambda x: x.sum(dtype=x.dtype),
    "mean": lambda x: x.mean(),
    "mean of rows": lambda x: x[:4].clone().mean(0),
    "amax": lambda x: x.amax(),
    "amin of rows": lambda x: x.amin(0),
    "max": lambda x: x.max(),
    "any": lambda x: x.any(),
    "any of rows": lambda x: x.any(0, keepdim=True),
    "all": lambda x: x.all(),
    "prod": lambda x: x.prod(0),
    "norm": lambda x: torch.linalg.vector_norm(x),
    "count": lambda x: x.count_nonzero(),
    "product": lambda x: x @ x,
}

FOLLOWERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "itself": lambda s, x: s,
    **{f"to {dtype}": lambda s, x, dtype=dtype: s.to(dtype) for dtype in DTYPES},
    **{f"to {dtype} + 1": lambda s, x, dtype=dtype: s.to(dtype) + 1 for dtype in DTYPES},
    **{f"with {dtype} of the same": lambda s, x, dtype=dtype: s + s.to(dtype) for dtype in DTYPES},
    "times": lambda s, x: s * 1.0,
    "halved": lambda s, x: s / 2,
    "negated": lambda s, x: -s,
    "of a bool": lambda s, x: s * True + s * 2,
    "complex": lambda s, x: s * 1j,
    "type_as": lambda s, x: s.type_as(x),
    "plus rows": lambda s, x: s + x,
    "stack": lambda s, x: torch.stack([s, s + s]).sum(0),
    "stack of dtypes": lambda s, x: torch.stack([s, (s * 2).double()]),
    "stack of kinds": lambda s, x: torch.stack([x.sum(), x.amax()]),
    "cat": lambda s, x: torch.cat([s.reshape(-1), (x > 0).any().reshape(-1)]),
    "where": lambda s, x: torch.where(s > 0, s, -s),
    "where itself": lambda s, x: torch.where(s.bool(), x, x * 2),
    "masked": lambda s, x: torch.masked_fill(x, s.bool(), 0),
    "any": lambda s, x: s.any(),
    "all": lambda s, x: s.all(),
    "sum": lambda s, x: s.sum() + s.sum(dtype=torch.float64),
    "amax": lambda s, x: s.amax(),
    "amin": lambda s, x: s.amin(),
    "norm": lambda s, x: torch.linalg.vector_norm(s),
    "not": lambda s, x: ~s,
    "or": lambda s, x: s | s,
    "exp": lambda s, x: (s / 100).exp(),
    "relu": lambda s, x: s.relu(),
    "abs": lambda s, x: s.abs(),
    "round": lambda s, x: (s * 0.5).round(),
    "threshold": lambda s, x: torch.nn.functional.threshold(s, 0.5, 10.0),
    "nan_to_num": lambda s, x: s.nan_to_num(posinf=-5.0),
    "clamp": lambda s, x: s.clamp(-1, 1),
    "maximum": lambda s, x: torch.maximum(s, s * 2),
    "minus 250": lambda s, x: s - 250,
    "bits": lambda s, x: s.reshape(1).view(torch.uint8),
    "ones like": lambda s, x: torch.ones_like(s) + s,
    "full like": lambda s, x: torch.full_like(s, 3) + torch.zeros_like(s),
    "new ones": lambda s, x: s.new_ones(2) + 1,
    "lists": lambda s, x: torch._foreach_mul([s, s.double()], 1.5)[0],
    "lists of sums": lambda s, x: torch._foreach_add([s], [s.double()])[0],
    "copied": lambda s, x: x.clone().copy_(s),
    "copied into": lambda s, x: s.clone().copy_(x.double().sum()),
    "added": lambda s, x: x.clone().add_(s),
    "added to": lambda s, x: s.clone().add_(s.double()),
    "of others": lambda s, x: s.clone().mul_((x > 0).any()),
    "lists in place": lambda s, x: _first(torch._foreach_add_, [s.clone()], [s.double()]),
    "lists of dtypes": lambda s, x: _first(torch._foreach_mul_, [s.clone(), s.double() * 1], 2.0),
    "lists of kinds": lambda s, x: _first(torch._foreach_mul_, [s * 1, x.double().sum()], 2.0),
    "exp in place": lambda s, x: s.double().exp_(),
    "view": lambda s, x: s.reshape(1, -1).expand(2, -1) * 0.5,
    "item": lambda s, x: torch.tensor(s.reshape(-1)[0].item()),
}


def _first(write: Callable[..., Any], xs: list[Tensor], other: Any) -> Tensor:
    write(xs, other)
    return xs[0]


def _value(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _differ(found: Tensor, wanted: Tensor) -> bool:
    found = _value(found)
    if found.dtype != wanted.dtype or found.shape != wanted.shape:
        return True
    return not torch.allclose(found, wanted, equal_nan=True)


def _followed(dtype: torch.dtype) -> tuple[int, list[str]]:
    """How many were compared, and which are not those of the whole."""
    mesh = resolve_mesh(None, "cpu")
    compared, wrong = 0, []
    for values in VALUES:
        if not dtype.is_floating_point and torch.inf in values:
            continue
        full = torch.tensor(values, dtype=torch.float64).to(dtype)
        x = distribute_tensor(full, mesh.device_mesh, [Shard(0)])
        for reduction, follower in itertools.product(REDUCTIONS, FOLLOWERS):
            # shares in their own dtype may be halved before their sum is too large for it
            if 40000.0 in values and not follower.startswith(("to", "with", "itself")):
                continue
            f, g = REDUCTIONS[reduction], FOLLOWERS[follower]
            try:
                wanted = g(f(full), full)
            except (RuntimeError, TypeError):
                continue  # not in plain PyTorch either
            try:
                with WholeLeaves():
                    found = g(f(x), x)
            except ShardError as error:
                if "writes into a sum over ranks" not in str(error):
                    raise
                continue
            except Exception as error:
                wrong.append(f"{reduction}, {follower} of {values}: {error}")
                continue
            compared += 1
            if _differ(found, wanted):
                wrong.append(f"{reduction}, {follower} of {values}: {_value(found)} for {wanted}")
    return compared, wrong


BYTES = pytest.param(
    torch.uint8,
    marks=pytest.mark.skipif(
        not is_supported(), reason="torch 2.11's DTensor has it that any() of bytes is a bool"
    ),
)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, BYTES, torch.bool], ids=str)
@pytest.mark.quick("torch.float64")
def test_what_follows_a_reduction_is_that_of_the_whole(dtype: torch.dtype) -> None:
    for compared, wrong in run_ranks(2, _followed, dtype, timeout=200):
        assert wrong == []
        assert compared > 500


def _counted() -> list[str]:
    x = torch.tensor([1.0, torch.nan, torch.inf, torch.nan, 2.0], dtype=torch.float64)
    wrong = []
    finders: dict[str, Callable[[Tensor], Tensor]] = {
        "found_inf": lambda g: torch.isnan(g).any().float(),
        "any * 1.": lambda g: (g > 0).any() * 1.0,
        "any + 1": lambda g: (g > 0).any(0).long() + 1,
    }
    for executor in ("traced", "eager"):
        cfg = fzero.Config(stage=3, layout="rows", executor=executor)
        shards = fzero.shard({"w": x.clone()}, cfg)
        for name, f in finders.items():
            with torch.inference_mode():
                inferred = fzero.tree_map(f, shards)["w"]
            found = (fzero.jit(lambda p, f=f: f(p["w"]), cfg)(shards), inferred)
            if any(_differ(one, f(x)) for one in found):
                wrong.append(f"{name} {executor}")
    return wrong


def test_whether_there_is_one_is_no_count_of_ranks() -> None:
    assert run_ranks(2, _counted) == [[], []]
