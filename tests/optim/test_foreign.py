"""Optimizers from elsewhere: at every stage and executor the numbers of their own plain loop."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchopt
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fzero
from fzero import Config, optim, tree
from fzero.errors import ConfigError
from tests.ranks import run_ranks

F64 = torch.float64
STEPS = 4


class Nested:
    """A nested state, with plain tensors that know only shapes."""

    def init(self, params: Any) -> Any:
        kept = {
            n: {"m": [torch.zeros(p.shape, dtype=p.dtype)]}
            for n, p in params.items()
            if p is not None
        }
        return (kept, [torch.zeros(()), torch.ones(2)])

    def update(self, grads: Any, state: Any, params: Any = None) -> Any:
        kept, (count, other) = state
        new = {n: {"m": [0.5 * kept[n]["m"][0] + g]} for n, g in grads.items() if g is not None}
        return {n: -0.1 * new[n]["m"][0] for n in new}, (new, [count + 1, 0.5 * other])


class Numbers:
    """Python numbers, also on branches, and a string."""

    def init(self, params: Any) -> Any:
        return {"count": 0, "rate": 0.1, "phase": "warm", "m": dict(params)}

    def update(self, grads: Any, state: Any, params: Any = None) -> Any:
        state["count"] += 1  # writes into its containers and tensors, as many do
        if state["count"] == 3:
            state |= {"rate": 0.05, "phase": "cold"}
        for n, g in grads.items():
            state["m"][n].mul_(0.5).add_(g)
        return {n: -state["rate"] / state["count"] * m for n, m in state["m"].items()}, state


class Reading:
    """Reads values of whole leaves, and works on matrices."""

    def init(self, params: Any) -> Any:
        return ()

    def update(self, grads: Any, state: Any, params: Any) -> Any:
        updates = {}
        for n, g in grads.items():
            size = g.norm().item() + float(params[n].max()) + sum(g.flatten().tolist())
            flat = g.reshape(len(g), -1)
            whitened = torch.kron(flat @ flat.T, torch.ones(1, 1, dtype=g.dtype)) @ flat
            updates[n] = -0.01 * whitened.reshape(g.shape) / (1 + abs(size))
        return updates, state


OPTIMIZERS: dict[str, Any] = {
    "nested": Nested,
    "numbers": Numbers,
    "reading": Reading,
    "torchopt.sgd": lambda: torchopt.sgd(0.1, momentum=0.9),
    "torchopt.adam": lambda: torchopt.adam(0.1),
    "torchopt.adamw": lambda: torchopt.adamw(0.1, weight_decay=0.1),
    "clipped": lambda: optim.chain(optim.clip_by_global_norm(0.5), Numbers()),
    "into adam": lambda: optim.chain(Nested(), optim.scale(-1.0), optim.adam(0.01)),
    "masked": lambda: optim.chain(
        optim.masked(Nested(), lambda tree: {n: x.dim() > 1 for n, x in tree.items()}),
        optim.sgd(0.1, momentum=0.5),
    ),
}


def _module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def _loss(out: Tensor) -> Tensor:
    return out.square().mean() + out.mean()


def _plain(name: str, batches: Tensor) -> dict[str, Tensor]:
    """A loop of one's own with the same object, on whole leaves and the whole batch."""
    module, opt = _module(), optim.as_optimizer(OPTIMIZERS[name]())
    params = {n: p.detach() for n, p in module.named_parameters()}
    state = opt.init(params)
    for batch in batches:
        module.zero_grad()
        _loss(module(batch)).backward()
        grads = {n: p.grad for n, p in module.named_parameters()}
        with torch.no_grad():
            updates, state = opt.update(grads, state, params)
            for n, p in module.named_parameters():
                p.add_(updates[n])
    return params


def _run(name: str, stage: int, how: str, donate: bool, batches: Tensor) -> dict[str, Tensor]:
    module, opt = _module(), OPTIMIZERS[name]()
    if how == "engine":
        engine = fzero.Engine(module, opt, Config(stage=stage))
        for batch in batches:
            _loss(engine(batch)).backward()
            engine.step()
            engine.state = engine.state
        return engine.full_params()
    apply, params = fzero.functionalize(module)
    cfg = Config(stage=stage, executor=how, donate=donate)
    step_fn = fzero.make_train_step(lambda p, x: _loss(apply(p, x)), opt, cfg)
    state = step_fn.init(params)
    for batch in batches:
        state = step_fn(*state, batch)
    return fzero.unshard(state[0])


def _gaps(expected: dict[str, dict[str, Tensor]], batches: Tensor) -> dict[str, float]:
    """On a rank: how far each optimizer, stage and executor is from the plain loop."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mine = batches.chunk(world, dim=1)[rank]
    gaps = {}
    kinds = itertools.product(OPTIMIZERS, range(4), ("engine", "traced", "eager"))
    for i, (name, stage, how) in enumerate(kinds):
        if (i // 3 + i + world) % 3:
            continue  # each world takes another third
        ours = _run(name, stage, how, bool(i % 3), mine)
        assert ours.keys() == expected[name].keys()
        gaps[f"{name}, stage {stage}, {how}"] = max(
            (ours[n] - x).abs().max().item() for n, x in expected[name].items()
        )
    return gaps


@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.quick("2")
def test_an_optimizer_from_elsewhere_has_the_numbers_of_its_own_loop(world: int) -> None:
    batches = torch.randn(STEPS, 6, 3, dtype=F64, generator=torch.Generator().manual_seed(3))
    expected = {name: _plain(name, batches) for name in OPTIMIZERS}
    for gaps in run_ranks(world, _gaps, expected, batches, timeout=240):
        assert gaps == pytest.approx(dict.fromkeys(gaps, 0.0), abs=1e-10)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_its_state_is_sharded_between_steps(stage: int) -> None:
    for kinds in run_ranks(2, _kinds, stage):
        assert kinds == [((5, 3), (5, 3), True), ((), (), False), ((2,), (2,), False)]


def _kinds(stage: int) -> list[Any]:
    step_fn = fzero.make_train_step(lambda p, x: (p["w"] * x).sum(), Nested(), Config(stage=stage))
    params, state = step_fn.init({"w": torch.ones(5, 3)})
    _, state = step_fn(params, state, torch.ones(3))
    found = [x.full_tensor() if isinstance(x, DTensor) else x for x in tree.leaves(state.inner)]
    return [
        (tuple(x.shape), tuple(whole.shape), isinstance(x, DTensor) and len(x.to_local()) < 5)
        for x, whole in zip(tree.leaves(state.inner), found, strict=True)
    ]


class Failing(Numbers):
    """Writes into all that it is given, then raises, once."""

    def __init__(self, how: str) -> None:
        self.how, self.calls = how, 0

    def update(self, grads: Any, state: Any, params: Any = None) -> Any:
        self.calls += 1
        if self.calls != 2:
            return super().update(grads, state, params)
        updates, new = super().update(grads, state, params)
        for x in (*params.values(), *grads.values()):
            x.zero_()
        if self.how == "structure":
            return updates, {"count": 1}
        if self.how == "updates":
            return {n: u.sum() for n, u in updates.items()}, new
        if self.how == "number":
            return updates, new | {"count": torch.ones(())}
        raise ValueError("not today")


HOWS = {
    "raise": (ValueError, "not today"),
    "structure": (ConfigError, "structure of its state"),
    "updates": (ConfigError, r"updates\['0.bias'\].*shapes of their parameters"),
    "number": (ConfigError, r"state\['count'\] from a int \(1\) to torch.float32"),
}


def _copy(values: Any) -> Any:
    return tree.map(lambda x: x.clone() if isinstance(x, Tensor) else x, fzero.unshard(values))


def _after_failure(how: str) -> None:
    """On a rank: a step that raised left everything as it was, and can be taken again."""
    kind, message = HOWS[how]
    batch = torch.ones(2, 3, dtype=F64) * (1 + dist.get_rank())
    executors = ("traced", "eager", "engine")
    for stage in range(4):
        executor = executors[(stage + list(HOWS).index(how)) % 3]
        module, opt = _module(), Failing(how)
        if executor == "engine":
            engine = fzero.Engine(module, opt, Config(stage=stage))

            def step(engine: Any = engine) -> None:
                _loss(engine(batch)).backward()
                engine.step()

            def state(engine: Any = engine) -> Any:
                return engine.state[0], engine.state[1].inner
        else:
            apply, params = fzero.functionalize(module)
            step_fn = fzero.make_train_step(
                lambda p, x, apply=apply: _loss(apply(p, x)),
                opt,
                Config(stage=stage, executor=executor),
            )
            held = [step_fn.init(params)]

            def step(held: Any = held, step_fn: Any = step_fn) -> None:
                held.append(step_fn(*held[-1], batch))

            def state(held: Any = held) -> Any:
                return held[-1][0], held[-1][1].inner

        step()
        before = _copy(state())
        with pytest.raises(kind, match=message):
            step()
        after = _copy(state())
        for path, old, new in zip(
            tree.paths(before), tree.leaves(before), tree.leaves(after), strict=True
        ):
            same = torch.equal(old, new) if isinstance(old, Tensor) else old == new
            assert same, f"stage {stage}, {executor}: {path}"
        if executor != "engine":
            step()
            assert state()[1]["count"] == before[1]["count"] + 1


@pytest.mark.parametrize("how", HOWS)
def test_nothing_is_half_updated_when_it_raises(how: str) -> None:
    run_ranks(2, _after_failure, how, timeout=120)


def test_an_overflow_leaves_its_numbers_as_they_were() -> None:
    cfg = Config(stage=2, on_nonfinite="skip", donate=False)
    step_fn = fzero.make_train_step(lambda p, x: (p["w"] * x).sum(), Numbers(), cfg)
    state = step_fn.init({"w": torch.ones(3)})
    skipped = step_fn(*state, torch.full((3,), torch.inf))
    assert skipped[1].inner["count"] == 0
    assert torch.equal(skipped[0]["w"], state[0]["w"])
    assert step_fn(*skipped, torch.ones(3))[1].inner["count"] == 1


def test_its_state_comes_back_from_a_checkpoint(tmp_path: Any) -> None:
    step_fn = fzero.make_train_step(lambda p, x: (p["w"] * x).sum(), Numbers())
    fresh = step_fn.init({"w": torch.ones(3)})
    state = step_fn(*step_fn.init({"w": torch.ones(3)}), torch.ones(3))
    fzero.checkpoint.save(str(tmp_path), *state)
    loaded = fzero.checkpoint.load(str(tmp_path), *fresh)
    assert loaded[1].inner["count"] == 1
    assert torch.equal(fzero.unshard(loaded[1].inner["m"]["w"]), torch.full((3,), 1.5))


class Loop:
    """Loops over leaves, and knows of none that are absent."""

    def __init__(self, breaks: str) -> None:
        self.breaks = breaks

    def init(self, params: Any) -> Any:
        return {k: v.shape for k, v in params.items()} and () if self.breaks == "init" else ()

    def update(self, grads: Any, state: Any, params: Any = None) -> Any:
        return {k: -0.1 * v for k, v in grads.items()}, state


@pytest.mark.parametrize("breaks", ["init", "update"])
@pytest.mark.parametrize("how", ["frozen", "multi_transform"])
def test_one_that_meets_none_is_told_what_it_stands_for(breaks: str, how: str) -> None:
    def model_fn(params: Any, x: Tensor) -> Tensor:
        return (params["a"] * x).sum() + (params["b"] * x).sum()

    opt: Any = Loop(breaks)
    if how == "multi_transform":
        opt = optim.multi_transform({"l": opt, "s": optim.sgd(0.1)}, {"a": "s", "b": "l"})
    cfg = Config(frozen=("a",) if how == "frozen" else ())
    step_fn = fzero.make_train_step(model_fn, opt, cfg)
    with pytest.raises((AttributeError, TypeError)) as error:
        step_fn(*step_fn.init({"a": torch.ones(2), "b": torch.ones(2)}), torch.ones(2))
    (note,) = error.value.__notes__
    assert "None at ['a']" in note
    assert "fzero.tree_map" in note


def test_an_error_of_its_own_has_no_note() -> None:
    class Wrong(Loop):
        def update(self, grads: Any, state: Any, params: Any = None) -> Any:
            return state.missing

    step_fn = fzero.make_train_step(lambda p, x: (p["a"] * x).sum(), Wrong("update"))
    with pytest.raises(AttributeError, match="missing") as error:
        step_fn(*step_fn.init({"a": torch.ones(2)}), torch.ones(2))
    assert not getattr(error.value, "__notes__", [])
