"""What is written counts: any history of writes and steps goes as written, in plain torch.

Random programs of writes, steps and checkpoints, against a few lines that say what must come out:
one master a parameter, in float32, of which the parameter is the cast. Gradients, learning rate and
written values are such that float32 computes exactly.
"""

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fzero
from fzero import Config, tree
from fzero.masters import follow_, followed
from tests.ranks import run_ranks

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


def _wrong(programs: list[Program], stage: int, precision: str | None, make: str) -> list[str]:
    """On a rank: what came out otherwise than the reference says."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    name, _, offload = (precision or "").partition("+")
    scale = {"loss_scale": 128.0} if name == "fp16" else {}
    cfg = Config(
        stage=stage,  # pyright: ignore
        precision=name or None,
        offload=offload or None,  # pyright: ignore
        on_nonfinite="skip",
        executor="traced" if make == "engine" else make,  # pyright: ignore
        **scale,
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
            elif what == "bad":  # a step that is skipped
                run.step(torch.full((8,), torch.inf))
            elif what == "nan":
                run.write("data", _values(seed, nan=True))
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


WRITES = ["data", "in place", "swap", "load", "nan"]
OPS = st.tuples(st.sampled_from([*WRITES, "step", "step", "bad"]), st.integers(1, 9))


@pytest.mark.parametrize("make", ["traced", "eager", "engine"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_written_counts(stage: int, make: str) -> None:
    @settings(max_examples=8, deadline=None)
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


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 3 * 2**16), max_size=4), st.booleans())
def test_one_written_element_is_found_wherever_it_is(sizes: list[int], strided: bool) -> None:
    masters = [torch.randn(n) for n in sizes]
    parts = [m.repeat(2, 1).t()[:, 0].bfloat16() if strided else m.bfloat16() for m in masters]
    want = [m.clone() for m in masters]
    for i, n in enumerate(sizes):
        if n:
            place = int(torch.randint(n, ()))
            parts[i][place] = want[i][place] = 1000.0
    follow_(masters, parts)
    assert all(map(torch.equal, masters, want))
