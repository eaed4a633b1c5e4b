"""`Config(executor="inductor")`: the generated function's results, and what can't be compiled runs
generated and says so."""

import subprocess
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fzero
from benchmarks.allocations import measure
from benchmarks.models import Size, batch_of, fzero_step
from fzero.program import inductor
from fzero.program.graph import output_node
from fzero.step.alike import digest
from tests.models.compare import batch_of as batch_of_case
from tests.models.compare import error, errors_on_ranks, scale, stepped
from tests.models.zoo import CASES
from tests.program.test_stretches import inputs_of
from tests.ranks import fake_ranks, run_ranks

TINY = Size(vocabulary=64, width=64, layers=3, heads=4, tokens=32, rows=2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.norm, self.drop = nn.LayerNorm(6), nn.Dropout(0.3)
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.drop(torch.tanh(self.norm(layer(x))))
        return self.last(x)


def trained(steps: int = 3, **config: Any) -> tuple[dict[str, Tensor], fzero.Program]:
    """Parameters after some steps, and what ran."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    cfg = fzero.Config(**config)
    torch.manual_seed(0)
    apply, params = fzero.functionalize(Net())

    def model_fn(params: Any, x: Tensor) -> Tensor:
        return apply(params, x).square().mean()

    step_fn = fzero.make_train_step(model_fn, fzero.optim.sgd(0.1, momentum=0.9), cfg)
    params, opt_state = step_fn.init(params)
    x = torch.empty(0)
    for i in range(steps):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * i + rank))
        params, opt_state = step_fn(params, opt_state, x)
    return fzero.unshard(params), step_fn.lower(params, opt_state, x)


def line_of(program: fzero.Program) -> str:
    """What the log says became of it."""
    (line,) = [line for line in program.log if line.startswith("inductor: ")]
    return line


def largest(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.mark.parametrize("stage", [0, 3])
def test_what_cannot_be_compiled_runs_generated_and_says_so(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(graph: Any) -> str:
        return "NotImplementedError: a riddle"

    monkeypatch.setattr(inductor, "refuse_without_compiler", lambda: None)
    monkeypatch.setattr(inductor, "compiled", none)
    found, program = trained(stage=stage, executor="inductor")
    wanted, _ = trained(stage=stage)
    assert largest(found, wanted) == 0.0
    assert "x layers.0: NotImplementedError: a riddle" in line_of(program)
    assert "inductor: 0 of " in str(program)


def test_layers_of_one_kind_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []

    def count(graph: Any) -> Any:
        texts.append(str(graph))
        return inductor.generated(graph)

    monkeypatch.setattr(inductor, "refuse_without_compiler", lambda: None)
    monkeypatch.setattr(inductor, "compiled", count)
    found, program = trained(stage=2, executor="inductor")
    assert largest(found, trained(stage=2)[0]) == 0.0
    assert len(set(texts)) == len(texts)
    # three layers forward and backward, split by a mask each, and the head
    stretches = int(line_of(program).split(" stretches")[0].split()[-1])
    assert len(texts) < stretches


def test_results_that_lie_otherwise_are_laid_out_as_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def turned(graph: Any) -> Any:
        run = inductor.generated(graph)

        def otherwise(given: list[Any]) -> Sequence[Tensor]:
            return [x.t().contiguous().t() if x.dim() == 2 else x for x in run(given)]

        return otherwise

    monkeypatch.setattr(inductor, "refuse_without_compiler", lambda: None)
    monkeypatch.setattr(inductor, "compiled", turned)
    found, program = trained(executor="inductor")
    assert largest(found, trained()[0]) == 0.0
    run = inductor.compile_stretches(program, lambda line: None)
    (outputs,) = output_node(program.graph).args
    for _ in range(3):
        for x, node in zip(run(*inputs_of(program)), outputs, strict=True):  # pyright: ignore
            assert x.stride() == node.meta["val"].stride()


@pytest.mark.parametrize("what", ["shape", "raises"])
def test_results_of_another_shape_are_not_taken(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(graph: Any) -> Any:
        run = inductor.generated(graph)

        def otherwise(given: list[Any]) -> Sequence[Tensor]:
            results = run(given)
            assert what != "raises", "expected size 3==2"
            return [x.unsqueeze(0) for x in results]

        return otherwise

    monkeypatch.setattr(inductor, "refuse_without_compiler", lambda: None)
    monkeypatch.setattr(inductor, "compiled", wrong)
    with pytest.warns(UserWarning, match="runs generated"):
        found, _ = trained(executor="inductor")
    assert largest(found, trained()[0]) == 0.0


def _one_step(folder: Any) -> fzero.Program:
    model_fn = fzero.functionalize(Net())[0]
    cfg = fzero.Config(executor="inductor")
    step_fn = fzero.make_train_step(_Loss(model_fn), fzero.optim.sgd(0.1), cfg)
    step_fn.load_programs(folder)
    state = step_fn.init(dict(Net().named_parameters()))
    state = step_fn(*state, torch.ones(8, 6))
    step_fn.save_programs(folder)
    return step_fn.lower(*state, torch.ones(8, 6))


class _Loss:
    def __init__(self, apply: Any) -> None:
        self.apply = apply

    def __call__(self, params: Any, x: Tensor) -> Tensor:
        return self.apply(params, x).square().mean()


def test_saved_programs_and_functions_of_shards_are_compiled_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    texts = []

    def count(graph: Any) -> Any:
        texts.append(str(graph))
        return inductor.generated(graph)

    monkeypatch.setattr(inductor, "refuse_without_compiler", lambda: None)
    monkeypatch.setattr(inductor, "compiled", count)
    first, second = _one_step(tmp_path), _one_step(tmp_path)
    assert line_of(first) == line_of(second)  # and one of them each
    assert texts[: len(texts) // 2] == texts[len(texts) // 2 :]
    texts.clear()
    grads = fzero.value_and_grad(
        lambda params, x: (params["w"] * x).tanh().sin().sum(), fzero.Config(executor="inductor")
    )
    loss, _ = grads({"w": torch.ones(3)}, torch.ones(3))
    assert float(loss) == pytest.approx(3 * torch.ones(()).tanh().sin().item())
    assert texts


def test_without_a_compiler_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "why_not", lambda: "InvalidCxxCompiler: none")
    with pytest.raises(fzero.ConfigError, match=r"InvalidCxxCompiler.*executor='traced'"):
        trained(executor="inductor")


# ------------------------------------------------------------------------------- really compiled
@pytest.mark.slow
@pytest.mark.parametrize("config", [{"stage": 0}, {"stage": 3, "accum_steps": 2}], ids=str)
def test_one_rank_equals_the_generated_function(config: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found, program = trained(executor="inductor", **config)
    assert "generated" not in line_of(program)
    assert largest(found, trained(**config)[0]) < 1e-6


def _difference(stage: int) -> float:
    return largest(trained(executor="inductor", stage=stage)[0], trained(stage=stage)[0])


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_equal_the_generated_function(stage: int) -> None:
    assert max(run_ranks(2, _difference, stage, timeout=500)) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_digest_of_an_updates_numbers_is_compiled(count: int) -> None:
    numbers = [torch.tensor(0.1 * i + 7) for i in range(count)]

    def fn(*numbers: Tensor) -> tuple[Tensor]:
        return (digest(numbers, torch.device("cpu")),)

    with FakeTensorMode() as mode:
        graph = make_fx(fn)(*map(mode.from_tensor, numbers)).graph
    run = inductor.compiled(graph)
    assert not isinstance(run, str), run
    (found,) = run([*numbers])
    assert torch.equal(found, *fn(*numbers))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_the_peak_is_the_programs(stage: int) -> None:
    cfg = fzero.Config(stage=stage, executor="inductor")
    with fake_ranks(4):
        held, step = measure(
            lambda: fzero_step(TINY, batch_of(TINY, 2), fzero.optim.adamw(1e-3), cfg)
        )
        assert held.peak == pytest.approx(step.lower().peak_bytes(), rel=0.03)


# the longest of docs/models.md is another matter of minutes each: benchmarks/inductor.py has all
FEW = ["GPT-2", "CNN with BatchNorm", "nn.LSTM", "SiLU, GroupNorm, Mish", "LoRA"]


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case.name in FEW], ids=lambda c: c.name)
def test_real_models_equal_the_generated_function(case: Any) -> None:
    batch = batch_of_case(case)
    wanted = stepped(case, batch, stage=3)
    found = stepped(case, batch, stage=3, executor="inductor")
    assert error(found, wanted) <= 1e-6 * max(scale(wanted), 1.0)


@pytest.mark.slow
def test_two_ranks_of_real_models_are_backward_on_both_batches() -> None:
    for found in run_ranks(2, errors_on_ranks, FEW[:2], 3, "inductor", timeout=500):
        assert {name: e for name, e in found.items() if e > 1e-5} == {}


_ONE_STEP = """
import torch
from torch._dynamo.utils import counters
from tests.program.test_inductor import trained
torch.set_num_threads(1)
trained(1, executor="inductor")
print(counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"])
"""


@pytest.mark.slow
def test_the_next_process_finds_the_kernels_on_disk(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    command = [sys.executable, "-c", _ONE_STEP]
    runs = [subprocess.run(command, check=True, capture_output=True, text=True) for _ in range(2)]
    (_, missed), (hits, none) = [map(int, run.stdout.split()) for run in runs]
    assert missed == hits > 0
    assert none == 0
