"""What is written into a parameter is in the next step, in the state and in the next checkpoint.

Random programs of writes, steps and checkpoints, against a few lines that say what must come out:
one master a parameter, in float32, of which the parameter is the cast. Gradients, learning rate and
written values are such that float32 computes exactly.
"""

import itertools
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fzero
from fzero import Config, tree
from fzero.state.follow import Follower, follow_, followed
from tests.ranks import fake_ranks, run_ranks

SHAPES = {"a": (5, 3), "b": (2, 7), "c": (4,), "d": ()}
LR = 1 / 1024  # a step that bfloat16 and float16 round off
Program = list[tuple[str, int]]


def _values(seed: int, nan: bool = False) -> dict[str, Tensor]:
    """Numbers that every dtype holds; a third of them is what it was before anybody wrote."""
    draw = torch.Generator().manual_seed(seed)
    full = {k: torch.randint(-16, 16, s, generator=draw) / 8 for k, s in SHAPES.items()}
    return {k: x.masked_fill(x > 1.5, torch.nan) if nan else x for k, x in full.items()}


def _batch(seed: int) -> Tensor:
    return torch.randint(-4, 5, (8,), generator=torch.Generator().manual_seed(seed)).float()


def _loss(params: Any, batch: Tensor) -> Tensor:
    """Linear, so that the gradient of an element is the mean of the batch."""
    return batch.to(params["a"].dtype).mean() * sum(x.sum() for x in params.values())


class Reference:
    """What must come out. A master sees a write once it is looked at, or a step is made."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.master = dtype, _values(0)
        self.params = _values(0)

    def write(self, new: dict[str, Tensor]) -> None:
        self.params = {k: x.to(self.dtype) for k, x in new.items()}

    def look(self) -> None:
        for k, x in self.master.items():
            kept = self.params[k] == x.to(self.dtype)
            self.master[k] = torch.where(kept, x, self.params[k].float())

    def step(self, seed: int, world: int) -> None:
        self.look()
        grad = sum(_batch(seed + rank).mean() for rank in range(world)) / world
        self.master = {k: x - LR * grad for k, x in self.master.items()}
        self.params = {k: x.to(self.dtype) for k, x in self.master.items()}


STEPS: dict[str, Any] = {}  # staging out costs more than all else here


class Functional:
    """A step function and what it carries."""

    def __init__(self, cfg: Config) -> None:
        self.step_fn = STEPS.get(repr(cfg)) or fzero.make_train_step(
            _loss, fzero.optim.sgd(LR), cfg
        )
        STEPS[repr(cfg)] = self.step_fn
        self.params, self.state = self.step_fn.init(_values(0))

    def write(self, how: str, new: dict[str, Tensor]) -> None:
        if how == "load":
            with tempfile.TemporaryDirectory() as own:
                folder = _shared(own)
                fzero.checkpoint.save(folder, new)
                self.params, _ = fzero.checkpoint.load(folder, self.params, cast=True)
                _meet()
            return
        if how == "swap":
            self.params = tree.map(torch.clone, self.params)
        for k, x in self.params.items():
            value = new[k].to(x.dtype)
            if isinstance(x, DTensor):
                part = fzero.shard({k: value})[k]
                x.to_local().data.copy_(part.to_local())
            elif how == "data":
                x.data.copy_(value)
            else:
                x.copy_(value)

    def step(self, batch: Tensor) -> None:
        self.params, self.state = self.step_fn(self.params, self.state, batch)


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for k, x in _values(0).items():
            self.register_parameter(k, nn.Parameter(x))

    def forward(self, batch: Tensor) -> Tensor:
        return _loss(dict(self.named_parameters()), batch)


class Engine:
    """The same with an engine."""

    def __init__(self, cfg: Config) -> None:
        self.engine = fzero.Engine(Holder(), fzero.optim.sgd(LR), cfg)
        self.is_lazy = cfg.stage == 3 and (dist.is_initialized() or cfg.precision is not None)

    @property
    def params(self) -> Any:
        return self.engine.state[0]

    @property
    def state(self) -> Any:
        return self.engine.state[1]

    def write(self, how: str, new: dict[str, Tensor]) -> None:
        module = self.engine.module
        if how == "swap" or self.is_lazy:
            params, state = self.engine.state
            other = Functional.__new__(Functional)
            other.params = tree.map(torch.clone, params)
            other.write("data", new)
            self.engine.state = other.params, tree.map(torch.clone, state)
        elif how == "load":
            module.load_state_dict(new)
        else:
            for k, x in module.named_parameters():
                if how == "data":
                    x.data.copy_(new[k])
                else:
                    with torch.no_grad():
                        x.copy_(new[k])

    def step(self, batch: Tensor) -> None:
        self.engine.backward(self.engine(batch))
        self.engine.step()


def _shared(folder: str) -> str:
    names = [folder]
    if dist.is_initialized():
        dist.broadcast_object_list(names)
    return names[0]


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def _config(**fields: Any) -> Config:
    return Config(**fields)


def _wrong(programs: list[Program], stage: int, precision: str | None, make: str) -> list[str]:
    """On a rank: what came out otherwise than the reference says."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    name, _, offload = (precision or "").partition("+")
    cfg = _config(
        stage=stage,
        precision=name or None,
        offload=offload or None,
        on_nonfinite="skip",
        executor="traced" if make == "engine" else make,
        loss_scale=128.0 if name == "fp16" else None,
    )
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name, torch.float32)
    wrong = []
    for i, program in enumerate(programs):
        run = (Engine if make == "engine" else Functional)(cfg)
        masters = run.state.master is not None
        want = Reference(low if masters else torch.float32)
        for turn, (what, seed) in enumerate(program):
            if what == "step":
                run.step(_batch(seed + rank))
                want.step(seed, world)
            elif what == "bad":  # a step that is skipped, after it has looked
                run.step(torch.full((8,), torch.inf))
                want.look()
            elif what == "nan":
                run.write("data", _values(seed, nan=True))
                want.write(_values(seed, nan=True))
                if isinstance(run, Engine) and run.is_lazy:
                    want.look()  # the next write asks for the state
                run.write("data", _values(seed))
                want.write(_values(seed))
            else:
                run.write(what, _values(seed))
                want.write(_values(seed))
            if make == "engine":
                want.look()  # its state is
            got = fzero.unshard(run.params)
            if not all(torch.equal(x, got[k]) for k, x in want.params.items()):
                wrong.append(f"program {i}, {turn} {what}: parameters")
        want.look()
        with tempfile.TemporaryDirectory() as own:
            folder = _shared(own)
            fzero.checkpoint.save(folder, run.params, run.state)
            fresh = {k: torch.zeros(s) for k, s in SHAPES.items()}
            stored, _ = fzero.checkpoint.load(folder, fresh)
            _meet()
        run.step(torch.zeros(8))  # what the masters are is what this publishes and leaves in them
        held = fzero.unshard(run.params if not masters else run.state.master)
        for what, found in (("the checkpoint", stored), ("the state", held)):
            if not all(torch.equal(x, found[k]) for k, x in want.master.items()):
                wrong.append(f"program {i}: {what}")
    return wrong


def test_what_was_gathered_before_a_write_is_gathered_anew() -> None:
    for keep in (True, False):
        cfg = Config(stage=3, precision="bf16", reshard_after_forward=not keep)
        engine = fzero.Engine(nn.Linear(2, 1, bias=False), fzero.optim.sgd(0.1), cfg)
        engine(torch.ones(1, 2))
        engine.state[0]["weight"].to_local().data.fill_(5.0)
        assert engine(torch.ones(1, 2)).item() == 10.0


WRITES = ["data", "in place", "swap", "load", "nan"]
OPS = st.tuples(st.sampled_from([*WRITES, "step", "step", "bad"]), st.integers(1, 9))


@pytest.mark.parametrize("make", ["traced", "eager", "engine"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.quick("1-engine", "3-traced", "3-eager", "2-traced")
def test_what_is_written_counts(stage: int, make: str) -> None:
    @settings(max_examples=8)
    @given(
        st.sampled_from([None, "bf16", "fp16", "bf16+cpu", "+cpu"]),
        st.lists(OPS, min_size=1, max_size=4),
    )
    def law(precision: str | None, program: Program) -> None:
        assert _wrong([program], stage, precision, make) == []

    law()


@pytest.mark.parametrize("make", ["traced", "engine"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_written_counts_on_two_ranks(stage: int, make: str) -> None:
    program: Program = [("step", 1), ("load", 2), ("data", 3), ("step", 4), ("swap", 5)]
    assert run_ranks(2, _wrong, [program], stage, "bf16", make) == [[], []]


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("high", [torch.float32, torch.float64])
def test_a_master_that_nobody_wrote_beside_keeps_its_digits(
    low: torch.dtype, high: torch.dtype
) -> None:
    bits = torch.randint(-(2**31), 2**31, (3, 2**16 + 1), dtype=torch.int32)
    master = bits.view(torch.float32).nan_to_num().to(high)  # infinities, subnormal ones
    master[0, :7] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1e-45, 1e-8, 7e4])
    before = master.clone()
    part = torch.empty_like(master, dtype=low)
    torch._foreach_copy_([part], [master])  # pyright: ignore[reportPrivateImportUsage]
    follow_([master], [part])
    assert torch.equal(master, before)
    assert followed(master, part) is master


def _in_place(w: Tensor) -> None:
    with torch.no_grad():
        w.mul_(0.5)


def test_a_state_that_is_read_between_two_writes_has_seen_the_first() -> None:
    assert _wrong([[("data", 1), ("step", 1), ("nan", 1)]], 3, "bf16+cpu", "engine") == []


def _through_a_view(w: Tensor) -> None:
    with torch.no_grad():
        w.t()[:2].split(1)[1].zero_()


def _together(w: Tensor) -> None:
    with torch.no_grad():
        torch._foreach_mul_([w, torch.ones(1)], 0.5)  # pyright: ignore[reportPrivateImportUsage]


IN_FORWARD = [
    _in_place,
    _through_a_view,
    _together,
    lambda w: w.data.mul_(0.5),
    lambda w: torch.mul(w.detach(), 0.5, out=w.detach()),
    lambda w: F.embedding(torch.tensor([0]), w, max_norm=0.1),
]
COPIES = [lambda w: w.clone(), lambda w: w * 1, lambda w: w.double(), lambda w: w.detach().clone()]


def _writing(
    write: Callable[[Tensor], object], name: str = "frozen", end: Callable[..., Any] = torch.sum
) -> Callable[..., Tensor]:
    def model_fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
        write(params[name])
        return end((params["w"] @ params["frozen"].t() @ x.to(params["w"].dtype)).sum())

    return model_fn


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("executor", ["traced", "eager"])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_function_that_writes_a_parameter_is_refused(
    stage: int, executor: str, precision: str | None
) -> None:
    cfg = _config(stage=stage, executor=executor, precision=precision, frozen=["frozen"])
    full = {"w": torch.ones(3, 4), "frozen": torch.ones(5, 4)}
    for write in IN_FORWARD:
        step_fn = fzero.make_train_step(_writing(write), fzero.optim.sgd(0.1), cfg)
        with pytest.raises(fzero.FzeroError, match="'frozen' in place"):
            step_fn(*step_fn.init(full), torch.ones(5))
    for copy in COPIES:
        step_fn = fzero.make_train_step(
            _writing(lambda w, copy=copy: copy(w).mul_(2)), fzero.optim.sgd(0.1), cfg
        )
        step_fn(*step_fn.init(full), torch.ones(5))


class OldStyle(torch.autograd.Function):
    """What `torch.func` refuses, so that a step is recorded through `torch.autograd.grad`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


MIXED = fzero.Precision(torch.float32, reduce=torch.float64, master=torch.float64)


@pytest.mark.parametrize("precision", [None, "bf16", pytest.param(MIXED, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow), 3])
def test_it_is_refused_where_leaves_are_gathered(stage: int, precision: Any) -> None:
    wide = torch.float64 if precision is MIXED else torch.float32
    full = {"w": torch.ones(5, 4, dtype=wide), "frozen": torch.ones(5, 4, dtype=wide)}
    cfg = _config(stage=stage, precision=precision, frozen=["frozen"])
    with fake_ranks(4):
        for write, name, end in itertools.product(IN_FORWARD, full, (torch.sum, OldStyle.apply)):
            model_fn = _writing(write, name, end)
            step_fn = fzero.make_train_step(model_fn, fzero.optim.sgd(0.1), cfg)
            params, state = step_fn.init(full)
            with pytest.raises(fzero.FzeroError, match=f"{name!r} in place"):
                step_fn.lower(params, state, torch.ones(5))


def _max_norm(stage: int, direct: bool) -> str:
    module = nn.Sequential(nn.Embedding(4, 2, max_norm=0.1))
    engine = fzero.Engine(module, fzero.optim.sgd(0.1), Config(stage=stage))  # pyright: ignore
    try:
        (module if direct else engine)(torch.tensor([dist.get_rank()])).sum().backward()
    except fzero.FzeroError as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_forward_that_makes_ranks_drift_apart_is_refused(stage: int, direct: bool) -> None:
    torch.manual_seed(0)
    for said in run_ranks(2, _max_norm, stage, direct):
        assert "0.weight" in said


def test_on_one_rank_a_forward_may_write() -> None:
    module = nn.Sequential(nn.Embedding(4, 2, max_norm=0.1))
    engine = fzero.Engine(module, fzero.optim.sgd(0.0), Config(stage=2, precision="bf16"))
    engine(torch.tensor([0])).sum().backward()
    engine.step()
    assert engine.full_params()["0.weight"][0].float().norm() < 0.11


def _head(m: nn.Sequential) -> None:
    m[1] = nn.Linear(2, 3)


def _adapter(m: nn.Sequential) -> None:
    m[0].register_module("lora", nn.Linear(2, 1))


def _tied(m: nn.Sequential) -> None:
    m[1].weight = m[0].weight


def _assigned(m: nn.Sequential) -> None:
    m.load_state_dict({k: v.detach().clone() for k, v in m.state_dict().items()}, assign=True)


def _removed(m: nn.Sequential) -> None:
    m[1] = nn.Identity()


@pytest.mark.parametrize("late", [_head, _adapter, _tied, _assigned, _removed])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("when", ["forward", "step"])
def test_parameters_that_come_or_go_after_the_engine_are_refused(
    late: Callable[[nn.Sequential], None], stage: int, when: str
) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    engine = fzero.Engine(module, fzero.optim.sgd(0.1), Config(stage=stage))  # pyright: ignore
    if when == "step":
        engine(torch.ones(1, 2)).sum().backward()
    late(module)
    with pytest.raises(fzero.FzeroError, match=r"parameter '.*(weight|bias)'"):
        (engine.step if when == "step" else lambda: engine(torch.ones(1, 2)))()
    assert engine.full_params()["1.bias"].shape == (2,)  # what was trained can still be had


def test_what_has_no_parameters_may_come_and_go() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    engine = fzero.Engine(module, fzero.optim.sgd(0.1))
    module[1] = nn.Sequential(nn.Tanh())
    module[0].tied = nn.ParameterList([module[0].weight])
    engine(torch.ones(1, 2)).sum().backward()
    engine.step()
    state = engine.state_dict()  # a second name is no other parameter
    torch.testing.assert_close(state["0.tied.0"], state["0.weight"])
    engine.load_state_dict(state)
    module[1].add_module("1", nn.Linear(2, 2))  # below what came late
    with pytest.raises(fzero.FzeroError, match=r"'1\.1\.weight'"):
        engine(torch.ones(1, 2))


@settings(max_examples=20)
@given(st.lists(st.integers(0, 3 * 2**16), max_size=4), st.sampled_from([1, 2, 3]), st.booleans())
def test_one_written_element_is_found_wherever_it_is(
    sizes: list[int], columns: int, strided: bool
) -> None:
    masters = [torch.randn(n, columns) for n in sizes]
    masters = [m.squeeze(1) if columns == 1 else m for m in masters]
    parts = [m.bfloat16() for m in masters]
    if strided:
        parts = [torch.stack([x, x], -1)[..., 0] for x in parts]
    follower = Follower(masters, parts)
    for value in (1000.0, 0.0, -0.0):  # again and again, and of two equal numbers the one written
        want = [m.clone() for m in masters]
        for i, n in enumerate(sizes):
            if n:
                row, column = int(torch.randint(n, ())), columns - 1
                parts[i].view(n, -1)[row, column] = want[i].view(n, -1)[row, column] = value
        follower(masters, parts)
        for found, wanted in zip(masters, want, strict=True):
            assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))


@pytest.mark.parametrize("columns", [1, 3])
def test_the_first_and_the_last_element_of_every_leaf_count(columns: int) -> None:
    sizes = [3, 2**12, 2**12 + 1, 5, 2**17, 2**17, 2**18 + 1]
    masters = [torch.randn(n, columns) for n in sizes]
    parts = [m.bfloat16() for m in masters]
    follower = Follower(masters, parts)
    for master, part in zip(masters, parts, strict=True):
        for row, column in ((0, 0), (-1, -1)):
            part[row, column] = 1000.0
            follower(masters, parts)  # where nothing else was written
            assert master[row, column] == 1000.0
