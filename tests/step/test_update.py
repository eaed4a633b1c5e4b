"""What comes after the gradients gives the same numbers on shards as on whole leaves."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fzero
from fzero import Config, optim, tree
from fzero.distributed.ragged import is_supported
from fzero.layout import LeafLayout
from fzero.step.update import _borders
from tests.ranks import fake_ranks, run_ranks

F64 = torch.float64
STAGES = {2: (0, 1, 2, 3), 3: (1, 3)}
SHAPES = {"gain": (), "odd": (7, 15), "wide": (16, 17), "empty": (0, 2), "fixed": (3,)}

OPTIMIZERS = {
    "sgd": lambda: optim.sgd(0.1, 0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda: optim.adam(1e-2),
    "adamw": lambda: optim.adamw(1e-2, weight_decay=0.1),
    "lion": lambda: optim.lion(1e-3, weight_decay=0.1),
    "schedule": lambda: optim.sgd(optim.warmup_cosine(0.1, 2, 8)),
    "clip": lambda: optim.chain(optim.clip_by_global_norm(0.1), optim.sgd(0.1, 0.9)),
    "clip a part": lambda: optim.chain(
        optim.masked(optim.clip_by_global_norm(0.01), _matrices), optim.sgd(0.1)
    ),
}


def _matrices(params: Any) -> Any:
    return tree.map(lambda x: x.dim() > 1, params)


def _params() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {k: torch.randn(s, generator=generator, dtype=F64) for k, s in SHAPES.items()}


def _loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
    y = torch.tanh(x @ params["odd"]) * params["gain"]
    z = torch.nn.functional.pad(y, (0, 2)) @ params["wide"].t()
    return z.square().mean() + params["empty"].sum() + params["fixed"].sum()


def _train(name: str, stage: int, batches: Tensor, accum: int = 1) -> dict[str, Tensor]:
    cfg = Config(stage=stage, frozen="fixed", accum_steps=accum)
    step_fn = fzero.make_train_step(_loss, OPTIMIZERS[name](), cfg)
    state = step_fn.init(_params())
    for batch in batches:
        state = step_fn(*state, batch)
    return fzero.unshard(state[0])


def _gaps(reference: dict[str, dict[str, Tensor]], batches: Tensor) -> dict[str, float]:
    """On a rank: by optimizer and stage, how far from training alone on all rows."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mine = batches.chunk(world, dim=1)[rank]
    gaps = {}
    for name in OPTIMIZERS:
        for stage in STAGES[world]:
            accum = (
                len(mine[0]) if stage == 1 else 1
            )  # the update is then given unreduced gradients
            ours = _train(name, stage, mine, accum)
            pairs = [(ours[k], reference[name][k]) for k in ours if ours[k].numel()]
            gaps[f"{name}, stage {stage}"] = max((a - b).abs().max().item() for a, b in pairs)
    return gaps


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_optimizers_on_shards_equal_those_on_whole_leaves(world: int) -> None:
    batches = torch.randn(5, 6, 7, dtype=F64, generator=torch.Generator().manual_seed(3))
    reference = {name: _train(name, 0, batches) for name in OPTIMIZERS}
    for gaps in run_ranks(world, _gaps, reference, batches, timeout=120):
        assert gaps == pytest.approx(dict.fromkeys(gaps, 0.0), abs=1e-10)
        assert len(gaps) == len(STAGES[world]) * len(OPTIMIZERS)


def test_borders_keep_buckets_below_the_limit() -> None:
    def leaf(rows: int) -> LeafLayout:
        return LeafLayout("x", (rows,), torch.float32, 0, 2)

    assert _borders([], 100) == []
    assert _borders([leaf(10)], 1) == [1]
    assert _borders([leaf(10), leaf(10), leaf(10)], 80) == [2, 3]
    assert _borders([leaf(30), leaf(1), leaf(1)], 40) == [1, 3]


@pytest.mark.parametrize("size", [50, 20_000])  # a CPU sums rows of the longer one
@pytest.mark.parametrize("stage", [0, 3])
def test_the_factor_of_clipping_is_rounded_once(stage: int, size: int) -> None:
    """As DeepSpeed's ZeRO-3 has it: bfloat16 makes of a last digit a weight's 256th."""
    cfg = Config(stage=stage, clip_norm=0.3)
    step_fn = fzero.make_train_step(lambda p, x: (p * x).sum(), optim.sgd(1.0), cfg)
    for seed in range(60):
        x = torch.randn(size, generator=torch.Generator().manual_seed(seed))  # the gradient
        params, _ = step_fn(*step_fn.init(torch.zeros(size)), x)
        norm = x.double().square().sum().sqrt()
        factor = (0.3 / (norm + 1e-6)).float()
        assert torch.equal(fzero.unshard(params), -(x * factor)), seed


def test_what_is_updated_is_gathered_at_once_where_gradients_held_as_much() -> None:
    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        for w in params.values():
            x = torch.tanh(x @ w)
        return x.square().mean()

    params = {f"w{i}": torch.ones(64, 64) for i in range(40)}
    gathers = {}
    with fake_ranks(2):
        step_fn = fzero.make_train_step(loss, optim.sgd(0.1), Config(stage=2, layout="rows"))
        state = step_fn.init(params)
        for rows in (1, 100):
            _, update = step_fn.lower(*state, torch.ones(rows, 64)).parts()
            gathers[rows] = [row.kind for row in update.collectives()].count("all_gather")
    assert gathers[100] == 1 < gathers[1]


WEIGHTS = {"up": (512, 1024), "down": (1024, 511), "bias": (511,)}


def _large(dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    drawn = {k: torch.randn(s, generator=generator, dtype=F64) for k, s in WEIGHTS.items()}
    return {k: (x / x.shape[0] ** 0.5).to(dtype) for k, x in drawn.items()}


def _two_layers(params: dict[str, Tensor], x: Tensor) -> Tensor:
    x = torch.tanh(x.to(params["up"].dtype) @ params["up"])
    return (x @ params["down"] + params["bias"]).square().mean()


def _stages(
    precision: Any, accum: int, batches: Tensor, **more: Any
) -> list[tuple[list[Any], str]]:
    """On a rank, at stages 0 to 2: parameters after each step, and the last step's Program."""
    found = []
    for stage in (0, 1, 2):
        options = {"layout": "rows"} | more
        cfg = Config(stage=stage, accum_steps=accum, precision=precision, **options)
        step_fn = fzero.make_train_step(_two_layers, optim.sgd(0.3, 0.9), cfg)
        state = step_fn.init(_large(batches.dtype))
        if stage == 2 and dist.get_rank() == 0:  # a part of a larger memory, and on one rank alone
            up = state[0]["up"]
            within = up.new_empty(2 * up.numel())[7:][: up.numel()].view(up.shape).copy_(up)
            state = state[0] | {"up": within}, state[1]
        after = []
        mine = batches.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]
        for batch in mine:
            given, before = state[0], {k: x.clone() for k, x in state[0].items()}
            state = step_fn(*state, batch)
            kept = all(torch.equal(given[k], x) for k, x in before.items())
            assert kept or cfg.donate
            after.append(fzero.unshard(state[0]))
        found.append((after, str(step_fn.lower(*state, mine[0]))))
    return found


@pytest.mark.parametrize(("precision", "accum"), [(None, 1), (None, 2), ("bf16", 1)])
@pytest.mark.quick("None-2", "bf16-1")
def test_leaves_that_are_gathered_where_they_live_are_those_of_plain_torch(
    precision: Any, accum: int
) -> None:
    dtype = F64 if precision is None else torch.float32
    batches = torch.randn(3, 8, 512, generator=torch.Generator().manual_seed(5), dtype=dtype)
    params = {k: x.requires_grad_() for k, x in _large(F64).items()}
    plain = torch.optim.SGD(params.values(), 0.3, momentum=0.9)
    expected = []
    for batch in batches.to(F64):
        plain.zero_grad()
        _two_layers(params, batch).backward()
        plain.step()
        expected.append({k: x.detach().clone() for k, x in params.items()})
    tolerance = 1e-12 if precision is None else 2e-2
    for whole, *split in run_ranks(2, _stages, precision, accum, batches):
        for found, text in split:
            assert "gather over: 2 leaves" in text
            torch.testing.assert_close(found, whole[0], rtol=0, atol=0 if accum == 1 else 1e-12)
            for mine, wanted in zip(found, expected, strict=True):
                for k, x in mine.items():
                    assert (x.to(F64) - wanted[k]).abs().max() < tolerance


@pytest.mark.skipif(not is_supported(), reason="flats want a torch whose DTensors can be ragged")
@pytest.mark.parametrize(
    ("precision", "accum", "donate"),
    [(None, 1, True), (None, 2, True), ("bf16", 1, True), (None, 1, False)],
)
@pytest.mark.quick("None-2-True", "bf16-1-True")
def test_so_they_are_where_they_lie_end_to_end(precision: Any, accum: int, donate: bool) -> None:
    """On one rank a leaf comes from elsewhere: it is where it should be from the first step on."""
    dtype = F64 if precision is None else torch.float32
    batches = torch.randn(3, 8, 512, generator=torch.Generator().manual_seed(5), dtype=dtype)
    more = {"layout": "flat", "donate": donate}
    by_rows = run_ranks(2, _stages, precision, accum, batches)[0]
    for whole, *split in run_ranks(2, partial(_stages, **more), precision, accum, batches):
        torch.testing.assert_close(whole[0], by_rows[0][0], rtol=0, atol=0)
        for found, text in split:
            assert "gather over: 3 leaves" in text
            assert text.count(", in place") >= 1
            assert "unpack_into" not in text
            torch.testing.assert_close(found, whole[0], rtol=0, atol=0 if accum == 1 else 1e-12)


def _homes(stage: int) -> tuple[bool, bool, bool]:
    """On a rank: whether leaves lie in one memory: the first ones, copies, and those of a step."""

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return (torch.tanh(x @ params["w"]) * params["b"]).square().mean()

    def full() -> dict[str, Tensor]:
        return {"w": torch.ones(5, 3), "b": torch.ones(3)}

    step_fn = fzero.make_train_step(loss, optim.sgd(0.3), Config(stage=stage, layout="flat"))
    params, opt_state = step_fn.init(full())
    first, _ = step_fn(params, opt_state, torch.ones(4, 5))
    same = all(first[k] is x for k, x in params.items())

    def together(leaves: dict[str, Tensor]) -> bool:
        return len({x.untyped_storage()._cdata for x in leaves.values()}) == 1

    apart = {k: x.clone() for k, x in first.items()}
    moved, _ = step_fn(apart, step_fn.init(full())[1], torch.ones(4, 5))
    return same and together(params) and together(first), together(apart), together(moved)


def _update_of_eager() -> str:
    cfg = Config(stage=2, layout="flat", executor="eager")
    step_fn = fzero.make_train_step(_two_layers, optim.sgd(0.3), cfg)
    step_fn(*step_fn.init(_large(F64)), torch.ones(4, 512, dtype=F64))
    (eager,) = step_fn._executors._eager.values()
    made = eager.update_program._last
    assert made is not None
    return str(made.program)


@pytest.mark.skipif(not is_supported(), reason="flats want a torch whose DTensors can be ragged")
def test_the_eager_executors_update_gathers_them_there_too() -> None:
    for text in run_ranks(2, _update_of_eager):
        assert "gather over: 3 leaves" in text


@pytest.mark.skipif(not is_supported(), reason="flats want a torch whose DTensors can be ragged")
@pytest.mark.parametrize("stage", [1, 2])
def test_parameters_of_flats_are_at_home_from_init_on(stage: int) -> None:
    assert run_ranks(2, _homes, stage) == [(True, False, True)] * 2


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_clipping_makes_no_second_set_of_gradients(stage: int, world: int) -> None:
    params = {f"w{i}": torch.ones(64, 64) for i in range(8)}
    peaks = []
    with fake_ranks(world):
        for clip in (None, 0.1):
            cfg = Config(stage=stage, clip_norm=clip, layout="rows")
            step_fn = fzero.make_train_step(_layers, optim.adamw(0.1), cfg)
            state = step_fn.init(params)
            _, update = step_fn.lower(*state, torch.ones(2, 64)).parts()
            peaks.append(update.peak_bytes())
    assert peaks[1] <= peaks[0] + 256  # a few numbers


def _layers(params: dict[str, Tensor], x: Tensor) -> Tensor:
    for w in params.values():
        x = torch.tanh(x @ w)
    return x.square().mean()


class _Given(torch.autograd.Function):
    """The sum of a product, whose gradient is what it was given; of a gradient of one, that is."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, c: Tensor) -> Tensor:
        ctx.save_for_backward(c)
        return (w * c).sum()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        (c,) = ctx.saved_tensors
        return c.view_as(c), None


def _seen(params: dict[str, Tensor], x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Gradients in one memory, on the batch's, and on that of aux."""
    made: Any = x * 2
    loss = ((params["a"] + params["b"]) * x).sum() + _Given.apply(params["c"], made)
    loss = loss + _Given.apply(params["d"], x) + params["e"].sum()
    return loss, {"made": made, "below": made[1:], "x": x, "a": params["a"]}


def _one_step(x: Tensor, **fields: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Parameters before and after a step of `_seen`, and its aux."""
    step_fn = fzero.make_train_step(_seen, optim.sgd(0.1), Config(has_aux=True, **fields))
    before = {name: torch.randn(4, 8, dtype=F64) for name in "abcde"}
    given = x.clone()
    params, opt_state = step_fn(*step_fn.init(before), x)
    assert torch.equal(x, given)
    return before, fzero.unshard(params), opt_state.metrics["aux"]


@pytest.mark.parametrize("executor", ["traced", "eager"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_nobody_sees_that_gradients_are_clipped_in_place(stage: int, executor: str) -> None:
    x = torch.randn(4, 8, dtype=F64)
    before, after, aux = _one_step(x, stage=stage, executor=executor, clip_norm=0.5)
    seen = {"made": x * 2, "below": x[1:] * 2, "x": x, "a": before["a"]}
    torch.testing.assert_close(aux, seen, rtol=0, atol=0)
    grads = {"a": x, "b": x, "c": x * 2, "d": x, "e": torch.ones_like(x)}
    norm = torch.stack([g.norm() for g in grads.values()]).norm()
    expected = {k: before[k] - 0.1 * (0.5 / (norm + 1e-6)) * g for k, g in grads.items()}
    torch.testing.assert_close(after, expected)


@pytest.mark.parametrize("executor", ["traced", "eager"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_nobody_sees_that_gradients_are_summed_in_place(stage: int, executor: str) -> None:
    x = torch.randn(8, 8, dtype=F64)
    before, _, aux = _one_step(x, stage=stage, executor=executor, accum_steps=2)
    for name, found in aux.items():
        parts = x.chunk(2)
        seen = {"made": [2 * part for part in parts], "x": parts, "a": [before["a"]] * 2}
        seen["below"] = [made[1:] for made in seen["made"]]
        whole = found.reshape(2, -1, 8)
        assert torch.equal(whole, torch.stack(list(seen[name])).reshape(2, -1, 8)), name
