"""What a parameter that has an engine says to those who look for its gradient.

[Note: owned parameters] An engine takes each gradient over as it comes, so it is not in
`param.grad`. Whoever looks there (`module.zero_grad()`, `clip_grad_norm_`, `torch.optim`, a logger)
would find nothing and do nothing. So while an engine holds a gradient, `param.grad` is a
`HeldGradient`: not None, without memory. What reads or changes it is refused, with what to use
instead; setting it to None drops the gradient, which is all that `zero_grad` does. While the engine
holds none, `param.grad` is None as in plain PyTorch.

Engines themselves go past all that, to what autograd sees: `raw_grad`, `set_raw_grad`.
"""

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fzero.eager.memoryless import METHODS
from fzero.errors import BackwardError

# Torch's own descriptor, which the classes below put a property in front of.
_GRAD: Any = torch.Tensor.grad
raw_grad: Callable[[Tensor], Tensor | None] = _GRAD.__get__
set_raw_grad: Callable[[Tensor, Tensor | None], None] = _GRAD.__set__


class Holder(Protocol):
    """What holds the gradients of an engine: its driver."""

    def holds(self, index: int, /) -> bool:
        """Whether there is a gradient of this leaf."""
        ...

    def drop(self, index: int, /) -> None:
        """Drop the gradients of one leaf."""
        ...


class Owner(NamedTuple):
    """Whose a parameter is.

    Args:
        holder: of its gradient; the parameter must not keep it alive.
        leaf_index: of the parameter among the engine's.
        name: of the parameter.
    """

    holder: "weakref.ref[Holder]"
    leaf_index: int
    name: str

    def refuse(self, what: str) -> NoReturn:
        """Raise, and say where the gradient is and what to use."""
        raise BackwardError(
            f"{what}, and the gradient of {self.name!r} is the engine's: it may be sharded, or not "
            f"reduced yet. Read it with engine.full_grad({self.name!r}), clip with "
            "Config(clip_norm=...), give engine.optimizer to a GradScaler (or scale with "
            "Config(loss_scale='dynamic')), update with engine.step() and the optimizer that the "
            "engine was given (not torch.optim), drop it with engine.zero_grad(), and change it on "
            "its way with a hook: parameter.register_hook(...)."
        )


def own(param: Tensor, owner: Owner) -> None:
    """Note whose a parameter is."""
    param.fzero_owner = owner  # pyright: ignore[reportAttributeAccessIssue]


def has_owner(param: Tensor) -> bool:
    """Whether a parameter is of an engine that is still there."""
    return _owner(param) is not None


def _owner(param: Tensor) -> tuple[Owner, Holder] | None:
    """The owner of a parameter and what holds its gradient, if that is still there."""
    owner: Owner | None = param.__dict__.get("fzero_owner")
    holder = None if owner is None else owner.holder()
    # an engine that is gone holds nothing: its parameters are then as plain ones
    return None if owner is None or holder is None else (owner, holder)


def _read(param: Tensor) -> Tensor | None:
    """The gradient that autograd has left here; else what stands for the engine's, or None."""
    # there while hooks run, and until the end of a task that is not synced
    grad = raw_grad(param)
    if grad is not None or (found := _owner(param)) is None:
        return grad
    owner, holder = found
    return HeldGradient(param, owner) if holder.holds(owner.leaf_index) else None


def _write(param: Tensor, grad: Tensor | None) -> None:
    found = _owner(param)
    if found is None:
        return set_raw_grad(param, grad)
    owner, holder = found
    if grad is None:
        # what autograd left here as well: of a task that is not synced it has not been taken over
        # yet
        set_raw_grad(param, None)
        return holder.drop(owner.leaf_index)
    # p.grad = p.grad: what was read is put back
    if isinstance(grad, HeldGradient) and grad.owner == owner:
        return None
    return owner.refuse("p.grad was assigned a tensor")


def _delete(param: Tensor) -> None:
    _write(param, None)


def _register(param: Tensor, hook: Callable[[Tensor], None]) -> Any:
    """`register_post_accumulate_grad_hook`, refused: it would find no gradient in `param.grad`."""
    if (found := _owner(param)) is not None:
        found[0].refuse("register_post_accumulate_grad_hook was called")
    leave_accumulate_hooks(param)  # of an engine that is gone
    return Tensor.register_post_accumulate_grad_hook(param, hook)


grad_of_owned = property(_read, _write, _delete, "See [Note: owned parameters].")
refuse_accumulate_hook = _register


class HeldGradient(Tensor):
    """Stands for a gradient that an engine holds; see [Note: owned parameters]."""

    owner: Owner

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore

    @staticmethod
    def __new__(cls, param: Tensor, owner: Owner) -> "HeldGradient":
        # no storage: a gradient that is sharded, or not summed yet, has no values to show
        self: HeldGradient = torch.Tensor._make_wrapper_subclass(  # pyright: ignore
            cls, param.shape, dtype=param.dtype, device=param.device
        )
        self.owner = owner
        return self

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        gradients = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, HeldGradient)]
        # zeros are what no gradient means to an engine, so it drops what it has
        if func in _ZEROS:  # zero_grad(set_to_none=False)
            for x in gradients:
                if (holder := x.owner.holder()) is not None:
                    holder.drop(x.owner.leaf_index)
            return args[0] if func is torch.ops.aten.zero_.default else None
        return gradients[0].owner.refuse(f"{func} was to run on p.grad")

    @property
    def is_sparse(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Refused: optimizers ask it first; some decay weights before they read a gradient."""
        return self.owner.refuse("p.grad was asked for")

    def __repr__(self, **_: Any) -> str:  # pyright: ignore
        return f"HeldGradient({self.owner.name!r}: see engine.full_grad)"

    def __deepcopy__(self, memo: Any) -> Any:
        self.owner.refuse("p.grad was to be copied")

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.owner.refuse("p.grad was to be saved")


_ZEROS = (torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default)


class OwnedParameter(nn.Parameter):
    """A parameter that is always there, with an engine. Copies and saved ones are plain."""

    fzero_plain = True

    grad = grad_of_owned  # pyright: ignore[reportAssignmentType]
    register_post_accumulate_grad_hook = refuse_accumulate_hook  # pyright: ignore

    def detach(self) -> Tensor:
        """A plain tensor; to `nn.Parameter(self)`, which insists on it, one of this class."""
        plain = super().detach()
        # of a function that is compiled there are no frames to look at
        made = not torch.compiler.is_compiling() and sys._getframe(1).f_code is _MAKES_PARAMETERS
        return plain.as_subclass(OwnedParameter) if made else plain

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            values = self.data.clone(memory_format=torch.preserve_format)
            memo[id(self)] = nn.Parameter(values, self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # a file must load where there is no engine, and no fzero
        return nn.Parameter(self.data, self.requires_grad).__reduce_ex__(protocol)


_MAKES_PARAMETERS = nn.Parameter.__new__.__code__


class FormerParameter(nn.Parameter):
    """What was the module's parameter before a lazy one took its index.

    Whoever still holds it (a variable, an optimizer made earlier) means the parameter of now: every
    operator, attribute and hook goes to that one.

    Attributes:
        now: the lazy parameter.
    """

    fzero_plain = True
    now: Tensor

    grad = grad_of_owned  # pyright: ignore[reportAssignmentType]
    register_post_accumulate_grad_hook = refuse_accumulate_hook  # pyright: ignore

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = pytree.tree_map_only(FormerParameter, _now, (args, kwargs or {}))
        if (own := METHODS.get(getattr(func, "__name__", ""))) and args:
            # torch's own would go past it, to memory that isn't there
            return own(*args, **(kwargs or {}))
        attribute = getattr(getattr(func, "__self__", None), "__name__", None)
        if attribute is not None and args and isinstance(args[0], Tensor):
            if func.__name__ == "__set__":  # past what its class makes of it, otherwise
                return setattr(args[0], attribute, args[1])
            if func.__name__ == "__get__":
                return getattr(args[0], attribute)
        return func(*args, **kwargs)  # pyright: ignore[reportCallIssue]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.now.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.now.__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:  # pyright: ignore
        return f"FormerParameter({self.now!r})"


def _now(x: FormerParameter) -> Tensor:
    return x.__dict__["now"]


def become_former(param: nn.Parameter, now: Tensor) -> None:
    """Let `param` stand for `now` from here on, and hold no memory."""
    # in place: whoever has it has this object, which can't be taken from them
    param.data = param.data.new_empty(0)
    param.__class__ = FormerParameter
    param.now = now  # pyright: ignore[reportAttributeAccessIssue]


def leave_accumulate_hooks(param: Any) -> None:
    """Give a parameter a dict of hooks of its own, if it shares one with all of an engine's."""
    if isinstance(param._post_accumulate_grad_hooks, SharedHooks):
        param._post_accumulate_grad_hooks = OrderedDict()


class SharedHooks(dict[int, Any]):
    """The hooks of a parameter, as autograd keeps them: one dict for several, whose own they are.

    The attribute that it is set as is private; `Tensor.register_post_accumulate_grad_hook`, the
    public way, makes each parameter a dict of its own in it.
    """

    def put_on(self, param: Any) -> None:
        """Have autograd look here after it has accumulated into this parameter."""
        param._post_accumulate_grad_hooks = self

    def __setitem__(self, key: int, hook: Any) -> None:
        raise BackwardError(
            "Tensor.register_post_accumulate_grad_hook was called, past the parameter's own "
            "method, for a parameter that an engine was made with. An engine takes gradients over "
            "as they come, so the hook would find none: change a gradient on its way with "
            "parameter.register_hook(...). Once the engine is gone, call the parameter's own "
            "method, parameter.register_post_accumulate_grad_hook(...)."
        )


def keep_hooks(old: Tensor, new: Tensor) -> None:
    """Hooks and notes of one tensor on another, which takes its index.

    The dict of hooks is one for both, so that handles that were given out remove what they should.
    """
    for name, value in vars(old).items():
        if name not in vars(new):
            setattr(new, name, value)
    if old._backward_hooks and new.requires_grad:
        new._backward_hooks = old._backward_hooks


def disown(param: nn.Parameter, now: Tensor, values: Tensor) -> None:
    """Make of what was a module's parameter before an engine came the plain one that it was.

    Args:
        param: the parameter of before; where there is no lazy one in its place, the one of now.
        now: the engine's.
        values: full, which become the parameter's.
    """
    hooks = now._backward_hooks
    for x in (param, now):
        vars(x).pop("fzero_owner", None)
        leave_accumulate_hooks(x)
    if type(param) in (OwnedParameter, FormerParameter):
        vars(param).pop("now", None)
        param.__class__ = nn.Parameter
    param.data = values
    param.grad = None
    if now is not param and hooks:
        param._backward_hooks = hooks
