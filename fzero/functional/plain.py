"""Parameters are plain tensors: what a class of their own would do is lost on shards.

A shard is a part of a parameter's memory. A class that changes what an operator does with its
tensors (quantised weights, `DTensor`), or that keeps values beside them, doesn't survive being cut,
sent and put together again. So such a parameter is refused by name, before anything runs.

A hook on a parameter belongs to the one tensor that it was registered on; `hook_on` finds it.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fzero.errors import ShardError

# classes of torch's own that stand for a plain tensor: fake ones, and the ranks of a simulation
_STANDS_FOR_PLAIN = ("torch._subclasses.", "torch.distributed._local_tensor")


def check_plain(name: str, x: Tensor) -> None:
    """Raise a ShardError that names a parameter of another class or layout than a plain tensor's.

    Args:
        name: of the parameter, as the message shows it.
        x: the parameter.

    Examples:
        >>> check_plain("weight", nn.Parameter(torch.ones(2)))
        >>> check_plain("table", torch.eye(2).to_sparse())
        Traceback (most recent call last):
        ...
        fzero.errors.ShardError: the parameter 'table' has the layout torch.sparse_coo, and ...
    """
    kind = type(x)
    if isinstance(x, DTensor):
        raise ShardError(
            f"the parameter {name!r} is a DTensor ({', '.join(map(str, x.placements))} on "
            f"{_axes(x)}), and a parameter here must be a plain tensor: fzero splits over "
            "data-parallel ranks only, and knows no tensor parallelism. Give it the module before "
            "parallelize_module or fully_shard, or parameter.full_tensor()."
        )
    if not (kind in (Tensor, nn.Parameter) or stands_for_plain(kind)):
        raise ShardError(
            f"the parameter {name!r} is a {kind.__module__}.{kind.__qualname__}, and a parameter "
            "here must be a plain torch.nn.Parameter: what its class adds would be lost where it "
            "is sharded. Use nn.Parameter(p.as_subclass(torch.Tensor)), or a plain parameter and a "
            "forward (or torch.nn.utils.parametrize) that does what the class does."
        )
    if x.layout is not torch.strided:
        raise ShardError(
            f"the parameter {name!r} has the layout {x.layout}, and must be dense to be split over "
            "ranks. Use parameter.to_dense(); gradients may be sparse."
        )


def stands_for_plain(kind: type) -> bool:
    """Whether tensors of a class are plain ones, as far as their users can tell."""
    return getattr(kind, "fzero_plain", False) or kind.__module__.startswith(_STANDS_FOR_PLAIN)


def hook_on(x: Tensor) -> str | None:
    """How a hook that somebody has registered on a tensor was registered; None without one.

    Examples:
        >>> p = nn.Parameter(torch.ones(2))
        >>> handle = p.register_hook(lambda grad: grad * 0)
        >>> hook_on(p)
        'register_hook'
        >>> handle.remove()
        >>> hook_on(p)
    """
    if x._backward_hooks:
        return "register_hook"
    return "register_post_accumulate_grad_hook" if foreign_accumulate_hooks(x) else None


def foreign_accumulate_hooks(x: Tensor) -> list[Any]:
    """The hooks of `register_post_accumulate_grad_hook` that are no engine's."""
    hooks = x._post_accumulate_grad_hooks  # pyright: ignore[reportAttributeAccessIssue]
    return [hook for hook in hooks.values() if not hasattr(hook, "engine")] if hooks else []


def _axes(x: DTensor) -> str:
    names = x.device_mesh.mesh_dim_names
    return f"mesh axes {names}" if names else f"a mesh of {tuple(x.device_mesh.shape)}"
