"""What a module leaves for its next call counts there in plain PyTorch: here it is refused, unless
nothing depends on it."""

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero import TraceError
from fzero.functional.functionalize import functionalize


class Net(nn.Module):
    """A layer, and `forward` as a function of the module and its input."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor], **attributes: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("frequencies", torch.linspace(0, 1, 3), persistent=False)
        for name, value in attributes.items():
            setattr(self, name, value)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def hidden(m: Any, x: Tensor) -> Tensor:
    y = m.layer(x)
    y = y if m.h is None else y + m.h[0]
    m.h = (y.detach().mean(0),)
    return y


def counter(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    return m.layer(x) * m.calls


def first_call(m: Any, x: Tensor) -> Tensor:
    y = m.layer(x)
    if not m.done:
        m.shift, m.done = y.detach().mean(0), True
    return y - m.shift


def average(m: Any, x: Tensor) -> Tensor:
    y = m.layer(x)
    m.mean = 0.9 * m.mean + 0.1 * y.detach().mean(0)
    return y - m.mean


def window(m: Any, x: Tensor) -> Tensor:
    y = m.layer(x)
    m.last.append(y.detach().mean())
    return y * sum(m.last)


def in_a_dict(m: Any, x: Tensor) -> Tensor:
    m.counts["calls"] = m.counts.get("calls", 0) + 1
    return m.layer(x) * m.counts["calls"]


def warm_up(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    return m.layer(x) * (1.0 if m.calls > 1000 else 0.5)


def every_third(m: Any, x: Tensor) -> Tensor:
    m.state["calls"] += 1
    return m.layer(x) * (2.0 if m.state["calls"] % 3 else 1.0)


CARRIED: dict[str, tuple[Callable[[], Net], str]] = {
    "hidden state": (lambda: Net(hidden, h=None), "'h'"),
    "counter": (lambda: Net(counter, calls=0), "'calls'"),
    "a first call": (lambda: Net(first_call, done=False, shift=0.0), "'done'"),
    "average": (lambda: Net(average, mean=0.0), "'mean'"),
    "window": (lambda: Net(window, last=deque(maxlen=2)), "'last'"),
    "a warm-up": (lambda: Net(warm_up, calls=0), "'calls'"),
    "every third call": (lambda: Net(every_third, state={"calls": 0}), "'state'"),
    "in a dict": (lambda: Net(in_a_dict, counts={}), "'counts'"),
}


def counts_only(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    m.seen.append(m.calls)
    m.warned = m.warned or True
    return m.layer(x)


def logs(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    y = m.layer(x)
    if m.calls % 100 == 0:
        m.seen.append((m.calls, y.mean().item()))
    if m.calls > 5:
        m.seen.append(m.calls)
    return y


def rotary(m: Any, x: Tensor) -> Tensor:
    if m.table is None or len(m.table) < len(x):
        m.rows = len(x)
        m.table = torch.outer(torch.arange(m.rows), m.frequencies).cos()
    return m.layer(x) * m.table[: len(x)]


def masks(m: Any, x: Tensor) -> Tensor:
    if x.shape not in m.known:
        m.known[x.shape] = torch.ones(len(x), len(x)).tril()
    return m.known[x.shape] @ m.layer(x)


def like(m: Any, x: Tensor) -> Tensor:
    if m.twos is None or m.twos.shape != x.shape:
        m.twos = torch.full_like(x, 2.0)
    return m.layer(x) * m.twos


def kept_for_others(m: Any, x: Tensor) -> Tensor:
    y = m.layer(x)
    m.before, m.now = m.now, y
    m.log.append(y.detach())
    return y + m.now.mean()


def emptied_first(m: Any, x: Tensor) -> Tensor:
    m.losses.clear()
    m.losses.append(m.layer(x).square().mean())
    return m.layer(x) + sum(m.losses)


FREE: dict[str, Callable[[], Net]] = {
    "counts that nothing reads": lambda: Net(counts_only, calls=0, seen=[], warned=False),
    "a log of each hundredth call": lambda: Net(logs, calls=0, seen=[]),
    "a rotary table": lambda: Net(rotary, table=None, rows=0),
    "masks by shape": lambda: Net(masks, known={}),
    "a constant like the input": lambda: Net(like, twos=None),
    "values for others": lambda: Net(kept_for_others, before=None, now=None, log=[]),
    "a list that is emptied first": lambda: Net(emptied_first, losses=[]),
}


def trained(make: Callable[[], Net], *, buffers: bool = True, steps: int = 3) -> Any:
    torch.manual_seed(0)
    net = make()
    cfg = fzero.Config(stage=0)
    if buffers:
        apply, params, state = functionalize(net, buffers=True)

        def model_fn(params: Any, state: Any, x: Tensor) -> Any:
            out, state = apply(params, state, x)
            return out.square().mean(), state

        step_fn = fzero.make_train_step(model_fn, fzero.optim.sgd(0.1), cfg)
        params, opt_state = step_fn.init(params, state)
    else:
        apply, params = functionalize(net)
        step_fn = fzero.make_train_step(
            lambda params, x: apply(params, x).square().mean(), fzero.optim.sgd(0.1), cfg
        )
        params, opt_state = step_fn.init(params)
    for rows in (4, 2, 5)[:steps]:
        params, opt_state = step_fn(params, opt_state, torch.ones(rows, 3))
    return fzero.unshard(params)


def plain(make: Callable[[], Net]) -> Any:
    torch.manual_seed(0)
    net = make()
    opt = torch.optim.SGD(net.parameters(), 0.1)
    for rows in (4, 2, 5):
        net(torch.ones(rows, 3)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    return dict(net.named_parameters())


@pytest.mark.parametrize("buffers", [True, False])
@pytest.mark.parametrize("name", CARRIED)
def test_what_the_next_call_would_compute_with_is_refused(name: str, buffers: bool) -> None:
    make, what = CARRIED[name]
    with pytest.raises(TraceError, match=f"leaves the attribute {what} of the module.*its next"):
        trained(make, buffers=buffers, steps=1)


@pytest.mark.parametrize("buffers", [True, False])
@pytest.mark.parametrize("name", FREE)
def test_what_nothing_depends_on_is_no_hindrance(name: str, buffers: bool) -> None:
    found, wanted = trained(FREE[name], buffers=buffers), plain(FREE[name])
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value)


def test_the_module_is_as_it_was_after_a_refusal() -> None:
    net = Net(counter, calls=0)
    apply, params = functionalize(net)
    for _ in range(2):
        with pytest.raises(TraceError, match="'calls'"):
            fzero.sharded(apply, fzero.Config(stage=0))(params, torch.ones(1, 3))
        assert net.calls == 0


def test_an_engine_keeps_what_its_module_writes() -> None:
    torch.manual_seed(0)
    net = Net(hidden, h=None)
    engine = fzero.Engine(net, fzero.optim.sgd(0.1))
    for rows in (4, 2, 5):
        engine(torch.ones(rows, 3)).square().mean().backward()
        engine.step()
    for key, value in plain(lambda: Net(hidden, h=None)).items():
        torch.testing.assert_close(engine.full_param(key), value)
