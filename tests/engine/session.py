"""Random programs, operation by operation, on an engine and on plain torch beside it."""

import contextlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fzero
from tests.engine.models import Lost, Net, TiledLoss
from tests.engine.parity import LR, SGD, Plain, build, compare, data

WAYS = ["plain", "re", "non", "tiled", "bypassing"]
ROUTES = ["backward", "engine.backward", "engine.scale", "autograd.backward"]


class Anything(nn.Module):
    """A net whose middle is computed, recomputed or torn to tiles, and which fails where told."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.middle, self.head = Net(), nn.Linear(5, 5), nn.Linear(5, 3)
        self.fails = ""

    def forward(self, x: Tensor, way: str, times: int) -> Tensor:
        h = self.net(x, times)
        h.register_hook(self._hook) if h.requires_grad else None
        if way in ("re", "non"):
            h = checkpoint(self._middle, h, use_reentrant=way == "re")  # pyright: ignore
        else:
            h = self._middle(h)
        if self.fails == "forward":
            raise Lost
        if way == "tiled":
            return TiledLoss.apply(h, self.head)
        return self.head(h).square().mean()  # pyright: ignore

    def _middle(self, h: Tensor) -> Tensor:
        return torch.tanh(self.middle(h))

    def _hook(self, grad: Tensor) -> None:
        if self.fails == "backward":
            raise Lost


class Session:
    """An engine and, for every rank, plain torch: whatever is done is done to all of them.

    Operations take numbers, and do nothing where there is nothing to do: any list of them is a
    program.
    """

    def __init__(self, rank: int, world: int, **fields: Any) -> None:
        self.rank, self.world, self.cfg = rank, world, fzero.Config(**fields)
        self.engine = fzero.Engine(build(Anything), SGD(), self.cfg)
        self.plain = [Plain(build(Anything), self.cfg.accum_steps) for _ in range(world)]
        # losses that backward can be called on: their forward, the engine's, and plain torch's
        self.live: list[tuple[int, Tensor, list[Tensor]]] = []
        self.early: dict[int, list[list[Tensor | None]]] = {}
        self.reached: set[int] = set()
        self.moved = False
        self.forwards = self.updates = 0
        self.paused = contextlib.ExitStack()
        self.is_paused = False

    def run(self, program: Sequence[tuple[str, int, int]]) -> None:
        for operation, a, b in program:
            self.do(operation, a, b)
        self.compare()

    def do(self, operation: str, a: int, b: int) -> None:
        """An operation by its name, or a way to go forward."""
        if operation in WAYS:
            self.forward(operation, b)
        else:
            getattr(self, operation)(a, b)

    def forward(self, way: str, b: int) -> None:
        varied = b % 2
        self.forwards += 1

        def loss_of(net: Any, rank: int) -> Tensor:
            x = data(rank, self.forwards).requires_grad_()
            loss = net(x, way, 1 + varied * rank)
            if way == "bypassing":
                loss = loss + net.module.net.outside.exp().mean() * (rank + 1)
            return loss

        ours = loss_of(self.engine, self.rank)
        theirs = []
        self.early[self.forwards] = []
        for rank, net in enumerate(self.plain):
            # an engine keeps what forward makes for the backward that reaches it
            params = list(net.module.parameters())
            before = [p.grad for p in params]
            net.module.zero_grad()
            theirs.append(loss_of(net, rank))
            self.early[self.forwards].append([p.grad for p in params])
            for p, grad in zip(params, before, strict=True):
                p.grad = grad
        self.live.append((self.forwards, ours, theirs))

    def look(self, a: int, b: int) -> None:
        """Forwards that nobody goes back from: right, and nothing comes of them."""
        engine, x, way = self.engine, data(self.rank, a), WAYS[a % 3]
        with torch.no_grad():
            want = self.plain[self.rank](x, way, 2)
        before = engine.is_gradient_accumulation_boundary()
        outs = []
        if b % 5 == 0:
            with torch.no_grad():
                outs.append(engine(x, way, 2))
        elif b % 5 == 1:
            with torch.inference_mode():
                outs.append(engine.module(x, way, 2))
        elif b % 5 == 2:
            with engine.local_forward(), torch.no_grad():
                outs += [engine(x, way, 2) for _ in range((a + self.rank) % 3)]
        elif b % 5 == 3:
            with engine.gathered(["middle.weight", "net.tied.weight"]), torch.no_grad():
                outs.append(engine.eval()(x, way, 2))
            engine.train()
        else:
            with contextlib.suppress(Lost), engine.local_forward():
                with torch.enable_grad():  # it has a graph, and nobody goes back through it
                    outs.append(engine(x, "plain", 2).detach())
                with pytest.raises(fzero.BackwardError, match="local_forward"):
                    engine.module.middle.weight.sum().backward()
                raise Lost
        for out in outs:  # updates before it may have added up in another order
            torch.testing.assert_close(out, want, rtol=0, atol=1e-9)
        assert b % 5 == 4 or engine.is_gradient_accumulation_boundary() == before

    def write(self, a: int, b: int) -> None:
        """One rank writes to a parameter, or all load others, between two backwards."""
        self.live.clear()  # they were computed from the parameters of before
        name, engine = ("net.tied.weight", "middle.bias", "net.gain")[a % 3], self.engine
        modules = [net.module for net in self.plain]
        if b % 3 == 0:
            state = engine.state_dict()
            assert state.keys() == modules[0].state_dict().keys()
            state = {key: 0.9 * x for key, x in state.items()}
            assert engine.load_state_dict(state) == ([], [])
            for module in modules:
                module.load_state_dict(state)
            return
        chosen = b % self.world
        with torch.no_grad():
            with engine.gathered(name, modifier_rank=chosen) as params:
                (param,) = params.values()
                param.mul_(0.9 if self.rank == chosen else 7.0)
            for module in modules:
                module.get_parameter(name).mul_(0.9)
        block = engine.gathered(name, modifier_rank=chosen)
        with contextlib.suppress(Lost), torch.no_grad(), block as params:
            params.popitem()[1].zero_()
            raise Lost

    def backward(self, a: int, b: int) -> None:
        if not self.live:
            return
        at, retain = a % len(self.live), b % 3 == 0
        number, ours, theirs = self.live[at]
        if "TiledLoss" in type(ours.grad_fn).__name__ and b % 2:
            ours, theirs = ours * 1.0, [x * 1.0 for x in theirs]
        self._call(ROUTES[(a + b) % len(ROUTES)], ours, retain)
        for x in theirs:
            x.backward(retain_graph=retain)
        if not retain:
            del self.live[at]
        self._moved({number})

    def backward_of_two(self, a: int, b: int) -> None:
        if len(self.live) < 2:
            return
        (one, x, xs), (two, y, ys) = self.live.pop(a % len(self.live)), self.live.pop()
        self._call(ROUTES[b % len(ROUTES)], x + 2 * y, False)
        for u, v in zip(xs, ys, strict=True):
            (u + 2 * v).backward()
        self._moved({one, two})

    def only_grad(self, a: int, b: int) -> None:
        if self.live:
            _, ours, _ = self.live[a % len(self.live)]
            weight = self.engine.module.middle.weight
            torch.autograd.grad(ours, [weight], retain_graph=True, allow_unused=True)

    def fail(self, a: int, b: int) -> None:
        """An exception in a forward, or in the backward of a forward that is still there."""
        self.engine.module.fails = "forward" if a % 2 else "backward"
        if a % 2:
            with pytest.raises(Lost):
                self.engine(data(self.rank), WAYS[b % 4], 1)
        elif self.live:
            _, ours, _ = self.live[b % len(self.live)]
            with pytest.raises(Lost):
                self._call(ROUTES[(a // 2) % 2 + 1], ours, True)
        self.engine.module.fails = ""

    def pause(self, a: int, b: int) -> None:
        if self.is_paused:
            self.paused.close()
        else:
            self.paused.enter_context(self.engine.no_sync())
        self.is_paused = not self.is_paused

    def step(self, a: int, b: int) -> None:
        if self.is_paused or not self.moved:
            with pytest.raises(fzero.BackwardError, match=r"no_sync|no backward"):
                self.engine.step()
            return
        if b % 3 == 0:
            self.compare()
        self.engine.step()
        self.moved = False
        if self.cfg.accum_steps == 1 or len(self.reached) >= self.cfg.accum_steps:
            grads = self._wanted()
            with torch.no_grad():
                for net in self.plain:
                    for name, p in net.module.named_parameters():
                        grad = grads[name]
                        p -= LR * (torch.zeros_like(p) if grad is None else grad)
            self.updates += 1
            self.live.clear()  # they were computed from the parameters of before
            self._clear()
            for name, p in self.plain[0].module.named_parameters():
                found = self.engine.full_params()[name]
                torch.testing.assert_close(found, p.detach(), rtol=0, atol=1e-9)
        assert int(self.engine.state[1].step) == self.updates

    def zero_grad(self, a: int, b: int) -> None:
        self.engine.zero_grad()
        self._clear()

    def compare(self, a: int = 0, b: int = 0) -> None:
        compare(self.engine, self._wanted(), f"{self.cfg}", 1e-9)
        if not self.moved:
            return
        count = len(self.reached)
        assert self.engine.is_gradient_accumulation_boundary() or count < self.cfg.accum_steps

    def _call(self, route: str, loss: Tensor, retain: bool) -> None:
        engine = self.engine
        if self.cfg.loss_scale is not None and route in ("backward", "autograd.backward"):
            loss = engine.scale(loss)
        if route == "engine.backward":
            engine.backward(loss, retain_graph=retain)
        elif route == "engine.scale":
            engine.scale(loss).backward(retain_graph=retain)
        elif route == "backward":
            loss.backward(retain_graph=retain)
        else:
            torch.autograd.backward([loss], retain_graph=retain)

    def _moved(self, forwards: set[int]) -> None:
        for forward in forwards:
            for net, grads in zip(self.plain, self.early.pop(forward, []), strict=False):
                for p, grad in zip(net.module.parameters(), grads, strict=True):
                    if grad is not None:
                        p.grad = grad if p.grad is None else p.grad + grad
        self.reached |= forwards
        self.moved = True

    def _clear(self) -> None:
        for net in self.plain:
            net.module.zero_grad()
        self.reached, self.moved = set(), False

    def _wanted(self) -> dict[str, Tensor | None]:
        total: dict[str, Tensor | None] = {}
        for net in self.plain:
            for name, p in net.module.named_parameters():
                held = total.setdefault(name, None)
                if p.grad is not None:
                    part = p.grad / self.world / self.cfg.accum_steps
                    total[name] = part if held is None else held + part
        return total
