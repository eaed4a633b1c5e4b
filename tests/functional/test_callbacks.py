"""What backward calls runs with the tensors of the call that it belongs to."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import fzero
from fzero.errors import TransformOverError
from fzero.functional.callbacks import wrapping


# --------------------------------------------------------------------- modules that do such things
class Returns(torch.autograd.Function):
    """Runs `fn` again in backward, and returns the gradients of its parameters."""

    @staticmethod
    def forward(ctx: Any, fn: Any, x: Tensor, *params: Tensor) -> Tensor:  # pyright: ignore
        ctx.fn, ctx.params = fn, params
        ctx.save_for_backward(x)
        with torch.no_grad():
            return fn(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.fn(x)
        return None, *torch.autograd.grad(y, (x, *ctx.params), grad)


class SetsUp(torch.autograd.Function):
    """The same, in the style that torch.func takes."""

    @staticmethod
    def forward(fn: Any, x: Tensor, *params: Tensor) -> Tensor:  # pyright: ignore
        with torch.no_grad():
            return fn(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.fn, x, *ctx.params = inputs
        ctx.save_for_backward(x)

    backward = Returns.backward


class Accumulates(Returns):
    """As Megatron and DeepSpeed do it: what `fn` closes over gets its gradient on the side."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            torch.autograd.backward(ctx.fn(x), grad)
        return None, x.grad


class Notes(torch.autograd.Function):
    """block(x), whose backward reads an attribute that forward has set, as reversible layers do."""

    @staticmethod
    def forward(ctx: Any, block: Any, x: Tensor) -> Tensor:  # pyright: ignore
        ctx.block, block.power = block, 2
        ctx.save_for_backward(x)
        return block(x) ** block.power

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (ctx.block(x) ** ctx.block.power).backward(grad)
        return None, x.grad


class Reads(torch.autograd.Function):
    """x @ w.T, whose backward reads the weight from its module and calls nothing."""

    @staticmethod
    def forward(ctx: Any, module: nn.Linear, x: Tensor, w: Tensor) -> Tensor:  # pyright: ignore
        ctx.module = module
        ctx.save_for_backward(x)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        (x,) = ctx.saved_tensors
        return None, grad @ ctx.module.weight, grad.t() @ x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 5), nn.Linear(5, 3)
        self.power = 7
        self.shift: Tensor
        self.register_buffer("shift", torch.full((3,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))) + self.shift


def saved_by_recipe(block: Block, x: Tensor) -> Tensor:
    """Keeps no activation of `tanh`: its hook on saved tensors runs `up` again."""
    h = block.up(x)
    with saved_tensors_hooks(lambda t: None, lambda _: torch.tanh(block.up(x)).detach()):
        h = torch.tanh(h)
    return block.down(h) + block.shift


def hooked(block: Block, x: Tensor) -> Tensor:
    h = block.up(x)
    if h.requires_grad:
        h.register_hook(lambda grad: grad * block.up.bias.detach())
    return block.down(h)


def hooked_by_module(block: Block, x: Tensor) -> Tensor:
    """Its hook is set where the block is made."""
    return block(x)


WAYS: dict[str, Callable[[Block, Tensor], Tensor]] = {
    "returns": lambda block, x: Returns.apply(block, x, *block.parameters()),  # pyright: ignore
    "sets up": lambda block, x: SetsUp.apply(block, x, *block.parameters()),  # pyright: ignore
    "accumulates": lambda block, x: Accumulates.apply(block, x),  # pyright: ignore
    "notes": lambda block, x: Notes.apply(block, x),  # pyright: ignore
    "reads": lambda block, x: block.down(Reads.apply(block.up, x, block.up.weight)),  # pyright: ignore
    "saved by recipe": saved_by_recipe,
    "hooked": hooked,
    "hooked by module": hooked_by_module,
}


class Net(nn.Module):
    def __init__(self, way: str, shared: bool = False) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(2, 3), nn.Linear(3, 2)
        first = Block()
        self.blocks = nn.ModuleList([first, first if shared else Block()])
        self.way = WAYS[way]
        if way == "hooked by module":
            first.up.register_full_backward_hook(
                lambda up, into, out: (into[0] * up.weight.detach().sum(),)
            )

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = x + self.way(block, x)  # pyright: ignore
        return self.head(x).square().mean()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("executor", ["traced", "eager"])
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("accum", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_training_is_that_of_backward(way: str, executor: Any, stage: Any, accum: int) -> None:
    torch.manual_seed(0)
    net = Net(way, shared=accum == 2).double()
    plain = copy.deepcopy(net)
    batches = [torch.randn(4, 2, dtype=torch.float64) for _ in range(3)]
    optimizer = torch.optim.SGD(plain.parameters(), 0.5)
    for batch in batches:
        optimizer.zero_grad()
        for part in batch.chunk(accum):
            (plain(part) / accum).backward()
        optimizer.step()

    apply, params = fzero.functionalize(net)
    cfg = fzero.Config(stage=stage, executor=executor, accum_steps=accum)
    step = fzero.make_train_step(apply, fzero.optim.sgd(0.5), cfg)
    params, state = step.init({name: p.clone() for name, p in params.items()})
    own = {name: p.clone() for name, p in net.named_parameters()}
    for batch in batches:
        params, state = step(params, state, batch)
    full = fzero.unshard(params)
    for name, p in plain.named_parameters():
        torch.testing.assert_close(full[name], p.detach(), rtol=1e-10, atol=1e-12)
    for name, p in net.named_parameters():
        assert torch.equal(p, own[name])
        assert p.grad is None


class AsksFirst(Accumulates):
    """As theirs do: `torch.autograd.grad` would lose what accumulates on the side."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        if not torch.autograd._is_checkpoint_valid():  # pyright: ignore
            raise RuntimeError("not compatible with .grad()")
        return Accumulates.backward(ctx, grad)


class First(nn.Module):
    """Checkpoints what reads the batch, which needs no gradient by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = AsksFirst.apply(self.block, x.detach().requires_grad_())  # pyright: ignore
        return self.head(x).square().mean()


@pytest.mark.parametrize("executor", ["traced", "eager"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_checkpoint_of_the_batch_gets_its_gradient(executor: Any, stage: Any) -> None:
    torch.manual_seed(0)
    net, x = First().double(), torch.randn(4, 3, dtype=torch.float64)
    net(x).backward()
    apply, params = fzero.functionalize(net)
    cfg = fzero.Config(stage=stage, executor=executor)
    step = fzero.make_train_step(apply, fzero.optim.sgd(1.0), cfg)
    new, state = step.init({name: p.clone() for name, p in params.items()})
    new, _ = step(new, state, x)
    full = fzero.unshard(new)
    for name, p in net.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(full[name], (p - p.grad).detach(), rtol=1e-10, atol=1e-12)


def test_what_comes_after_its_bucket_was_reduced_is_refused() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.block = nn.Linear(3, 3), Block()

        def forward(self, x: Tensor) -> Tensor:
            return self.block(Accumulates.apply(self.block, self.a(x))).sum()  # pyright: ignore

    apply, params = fzero.functionalize(Shared())
    cfg = fzero.Config(executor="eager", bucket_mb=1e-6)
    step = fzero.make_train_step(apply, fzero.optim.sgd(0.5), cfg)
    params, state = step.init(params)
    with pytest.raises(fzero.FzeroError, match=r"gradient of 'block\.\w+\.\w+' came after"):
        step(params, state, torch.ones(2, 3))


@pytest.mark.parametrize("way", WAYS)
def test_gradients_outside_of_a_step_are_those_of_backward(way: str) -> None:
    torch.manual_seed(0)
    net, x = Net(way).double(), torch.randn(4, 2, dtype=torch.float64)
    apply, params = fzero.functionalize(net)
    sets = [{n: (p * f).requires_grad_() for n, p in params.items()} for f in (0.5, 2.0)]
    sum(apply(own, x) for own in sets).backward()  # pyright: ignore  two calls, one backward
    for own in sets:
        other = Net(way).double()
        other.load_state_dict({**net.state_dict(), **{n: p.detach() for n, p in own.items()}})
        other(x).backward()
        for name, p in other.named_parameters():
            torch.testing.assert_close(own[name].grad, p.grad, rtol=1e-10, atol=1e-12)
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("way", ["sets up", "hooked"])
def test_after_a_transform_is_over_it_is_refused(way: str) -> None:
    net, x = Net(way), torch.randn(4, 2)
    apply, params = fzero.functionalize(net)
    _, pull = torch.func.vjp(lambda params: apply(params, x), params)
    with pytest.raises(TransformOverError, match=r"backward reads 'blocks\.1\.\w+\.\w+'"):
        pull(torch.ones(()))


def test_a_function_that_reads_no_module_works_under_transforms() -> None:
    class Triple(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: Tensor) -> Tensor:  # pyright: ignore
            return 3 * x

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore
            (x,) = ctx.saved_tensors
            return 3 * grad + 0 * x

    class Module(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return Triple.apply(super().forward(x).square()).sum()  # pyright: ignore

    apply, params = fzero.functionalize(Module(2, 2))
    xs = torch.randn(5, 3, 2)
    grads = torch.vmap(torch.func.grad(apply), (None, 0))(params, xs)
    for i, x in enumerate(xs):
        one = {name: p.clone().requires_grad_() for name, p in params.items()}
        apply(one, x).backward()
        for name, p in one.items():
            torch.testing.assert_close(grads[name][i], p.grad)


def test_a_call_that_is_over_leaves_torch_as_it_was() -> None:
    names = [
        (torch.autograd.Function, "apply"),
        (Tensor, "register_hook"),
        (Tensor, "register_post_accumulate_grad_hook"),
        (saved_tensors_hooks, "__enter__"),
    ]
    before = [vars(owner)[name] for owner, name in names]
    with wrapping(lambda function: function), wrapping(lambda function: function):
        assert not any(vars(o)[n] is b for (o, n), b in zip(names, before, strict=True))
    assert all(vars(o)[n] is b for (o, n), b in zip(names, before, strict=True))


def test_other_threads_are_not_concerned() -> None:
    called: list[str] = []

    def elsewhere() -> None:
        x = torch.ones(1, requires_grad=True)
        Returns.apply(torch.sin, x).backward()  # pyright: ignore
        called.append("elsewhere")

    def never(function: Any) -> Any:
        raise AssertionError("another thread's call")

    with wrapping(never):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert called == ["elsewhere"]
