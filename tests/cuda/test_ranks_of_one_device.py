"""NCCL between ranks: two processes that share a device, of which NCCL believes that it is two.

NCCL refuses ranks of one device on one host. Whether it is one host `NCCL_HOSTID` says; ranks of
several hosts talk through sockets, here on the loopback. Two processes take turns on a device, so
a collective takes milliseconds: this is for values, order and errors, not for speed.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fzero
from fzero.distributed.ragged import is_supported
from tests.cuda.test_one_device import (
    DEVICE,
    Batch,
    Net,
    assert_near,
    batches,
    net,
    plain,
)
from tests.ranks import LOOPBACK, run_fresh

pytestmark = [
    pytest.mark.skipif(
        not (torch.cuda.is_available() and dist.is_nccl_available()),
        reason="torch sees no CUDA device, or was built without NCCL",
    ),
    pytest.mark.timeout(240),
]
STAGES = (0, 1, 2, 3)
LAYOUTS = ("rows", "flat") if is_supported() else ("rows",)
WORLD = 2


def _join(backend: str = "cpu:gloo,cuda:nccl") -> None:
    os.environ |= {
        "NCCL_HOSTID": f"host-of-{os.environ['RANK']}",
        "NCCL_SOCKET_IFNAME": LOOPBACK,
        "NCCL_IB_DISABLE": "1",
    }
    torch.cuda.set_device(DEVICE)
    dist.init_process_group(backend)


def _mine(steps: list[Batch]) -> list[Batch]:
    rank = dist.get_rank()
    return [(x.chunk(WORLD)[rank], y.chunk(WORLD)[rank]) for x, y in steps]


def _sgd(params: Any) -> torch.optim.SGD:
    return torch.optim.SGD(params, 0.3)


def _plain(module: Net) -> Any:
    return plain(module, batches(4), _sgd, 0.5)


def _trained(cfg: fzero.Config, module: Net, steps: list[Batch]) -> tuple[Any, Any, Any]:
    apply, params = fzero.functionalize(module)
    step_fn = fzero.make_train_step(lambda p, b: apply(p, *b), fzero.optim.sgd(0.3), cfg)
    params, state = step_fn.init(params)
    for batch in steps:
        params, state = step_fn(params, state, batch)
    return step_fn, params, state


def _steps(stage: int, executor: Any) -> list[str]:
    _join()
    wanted = _plain(net())
    ran = []
    for layout in LAYOUTS:
        for graph in (False, True)[: 2 if executor != "eager" else 1]:
            # compiling takes its time
            for accum_steps in (1, 2) if executor != "inductor" else (2,):
                words: dict[str, Any] = {"layout": layout, "executor": executor}
                words |= {"accum_steps": accum_steps, "clip_norm": 0.5, "cuda_graph": graph}
                cfg = fzero.Config(stage, **words)
                _, params, state = _trained(cfg, net(), _mine(batches(4)))
                assert_near(fzero.unshard(params), wanted)
                assert torch.isfinite(state.metrics["loss"])
                ran.append(str(words))
    dist.destroy_process_group()
    return ran


@pytest.mark.parametrize("executor", ["traced", "eager", "inductor"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_equals_plain_torch(stage: int, executor: Any) -> None:
    found = run_fresh(WORLD, _steps, stage, executor, timeout=220)
    assert found[0] == found[1]
    assert found[0]


def _lives_on() -> None:
    """A graph that nobody lets go of, and a program that ends without a word."""
    _join()
    _lives_on.kept = _trained(fzero.Config(3, cuda_graph=True), net(), _mine(batches(4)))  # pyright: ignore
    (step_fn, params, state), batch = _lives_on.kept, _mine(batches(1))[0]  # pyright: ignore
    log = [x for x in step_fn.lower(params, state, batch).log if x.startswith("CUDA graph")]
    assert log
    assert all("works on" in x for x in log), log


@pytest.mark.parametrize("destroyed", [True, False])
def test_graphs_that_live_on_let_a_program_end(destroyed: bool) -> None:
    program = (
        "import torch.distributed as dist\n"
        "from tests.cuda.test_ranks_of_one_device import _lives_on\n"
        "_lives_on()\n" + "dist.destroy_process_group()\n" * destroyed
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={WORLD}", "--no-python", sys.executable, "-c", program]
    subprocess.run(command, check=True, timeout=150)


def _nccl_alone() -> None:
    _join("nccl")
    wanted = _plain(net())
    _, params, _ = _trained(fzero.Config(3, clip_norm=0.5), net(), _mine(batches(4)))
    assert_near(fzero.unshard(params), wanted)
    dist.destroy_process_group()


def test_a_group_of_nccl_alone() -> None:
    run_fresh(WORLD, _nccl_alone, timeout=120)


def _nccl_alone_with_state_on_the_host(folder: str) -> None:
    """What is saved, offloaded and gathered to the host, though no group moves its memory."""
    _join("nccl")
    steps = _mine(batches(4))
    for stage in (2, 3):
        for layout in LAYOUTS:
            cfg = fzero.Config(stage, clip_norm=0.5, layout=layout, offload="cpu")
            _, params, state = _trained(cfg, net(), steps)
            wanted = _plain(net())
            assert_near(fzero.unshard(params), wanted)
            for asynchronous in (False, True):
                path = f"{folder}/{stage}-{layout}-{asynchronous}"
                fzero.checkpoint.save(path, params, state, asynchronous=asynchronous)
                fzero.checkpoint.wait()
                _, like, state_like = _trained(cfg, net(), [])
                again = fzero.checkpoint.load(path, like, state_like)
                assert_near(fzero.unshard(again[0]), wanted)
            fzero.checkpoint.export_safetensors(f"{folder}/{stage}-{layout}.safetensors", params)
            engine: Any = fzero.Engine(net(), fzero.optim.sgd(0.3), fzero.Config(stage))
            for x, y in steps:
                engine(x, y).backward()
                engine.step()
            assert_near(engine.full_params(), plain(net(), batches(4), _sgd, None))
            held = engine.state_dict()
            assert held.keys() == dict(net().named_parameters()).keys()
            engine.load_state_dict(held)
            engine.release()
    dist.destroy_process_group()


def test_a_group_of_nccl_alone_with_state_on_the_host(tmp_path: Path) -> None:
    run_fresh(WORLD, _nccl_alone_with_state_on_the_host, str(tmp_path), timeout=220)


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 192)

    def forward(self, x: Any) -> Any:
        q, k, v = (y.unflatten(-1, (4, 16)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)


def _masks() -> tuple[float, bool]:
    """Ranks draw masks of their own in attention; computed again they are the same."""
    _join()
    torch.manual_seed(0)
    module = nn.Sequential(_Attention()).to(DEVICE, torch.bfloat16)
    x = torch.randn(4, 16, 64, device=DEVICE, dtype=torch.bfloat16)
    finals, losses = [], []
    for words in ({}, {"remat": {"0": "nothing"}}):
        apply, params = fzero.functionalize(module)
        words: dict[str, Any]

        def loss(params: Any, x: Any, apply: Any = apply) -> Any:
            found = apply(params, x).float().square().mean()
            return found, found

        cfg = fzero.Config(3, has_aux=True, **words)
        step_fn = fzero.make_train_step(loss, fzero.optim.sgd(0.1), cfg)
        params, state = step_fn.init(params)
        params, state = step_fn(params, state, x)
        finals.append(fzero.unshard(params))
        losses.append(float(state.metrics["aux"]))
    same = all(torch.equal(finals[0][k], v) for k, v in finals[1].items())
    dist.destroy_process_group()
    return losses[0], same


def test_ranks_draw_masks_of_their_own() -> None:
    (one, same), (two, also) = run_fresh(WORLD, _masks, timeout=150)
    assert same
    assert also
    assert one != two


def _engines() -> None:
    _join()
    wanted = _plain(net())
    for stage in STAGES:
        for layout in LAYOUTS:
            cfg = fzero.Config(stage, clip_norm=0.5, accum_steps=2, layout=layout)
            engine: Any = fzero.Engine(net(), fzero.optim.sgd(0.3), cfg)
            for x, y in _mine(batches(4)):
                for half in (slice(0, 2), slice(2, 4)):
                    engine(x[half], y[half]).backward()
                    engine.step()
            assert_near(engine.full_params(), wanted)
            engine.release()
    dist.destroy_process_group()


def test_engines_equal_plain_torch() -> None:
    run_fresh(WORLD, _engines, timeout=220)


def _recomputed_in_bf16() -> None:
    """Recomputation and prefetch change nothing; nor does offload, over pinned memory."""
    _join()
    finals = []
    ways: list[dict[str, Any]] = [{}, {"remat": {"blocks.*": "nothing"}}, {"offload": "cpu"}]
    for words in [*ways, {"prefetch": 0}]:
        for layout in LAYOUTS:
            cfg = fzero.Config(3, precision="bf16", layout=layout, **words)
            apply, params = fzero.functionalize(net(torch.float32))
            opt = fzero.optim.adamw(1e-2)
            step_fn = fzero.make_train_step(lambda p, b, f=apply: f(p, *b), opt, cfg)
            params, state = step_fn.init(params)
            for batch in _mine(batches(4)):
                params, state = step_fn(params, state, batch)
            finals.append({k: x.float() for k, x in fzero.unshard(params).items()})
    for other in finals[1:]:
        for name, x in finals[0].items():
            torch.testing.assert_close(other[name], x, rtol=1e-2, atol=1e-3)
    dist.destroy_process_group()


def test_ways_to_compute_in_bf16() -> None:
    run_fresh(WORLD, _recomputed_in_bf16, timeout=220)


def _functions() -> None:
    _join()
    apply, params = fzero.functionalize(net())
    whole = batches(1)[0]

    def loss(params: Any, batch: Batch) -> Tensor:
        return apply(params, *batch)

    params = {name: x.detach() for name, x in params.items()}
    wanted, value = torch.func.grad_and_value(loss)(params, whole)
    for layout in LAYOUTS:
        cfg = fzero.Config(3, layout=layout)
        shards = fzero.shard(params, cfg)
        found, grads = fzero.value_and_grad(loss, cfg)(shards, _mine([whole])[0])
        torch.testing.assert_close(found, value)
        assert_near(fzero.unshard(grads), wanted)
        vectors = fzero.tree_random_like(shards, 3)
        full = fzero.unshard(vectors)
        _, products = fzero.hvp(loss, cfg)(shards, vectors, _mine([whole])[0])
        want: Any = torch.func.jvp(lambda p: torch.func.grad(loss)(p, whole), (params,), (full,))
        assert_near(fzero.unshard(products), want[1])
    dist.destroy_process_group()


def test_functions_of_shards() -> None:
    run_fresh(WORLD, _functions, timeout=220)


def _checkpoints(folder: str) -> None:
    _join()
    steps = _mine(batches(6))
    for stage in (2, 3):
        for asynchronous in (False, True):
            cfg, path = fzero.Config(stage, precision="bf16"), f"{folder}/{stage}-{asynchronous}"
            step_fn, params, state = _trained(cfg, net(torch.float32), steps[:3])
            fzero.checkpoint.save(path, params, state, asynchronous=asynchronous)
            for batch in steps[3:]:  # in place, while it is written
                params, state = step_fn(params, state, batch)
            if asynchronous:
                fzero.checkpoint.wait()
            fresh, like, state_like = _trained(cfg, net(torch.float32), [])
            again: Any = fzero.checkpoint.load(path, like, state_like)
            for batch in steps[3:]:
                again = fresh(*again, batch)
            mine, again = fzero.unshard(params), fzero.unshard(again[0])
            assert all(torch.equal(again[k], x) for k, x in mine.items())
    dist.destroy_process_group()


def test_training_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    run_fresh(WORLD, _checkpoints, str(tmp_path), timeout=220)


def _numbers_from_outside() -> None:
    """A scale on the device is read anew at each call, a number made of one is compared."""
    _join()
    scale, limit = torch.tensor(1.0, device=DEVICE), torch.tensor(4)
    x = torch.arange(12.0, device=DEVICE, dtype=torch.float64).view(6, 2) + dist.get_rank()

    def loss(params: Any, batch: Tensor) -> Tensor:
        return (batch[:limit] @ params["w"]).sum() * scale

    params = {"w": torch.ones(2, device=DEVICE, dtype=torch.float64)}
    fn = fzero.value_and_grad(loss, fzero.Config(0))
    shards = fzero.shard(params, fzero.Config(0))
    for rows, factor in ((4, 1.0), (4, 2.0), (2, 2.0), (6, 0.5)):
        limit.fill_(rows)
        scale.fill_(factor)
        found, grads = fn(shards, x)
        both = [torch.arange(12.0, dtype=torch.float64).view(6, 2) + rank for rank in range(WORLD)]
        wanted = sum(y[:rows].sum(0) for y in both) / WORLD * factor
        torch.testing.assert_close(fzero.unshard(grads)["w"].cpu(), wanted)
        torch.testing.assert_close(found.cpu(), wanted.sum())  # pyright: ignore
    dist.destroy_process_group()


def test_numbers_from_outside() -> None:
    run_fresh(WORLD, _numbers_from_outside, timeout=120)


def _other_parameters() -> str:
    """Rank 1 hands in another tree: both hear of it before a collective could hang."""
    _join()
    apply, params = fzero.functionalize(net())
    if dist.get_rank():
        params = {k: x for k, x in params.items() if not k.startswith("head")}
    cfg = fzero.Config(3)
    step_fn = fzero.make_train_step(lambda p, b: apply(p, *b), fzero.optim.sgd(0.3), cfg)
    with pytest.raises(fzero.RankMismatchError) as error:
        step_fn.init(params)
    _, params, _ = _trained(cfg, net(), _mine(batches(2)))  # and the device can go on
    assert_near(fzero.unshard(params), plain(net(), batches(2), _sgd, None))
    dist.destroy_process_group()
    return str(error.value)


def test_ranks_that_differ_hear_of_it() -> None:
    for said in run_fresh(WORLD, _other_parameters, timeout=150):
        assert "rank 1" in said
        assert "head" in said
