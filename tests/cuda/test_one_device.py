"""What a CUDA device changes: streams, NCCL, graphs, pinned memory, generators, kernels of its own.

Values are compared with plain PyTorch's on the same device, or with fzero's own another way. One
device is enough: NCCL takes one rank of it; two ranks that share it talk over gloo.
"""

import contextlib
import copy
import gc
import itertools
import math
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import fzero
from fzero.distributed.dtensor import local_tensor
from fzero.tree import leaves
from tests.ranks import fake_ranks, run_fresh

DEVICE = torch.device("cuda", 0)
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.timeout(180),
]
STAGES = (0, 1, 2, 3)
Batch = tuple[Tensor, Tensor]


@pytest.fixture(autouse=True)
def nccl() -> Iterator[None]:
    """A process group of one rank: gloo for the host, NCCL for the device."""
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    try:
        torch.cuda.synchronize()
    except RuntimeError:  # what reads where nothing is leaves no device to the tests after it
        os._exit(1)  # pytest-xdist names the test, and starts another process
    if dist.is_initialized():  # not if a test wanted none
        dist.destroy_process_group()


# -------------------------------------------------------------------------------- the same step
class Block(nn.Module):
    def __init__(self, width: int, dropout: float, recomputed: bool) -> None:
        super().__init__()
        self.ln, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.down, self.drop = nn.Linear(4 * width, width), nn.Dropout(dropout)
        self.recomputed = recomputed

    def inner(self, x: Tensor) -> Tensor:
        q = self.ln(x)
        mixed = (q @ q.transpose(-1, -2)).softmax(-1) @ q
        return x + self.drop(self.down(F.gelu(self.up(mixed))))

    def forward(self, x: Tensor) -> Tensor:
        if self.recomputed:
            return torch_checkpoint(self.inner, x, use_reentrant=False)  # pyright: ignore
        return self.inner(x)


class Net(nn.Module):
    def __init__(self, width: int = 16, dropout: float = 0.0, *, recomputed: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(Block(width, dropout, recomputed) for _ in range(3))
        self.head = nn.Linear(width, 11)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return F.cross_entropy(logits.view(-1, 11), targets.view(-1))


def net(dtype: torch.dtype = torch.float64, **words: Any) -> Net:
    torch.manual_seed(0)
    return Net(**words).to(DEVICE, dtype)


def batches(count: int, rows: int = 8) -> list[Batch]:
    draw = torch.Generator().manual_seed(1)
    return [
        (
            torch.randint(11, (rows, 7), generator=draw).to(DEVICE),
            torch.randint(11, (rows, 7), generator=draw).to(DEVICE),
        )
        for _ in range(count)
    ]


def plain(module: Net, steps: list[Batch], opt: Callable[[Any], Any], clip: float | None) -> Any:
    module = copy.deepcopy(module)
    optimizer = opt(module.parameters())
    for batch in steps:
        module(*batch).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return {name: x.detach() for name, x in module.named_parameters()}


def build(module: Net, opt: Any, cfg: fzero.Config) -> tuple[fzero.TrainStep, Any, Any]:
    apply, params = fzero.functionalize(copy.deepcopy(module))
    step_fn = fzero.make_train_step(lambda params, batch: apply(params, *batch), opt, cfg)
    return step_fn, *step_fn.init(params)


def trained(module: Net, steps: list[Batch], opt: Any, cfg: fzero.Config) -> tuple[Any, Any]:
    step_fn, params, state = build(module, opt, cfg)
    for batch in steps:
        params, state = step_fn(params, state, batch)
    return fzero.unshard(params), state


def assert_near(found: Any, wanted: Any, rtol: float = 1e-9) -> None:
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        assert found[name].device == x.device, name
        torch.testing.assert_close(found[name], x, rtol=rtol, atol=rtol)


def assert_same(found: Any, wanted: Any) -> None:
    for a, b in zip(leaves(found), leaves(wanted), strict=True):
        if isinstance(a, Tensor):
            assert torch.equal(local_tensor(a), local_tensor(b))


@pytest.mark.parametrize("executor", ["traced", "eager", "inductor"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_equals_plain_torch(stage: int, executor: Any) -> None:
    steps = batches(4)
    wanted = plain(net(), steps, lambda p: torch.optim.SGD(p, 0.3), 0.5)
    cfg = fzero.Config(stage, executor=executor, clip_norm=0.5, accum_steps=2)
    assert_near(trained(net(), steps, fzero.optim.sgd(0.3), cfg)[0], wanted)


@pytest.mark.parametrize("stage", STAGES)
def test_adamw_equals_torchs(stage: int) -> None:
    steps = batches(4)
    wanted = plain(net(), steps, lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1), None)
    opt = fzero.optim.adamw(1e-2, weight_decay=0.1)
    assert_near(trained(net(), steps, opt, fzero.Config(stage))[0], wanted)


def optimizers() -> dict[str, Any]:
    return {
        "lion": fzero.optim.lion(1e-3),
        "lamb": fzero.optim.lamb(1e-2),
        "adafactor": fzero.optim.adafactor(1e-2),
        "muon": fzero.optim.muon(1e-2),
        "ema": fzero.optim.chain(fzero.optim.adam(1e-2), fzero.optim.ema(0.9)),
        "schedule": fzero.optim.adamw(fzero.optim.warmup_cosine(1e-2, 2, 4)),
    }


@pytest.mark.parametrize("name", list(optimizers()))
def test_an_optimizer_as_on_the_cpu(name: str) -> None:
    steps = batches(3)
    found, _ = trained(net(), steps, optimizers()[name], fzero.Config(3))
    on_cpu = [(x.cpu(), y.cpu()) for x, y in steps]
    wanted, _ = trained(net().cpu(), on_cpu, optimizers()[name], fzero.Config(3))
    for key, x in wanted.items():
        torch.testing.assert_close(found[key].cpu(), x, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_reduced_precision_learns(precision: Any, stage: int) -> None:
    steps = batches(1) * 30
    module = net(torch.float32)
    opt = fzero.optim.adamw(1e-2)
    cfg = fzero.Config(stage, precision=precision, clip_norm=1.0)
    step_fn, params, state = build(module, opt, cfg)
    params, state = step_fn(params, state, steps[0])
    first = float(state.metrics["loss"])
    for batch in steps:
        params, state = step_fn(params, state, batch)
    assert float(state.metrics["loss"]) < 0.75 * first
    assert all(x.device == DEVICE for x in map(local_tensor, leaves(params)))


def test_an_overflow_skips_a_step() -> None:
    cfg = fzero.Config(3, precision="fp16", loss_scale=fzero.LossScale(init=2.0**40, window=1000))
    step_fn, params, state = build(net(torch.float32), fzero.optim.sgd(0.1), cfg)
    before = fzero.unshard(params)
    before = {name: x.clone() for name, x in before.items()}
    params, state = step_fn(params, state, batches(1)[0])
    assert bool(state.metrics["skipped"])
    assert_same(fzero.unshard(params), before)
    for _ in range(60):
        params, state = step_fn(params, state, batches(1)[0])
    assert not bool(state.metrics["skipped"])
    assert float(state.metrics["loss_scale"]) < 2.0**40


# ----------------------------------------------------------------------------------- randomness
@pytest.mark.parametrize("executor", ["traced", "eager"])
def test_dropout_is_a_function_of_the_state(executor: Any) -> None:
    cfg = fzero.Config(3, executor=executor, donate=False)
    step_fn, params, state = build(net(dropout=0.5), fzero.optim.sgd(0.1), cfg)
    batch = batches(1)[0]
    first = step_fn(params, state, batch)
    torch.rand(100, device=DEVICE)
    again = step_fn(params, state, batch)
    assert_same(first[0], again[0])
    other = step_fn(*first, batch)
    assert not torch.equal(other[1].metrics["loss"], first[1].metrics["loss"])


def test_masks_are_drawn_again_where_forward_is_computed_again() -> None:
    steps = batches(3)
    states = [
        trained(net(dropout=0.5, recomputed=recomputed), steps, fzero.optim.sgd(0.1), cfg)[0]
        for recomputed, cfg in (
            (False, fzero.Config(3)),
            (True, fzero.Config(3)),
            (False, fzero.Config(3, remat={"blocks.*": "nothing"})),
        )
    ]
    assert_same(states[0], states[1])
    assert_same(states[0], states[2])


def test_the_users_generator_is_left_alone() -> None:
    step_fn, params, state = build(net(dropout=0.5), fzero.optim.sgd(0.1), fzero.Config(3))
    torch.manual_seed(3)
    wanted = torch.rand(3, device=DEVICE)
    torch.manual_seed(3)
    for batch in batches(3):
        params, state = step_fn(params, state, batch)
    assert torch.equal(torch.rand(3, device=DEVICE), wanted)


# --------------------------------------------------------------------------------------- graphs
@pytest.mark.parametrize("executor", ["traced", "inductor"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_graph_computes_what_its_program_does(stage: int, executor: Any) -> None:
    steps = batches(6)
    words: dict[str, Any] = {"clip_norm": 0.5, "accum_steps": 2, "executor": executor}
    opt = fzero.optim.adamw(fzero.optim.warmup_cosine(1e-2, 3, 10))
    wanted, _ = trained(net(), steps, opt, fzero.Config(stage, **words))
    step_fn, params, state = build(net(), opt, fzero.Config(stage, cuda_graph=True, **words))
    losses = []
    for batch in steps:
        params, state = step_fn(params, state, batch)
        losses.append(state.metrics["loss"])
    log = [x for x in step_fn.lower(params, state, steps[0]).log if x.startswith("CUDA graph")]
    assert log
    assert all("works on" in x for x in log), log
    assert_near(fzero.unshard(params), wanted, 1e-12)
    assert len({float(x) for x in losses}) == len(losses)  # none was written over


def test_a_graph_of_bf16_with_masters() -> None:
    steps = batches(5)
    opt = fzero.optim.adamw(1e-2)
    wanted, _ = trained(net(torch.float32), steps, opt, fzero.Config(3, precision="bf16"))
    cfg = fzero.Config(3, precision="bf16", cuda_graph=True)
    assert_same(trained(net(torch.float32), steps, opt, cfg)[0], wanted)


def test_graphs_take_turns_and_follow_what_moves() -> None:
    steps = batches(8)
    opt = fzero.optim.sgd(0.3, momentum=0.9)
    cfg = fzero.Config(3, cuda_graph=True)
    one, two = build(net(), opt, cfg), build(net(), opt, cfg)
    states = [one[1:], two[1:]]
    for number, batch in enumerate(steps):
        for which, (step_fn, *_) in enumerate((one, two)):
            states[which] = step_fn(*states[which], batch)
        if number == 4:  # as from a checkpoint: elsewhere
            states[0] = copy.deepcopy(states[0])
    wanted, _ = trained(net(), steps, opt, fzero.Config(3))
    assert_near(fzero.unshard(states[0][0]), wanted, 1e-12)
    assert_near(fzero.unshard(states[1][0]), wanted, 1e-12)


# ---------------------------------------------------------------------------------- host memory
@pytest.mark.parametrize("stage", STAGES)
def test_offloaded_state_is_pinned_and_changes_no_number(stage: int) -> None:
    steps = batches(4)
    opt = fzero.optim.adamw(1e-2)
    found, state = trained(net(torch.float32), steps, opt, fzero.Config(stage, offload="cpu"))
    wanted, _ = trained(net(torch.float32), steps, opt, fzero.Config(stage))
    assert_near(found, wanted, 1e-4)
    held = [x for x in map(local_tensor, leaves(state.inner)) if x.dim()]
    assert held
    assert all(x.device.type == "cpu" for x in held)
    assert all(x.is_pinned() for x in held)


def measured(cfg: fzero.Config) -> tuple[Any, int, int]:
    """Full parameters after three steps, and the third's peak: predicted and the allocator's."""
    gc.collect()
    x = torch.ones(2048, 256, device=DEVICE)
    F.linear(x, x, x[:, 0].contiguous())  # cuBLAS takes its workspace once
    del x
    before = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    module = Net(256).to(DEVICE)
    draw = torch.randint(11, (2, 64, 32), device=DEVICE)
    batch = (draw[0], draw[1])
    apply, params = fzero.functionalize(module)
    module.to("meta")
    step_fn = fzero.make_train_step(lambda p, b: apply(p, *b), fzero.optim.adamw(1e-2), cfg)
    params, state = step_fn.init(params)
    for _ in range(2):
        params, state = step_fn(params, state, batch)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    params, state = step_fn(params, state, batch)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    return fzero.unshard(params), step_fn.lower(params, state, batch).peak_bytes(), peak


@pytest.mark.parametrize("offload", [None, "activations"])
def test_a_limit_is_kept_and_changes_no_number(offload: Any) -> None:
    wanted, free, _ = measured(fzero.Config(3))
    limit = int(free * 0.75)
    found, limited, peak = measured(fzero.Config(3, memory_limit=limit, offload=offload))
    assert limited <= limit
    assert peak <= limit * 1.02
    assert_near(found, wanted, 1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_the_predicted_peak_is_the_allocators(stage: int) -> None:
    """In float32: torch's sums of bf16 over rows (a bias) take up to 16 MiB of their own."""
    _, said, peak = measured(fzero.Config(stage))
    assert abs(peak / said - 1) < 0.02, (peak, said)


# ---------------------------------------------------------------------------- functions of shards
def test_derivatives_equal_torch_funcs() -> None:
    module = net()
    apply, params = fzero.functionalize(module)
    batch = batches(1)[0]

    def loss(params: Any, batch: Batch) -> Tensor:
        return apply(params, *batch)

    params = {name: x.detach() for name, x in params.items()}
    cfg = fzero.Config(3)
    shards = fzero.shard(params, cfg)
    wanted, wanted_value = torch.func.grad_and_value(loss)(params, batch)
    value, grads = fzero.value_and_grad(loss, cfg)(shards, batch)
    assert_near(fzero.unshard(grads), wanted)
    torch.testing.assert_close(value, wanted_value)
    vectors = fzero.tree_random_like(shards, 3)
    on_cpu = fzero.tree_random_like(fzero.shard({k: x.cpu() for k, x in params.items()}, cfg), 3)
    for key, x in fzero.unshard(on_cpu).items():
        full = fzero.unshard(vectors)[key]
        assert full.device == DEVICE
        torch.testing.assert_close(full.cpu(), x)
    full = fzero.unshard(vectors)
    _, products = fzero.hvp(loss, cfg)(shards, vectors, batch)
    _, wanted = torch.func.jvp(lambda p: torch.func.grad(loss)(p, batch), (params,), (full,))
    assert_near(fzero.unshard(products), wanted)
    _, tangent = fzero.jvp(loss, cfg)(shards, vectors, batch)
    dot = fzero.tree_vdot(grads, vectors)
    torch.testing.assert_close(tangent, dot)
    out = fzero.sharded(loss, cfg, reduce="mean")(shards, batch)
    torch.testing.assert_close(out, wanted_value)


# ----------------------------------------------------------------------------------- the Engine
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_an_engine_equals_plain_torch(stage: int, recomputed: bool) -> None:
    steps = batches(4)
    wanted = plain(net(), steps, lambda p: torch.optim.SGD(p, 0.3), 0.5)
    cfg = fzero.Config(stage, clip_norm=0.5, accum_steps=2)
    engine: Any = fzero.Engine(net(recomputed=recomputed), fzero.optim.sgd(0.3), cfg)
    for x, y in steps:
        for half in (slice(0, 4), slice(4, 8)):
            loss = engine(x[half], y[half])
            loss.backward()
            engine.step()
    assert_near(engine.full_params(), wanted)
    assert engine.device == DEVICE
    engine.release()


def test_an_engine_in_bf16_with_offload_and_a_checkpoint(tmp_path: Path) -> None:
    steps = batches(6)

    def engine_of() -> Any:
        cfg = fzero.Config(3, precision="bf16", offload="cpu")
        return fzero.Engine(net(torch.float32), fzero.optim.adamw(1e-2), cfg)

    first = engine_of()
    for batch in steps[:3]:
        first.backward(first(*batch))
        first.step()
    fzero.checkpoint.save(tmp_path / "3", *first.state)
    for batch in steps[3:]:
        first.backward(first(*batch))
        first.step()
    second = engine_of()
    second.state = fzero.checkpoint.load(tmp_path / "3", *second.state)
    for batch in steps[3:]:
        second.backward(second(*batch))
        second.step()
    assert_same(second.full_params(), first.full_params())


# ---------------------------------------------------------------------------------- checkpoints
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_training_goes_on_from_a_checkpoint(stage: int, asynchronous: bool, tmp_path: Path) -> None:
    steps = batches(6)
    cfg = fzero.Config(stage, precision="bf16")
    opt = fzero.optim.adamw(1e-2)
    step_fn, params, state = build(net(torch.float32), opt, cfg)
    for batch in steps[:3]:
        params, state = step_fn(params, state, batch)
    fzero.checkpoint.save(tmp_path / "c" / "3", params, state, asynchronous=asynchronous)
    for batch in steps[3:]:  # in place, while it is written
        params, state = step_fn(params, state, batch)
    if asynchronous:
        fzero.checkpoint.wait()
    fresh, like, state_like = build(net(torch.float32), opt, cfg)
    other = fzero.checkpoint.load(tmp_path / "c" / "3", like, state_like)
    for batch in steps[3:]:
        other = fresh(*other, batch)
    assert_same(other[0], params)
    fzero.checkpoint.export_safetensors(tmp_path / "model.safetensors", params)


def test_a_program_is_saved(tmp_path: Path) -> None:
    batch = batches(1)[0]
    step_fn, params, state = build(net(), fzero.optim.sgd(0.1), fzero.Config(3))
    step_fn.lower(params, state, batch).save(tmp_path / "program")


# ---------------------------------------------------------------------------------- other faces
def test_deepspeeds_face() -> None:
    import fzero.compat.deepspeed as deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "fp16": {"enabled": True, "initial_scale_power": 8},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-3, "warmup_num_steps": 4}},
    }
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
    data = torch.randn(32, 8, dtype=torch.float16)
    engine, _, loader, _ = deepspeed.initialize(model=model, config=config, training_data=data)
    losses = []
    for _ in range(6):
        for batch in loader:
            loss = engine(batch.to(engine.device)).float().square().mean()
            engine.backward(loss)
            engine.step()
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    assert engine.device.type == DEVICE.type


def test_model_state_on_the_device() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    module = module.to(DEVICE, torch.float64)
    x = torch.randn(4, 3, 9, 9, device=DEVICE, dtype=torch.float64)
    reference = copy.deepcopy(module)
    apply, params, buffers = fzero.functionalize(module, buffers=True)

    def model_fn(params: Any, state: Any, x: Tensor) -> Any:
        out, state = apply(params, state, x)
        return out.square().mean(), state

    step_fn = fzero.make_train_step(model_fn, fzero.optim.sgd(0.1), fzero.Config(3))
    params, state = step_fn.init(params, buffers)
    optimizer = torch.optim.SGD(reference.parameters(), 0.1)
    for _ in range(3):
        params, state = step_fn(params, state, x)
        reference(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    wanted = dict(reference.named_parameters())
    assert_near(fzero.unshard(params), {k: v.detach() for k, v in wanted.items()})
    for name, value in reference.named_buffers():
        torch.testing.assert_close(state.model_state[name], value)


def test_batches_on_the_host_are_named() -> None:
    step_fn, params, state = build(net(), fzero.optim.sgd(0.1), fzero.Config(3))
    batch = tuple(x.cpu() for x in batches(1)[0])
    with pytest.raises(fzero.FzeroError, match="cpu"):
        step_fn(params, state, batch)


@contextlib.contextmanager
def no_waits() -> Iterator[None]:
    """What lets the host wait for the device raises an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "words",
    [
        *({"stage": stage} for stage in STAGES),
        {"clip_norm": 1.0, "accum_steps": 2},
        {"clip_norm": 1.0, "norm_type": math.inf},
        {"norm_type": 1.0},
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"on_nonfinite": "skip"},
        {"executor": "eager"},
        {"executor": "inductor"},
        {"cuda_graph": True},
        {"frozen": "table.*"},
    ],
    ids=str,
)
def test_steps_do_not_wait_for_the_device(words: dict[str, Any]) -> None:
    opt = fzero.optim.adamw(1e-2)
    step_fn, params, state = build(net(torch.float32), opt, fzero.Config(**words))
    steps = batches(6)
    for batch in steps[:3]:
        params, state = step_fn(params, state, batch)
    with no_waits():
        for batch in steps[3:]:
            params, state = step_fn(params, state, batch)


@pytest.mark.parametrize("name", [*optimizers()])
def test_optimizers_do_not_wait_for_the_device(name: str) -> None:
    step_fn, params, state = build(net(torch.float32), optimizers()[name], fzero.Config(3))
    steps = batches(6)
    for batch in steps[:3]:
        params, state = step_fn(params, state, batch)
    with no_waits():
        for batch in steps[3:]:
            params, state = step_fn(params, state, batch)


@pytest.mark.parametrize("stage", STAGES)
def test_an_engines_steps_do_not_wait_for_the_device(stage: int) -> None:
    cfg = fzero.Config(stage, clip_norm=1.0, precision="bf16")
    engine: Any = fzero.Engine(net(torch.float32), fzero.optim.adamw(1e-2), cfg)
    for number, batch in enumerate(batches(6)):
        with no_waits() if number > 2 else contextlib.nullcontext():
            engine(*batch).backward()
            engine.step()
    engine.release()


# ------------------------------------------------------------------------ two ranks of one device
def _on_two(device: str, stage: int, executor: Any) -> Any:
    where = torch.device(device)
    torch.cuda.set_device(where)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    module = Net().to(where, torch.float64)
    apply, params = fzero.functionalize(module)
    mine = [tuple(x.to(where).chunk(2)[dist.get_rank()] for x in pair) for pair in batches(3)]
    cfg = fzero.Config(stage, executor=executor, clip_norm=0.5)
    step_fn = fzero.make_train_step(lambda p, b: apply(p, *b), fzero.optim.sgd(0.3), cfg)
    params, state = step_fn.init(params)
    for batch in mine:
        params, state = step_fn(params, state, batch)
    found = {k: x.cpu() for k, x in fzero.unshard(params).items()}
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize(
    ("stage", "executor"), [*itertools.product((0, 2, 3), ("traced", "eager"))]
)
def test_two_ranks_of_one_device_over_gloo(stage: int, executor: Any) -> None:
    wanted = plain(net(), batches(3), lambda p: torch.optim.SGD(p, 0.3), 0.5)
    for found in run_fresh(2, _on_two, str(DEVICE), stage, executor, timeout=150):
        for name, x in wanted.items():
            torch.testing.assert_close(found[name], x.cpu(), rtol=1e-9, atol=1e-9)


def test_a_step_of_eight_ranks_that_are_not_there() -> None:
    dist.destroy_process_group()
    with fake_ranks(8, rank=1):
        step_fn, params, state = build(net(torch.float32), fzero.optim.adamw(1e-2), fzero.Config(3))
        for batch in batches(3):
            params, state = step_fn(params, state, batch)
        assert step_fn.lower(params, state, batches(1)[0]).collectives()


def test_simulation_beside_a_device() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module = Net().to("meta")
        apply, params = fzero.functionalize(module)
        batch = (torch.zeros(4, 7, dtype=torch.long, device="meta"),) * 2
        dist.destroy_process_group()
        report = fzero.simulate(
            lambda p, b: apply(p, *b), fzero.optim.adamw(1e-3), fzero.Config(3), params, batch, 64
        )
    assert report.peak_bytes > 0
