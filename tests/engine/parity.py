"""The same program on an engine and on plain torch: its gradients must be the same.

A program is a function of (net, rank) that runs forwards and backwards. `net` is an engine, or a
`Plain`, which has an engine's surface and nothing behind it. Plain torch runs the program once for
each rank, on a module of its own, and the mean of what these got is what every rank of the engine
must have: the gradient of the concatenated batch.
"""

import contextlib
import copy
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fzero

LR = 0.1
STAGES = (0, 1, 2, 3)
Program = Callable[[Any, int], None]


class Plain:
    """A module in plain torch that is called as an engine is."""

    def __init__(self, module: nn.Module, accum_steps: int = 1) -> None:
        self.module, self.accum_steps = module, accum_steps

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Any:
        # every gradient is divided in the end
        whole = loss if scale_wrt_gas else loss * self.accum_steps
        whole.backward(retain_graph=retain_graph)

    def scale(self, loss: Tensor) -> Tensor:
        return loss

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        yield


class SGD:
    """Of our own: the library's would be staged out for each of hundreds of engines."""

    def init(self, params: Any) -> tuple[()]:
        return ()

    def update(self, grads: Any, state: tuple[()], params: Any = None) -> Any:
        return {k: None if g is None else -LR * g for k, g in grads.items()}, state


def data(rank: int, i: int = 0, rows: int = 3, columns: int = 6) -> Tensor:
    """Rows that no other rank and no other micro-batch has."""
    generator = torch.Generator().manual_seed(1000 * rank + i)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64)


def build(make: Callable[[], nn.Module]) -> nn.Module:
    """The same module every time."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return make().double()


def wanted(
    make: Callable[[], nn.Module], program: Program, world: int, accum_steps: int = 1
) -> dict[str, Tensor | None]:
    """The gradients that every rank must have, by name; None where no rank has one."""
    total: dict[str, Tensor | None] = {}
    for rank in range(world):
        net = Plain(build(make), accum_steps)
        program(net, rank)
        for name, p in net.module.named_parameters():
            held = total.setdefault(name, None)
            if p.grad is not None:
                part = p.grad.detach().to_dense() / world / accum_steps
                total[name] = part if held is None else held + part
    return total


def compare(
    engine: fzero.Engine, want: dict[str, Tensor | None], where: str, tol: float = 1e-10
) -> None:
    """The engine's gradients are these."""
    for name, expected in want.items():
        found = engine.full_grad(name)
        if expected is None:
            assert found is None, f"{where}: {name} has a gradient, and should have none"
            continue
        assert found is not None, f"{where}: {name} has no gradient"
        assert found.shape == expected.shape
        worst = (found - expected).abs().max().item() if found.numel() else 0.0
        assert worst < tol, f"{where}: {name} is off by {worst:.1e}"


def here() -> tuple[int, int]:
    """This rank and the world, which is 1 without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def agrees(
    make: Callable[[], nn.Module],
    program: Program,
    configs: list[dict[str, Any]],
    steps: int = 2,
) -> None:
    """At each config the program's gradients are plain torch's, and so are the parameters after.

    The program runs `steps` times from the same parameters, so that what an engine remembers of one
    step can harm the next, with an update in between that is undone.
    """
    rank, world = here()
    wants: dict[int, Any] = {}
    problems: list[str] = []
    for fields in configs:
        # small: by default all of a model like these travels together
        cfg = fzero.Config(**{"bucket_mb": 1e-3, **fields})
        accum = cfg.accum_steps
        want = wants.get(accum)
        if want is None:
            want = wants[accum] = wanted(make, program, world, accum)
        try:
            module = build(make)
            before = {name: p.detach().clone() for name, p in module.named_parameters()}
            engine = fzero.Engine(module, SGD(), cfg)
            start = copy.deepcopy(engine.state)
            for turn in range(steps):
                program(engine, rank)
                compare(engine, want, f"{fields}, step {turn}")
                engine.step()
                after = engine.full_params()
                for name, old in before.items():
                    grad = want[name]
                    new = old if grad is None else old - LR * grad
                    torch.testing.assert_close(after[name], new, rtol=0, atol=1e-10)
                engine.state = start
        except Exception:
            if world > 1 and len(configs) > 1:
                raise  # other ranks may be elsewhere
            problems.append(f"{fields}\n{traceback.format_exc()}")
    assert not problems, "\n".join(problems)
