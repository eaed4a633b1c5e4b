"""Modules that a user has compiled, at stage 3: `block.compile()`, `torch.compile(block)`.

[Note: compiled blocks] What torch compiles reads the memory of its parameters, and lazy ones have
none. So they are gathered around the compiled call, not in it: it finds plain tensors in the
module's slots, and nothing of ours is there to break its graph.

    lazy parameters ──Gather──▶ plain ones ──compiled──▶ outputs     then freed
                    ◀──Gather── gradients  ◀──compiled── gradients   filled before, freed after

What its backward has saved are those very tensors, so their memory is freed and filled in place, as
FSDP2 does with its own. Under `reshard_after_forward=False` it stays until the gradients have come.

A backward may begin anywhere inside: at an output, or at a value that a hook or a list has kept. So
it is filled when autograd takes out what it has saved. What keeps tensors in ways of its own
(`ctx.weight = weight`) is not seen by that: nodes of outputs fill, too, before they run.

[Note: values of the forward] What is filled in are the values of now. So how often the parameters
have been written is compared first: autograd does so for tensors that it has saved, but what is
written at stage 3 are shards. Nor does anything stay: what a graph task has filled is freed at its
end, even if it has brought no gradient of a parameter.
"""

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fzero.eager.lazy import LazyParameter
from fzero.eager.units import Units
from fzero.engine.autograd import watch
from fzero.engine.outputs import tensors_in
from fzero.errors import BackwardError, FzeroError
from fzero.functional.saved_hooks import enable_hooks, takes_hooks
from fzero.functional.tasks import current_task


class CompiledCalls:
    """Puts gathering around the compiled calls of modules.

    Args:
        units: what gathers.
        state: the parameters as `engine.state` has them, by index: who writes there is seen.
    """

    def __init__(self, units: Units, state: Sequence[Tensor]) -> None:
        self.units, self.state = units, state
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
                setattr(module, name, _Call(module, call, self.units, self.state))

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

    def __init__(
        self, module: nn.Module, call: Callable[..., Any], units: Units, state: Sequence[Tensor]
    ) -> None:
        self.module, self.call, self.units, self.state = module, call, units, state
        self._refuses_hooks = False  # what it calls, as is seen once

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
        memory = _Memory(self.units, lazy, self.module, self.state)
        full = _Gather.apply(memory, *lazy)
        new = dict(zip(map(id, lazy), full, strict=True))
        with _put(slots, new):
            out = self._saving(memory, args, kwargs)
        if not torch.is_grad_enabled():
            return out
        self._fill_in_backward(memory, out)
        # a checkpoint that computes again: what it saves is read at once, by nodes of another graph
        if not self.units.keep and current_task() == -1:
            self._free_until_backward(memory, args, kwargs)
        return out

    def _saving(self, memory: "_Memory", args: Any, kwargs: Any) -> Any:
        """The call itself; what it saves for backward goes through `memory`."""
        if self._refuses_hooks or not takes_hooks():
            return self.call(*args, **kwargs)
        memory.is_asked = True
        try:
            with saved_tensors_hooks(memory.pack, memory.unpack):
                return self.call(*args, **kwargs)
        except Exception as error:
            # torch.func.grad and vjp refuse them, mostly when they are compiled: nothing has run
            if "saved tensor hooks" not in str(error):
                raise
            self._refuses_hooks, memory.is_asked = True, False
            # what was refused has left them off for all that comes
            enable_hooks()
        return self.call(*args, **kwargs)

    def _fill_in_backward(self, memory: "_Memory", out: Any) -> None:
        # a module may keep outputs besides, such as an auxiliary loss
        kept = [x for part in self.module.modules() for x in vars(part).values()]
        kept = [x for x in kept if isinstance(x, Tensor)]
        for node in {x.grad_fn for x in tensors_in((out, kept)) if x.grad_fn is not None}:
            # of the node, not of the tensor: it runs whichever of its outputs has a gradient
            node.register_prehook(memory.fill)

    def _free_until_backward(self, memory: "_Memory", args: Any, kwargs: Any) -> None:
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
        module: whose call it is.
        state: the parameters as `engine.state` has them, by index.

    Attributes:
        is_trained: whether any of them gets a gradient.
        full: plain tensors of them, with values only if `is_there`.
        is_asked: whether autograd takes what it has saved through `unpack`.
    """

    def __init__(
        self,
        units: Units,
        lazy: Sequence[LazyParameter],
        module: nn.Module,
        state: Sequence[Tensor],
    ) -> None:
        self.units, self.lazy, self.module = units, lazy, module
        self.is_trained = any(x.requires_grad for x in lazy)
        self.full: list[Tensor] = []
        self.is_there = self.is_asked = False
        indices = [x.leaf_index for x in lazy]
        self._sources = [(x, units.shards[i], state[i]) for x, i in zip(lazy, indices, strict=True)]
        self._counts = [self._count(i) for i in range(len(lazy))]
        self._places: dict[int, int] = {}  # of each by its memory

    @torch.no_grad()
    def make(self) -> list[Tensor]:
        """The full parameters, in memory of their own."""
        full = [self.units.full(x.leaf_index).clone() for x in self.lazy]
        # of the same memory: those themselves get a node, which holds this
        self.full = [x.detach() for x in full]
        self._places = {x.untyped_storage()._cdata: i for i, x in enumerate(full)}
        self.is_there = True
        return full

    def fill(self, grads: Any = None) -> None:
        """Gather again what backward is about to read, but for what was written since forward.

        Raises:
            BackwardError: a parameter was, and nobody asks which of them is read.
        """
        same = [self._count(i) == count for i, count in enumerate(self._counts)]
        if not all(same) and not self.is_asked:
            raise self._written(same.index(False))
        if self.is_there:
            return
        with torch.no_grad():
            for x, full in compress(zip(self.lazy, self.full, strict=True), same):
                value = self.units.full(x.leaf_index)
                full.untyped_storage().resize_(value.numel() * value.element_size())
                # autograd counts no write here: the values are those that it has seen
                full.data.copy_(value)
        self.is_there = True
        # gradients of gradients read later what was taken here, and ask nobody
        if self.is_asked or not torch.is_grad_enabled():
            watch(self.free, self.free)

    def free(self, grad: Any = None) -> None:
        """Give the memory back; the tensors stay, without values."""
        for full in self.full:
            full.untyped_storage().resize_(0)
        self.is_there = False

    def pack(self, x: Tensor) -> tuple[Tensor, int, int | None]:
        """What autograd keeps of a tensor that it saves."""
        # not the tensor itself, which may hold the node that saves it
        return x.detach(), x._version, self._place(x)

    def unpack(self, saved: tuple[Tensor, int, int | None]) -> Tensor:
        """The tensor, with its values.

        Raises:
            BackwardError: it is of a parameter that was written since forward.
            RuntimeError: it was written itself: torch leaves that to who has hooks.
        """
        x, version, place = saved
        if x._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: [{x.type()} {list(x.shape)}] is at version {x._version}; "
                f"expected version {version} instead."
            )
        if place is None:
            return x
        if self._count(place) != self._counts[place]:
            raise self._written(place)
        if current_task() == -1:  # somebody looks at what a node has saved
            value = self.units.full(self.lazy[place].leaf_index)
            return value.as_strided(x.size(), x.stride(), x.storage_offset()).clone()
        if not self.is_there:
            self.fill()
        # what is made of it has a backward that comes when this one is over
        return x.clone() if torch.is_grad_enabled() else x

    def _place(self, x: Tensor) -> int | None:
        """Which of the parameters lies in a tensor's memory."""
        try:
            return self._places.get(x.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # it has none: sparse, or a wrapper
            return None

    def _count(self, i: int) -> tuple[int, int, int]:
        """How often a parameter has been written, by the engine and in its state."""
        lazy, shard, own = self._sources[i]
        return lazy._version, shard._version, own._version

    def _written(self, i: int) -> BackwardError:
        lazy = self.lazy[i]
        own = [n for n, x in self.module.named_parameters() if x is lazy]
        name = lazy.leaf.name
        block = name.removesuffix(f".{own[0]}") if own else ""
        where = f"{block!r} ({type(self.module).__name__})" if block != name else "the module"
        return BackwardError(
            f"backward has come to a forward of {where}, which is compiled, and its parameter "
            f"{name!r} was written after that forward (by engine.step(), engine.load_state_dict, "
            "engine.gathered(..., modifier_rank=...), or in engine.state): gradients would be of "
            "the new values and of activations of the old ones. Call backward before parameters "
            "are written, or forward again after."
        )


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
