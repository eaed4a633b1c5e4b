"""What operators compute of DTensors under `WholeLeaves` is that of the whole tensors."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.torch_version import TorchVersion

import fzero
from fzero.distributed.ragged import is_supported
from fzero.errors import ShardError
from fzero.transforms.whole import (
    WholeLeaves,
    _has_rule,  # pyright: ignore[reportPrivateUsage]
    _is_empty_somewhere,  # pyright: ignore[reportPrivateUsage]
)
from tests.ranks import run_ranks

NEEDS_RAGGED = pytest.mark.skipif(
    not is_supported(), reason="flats want a torch whose DTensors can be ragged"
)
OLD = torch.__version__ < TorchVersion("2.12")
F64 = torch.float64
SHAPES = [(5, 7), (1, 7), (4, 3), (5,)]  # uneven, nothing on one rank, even, of one dim

LOSSES = (
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits"),
    *("soft_margin_loss", "poisson_nll_loss", "cross_entropy"),
)


def _losses() -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {
        f"{name} {how}": lambda p, q, name=name, how=how: getattr(F, name)(p, q, reduction=how)
        for name in LOSSES
        for how in ("mean", "sum", "none")
    }
    for how in ("mean", "sum"):
        found[f"binary_cross_entropy {how}"] = lambda p, q, how=how: F.binary_cross_entropy(
            p.sigmoid(), q.sigmoid(), weight=q, reduction=how
        )
        found[f"gaussian_nll_loss {how}"] = lambda p, q, how=how: F.gaussian_nll_loss(
            p, q, q.abs() + 0.1, reduction=how
        )
        found[f"cosine_embedding_loss {how}"] = lambda p, q, how=how: F.cosine_embedding_loss(
            p, q, q.new_ones(q.shape[:-1]), reduction=how
        )
        found[f"nll_loss {how}"] = lambda p, q, how=how: (
            F.nll_loss(p, q.argmax(-1), reduction=how) if p.dim() > 1 and len(p) > 1 else p.sum()
        )
    return found


def _others() -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {
        "cosine_similarity": lambda p, q: F.cosine_similarity(p, q, dim=-1),
        "pairwise_distance": lambda p, q: F.pairwise_distance(p, q),
        "dist": lambda p, q: torch.dist(p, q),
        "layer_norm": lambda p, q: F.layer_norm(p, p.shape[-1:]),
        "product": lambda p, q: p @ q.mT if p.dim() > 1 else p @ q,
        "vector product": lambda p, q: p.sum(0) @ q.mT if p.dim() > 1 else p.dot(q),
        "histc": lambda p, q: torch.histc(p, 5, 0, 2),
        "fftn": lambda p, q: torch.fft.fftn(p).abs(),
        "no dims": lambda p, q: p.sum(dim=[]) + p.amax(dim=()),
        "mean squared": lambda p, q: p.mean() ** 2,
        "take": lambda p, q: torch.take(p, (q > 1).long()),
        "filled": lambda p, q: torch.empty_like(p.sum(-1)).fill_(1.0) - p.sum(-1),
        "in place": lambda p, q: p.clone().scatter_(-1, (q * 0).long(), q),
        "conv1d": lambda p, q: (
            F.conv1d(p.flatten()[None, None], torch.ones_like(p[:1, None, :1]))
            if p.shape == (1, 7)
            else p
        ),
    }
    for dim in (0, -1):
        found |= {
            f"{name} {dim}": lambda p, q, name=name, dim=dim: getattr(torch, name)(p, dim)
            for name in (
                *("cumsum", "cumprod", "logcumsumexp", "softmax", "log_softmax", "logsumexp"),
                *("var", "mean", "sum", "amax", "argmax"),
            )
        }
        found |= {
            f"sort {dim}": lambda p, q, dim=dim: p.sort(dim).values,
            f"median {dim}": lambda p, q, dim=dim: p.median(dim).values,
            f"norm {dim}": lambda p, q, dim=dim: torch.linalg.vector_norm(p, 3.0, dim=dim),
            f"std_mean {dim}": lambda p, q, dim=dim: torch.std_mean(p, dim, correction=0),
        }
    return found


OPERATORS = _losses() | _others()
# what autograd writes of these, torch's DTensor refuses
NO_GRADIENT = {"cumprod", "filled", "histc", "argmax", "take", "in place", "std_mean"}


def _leaf(shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator, dtype=F64) * 1.5 + 0.1


def _full(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_full(x) for x in value]
    return value.full_tensor() if isinstance(value, DTensor) else value


def _close(found: Any, wanted: Any) -> bool:
    try:
        torch.testing.assert_close(_full(found), _full(wanted), equal_nan=True)
    except AssertionError:
        return False
    return True


def _of_shards(cfg: fzero.Config, names: list[str]) -> list[str]:
    """Which operators are others on shards."""
    wrong = []
    for shape in SHAPES:
        full = _leaf(shape, 0), _leaf(shape, 1)
        shards = fzero.shard({"p": full[0], "q": full[1]}, cfg)
        for name in names:
            f = OPERATORS[name]
            try:
                found = fzero.jit(lambda tree, f=f: f(tree["p"], tree["q"]), cfg)(shards)
            except ShardError as error:
                # leaves of flats have no views and hold no such writes, and say so
                if cfg.layout != "flat" or "of them" not in str(error):
                    raise
                continue
            if not _close(found, f(*full)):
                wrong.append(f"{name} of {shape}")
    return wrong


@pytest.mark.parametrize("layout", ["rows", pytest.param("flat", marks=NEEDS_RAGGED)])
@pytest.mark.quick("rows")
def test_operators_are_those_of_whole_leaves(layout: Any) -> None:
    cfg = fzero.Config(stage=3, layout=layout, executor="eager")
    assert run_ranks(2, _of_shards, cfg, list(OPERATORS)) == [[], []]


def test_operators_that_are_staged_out_are_those_of_whole_leaves() -> None:
    names = [
        *(f"{name} mean" for name in LOSSES),
        "cumsum -1",
        "filled",
        "cosine_similarity",
    ]
    assert run_ranks(2, _of_shards, fzero.Config(stage=3, layout="rows"), names) == [[], []]


def _gradients() -> list[str]:
    cfg, wrong = fzero.Config(stage=3, layout="rows", executor="eager"), []
    for shape in SHAPES:
        full = {"p": _leaf(shape, 0), "q": _leaf(shape, 1)}
        shards = fzero.shard(full, cfg)
        for name, f in OPERATORS.items():
            if name.split()[0] in NO_GRADIENT or name in NO_GRADIENT:
                continue

            def gradient(tree: Any, f: Any = f) -> Tensor:
                x = tree["p"].detach().requires_grad_()
                with torch.enable_grad():
                    loss = f(x, tree["q"]).square().sum()
                return torch.autograd.grad(loss, x)[0]

            try:
                found = fzero.jit(gradient, cfg)(shards)
            except RuntimeError as error:
                # where its formulas make zeros that are no DTensors, torch 2.11 refuses its own
                if not OLD or "mixed torch.Tensor and DTensor" not in str(error):
                    raise
                continue
            if not _close(found, gradient(full)):
                wrong.append(f"{name} of {shape}")
    return wrong


def test_gradients_are_those_of_whole_leaves() -> None:
    assert run_ranks(2, _gradients) == [[], []]


def _derived(executor: Any) -> bool:
    cfg = fzero.Config(stage=3, layout="rows", executor=executor)
    full, target = {"w": _leaf((5, 7), 0)}, {"w": _leaf((5, 7), 1)}

    def distance(params: Any, target: Any) -> Tensor:
        return F.mse_loss(params["w"], target["w"])

    def step(params: Any, target: Any) -> Any:
        value, grads = fzero.value_and_grad(distance, cfg)(params, target)
        return value, grads["w"], distance(params, target)

    found = fzero.jit(step, cfg)(fzero.shard(full, cfg), fzero.shard(target, cfg))
    grads, value = torch.func.grad_and_value(distance)(full, target)
    return _close(list(found), [value, grads["w"], value])


@pytest.mark.parametrize("executor", ["traced", "eager"])
def test_a_step_has_the_value_that_it_differentiates(executor: Any) -> None:
    assert run_ranks(2, _derived, executor) == [True, True]


def _outside_of_jit() -> bool:
    full = _leaf((5, 7), 0)
    shards = fzero.shard({"w": full}, fzero.Config(stage=3, layout="rows"))
    with torch.inference_mode():  # nothing takes composite operators apart there
        inferred = fzero.tree_map(
            lambda x: F.cosine_embedding_loss(x, x * x, x.sum(1) * 0 + 1), shards
        )
    mapped = fzero.tree_map(lambda x: F.mse_loss(x, x * 2), shards)
    wanted = F.cosine_embedding_loss(full, full * full, full.sum(1) * 0 + 1)
    return _close(mapped["w"], F.mse_loss(full, full * 2)) and _close(inferred["w"], wanted)


def test_tree_map_is_that_of_whole_leaves() -> None:
    assert run_ranks(2, _outside_of_jit) == [True, True]


# a sum over shards (or mean, or maximum) and what is this rank's own
MIXED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "times": lambda p, x: p.sum() * x,
    "times from the left": lambda p, x: x * p.sum(),
    "plus": lambda p, x: p.sum() + x,
    "minus": lambda p, x: x - p.sum(),
    "over": lambda p, x: p.sum() / x,
    "under": lambda p, x: x / p.sum(),
    "power": lambda p, x: p.sum() ** x,
    "mean": lambda p, x: p.mean() * x,
    "max": lambda p, x: p.max() * x,
    "norm": lambda p, x: torch.linalg.vector_norm(p) + x,
    "one element": lambda p, x: p.sum() * x.view(1),
    "where": lambda p, x: torch.where(x > 1.5, p.sum(), -p.sum()),
    "where own": lambda p, x: torch.where(p.sum() > 3, x, p.sum()),
    "lerp": lambda p, x: torch.lerp(p.sum(), x, 0.5),
    "addcmul": lambda p, x: torch.addcmul(p.sum(), x, p.mean()),
    "maximum": lambda p, x: torch.maximum(p.sum(), x * 20),
    "compared": lambda p, x: (p.sum() > x * 10) * 1.0,
    "stack": lambda p, x: torch.stack([p.sum(), x]),
    "cat": lambda p, x: torch.cat([p.sum().view(1), x.view(1)]),
    "lists": lambda p, x: torch._foreach_mul([p.sum(), p.mean()], [x, x])[1],
    "twice": lambda p, x: p.sum() * x * p.sum(),
    "of both": lambda p, x: p.sum() * (p.mean() + x) + p.sum(),
    "numbers": lambda p, x: (p.sum() * 2.0 + 1) / 3 + 0 * x,
    "in place": lambda p, x: p.sum().clone().mul_(x),
    "into its own": lambda p, x: x.clone().add_(_value(p.sum())),
    "rows, by a sum": lambda p, x: (p * p.sum()).sum() * x,
}


def _value(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _of_own(cfg: fzero.Config) -> list[str]:
    rank, wrong = dist.get_rank(), []
    for shape in [(5, 7), (1, 7)]:
        leaf, x = _leaf(shape, 0), torch.tensor(rank + 1.0, dtype=F64)
        params = {"w": leaf.clone()}
        params = fzero.shard(params, cfg) if cfg.stage == 3 else params

        def every(tree: Any, x: Tensor) -> Any:
            return {name: f(tree["w"], x) for name, f in MIXED.items()}

        found, wanted = fzero.jit(every, cfg)(params, x), every({"w": leaf}, x)
        mapped = fzero.tree_map(lambda p, x=x: list(every({"w": p}, x).values()), params)["w"]
        mapped = dict(zip(MIXED, mapped, strict=True))
        for name in MIXED:
            if not _close(found[name], wanted[name]) or not _close(mapped[name], wanted[name]):
                wrong.append(f"{name} of {shape}")
    return wrong


@pytest.mark.parametrize("executor", ["traced", "eager"])
@pytest.mark.parametrize(
    ("stage", "layout"),
    [(0, "rows"), (3, "rows"), pytest.param(3, "flat", marks=NEEDS_RAGGED)],
)
def test_what_is_a_ranks_own_stays_its_own_beside_sums(
    stage: Any, layout: Any, executor: Any
) -> None:
    cfg = fzero.Config(stage=stage, layout=layout, executor=executor)
    assert run_ranks(2, _of_own, cfg) == [[], []]


# of nothing there is none of these, and one of three ranks has nothing of two elements
WITHOUT_IDENTITY: dict[str, Callable[[Tensor], Tensor]] = {
    "amax": lambda x: x.amax(),
    "amin of rows": lambda x: x.amin(0),
    "max": lambda x: x.max(),
    "max of rows": lambda x: x.max(0).values,
    "aminmax": lambda x: torch.stack(list(x.aminmax())),
    "largest": lambda x: x.abs().max(),
    "argmin": lambda x: x.argmin(),
    "median": lambda x: x.median(),
    "logsumexp": lambda x: x.logsumexp(0),
    "std": lambda x: x.std(),
    "prod": lambda x: x.prod(),
    "mean": lambda x: x.mean(),
    "lists": lambda x: torch._foreach_max([x])[0],  # pyright: ignore
    "norms of lists": lambda x: torch.stack(list(torch._foreach_norm([x, x], float("inf")))),
} | {
    f"norm {order}": lambda x, order=order: torch.linalg.vector_norm(x, order)
    for order in (float("inf"), -float("inf"), -1.0, 0.0, 0.5, 2.0)
}


def _of_two(cfg: fzero.Config) -> list[str]:
    leaf, wrong = torch.tensor([-3.0, -4.0], dtype=F64), []
    shards = fzero.shard({"w": leaf.clone()}, cfg)

    def every(x: Tensor) -> Any:
        return {name: f(x) for name, f in WITHOUT_IDENTITY.items()}

    found, wanted = fzero.jit(lambda tree: every(tree["w"]), cfg)(shards), every(leaf)
    mapped = fzero.tree_map(every, shards)["w"]
    for name, value in wanted.items():
        if not _close(found[name], value) or not _close(mapped[name], value):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("executor", ["traced", "eager"])
@pytest.mark.parametrize("layout", ["rows", pytest.param("flat", marks=NEEDS_RAGGED)])
def test_reductions_hold_where_a_rank_has_nothing(layout: Any, executor: Any) -> None:
    cfg = fzero.Config(stage=3, layout=layout, executor=executor)
    assert run_ranks(3, _of_two, cfg) == [[], [], []]


# operands that lie otherwise than what is written, or are broadcast to it
WRITERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "an element": lambda y, x: y.__setitem__(0, 0),
    "a row of its own": lambda y, x: y.__setitem__(0, y[-1].clone()),
    "rows times 2": lambda y, x: y[:1].mul_(2),
    "a number": lambda y, x: y.div_(x.sum()),
    "copied": lambda y, x: y.copy_(x.softmax(0)),
    "copied of another dtype": lambda y, x: y.copy_(x.float().cumsum(0)),
    "broadcast": lambda y, x: y.add_(x[-1]),
    "minus its mean": lambda y, x: y.sub_(y.mean(0, keepdim=True)),
    "sorted": lambda y, x: y.add_(x.sort(0).values),
    "lerp": lambda y, x: y.lerp_(x.softmax(0), 0.5),
    "lerp of weights": lambda y, x: y.lerp_(x.cumsum(0), x.softmax(0)),
    "addcmul": lambda y, x: y.addcmul_(x.cumsum(0), x * 2),
    "masked": lambda y, x: y.masked_fill_(x.cumsum(0) > 1, 0.0),
    "on the full": lambda y, x: y.cumsum_(0),
    "out": lambda y, x: torch.add(x.cumsum(0), x, out=y),
    "lists": lambda y, x: torch._foreach_add_([y, x.clone()], [x.cumsum(0), x]),
    "itself": lambda y, x: y.mul_(y),
}


def _of_one_row() -> list[str]:
    wrong = []
    for ranks, placements in [
        ((2,), [Shard(0)]),
        ((2,), [Shard(1)]),
        ((1, 2), [Replicate(), Shard(0)]),
        ((2, 1), [Shard(0), Shard(1)]),
        ((2, 1), [Shard(0), Shard(0)]),
    ]:
        mesh = init_device_mesh("cpu", ranks)
        for shape in [(1,), (1, 4), (4, 1), (1, 1), (4,)]:
            if any(p.is_shard(1) for p in placements) and len(shape) < 2:
                continue
            full = _leaf(shape, 0)
            shard: Any = distribute_tensor(full, mesh, placements)
            for name, write in WRITERS.items():
                wanted, y = full.clone(), shard.clone()
                write(wanted, full)
                try:
                    with WholeLeaves():
                        write(y, shard)
                except Exception as error:
                    wrong.append(f"{name} {shape} {placements}: {error}")
                    continue
                if y.placements != tuple(placements) or not _close(y, wanted):
                    wrong.append(f"{name} {shape} {placements}")
    return wrong


def test_a_leaf_of_one_row_is_written_in_place() -> None:
    assert run_ranks(2, _of_one_row) == [[], []]


# what they do to a square leaf, whose shape stays
RESHAPERS: dict[str, Callable[[Tensor], Any]] = {
    "t_": lambda y: y.t_(),
    "transpose_": lambda y: y.transpose_(0, 1),
    "transpose_ (swapaxes_)": lambda y: y.swapaxes_(0, 1),
    "as_strided_": lambda y: y.as_strided_((2, 2), (1, 2)),
    "squeeze_": lambda y: y.squeeze_(),
    "squeeze_ of a dim": lambda y: y.squeeze_(0),
    "unsqueeze_": lambda y: y.unsqueeze_(0),
    "resize_": lambda y: y.resize_(2, 2),
    "as_strided": lambda y: y.as_strided((2, 2), (1, 2)),
    "as_strided (fill_diagonal_)": lambda y: y.fill_diagonal_(3.0),
}


def _reshaped() -> None:
    cfg = fzero.Config(stage=3, layout="rows", executor="eager")
    x = fzero.shard({"w": torch.arange(4.0).view(2, 2)}, cfg)["w"]
    makers = (lambda: x.clone(), lambda: x.cumsum(0))  # parts, and the same on all ranks
    modes = (torch.no_grad, torch.inference_mode)
    for name, make, mode in itertools.product(RESHAPERS, makers, modes):
        f = RESHAPERS[name]
        with WholeLeaves(), mode():
            y = make()
            view, before = y[0], y.full_tensor().clone()
            try:
                f(y)
            except ShardError as error:
                refused = str(error)
            else:
                refused = ""
            changed = before.clone()
            first = changed[0]
            if refused:
                assert f"aten.{name.split()[0]}." in refused
            else:
                f(changed)
            assert torch.equal(_full(y), changed), name
            assert torch.equal(_full(view), first), name
    # each rank's one row is none of the leaf's dims of one
    rows = fzero.shard({"w": torch.arange(6.0).view(2, 1, 3)}, cfg)["w"]
    with WholeLeaves():
        with pytest.raises(
            ShardError, match=r"aten.squeeze_.default gives a DTensor another shape"
        ):
            rows.clone().squeeze_()
        assert rows.clone().detach_().requires_grad_().requires_grad
        assert rows.squeeze().shape == (2, 3)


def test_what_changes_a_shape_in_place_is_refused_or_right() -> None:
    run_ranks(2, _reshaped)


def _refused() -> None:
    cfg = fzero.Config(stage=3, layout="rows", executor="eager")
    x = fzero.shard({"w": _leaf((5, 7), 0)}, cfg)["w"]
    with WholeLeaves():
        with pytest.raises(ShardError, match=r"aten.unfold.default gives a view of a DTensor"):
            x.unfold(0, 1, 1)
        with pytest.raises(ShardError, match=r"aten.fill_.Scalar writes into a sum over ranks"):
            x.sum().fill_(1.0)
        for write in (lambda s: s.mul_(torch.tensor(2.0)), lambda s: s.add_(x.sum() * 0 + 1)):
            with pytest.raises(ShardError, match=r"can't hold what may be each rank's own"):
                write(x.sum())
        # lists are combined place by place, where torch has a rule for that
        together = [x.sum(), x.sum() * torch.tensor(2.0)]
        if OLD:
            with pytest.raises(ShardError, match=r"this torch's lists can't write into"):
                torch._foreach_mul_(together, 2.0)
        else:
            torch._foreach_mul_(together, 2.0)
        # torch has a rule for these, which an even split is taken by
        with pytest.raises(ShardError, match=r"aten.view.default gives a view of a DTensor"):
            fzero.shard({"w": _leaf((5, 3), 0)}, cfg)["w"].flatten()
        # nobody knows whether these are the same on every rank
        for mixed in (lambda: x + torch.ones(5, 7), lambda: torch.bucketize(x, torch.arange(3.0))):
            with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
                mixed()
        with pytest.raises(RuntimeError, match=r"invalid for input of size 35"):
            x.view(4, 7)


def test_what_shards_cannot_hold_is_refused() -> None:
    run_ranks(2, _refused)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "randn_like": torch.randn_like,
    "bernoulli": lambda x: (torch.ones_like(x) * 0.5).bernoulli(),
    "uniform_": lambda x: torch.empty_like(x).uniform_(),
    "dropout": lambda x: F.dropout(x + 1, 0.5),
    "whether": lambda x: torch.empty_like(x, dtype=torch.bool).bernoulli_(0.5),
}


def _drawn(replicas: int) -> dict[str, list[float]]:
    mesh, found = None, {}
    if replicas > 1:
        size = dist.get_world_size() // replicas
        mesh = init_device_mesh("cpu", (replicas, size), mesh_dim_names=("replicate", "shard"))
    layouts = ("rows", "flat") if is_supported() else ("rows",)
    for layout, executor in itertools.product(layouts, ("traced", "eager")):
        cfg: Any = fzero.Config(3, layout=layout, executor=executor, mesh=mesh)
        params = fzero.shard({"w": _leaf((7, 5), 0), "b": _leaf((), 0)}, cfg)
        for name, draw in DRAWS.items():
            if layout == "flat" and name not in ("randn_like", "bernoulli"):
                continue  # the others write in place, which what lies in a flat can't be
            made = fzero.jit(lambda p, draw=draw: fzero.tree_map(draw, p), cfg)(params)
            for leaf, x in fzero.unshard(made).items():
                found[f"{layout} {executor} {name} {leaf}"] = x.double().flatten().tolist()
    return found


@pytest.mark.parametrize("replicas", [1, 2])
def test_copies_of_an_element_are_drawn_once(replicas: int) -> None:
    one, *others = run_ranks(2, _drawn, replicas)
    assert others == [one]
    many = [values for name, values in one.items() if name.endswith("w")]
    assert len(many) >= 2 * len(DRAWS)
    assert all(len(set(values)) > 1 for values in many)


def test_torch_says_what_it_has_rules_for() -> None:
    # Fails here first when torch moves them: all would get full tensors.
    aten = torch.ops.aten
    known = (aten.add.Tensor, aten.sum.default, aten.mm.default, aten.view.default)
    assert all(map(_has_rule, known))
    assert not _has_rule(aten.im2col.default)


def _flattened() -> None:
    full = {"w": _leaf((7, 5), 0)}
    params = fzero.shard(full, fzero.Config(3, layout="rows"))
    for fn in (lambda x: torch.softmax(x.flatten(), 0), lambda x: x.flatten().topk(2).values):
        wanted = fn(full["w"])
        if dist.get_world_size() == 1:
            assert _close(_full(fzero.jit(lambda p, fn=fn: fn(p["w"]))(params)), wanted)
            continue
        # torch 2.11 has a rule for it, which can't know what is written into it
        said = "gives a view of a DTensor" if OLD else "a view that crosses a split"
        with pytest.raises(ShardError, match=said):
            fzero.jit(lambda p, fn=fn: fn(p["w"]))(params)
        found = fzero.jit(lambda p, fn=fn: fn(p["w"].full_tensor()))(params)  # as it says
        assert _close(_full(found), wanted)


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_needs_others_elements_of_a_flattened_leaf_says_so(ranks: int) -> None:
    run_ranks(ranks, _flattened, timeout=100)


@given(rows=st.integers(1, 40), ranks=st.tuples(st.integers(1, 4), st.integers(1, 4)))
def test_every_rank_knows_whether_one_has_nothing(rows: int, ranks: tuple[int, int]) -> None:
    mesh = SimpleNamespace(size=lambda axis: ranks[axis])
    split: Any = SimpleNamespace(
        shape=(rows, 2), numel=lambda: 2 * rows, placements=(Shard(0), Shard(0)), device_mesh=mesh
    )
    parts = [torch.ones(rows)]
    for count in ranks:  # what torch.chunk doesn't give is empty
        chunks = [part.chunk(count) for part in parts]
        parts = [x for found in chunks for x in (*found, *[found[0][:0]] * (count - len(found)))]
    assert _is_empty_somewhere(split) == any(len(part) == 0 for part in parts)
