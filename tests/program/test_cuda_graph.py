"""CUDA graphs: what a capture is given, what is copied in and out, and what is left as it is.

No GPU is needed: `Fixed` stands in for one. As a graph does, it runs the same function on the same
memory each time, leaves results where they were at first, and runs nothing while it captures.
"""

import copy
import dataclasses
import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import fzero
from fzero.distributed.dtensor import local_tensor
from fzero.errors import ConfigError
from fzero.program import cuda_graph
from fzero.program.codegen import compile_program
from fzero.program.graph import placeholders
from tests.ranks import fake_ranks, run_ranks


class Fixed:
    """A device that captures; see the top of this file."""

    type = "cpu"
    captures = 0  # of all of them, in a test

    def capture(self, run: Callable[[], list[Any]], device: torch.device) -> "Recording":
        Fixed.captures += 1
        return Recording(run)


class Recording:
    def __init__(self, run: Callable[[], list[Any]]) -> None:
        self.call = run
        cells = [cell.cell_contents for cell in run.__closure__ or ()]
        (given,) = [cell for cell in cells if isinstance(cell, list)]
        tensors = [x for x in given if isinstance(x, Tensor)]
        before = [x.clone() for x in tensors]
        self.results = run()
        for x, value in zip(tensors, before, strict=True):
            x.copy_(value)
        self.owned = {x.untyped_storage()._cdata for x in tensors}
        self.open = False
        self.spoil()

    def spoil(self) -> None:
        for x in self.results:
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in self.owned:
                x.fill_(torch.nan if x.is_floating_point() or x.is_complex() else 1)

    def begin(self) -> None:
        assert not self.open
        self.open = True

    def run(self) -> None:
        for x, value in zip(self.results, self.call(), strict=True):
            if isinstance(x, Tensor) and x.data_ptr() != value.data_ptr():
                x.copy_(value)

    def end(self) -> None:
        self.spoil()  # the memory belongs to the next run
        self.open = False


@pytest.fixture(autouse=True)
def on_this_device(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch.setattr)


def pretend(setattr: Callable[..., None]) -> None:
    Fixed.captures = 0
    setattr(cuda_graph, "Cuda", Fixed)
    setattr(cuda_graph, "is_gloo", lambda group: False)


class Net(nn.Module):
    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.norm, self.drop = nn.LayerNorm(6), nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.tanh(self.norm(self.first(x)))))


def batch_at(i: int, rank: int = 0) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * i + rank))


def trained(
    *,
    steps: int = 4,
    drop: float = 0.0,
    opt: Any = None,
    between: Callable[[int, Any], Any] = lambda i, params: params,
    **config: Any,
) -> tuple[list[Tensor], dict[str, Tensor], tuple[str, ...]]:
    """Losses, parameters and the log."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(0)
    apply, params = fzero.functionalize(Net(drop))

    def model_fn(params: Any, x: Tensor) -> Tensor:
        return apply(params, x).square().mean()

    opt = opt or fzero.optim.adamw(1e-2)
    step_fn = fzero.make_train_step(model_fn, opt, fzero.Config(**config))
    params, opt_state = step_fn.init(params)
    losses, x = [], batch_at(0, rank)
    for i in range(steps):
        params = between(i, params)
        x = batch_at(i, rank)
        params, opt_state = step_fn(params, opt_state, x)
        losses.append(opt_state.metrics["loss"])
    log = step_fn.lower(params, opt_state, x).log
    return [torch.as_tensor(loss) for loss in losses], fzero.unshard(params), log


def same(a: Any, b: Any) -> None:
    (losses, params, _), (others, expected, _) = a, b
    assert torch.equal(torch.stack(losses), torch.stack(others))
    assert all(torch.equal(params[k], x) for k, x in expected.items())
    assert all(x.isfinite().all() for x in params.values())


CONFIGS: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "clip": {"clip_norm": 0.1},
    "skip": {"on_nonfinite": "skip"},
    "accumulated": {"accum_steps": 2},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_steps_are_those_of_generated_code(name: str) -> None:
    config = CONFIGS[name]
    found = trained(**config, cuda_graph=True)
    same(found, trained(**config))
    assert Fixed.captures == 2  # the gradients, and the update
    (line,) = {line for line in found[2] if line.startswith("CUDA graph")}
    assert "copies" in line


def _steps_of(config: dict[str, Any]) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        pretend(patch.setattr)
        losses, params, _ = trained(**config)
        return losses, params, Fixed.captures


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_collectives_are_captured_with_the_rest(stage: int) -> None:
    found = run_ranks(2, _steps_of, {"stage": stage, "cuda_graph": True})
    expected = run_ranks(2, _steps_of, {"stage": stage})
    for one, other in zip(found, expected, strict=True):
        same(one, other)
        assert (one[2], other[2]) == (2, 0)


def test_one_rank_of_many() -> None:
    """A made-up group moves nothing, so there are no numbers to compare."""
    with fake_ranks(8):
        _, _, log = trained(cuda_graph=True)
    assert Fixed.captures == 2
    assert not any("CUDA graph: none" in line for line in log)


def test_a_graph_ends_before_the_groups_whose_collectives_it_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL's communicators wait for it (pytorch/pytorch, issue 115388)."""
    alive: list[weakref.ref[Recording]] = []

    def capture(self: Fixed, run: Callable[[], list[Any]], device: torch.device) -> Recording:
        alive.append(weakref.ref(found := Recording(run)))
        return found

    ended: list[bool] = []
    shutdown = dist.ProcessGroup.shutdown

    def ends(group: Any) -> None:
        gc.collect()
        ended.extend(x() is None for x in alive)
        shutdown(group)

    monkeypatch.setattr(Fixed, "capture", capture)
    monkeypatch.setattr(dist.ProcessGroup, "shutdown", ends)
    with fake_ranks(2):
        apply, params = fzero.functionalize(Net())
        cfg = fzero.Config(3, cuda_graph=True)
        step_fn = fzero.make_train_step(
            lambda params, x: apply(params, x).square().mean(), fzero.optim.sgd(0.1), cfg
        )
        params, opt_state = step_fn.init(params)
        for i in range(3):
            params, opt_state = step_fn(params, opt_state, batch_at(i))
        gc.collect()
        assert [x() is not None for x in alive] == [True, True]
    assert ended
    assert all(ended)
    del step_fn  # it lived on


def test_a_torch_that_would_wait_for_a_graph_for_ever_gets_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_graph, "is_told", lambda: False)
    with fake_ranks(2):
        _, _, log = trained(cuda_graph=True)
    assert any("destroy_process_group" in line for line in log)
    assert Fixed.captures == 0


def copied(params: Any) -> Any:
    return {name: x.detach().clone() for name, x in params.items()}


def test_parameters_that_move_are_followed() -> None:
    """A checkpoint brings them to other memory, and the old ones are written to afterwards."""

    def moved(i: int, params: Any) -> Any:
        if i not in (3, 4):
            return params
        new = copied(params)
        for x in params.values():
            x.detach().fill_(torch.nan)
        return new

    same(trained(steps=7, cuda_graph=True, between=moved), trained(steps=7, between=moved))
    # gradients and update: at the second step, and when the parameters moved for the first time
    assert Fixed.captures == 4


def test_memory_that_parameters_have_left_is_free_after_the_next_step() -> None:
    old: list[StorageWeakRef] = []

    def moved(i: int, params: Any) -> Any:
        if i != 3:
            return params
        old.extend(StorageWeakRef(local_tensor(x).untyped_storage()) for x in params.values())
        return copied(params)

    trained(steps=5, cuda_graph=True, between=moved)
    assert len(old) == 6
    assert all(ref.expired() for ref in old)


def test_a_batch_that_is_written_over_is_read_anew() -> None:
    buffer = torch.empty(4, 6)

    def losses(**config: Any) -> list[Tensor]:
        apply, params = fzero.functionalize(Net())
        step_fn = fzero.make_train_step(
            lambda params, x: apply(params, x).square().mean(),
            fzero.optim.sgd(0.1),
            fzero.Config(**config),
        )
        state = step_fn.init(params)
        found = []
        for i in range(5):
            buffer.copy_(batch_at(i))
            params, opt_state = state = step_fn(*state, buffer)
            found.append(opt_state.metrics["loss"])
        return found

    torch.manual_seed(0)
    found = losses(cuda_graph=True)
    torch.manual_seed(0)
    assert found == losses()


def test_random_numbers_are_no_ones_twice() -> None:
    found = trained(drop=0.5, cuda_graph=True)
    same(found, trained(drop=0.5))
    assert Fixed.captures == 1  # the update
    assert any("CUDA graph: none" in line and "random" in line for line in found[2])


def test_what_cannot_be_captured_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(Fixed, "capture", refuse)
    found = trained(cuda_graph=True)
    same(found, trained())
    assert any("not permitted" in line for line in found[2])


def test_results_stay_when_the_next_run_writes_over_them() -> None:
    cfg = fzero.Config(cuda_graph=True)

    def fn(params: Any, x: Tensor) -> Any:
        y = x @ params["w"]
        return {"y": y, "again": y, "x": x, "sum": y.sum(), "view": y.t()}

    run = fzero.sharded(fn, cfg)
    params = fzero.shard({"w": torch.randn(6, 6)}, cfg)
    inputs = [batch_at(i) for i in range(5)]
    found = [run(params, x) for x in inputs]
    assert Fixed.captures == 1
    full = fzero.unshard(params)["w"]
    for x, row in zip(inputs, found, strict=True):
        y = x @ full
        for name, value in {"y": y, "again": y, "x": x, "sum": y.sum(), "view": y.t()}.items():
            assert torch.equal(row[name], value), name


def test_threads_take_turns() -> None:
    cfg = fzero.Config(cuda_graph=True)
    run = fzero.sharded(lambda params, x: (x @ params["w"]).relu(), cfg)
    params = fzero.shard({"w": torch.randn(6, 6)}, cfg)
    full = fzero.unshard(params)["w"]
    for i in range(2):
        run(params, batch_at(i))

    def work(rank: int) -> bool:
        inputs = [batch_at(i, rank) for i in range(30)]
        return all(torch.equal(run(params, x), (x @ full).relu()) for x in inputs)

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(work, range(3), timeout=60))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "elsewhere": lambda x: x.clone(),
    "there": lambda x: x,
    "transposed": lambda x: x.t(),
    "expanded": lambda x: x[:1].expand(x.shape),
    "negative": lambda x: torch._neg_view(x),
}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(LAYOUTS)), st.sampled_from(sorted(LAYOUTS))), max_size=7
    )
)
def test_wherever_inputs_lie_their_values_count(calls: list[tuple[str, str]]) -> None:
    """Inputs at the same address, but with other strides, or to be read negated, are others."""
    cfg = fzero.Config(cuda_graph=True)
    a, b = torch.randn(6, 6), torch.randn(6, 6)
    function = fzero.sharded(lambda params, x: [(x * params["w"]).cumsum(0), x], cfg)
    program = function.lower({"w": a}, b)
    run = cuda_graph.replayed(program, compile_program(program), lambda line: None)
    for one, other in calls:
        a.add_(1)
        b.mul_(0.5)
        w, x = LAYOUTS[one](a), LAYOUTS[other](b)
        first, second = run(w, x)
        assert torch.equal(first, (x * w).cumsum(0))
        assert torch.equal(second, x)


def test_an_input_that_is_a_result_is_the_callers_own() -> None:
    program = fzero.sharded(lambda params, x: x * params["w"], fzero.Config()).lower(
        {"w": torch.randn(3)}, torch.randn(3)
    )
    graph = copy.deepcopy(program.graph)
    output = next(iter(reversed(graph.nodes)))
    output.args = ((output.args[0][0], placeholders(graph)[1]),)
    program = dataclasses.replace(program, graph=graph, outputs=("y", "x"))
    run = cuda_graph.replayed(program, compile_program(program), lambda line: None)
    w = torch.randn(3)
    for i in range(4):
        x = torch.full((3,), float(i))
        assert run(w, x)[1] is x
    assert Fixed.captures == 1


def test_tensors_elsewhere_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"are on cpu.*CUDA devices alone"):
        trained(steps=1, cuda_graph=True)


@pytest.mark.parametrize(
    "config",
    [
        {"executor": "eager"},
        {"dynamic": True},
        {"donate": False},
        {"offload": "cpu"},
        {"opaque": "auto"},
        {"memory_limit": "1GiB"},
    ],
    ids=str,
)
def test_what_goes_against_it_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"Config\.cuda_graph=True: must be False with"):
        fzero.Config(**config, cuda_graph=True)


def test_an_engine_has_no_kernels_alone() -> None:
    with pytest.raises(ConfigError, match="make_train_step"):
        fzero.Engine(Net(), fzero.optim.sgd(0.1), fzero.Config(cuda_graph=True))


SETTINGS: list[tuple[Callable[[Any], None], Any, Any]] = [
    (lambda x: setattr(torch.backends.cuda.matmul, "fp32_precision", x), "tf32", "none"),
    (lambda x: setattr(torch.backends.cudnn, "benchmark", x), True, False),
    (lambda x: setattr(torch.backends.cudnn, "deterministic", x), True, False),
    (
        lambda x: setattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", x),
        False,
        True,
    ),
    (
        lambda x: setattr(torch.backends.cuda.matmul, "allow_fp16_accumulation", x),
        True,
        False,
    ),
]


@pytest.mark.parametrize("number", range(len(SETTINGS)))
def test_kernels_are_those_that_are_asked_for_now(number: int) -> None:
    setter, value, before = SETTINGS[number]

    def between(i: int, params: Any) -> Any:
        if i in (3, 5):
            setter(value if i == 3 else before)
        return params

    try:
        wanted = trained(steps=8)
        found = trained(steps=8, cuda_graph=True, between=between)
    finally:
        setter(before)
    same(found, wanted)
    assert Fixed.captures == 2 * 3  # of the gradients and of the update
