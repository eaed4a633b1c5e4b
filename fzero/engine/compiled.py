"""Modules that a user has compiled, at stage 3: `block.compile()`, `torch.compile(block)`.

[Note: compiled blocks] What torch compiles reads the memory of its parameters, and lazy ones have
none. So they are gathered around the compiled call, not in it: it finds plain tensors in the
module's slots, and nothing of ours is there to break its graph.

    lazy parameters ──Gather──▶ plain ones ──compiled──▶ outputs     then freed
                    ◀──Gather── gradients  ◀──compiled── gradients   filled before, freed after

What its backward has saved are those very tensors, so their memory is freed and filled in place, as
FSDP2 does with its own. Under `reshard_after_forward=False` it stays until the gradients have come.
"""

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fzero.eager.lazy import LazyParameter
from fzero.eager.units import Units
from fzero.engine.outputs import tensors_in
from fzero.errors import FzeroError
from fzero.functional.tasks import current_task


class CompiledCalls:
    """Puts gathering around the compiled calls of modules.

    Args:
        units: what gathers.
    """

    def __init__(self, units: Units) -> None:
        self.units = units
        self._wrapped: dict[tuple[nn.Module, str], Any] = {}

    def find(self, modules: Sequence[nn.Module]) -> None:
        """Wrap what has been compiled since it was last called."""
        for module in modules:
            for name in _CALLS:
                # as torch has put it there: a class's own forward is none
                call = module.__dict__.get(name)
                if call is None or not _is_compiled(module, name):
                    continue
                if isinstance(call, _Call):
                    if call.units is self.units:
                        continue
                    call = call.call  # of an engine that is gone
                self._wrapped[module, name] = call
                setattr(module, name, _Call(module, call, self.units))

    def remove(self) -> None:
        """Leave every call as it was."""
        for (module, name), call in self._wrapped.items():
            if isinstance(module.__dict__.get(name), _Call):
                setattr(module, name, call)
        self._wrapped.clear()


# `nn.Module.compile` sets the first, `torch.compile(module)` returns a module with the second.
_CALLS = ("_compiled_call_impl", "forward")


def _is_compiled(module: nn.Module, name: str) -> bool:
    # private in torch, without a public alternative: a module is asked for what its wrapper keeps
    return name == "_compiled_call_impl" or "_orig_mod" in module._modules


class _Call:
    """A compiled call with plain parameters in the module's slots."""

    def __init__(self, module: nn.Module, call: Callable[..., Any], units: Units) -> None:
        self.module, self.call, self.units = module, call, units

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # inside of another compiled module, which has plain parameters already
        if torch.compiler.is_compiling():
            return self.call(*args, **kwargs)
        return self._run(args, kwargs)

    def _run(self, args: Any, kwargs: Any) -> Any:
        slots = [
            (table, name, x)
            for part in self.module.modules()
            for table in (part._parameters,)
            for name, x in table.items()
            if type(x) is LazyParameter
        ]
        lazy = list({id(x): x for _, _, x in slots}.values())
        if not lazy:  # around it is another one
            return self.call(*args, **kwargs)
        memory = _Memory(self.units, lazy)
        full = _Gather.apply(memory, *lazy)
        new = dict(zip(map(id, lazy), full, strict=True))
        with _put(slots, new):
            out = self.call(*args, **kwargs)
        if not torch.is_grad_enabled():
            return out
        # a checkpoint that computes again: what it saves is read at once, by nodes of another graph
        if not self.units.keep and current_task() == -1:
            self._free_until_backward(memory, args, kwargs, out)
        return out

    def _free_until_backward(self, memory: "_Memory", args: Any, kwargs: Any, out: Any) -> None:
        # a module may keep outputs besides, such as an auxiliary loss
        kept = [x for part in self.module.modules() for x in vars(part).values()]
        kept = [x for x in kept if isinstance(x, Tensor)]
        for node in {x.grad_fn for x in tensors_in((out, kept)) if x.grad_fn is not None}:
            # of the node, not of the tensor: it runs whichever of its outputs has a gradient
            node.register_prehook(memory.fill)
        if not memory.is_trained:
            # no gradient of these will say that they are no longer needed
            for x in tensors_in((args, kwargs)):
                if x.requires_grad:
                    x.register_hook(memory.free)
        memory.free()


def explained(error: BaseException) -> FzeroError | None:
    """What to say of an error of Dynamo's that comes of lazy parameters; None of any other.

    A function that torch compiles has no slots to put plain parameters into. Given lazy ones, its
    graph breaks at what gathers them; under `fullgraph=True` that is an error, whose words show it.
    """
    # imported by who compiles; private in torch, and the base of all that Dynamo raises since 2.6
    exc: Any = sys.modules.get("torch._dynamo.exc")
    kind = getattr(exc, "TorchDynamoException", None)
    if kind is None or not isinstance(error, kind):
        return None
    if not any(x in str(error) for x in (f"{_OURS}{os.sep}", LazyParameter.__name__)):
        return None
    outside = (f"{os.path.dirname(torch.__file__)}{os.sep}", f"{_OURS}{os.sep}")
    frames = traceback.extract_tb(error.__traceback__)
    at = [frame for frame in frames if not frame.filename.startswith(outside)]
    where = f"{at[-1].filename}:{at[-1].lineno}, in {at[-1].name}" if at else "in forward"
    return FzeroError(
        f"{where}: a function compiled by torch.compile was given parameters of stage 3, which "
        "have no memory until they are gathered, and what gathers them can't be compiled. Compile "
        "the module that holds them instead (block.compile() or torch.compile(block)): its "
        "parameters are gathered around the call. Or give the function gathered copies, "
        "f(x, weight.clone())."
    )


# the package's folder, this one's parent
_OURS = os.path.dirname(os.path.dirname(__file__))


@contextlib.contextmanager
def _put(
    slots: Sequence[tuple[dict[str, Any], str, Any]], new: dict[int, Tensor]
) -> Iterator[None]:
    for table, name, x in slots:
        table[name] = new[id(x)]
    try:
        yield
    finally:
        for table, name, x in slots:
            table[name] = x


class _Memory:
    """The memory of a call's full parameters: there from forward to forward's end, and in backward.

    Args:
        units: what gathers.
        lazy: the parameters.

    Attributes:
        is_trained: whether any of them gets a gradient.
        full: plain tensors of them, with values only if `is_there`.
    """

    def __init__(self, units: Units, lazy: Sequence[LazyParameter]) -> None:
        self.units, self.indices = units, [x.leaf_index for x in lazy]
        self.is_trained = any(x.requires_grad for x in lazy)
        self.full: list[Tensor] = []
        self.is_there = False

    @torch.no_grad()
    def make(self) -> list[Tensor]:
        """The full parameters, in memory of their own."""
        self.full = [self.units.full(index).clone() for index in self.indices]
        self.is_there = True
        return self.full

    @torch.no_grad()
    def fill(self, grads: Any = None) -> None:
        """Gather again what backward is about to read."""
        if self.is_there:
            return
        for index, full in zip(self.indices, self.full, strict=True):
            value = self.units.full(index)
            full.untyped_storage().resize_(value.numel() * value.element_size())
            # autograd counts no write here: the values are those that it has seen
            full.data.copy_(value)
        self.is_there = True

    def free(self, grad: Any = None) -> None:
        """Give the memory back; the tensors stay, without values."""
        for full in self.full:
            full.untyped_storage().resize_(0)
        self.is_there = False


class _Gather(torch.autograd.Function):
    """Full parameters out of lazy ones; their gradients are the lazy ones'."""

    @staticmethod
    def forward(ctx: Any, memory: _Memory, *lazy: Tensor) -> tuple[Tensor, ...]:
        ctx.memory = memory
        full = memory.make()
        frozen = [x for x, p in zip(full, lazy, strict=True) if not p.requires_grad]
        ctx.mark_non_differentiable(*frozen)
        return tuple(full)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        ctx.memory.free()
        return (None, *grads)
