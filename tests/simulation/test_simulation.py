"""What is simulated is what would be staged out there, and costs what it does."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fzero
from benchmarks.allocations import measure
from benchmarks.models import GPT, Size, batch_of, fzero_step
from fzero.distributed.ragged import is_supported
from fzero.program import Program
from fzero.simulation import HARDWARE
from tests.ranks import fake_ranks

_CASES = [(1, None), (2, "bf16")]
_OTHERS = [(2, None), (1, "bf16")]


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(10, 30), nn.Linear(10, 7)
        self.register_buffer("shift", torch.ones(7))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inner(x).view(1, len(x), 2, 15).transpose(1, 2).split(5, -1)
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.outer(x.transpose(1, 2).flatten(2)[0]) + self.shift


def parts_of(device: str) -> tuple[Any, Any, Tensor]:
    with torch.device(device):
        apply, params = fzero.functionalize(Small())
        batch = torch.empty(8, 10)
    return (lambda params, x: apply(params, x).square().mean()), params, batch


def said(program: Program) -> Any:
    rows = [(*row, row.wire_bytes, row.times, row.dtype) for row in program.collectives()]
    return program.peak_bytes(), dict(program.peak().by_category()), rows, program.cost().flops


@pytest.mark.parametrize(
    ("stage", "accum", "precision"),
    [
        *[(stage, accum, precision) for stage in range(4) for accum, precision in _CASES],
        *[pytest.param(s, a, p, marks=pytest.mark.slow) for s in range(4) for a, p in _OTHERS],
    ],
)
def test_a_simulated_step_is_the_one_that_ranks_stage_out(
    stage: int, accum: int, precision: Any
) -> None:
    cfg = fzero.Config(stage=stage, accum_steps=accum, precision=precision, clip_norm=1.0)
    opt = fzero.optim.adamw(0.1)
    reports = [fzero.simulate(*made_for(opt, cfg, device), 4, "h100") for device in ("meta", "cpu")]
    with fake_ranks(4):
        model_fn, params, batch = parts_of("cpu")
        step_fn = fzero.make_train_step(model_fn, opt, cfg)
        program = step_fn.lower(*step_fn.init(params), batch)
    meta, real = reports
    assert said(meta.program) == said(real.program) == said(program)
    assert meta == real
    assert meta.peak_bytes == program.peak_bytes()
    adds_up(meta)


@pytest.mark.parametrize(("stage", "layout"), [(1, "rows"), (2, "rows"), (3, "flat")])
def test_so_is_one_of_either_layout(stage: int, layout: Any) -> None:
    if layout == "flat" and not is_supported():
        pytest.skip("flats want a torch whose DTensors can be ragged")
    opt = fzero.optim.adamw(0.1)
    cfg = fzero.Config(stage=stage, accum_steps=2, precision="bf16", layout=layout)
    report = fzero.simulate(*made_for(opt, cfg, "meta"), 4, "h100")
    with fake_ranks(4):
        model_fn, params, batch = parts_of("cpu")
        step_fn = fzero.make_train_step(model_fn, opt, cfg)
        assert said(report.program) == said(step_fn.lower(*step_fn.init(params), batch))
    adds_up(report)


def made_for(opt: Any, cfg: fzero.Config, device: str) -> tuple[Any, ...]:
    model_fn, params, batch = parts_of(device)
    return model_fn, opt, cfg, params, batch


def adds_up(report: fzero.Report) -> None:
    assert report.program is not None
    rows = report.program.collectives()
    assert sum(report.categories.values()) == report.peak_bytes
    assert report.sent == sum(row.wire_bytes * row.times for row in rows)
    assert sum(row.bytes for row in report.traffic) == sum(row.bytes * row.times for row in rows)
    assert sum(row.launches for row in report.traffic) == sum(row.times for row in rows)
    assert report.flops == report.program.cost().flops
    assert 0 <= report.exposed <= report.seconds


@pytest.mark.parametrize("stage", [1, 3])
def test_a_mesh_of_two_axes_is_the_one_that_ranks_stage_out(stage: int) -> None:
    opt, cfg = fzero.optim.adamw(0.1), fzero.Config(stage=stage)
    report = fzero.simulate(*made_for(opt, cfg, "meta"), (4, 8))
    with fake_ranks(32):
        mesh = dist.init_device_mesh("cpu", (4, 8), mesh_dim_names=("replicate", "shard"))
        model_fn, params, batch = parts_of("cpu")
        step_fn = fzero.make_train_step(model_fn, opt, fzero.Config(stage=stage, mesh=mesh))
        assert said(report.program) == said(step_fn.lower(*step_fn.init(params), batch))
    adds_up(report)
    assert {row.axis for row in report.traffic} == {"shard", "replicate"}
    for row in report.traffic:  # shards inside a node of eight, copies between nodes
        assert (row.between == 0) == (row.axis == "shard")
        assert (row.inside == 0) == (row.axis == "replicate")


@pytest.mark.parametrize("stage", [0, 3])
def test_the_peak_is_what_the_allocator_sees(stage: int) -> None:
    size = Size(vocabulary=200, width=32, layers=2, heads=4, tokens=16, rows=4)
    # in float32: operators of a CPU take scratch memory of their own in bfloat16
    opt, cfg = fzero.optim.adamw(0.1), fzero.Config(stage=stage)
    batch = batch_of(size, size.rows)
    with torch.device("meta"):
        apply, params = fzero.functionalize(GPT(size))
    model_fn = lambda params, batch: apply(params, *batch)  # noqa: E731
    simulated = fzero.simulate(model_fn, opt, cfg, params, batch, 4)
    with fake_ranks(4):
        held, _ = measure(lambda: fzero_step(size, batch, opt, cfg))
    assert simulated.peak_bytes == pytest.approx(held.peak, rel=0.02)


class Allocated(TorchDispatchMode):
    """Counts the bytes of real tensors that operators make."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if type(x) is Tensor and x.device.type != "meta":
                self.total += x.untyped_storage().nbytes()
        return result


@pytest.mark.parametrize("options", [{}, {"offload": "cpu"}, {"stage": 0, "precision": "bf16"}])
def test_nothing_of_the_models_size_is_allocated(options: dict[str, Any]) -> None:
    with torch.device("meta"):
        apply, params = fzero.functionalize(nn.Linear(10**6, 100))  # 400 MB
    batch = torch.empty(1, 10**6, device="meta")
    with Allocated() as seen:
        fzero.simulate(
            lambda params, x: apply(params, x).square().mean(),
            fzero.optim.adamw(0.1), fzero.Config(**options), params, batch, 2,
        )  # fmt: skip
    assert seen.total < 5e6  # the batch has 4 MB


def test_offload_moves_masters_and_optimizer_to_the_host() -> None:
    opt = fzero.optim.adamw(0.1)
    here = fzero.simulate(*made_for(opt, fzero.Config(precision="bf16"), "meta"), 4, "h100")
    there = fzero.simulate(
        *made_for(opt, fzero.Config(precision="bf16", offload="cpu"), "meta"), 4, "h100"
    )
    assert not {"masters", "optimizer"} & there.categories.keys()
    assert there.peak_bytes < here.peak_bytes
    assert there.host_bytes >= here.categories["optimizer"]
    assert there.seconds > here.seconds
    assert sum(there.categories.values()) == there.peak_bytes


def test_more_of_anything_is_never_slower() -> None:
    report = fzero.simulate(*made_for(fzero.optim.adamw(0.1), fzero.Config(), "meta"), (4, 8))
    base = replace(report.hardware, overhead=0.0, link_latency=1e-9, node_latency=1e-9)
    assert report.program is not None
    for rate in ("flops", "memory_bandwidth", "link_bandwidth", "node_bandwidth"):
        slow = replace(base, **{rate: getattr(base, rate) / 1e6})
        times = [report.program.cost(slow).seconds]
        for factor in (10, 1e3, 1e6, 1e9):
            faster = replace(slow, **{rate: getattr(slow, rate) * factor})
            times.append(report.program.cost(faster).seconds)
        assert times == sorted(times, reverse=True)
        assert times[0] > times[-1]


def test_what_cannot_be_simulated_is_refused() -> None:
    opt, cfg = fzero.optim.sgd(0.1), fzero.Config()
    for world in (0, 2.0, (2, 2, 2), (0, 4), True):
        with pytest.raises(fzero.ConfigError, match="number of ranks"):
            fzero.simulate(*made_for(opt, cfg, "meta"), world)  # pyright: ignore
    with pytest.raises(fzero.ConfigError, match="makes no Program"):
        fzero.simulate(*made_for(opt, fzero.Config(executor="eager"), "meta"), 2)
    with fake_ranks(2):
        mesh = dist.init_device_mesh("cpu", (2,))
        with pytest.raises(fzero.ConfigError, match="world_size="):
            fzero.simulate(*made_for(opt, fzero.Config(mesh=mesh), "meta"), 2)
    with pytest.raises(fzero.FzeroError, match="made-up ranks"):
        fzero.simulate(*made_for(opt, cfg, "meta"), 2).program.frontier()


def test_the_module_of_the_command_line_can_be_called_as_the_function() -> None:
    import fzero.simulate as module

    assert callable(module)
    assert callable(fzero.simulate)  # whichever of the two the import has left there
    cfg, params = fzero.Config(), {"w": torch.ones(8, 6)}
    said = [
        one(lambda p, x: (x @ p["w"]).sum(), fzero.optim.sgd(0.1), cfg, params, torch.ones(2, 8), 2)
        for one in (module, fzero.simulate)
    ]
    assert said[0].peak_bytes == said[1].peak_bytes


def test_a_limit_sends_activations_to_the_host_where_there_is_another() -> None:
    def told(cfg: fzero.Config, **changes: Any) -> fzero.Report:
        apply, params = fzero.functionalize(
            torch.nn.Sequential(*[torch.nn.Linear(512, 512, device="meta") for _ in range(4)])
        )
        batch = torch.empty(2**16, 512, device="meta")
        hardware = replace(HARDWARE["h100"], host_bandwidth=1e12, **changes)
        loss = lambda params, x: apply(params, x).square().mean()  # noqa: E731
        return fzero.simulate(loss, fzero.optim.sgd(0.1), cfg, params, batch, 4, hardware)

    limit = told(fzero.Config()).peak_bytes * 3 // 4
    cfg = fzero.Config(offload="activations", memory_limit=limit)
    away = told(cfg)
    assert away.program is not None
    assert away.peak_bytes <= limit
    assert away.host_bytes == away.program.host_bytes() > 0
    assert away.program.cost(away.hardware).crossed >= 2 * away.host_bytes
    with pytest.raises(fzero.ConfigError, match="the least that this step can hold"):
        told(cfg, shares_memory=True)
