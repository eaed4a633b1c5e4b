"""What a user's function in an optimizer is shown: whole leaves, on every rank, stage and world."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

import fzero
from fzero import Config, optim, tree
from fzero.distributed.ragged import is_supported
from fzero.errors import ConfigError, ShardError
from tests.ranks import run_ranks

F64 = torch.float64
LR, DECAY, STEPS = 0.1, 0.5, 3

MASKS = {
    "by size": lambda leaf: leaf.numel() >= 4,
    "by rows": lambda leaf: leaf.dim() > 0 and leaf.shape[0] > 2,
    "by parity": lambda leaf: sum(leaf.shape) % 2 == 1,
    "by dtype": lambda leaf: leaf.dtype == F64,
}
SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=5).map(
    lambda shapes: [*shapes, (5,), (1, 3)]
)  # two leaves that are uneven in every world


def _params(shapes: list[tuple[int, ...]], seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    leaves = [torch.randn(shape, generator=generator, dtype=F64) for shape in shapes]
    return {"blocks": [{"w": leaf} for leaf in leaves[1:]], "a.first": leaves[0]}


def _loss(params: Any, batch: Tensor) -> Tensor:
    # the gradient of element i is the mean of the batch times i: it differs from rank to rank
    leaves = tree.leaves(params)
    parts = [(x.flatten() * torch.arange(x.numel(), dtype=x.dtype)).sum() for x in leaves]
    return torch.stack(parts).sum() * batch.to(leaves[0].dtype).mean()


def _run(case: dict[str, Any], batches: Tensor) -> tuple[Any, list[Any]]:
    """Trained parameters, and all that the mask was shown."""
    seen: list[Any] = []

    def mask(values: Any) -> Any:
        kinds = [(tuple(x.shape), x.dtype, x.device.type) for x in tree.leaves(values)]
        seen.append(list(zip(tree.paths(values), kinds, strict=True)))
        return tree.map(MASKS[case["mask"]], values)

    opt = optim.chain(
        optim.masked(optim.masked(optim.add_decayed_weights(DECAY), mask), mask),
        optim.scale_by_learning_rate(LR),
    )
    config = {k: case[k] for k in ("stage", "executor", "frozen")}
    step_fn = fzero.make_train_step(_loss, opt, Config(**config))
    state = step_fn.init(_params(case["shapes"], case["seed"]))
    for batch in batches:
        state = step_fn(*state, batch)
    return fzero.unshard(state[0]), seen


def _plain(case: dict[str, Any], batches: Tensor) -> Any:
    """The same in plain torch on whole leaves and the whole batch."""
    params = _params(case["shapes"], case["seed"])
    leaves, names = tree.leaves(params), tree.names(params)
    trained = [
        x.requires_grad_() for x, n in zip(leaves, names, strict=True) if n not in case["frozen"]
    ]
    keep = MASKS[case["mask"]]
    groups = [
        {"params": [x for x in trained if keep(x)], "weight_decay": DECAY},
        {"params": [x for x in trained if not keep(x)]},
    ]
    sgd = torch.optim.SGD(groups, LR)
    for batch in batches:
        sgd.zero_grad()
        _loss(params, batch).backward()
        sgd.step()
    return tree.map(lambda x: x.detach(), params)


def _all_stages(case: dict[str, Any], batches: Tensor) -> list[tuple[Any, list[Any]]]:
    """On a rank: every stage."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mine = batches.chunk(world, dim=1)[rank]
    return [_run(case | {"stage": stage}, mine) for stage in range(4)]


@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
@given(
    shapes=SHAPES,
    mask=st.sampled_from(sorted(MASKS)),
    frozen=st.sampled_from([("a.first",), ()]),
    executor=st.sampled_from(["traced", "eager"]),
    seed=st.integers(0, 99),
)
@settings(max_examples=4, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@pytest.mark.quick("2")
def test_a_mask_decides_by_whole_leaves_whatever_the_sharding(
    world: int,
    shapes: list[tuple[int, ...]],
    mask: str,
    frozen: tuple[str, ...],
    executor: str,
    seed: int,
) -> None:
    case = {"shapes": shapes, "mask": mask, "frozen": frozen, "executor": executor, "seed": seed}
    batches = torch.randn(STEPS, 6, 2, generator=torch.Generator().manual_seed(seed), dtype=F64)
    expected = _plain(case, batches)
    params = _params(shapes, seed)
    shown = [
        (path, (tuple(x.shape), F64, "meta"))
        for path, x in zip(tree.paths(params), tree.leaves(params), strict=True)
    ]
    for rank in run_ranks(world, _all_stages, case, batches, timeout=120):
        for trained, seen in rank:
            assert all(each == shown for each in seen)
            for path, x, y in zip(
                *map(tree.paths, [params]), *map(tree.leaves, (trained, expected)), strict=True
            ):
                torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12, msg=path)


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("stage", range(4))
def test_a_mask_is_shown_the_dtype_that_is_updated(stage: int, precision: str | None) -> None:
    seen: list[torch.dtype] = []

    def mask(values: Any) -> Any:
        seen.extend(x.dtype for x in tree.leaves(values))
        return True

    opt = optim.masked(optim.sgd(0.1), mask)
    cfg = Config(stage=stage, precision=precision)
    step_fn = fzero.make_train_step(lambda p, x: (p["w"] * x).sum(), opt, cfg)
    step_fn(*step_fn.init({"w": torch.ones(3)}), torch.ones(3))
    assert set(seen) == {torch.float32}


def _read(values: Any) -> Any:
    return tree.map(lambda x: bool(x.abs().sum() > 0), values)


def test_a_mask_that_reads_values_is_refused_everywhere() -> None:
    opt = optim.masked(optim.sgd(0.1), _read)
    params = {"w": torch.ones(3)}
    with pytest.raises(ConfigError, match=r"masked: mask: the function reads values .*shapes"):
        opt.init(params)
    with pytest.raises(ConfigError, match="reads values"):
        fzero.make_train_step(lambda p, x: p["w"].sum(), opt).init(params)


def test_a_wrapper_that_nests_the_tree_otherwise_is_told() -> None:
    inner = optim.masked(optim.sgd(0.1), lambda values: tree.map(lambda x: x.dim() > 0, values))
    opt = optim.Optimizer(
        lambda params: inner.init([params]),
        lambda grads, state, params=None, **_: inner.update([grads], state, [params]),
    )
    with pytest.raises(ConfigError, match=r"masked: mask: it was given \[0\]\['w'\] \(3,\)"):
        fzero.make_train_step(lambda p, x: p["w"].sum(), opt).init({"w": torch.ones(3)})


def test_a_mask_may_raise_what_it_likes() -> None:
    def mask(values: Any) -> Any:
        raise RuntimeError("not today")

    with pytest.raises(RuntimeError, match="not today"):
        optim.masked(optim.sgd(0.1), mask).init({"w": torch.ones(3)})


MIXED: dict[str, Any] = {
    "sgd": lambda: optim.sgd(0.1, momentum=0.9),
    "adamw": lambda: optim.adamw(0.1),
    "lion": lambda: optim.lion(0.1),
    "adafactor": lambda: optim.adafactor(0.1),
    "muon": lambda: optim.muon(0.1),
}


def _of_layouts(name: str, params: str, grads: str, state: str) -> dict[str, Tensor] | str:
    draw = torch.Generator().manual_seed(0)
    shapes = (5, 3), (2, 7), (3,), (4,)
    full = {str(s): torch.randn(s, generator=draw, dtype=torch.float64) for s in shapes}
    full = {k: x for k, x in full.items() if name != "muon" or x.dim() == 2}

    def placed(layout: Any) -> Any:
        return fzero.shard(full, Config(layout=layout))

    opt, p, g = MIXED[name](), placed(params), placed(grads)
    own = opt.init(placed(state))
    try:
        for _ in range(3):
            own = opt.apply_(g, own, p)
    except ShardError as error:
        return str(error)
    return fzero.unshard(p)


@pytest.mark.skipif(not is_supported(), reason="this torch has no flats")
@pytest.mark.parametrize("name", MIXED)
def test_a_tree_that_lives_otherwise_gives_the_same_numbers_or_is_refused(name: str) -> None:
    want = run_ranks(2, _of_layouts, name, "rows", "rows", "rows")[0]
    for layouts in [("flat", "rows", "flat"), ("rows", "flat", "rows"), ("flat", "flat", "rows")]:
        for found in run_ranks(2, _of_layouts, name, *layouts):
            if isinstance(found, str):
                assert "An update in place needs both alike" in found
                assert layouts[0] != layouts[2]
            else:
                torch.testing.assert_close(found, want)
