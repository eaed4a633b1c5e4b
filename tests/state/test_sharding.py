"""`unshard(shard(x)) == x` on real ranks, for any tree of any leaves."""

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.utils import _pytree as pytree

import fzero
from fzero import Config, tree
from fzero.distributed.ragged import RaggedDTensor, is_supported
from fzero.errors import ShardError
from fzero.state.sharding import lies_flat
from tests.layout.test_layout import leaves
from tests.ranks import run_ranks


class Pair(NamedTuple):
    first: Any
    second: Any


def trees(leaf: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Dicts, lists, tuples, namedtuples and None, nested."""
    return st.recursive(
        leaf | st.none(),
        lambda inner: (
            st.dictionaries(st.sampled_from("abcd"), inner, max_size=3)
            | st.lists(inner, max_size=3)
            | st.tuples(inner, inner)
            | st.builds(Pair, inner, inner)
        ),
        max_leaves=6,
    )


def _same(a: Any, b: Any) -> bool:
    (left, spec), (right, other) = tree.flatten(a), tree.flatten(b)
    return spec == other and all(
        x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(left, right, strict=True)
    )


def _shared(new: Any, old: Any) -> bool:
    """Whether the two trees have memory in common."""

    def places(of: Any) -> set[int]:
        leaves = [x.to_local() if isinstance(x, DTensor) else x for x in tree.leaves(of)]
        return {x.untyped_storage().data_ptr() for x in leaves if x.numel()}

    return bool(places(new) & places(old))


def _wrong(drawn: list[Any], hybrid: bool) -> list[str]:
    """On a rank: the laws that some tree breaks."""
    mesh = init_device_mesh("cpu", (2, 2)) if hybrid else None
    cfg, wrong = Config(mesh=mesh), []
    for i, full in enumerate(drawn):
        kept = tree.map(torch.clone, full)
        sharded = fzero.shard(full, cfg)
        if not _same(fzero.unshard(sharded), full):
            wrong.append(f"tree {i}: unshard does not undo shard")
        if _shared(fzero.unshard(sharded), sharded) or _shared(fzero.unshard(full), full):
            wrong.append(f"tree {i}: unshard gives no copies")
        if not _same(fzero.unshard(sharded, copy=False), full):
            wrong.append(f"tree {i}: copy=False")
        gathered = fzero.unshard(sharded, rank0_only=True)
        if gathered is not None and _shared(gathered, sharded):
            wrong.append(f"tree {i}: rank0_only gives no copies")
        if not (_same(gathered, full) if dist.get_rank() == 0 else gathered is None):
            wrong.append(f"tree {i}: rank0_only")
        for x, y in zip(tree.leaves(full), tree.leaves(sharded), strict=True):
            if not isinstance(y, DTensor) or (y.shape, y.dtype) != (x.shape, x.dtype):
                wrong.append(f"tree {i}: {y}")
                continue
            theirs = distribute_tensor(x.contiguous(), y.device_mesh, y.placements)
            if not torch.equal(theirs.to_local(), y.to_local()):
                wrong.append(f"tree {i}: not the part of a DTensor")
            y.to_local().zero_()
        if not _same(full, kept):
            wrong.append(f"tree {i}: shards share memory with the input")
        if not _same(fzero.unshard(kept), kept):
            wrong.append(f"tree {i}: unshard changes full tensors")
    return wrong


@pytest.mark.parametrize(("world", "hybrid"), [(1, False), (2, False), (3, False), (4, True)])
def test_unshard_undoes_shard(world: int, hybrid: bool) -> None:
    @settings(max_examples=8)
    @given(st.lists(trees(leaves()), min_size=1, max_size=6))
    def law(drawn: list[Any]) -> None:
        assert run_ranks(world, _wrong, drawn, hybrid) == [[]] * world

    law()


@settings(max_examples=40)
@given(trees(leaves()))
def test_without_a_process_group_too(full: Any) -> None:
    assert not dist.is_initialized()
    assert _same(fzero.unshard(fzero.shard(full)), full)


def test_what_is_no_tree_is_refused_with_what_to_call() -> None:
    module = nn.Linear(2, 1)
    engine = fzero.Engine(nn.Linear(2, 1), fzero.optim.sgd(0.1))
    for there, said in (
        (module, r"sharded is a Linear.*engine\.full_params\(\)"),
        ({"a": module}, r"sharded\['a'\] is a Linear"),
        (engine, r"sharded is a Engine.*engine\.full_params\(\), or engine\.state_dict\(\)"),
        (module.named_parameters(), r"dict\(module\.named_parameters\(\)\)"),
    ):
        with pytest.raises(fzero.ShardError, match=said):
            fzero.unshard(there)
    with pytest.raises(fzero.ShardError, match=r"its shards are engine\.state\[0\]"):
        fzero.shard(engine)


def _commutes(x: Tensor) -> bool:
    def f(x: Tensor) -> Tensor:  # of correctly rounded operations, wherever a vector ends
        return (x * x + 3).sqrt().relu()

    return torch.equal(fzero.shard(f(x)).to_local(), f(fzero.shard(x).to_local()))


def test_sharding_commutes_with_elementwise_operations() -> None:
    for shape in ((7, 15), (16, 17), (1, 3), (5,), ()):
        assert run_ranks(3, _commutes, torch.randn(shape)) == [True] * 3


@pytest.mark.parametrize("executor", ["traced", "eager"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_steps_leave_what_was_unsharded_alone(stage: int, executor: str) -> None:
    cfg = Config(stage=stage, executor=executor)  # pyright: ignore
    step_fn = fzero.make_train_step(
        lambda p, x: (p["w"] * x).sum() * p["s"], fzero.optim.sgd(0.1), cfg
    )
    params, opt_state = step_fn.init({"w": torch.ones(3), "s": torch.tensor(1.0)})
    best = fzero.unshard(params)
    params, opt_state = step_fn(params, opt_state, torch.ones(4, 3))
    assert _same(best, {"w": torch.ones(3), "s": torch.tensor(1.0)})
    assert not _same(fzero.unshard(params), best)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_by_default_leaves_lie_end_to_end_where_parameters_are_whole(stage: int) -> None:
    """And where the optimizer works on shards: others are given DTensors to work on."""
    ours = fzero.optim.adamw(0.1)
    theirs = ours._replace(foreign=True)
    assert lies_flat(Config(stage=stage), ours) == (stage in (1, 2) and is_supported())
    assert lies_flat(Config(stage=stage), ours, small=True) == (stage > 0 and is_supported())
    assert not lies_flat(Config(stage=stage), theirs, small=True)
    assert not lies_flat(Config(stage=stage), None, small=True)
    for opt in (ours, theirs, None):
        assert lies_flat(Config(stage=stage, layout="flat"), opt)
        assert not lies_flat(Config(stage=stage, layout="rows"), opt, small=True)


class _Small(nn.Module):
    """Many small parameters: 2**20 elements."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        drawn = (
            torch.randn(64, 64, generator=generator, dtype=torch.float64) / 8 for _ in range(256)
        )
        self.weights = nn.ParameterList(drawn)

    def forward(self, x: Tensor) -> Tensor:
        for w in self.weights:
            x = torch.add(x, torch.tanh(x @ w), alpha=0.1)
        return x.square().mean()


def _of_many_small() -> tuple[int, bool, float]:
    """On a rank: leaves in flats, of an engine; whether a step has any; the engine's error."""
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    plain = _Small()
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    engine = fzero.Engine(_Small(), fzero.optim.sgd(0.1, momentum=0.9), Config(stage=3))
    for _ in range(2):
        theirs.zero_grad()
        plain(x).backward()
        theirs.step()
        engine.backward(engine(x.chunk(2)[dist.get_rank()]))
        engine.step()
    found = engine.full_params()
    error = max((found[name] - w).abs().max().item() for name, w in plain.named_parameters())
    leaves = tree.leaves(engine.state)
    flat = sum(isinstance(x, RaggedDTensor) for x in leaves)
    step_fn = fzero.make_train_step(lambda p, x: x, fzero.optim.sgd(0.1), Config(stage=3))
    params, _ = step_fn.init(dict(plain.named_parameters()))
    return flat, any(isinstance(x, RaggedDTensor) for x in params.values()), error


@pytest.mark.skipif(not is_supported(), reason="flats need torch 2.13")
def test_many_small_parameters_lie_end_to_end_in_an_engine() -> None:
    """Where nobody meets them; those of a step function are DTensors of torch's own."""
    for flat, handed_out, error in run_ranks(2, _of_many_small):
        assert flat >= 256
        assert not handed_out
        assert error < 1e-12


def _loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.stack([(x * w).square().sum() for w in params.values()]).sum()


def _on_from_elsewhere(stage: int, more: dict[str, Any], mixed: bool) -> str:
    """On a rank: what a step function says of a state that lies otherwise than it would."""
    full = {name: torch.ones(rows, 16) for name, rows in zip("abcd", (5, 3, 6, 7), strict=True)}
    cfg, opt = Config(stage=stage, layout="flat"), fzero.optim.sgd(0.1, momentum=0.9)
    params, opt_state = fzero.make_train_step(_loss, opt, cfg).init(full)
    if mixed:  # of as many rows on one rank, by chance
        params = {**params, "b": fzero.shard(full, Config())["b"]}
    step_fn = fzero.make_train_step(_loss, opt, cfg.replace(**more))
    try:
        step_fn(params, opt_state, torch.ones(1, 16))
    except fzero.ShardError as error:
        return str(error)
    return "taken"


@pytest.mark.skipif(not is_supported(), reason="flats need torch 2.13")
@pytest.mark.parametrize(
    ("stage", "more", "mixed"),
    [
        (3, {"layout": "rows"}, False),
        (3, {"bucket_mb": 2**-11}, False),
        (3, {}, True),
        (2, {"layout": "rows"}, False),  # parameters are whole, the momentum is not
        (1, {"bucket_mb": 2**-11}, False),
    ],
)
def test_every_rank_refuses_what_lies_otherwise(stage: int, more: Any, mixed: bool) -> None:
    """One that took it would wait for the others."""
    for said in run_ranks(3, _on_from_elsewhere, stage, more, mixed):
        assert said.startswith("params" if stage == 3 else "opt_state.inner")
        assert "and this step function has (" in said
        assert "layout, bucket_mb, frozen" in said


def _goes_on_replicated() -> list[float]:
    """On a rank: a foreign optimizer's step from its state as it is, and from a replicated one."""

    def to(x: Any, like: Any) -> Any:
        return x.redistribute(placements=like.placements) if isinstance(x, DTensor) else x

    def update(grads: Any, state: Any, params: Any = None, **_: Any) -> Any:
        state = tree.map(lambda a, b: 0.9 * a + to(b, a), state, grads)
        return tree.map(lambda a, b: to(-0.1 * a, b), state, grads), state

    opt = fzero.optim.Optimizer(lambda p: tree.map(torch.zeros_like, p), update)
    opt, cfg = opt._replace(foreign=True), Config(donate=False)
    params, opt_state = fzero.make_train_step(_loss, opt, cfg).init({"w": torch.ones(4, 4)})
    x = torch.ones(1, 4)
    params, opt_state = fzero.make_train_step(_loss, opt, cfg)(params, opt_state, x)
    whole = tree.map(lambda a: a.redistribute(placements=[Replicate()]), opt_state.inner)
    steps = [
        fzero.make_train_step(_loss, opt, cfg)(params, state, x)[0]
        for state in (opt_state, opt_state._replace(inner=whole))
    ]
    return [fzero.unshard(after)["w"].sum().item() for after in steps]


def test_the_state_of_a_foreign_optimizer_lies_as_that_likes() -> None:
    for one, other in run_ranks(2, _goes_on_replicated):
        assert one == other


@dataclasses.dataclass
class Fields:
    w: torch.Tensor


class Holder:
    def __init__(self, w: torch.Tensor) -> None:
        self.w = w


pytree.register_dataclass(Fields)
pytree.register_pytree_node(Holder, lambda x: ([x.w], None), lambda leaves, _: Holder(*leaves))


@pytest.mark.parametrize("kind", [Fields, Holder])
def test_what_only_torchs_registry_knows_is_refused_as_such(kind: Any) -> None:
    with pytest.raises(ShardError, match=r"registered with torch\.utils\._pytree.*optree\.") as e:
        fzero.shard({"a": kind(torch.ones(2))})
    assert "register_node(Fields" in str(e.value) or "register_pytree_node(Holder" in str(e.value)
