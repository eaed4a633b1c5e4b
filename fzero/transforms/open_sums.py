"""Sums over ranks that aren't made yet, and what operators on DTensors may do to them.

Torch leaves a reduction over a dim that is split open (`Partial`): each rank has its share, and
what is linear goes on with the shares, so that the sums of many leaves are made at once. Its rules
say what passes, and say too much: a cast of bools, whose sum is whether there is one, so that
`any().double()` counted ranks; maxima through what is monotone for some arguments (`threshold`,
`nan_to_num`); numbers of each rank's own. What is closed early is never wrong, so those rules are
believed of sums and means alone, in the dtype that these have.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.utils._pytree import tree_leaves, tree_map

from fzero.distributed.dtensor import beside, settled
from fzero.distributed.ragged import is_supported
from fzero.errors import ShardError
from fzero.transforms.view_copies import dtensors, gives_views, written


def by_rule(func: Any, args: Any, kwargs: Any) -> Any:
    """An operator by torch's rule, after what is open and can't stay so is closed.

    Every rank must call it.

    Raises:
        ShardError: it writes into an open sum what that can't hold.

    >>> from fzero.distributed.mesh import resolve_mesh
    >>> mesh = resolve_mesh(None, "cpu")
    >>> x = DTensor.from_local(torch.ones(3), mesh.device_mesh, mesh.placements(0))
    >>> by_rule(torch.ops.aten.sum.default, (x,), {}).placements
    (Partial(sum),)
    """
    if func._schema.name == "aten::empty_like" and isinstance(args[0], DTensor):
        return func(_unread(args[0]), *args[1:], **kwargs)
    args, kwargs = _beside_written(func, args, kwargs)
    if not any(map(_is_open, dtensors((args, kwargs)))):
        return _kept(func, func(*args, **kwargs))
    into = written(func, args, kwargs)
    writes = any(map(_is_open, dtensors(into)))
    if _meets_others(func, args, kwargs):
        if writes:
            raise _unmade(func, "can't hold what may be each rank's own", "x * y for x.mul_(y)")
        return _closed(func, args, kwargs)
    if func._schema.name == "aten::fill_" and _is_open(args[0]):
        raise ShardError(
            f"{func} writes into a sum over ranks that isn't made yet, where each rank's value "
            "would be added to the others'. Use the operator that gives a new tensor "
            "(torch.full_like), or write into x + 0."
        )
    opens = [x for x in dtensors((args, kwargs)) if _is_open(x)]
    passes = all(_passes(func, x) for x in opens)
    passes = passes and all(map(_are_alike, _together(func, args, kwargs)))
    if not passes or (writes and _casts(func, args, kwargs, into)):
        if writes:
            raise _unmade(func, _NOT_LINEAR, "x.exp() for x.exp_()")
        return _closed(func, args, kwargs)
    if writes and _is_foreach(func) and not is_supported():
        # torch 2.11 makes the sums for it, and what is written into these is lost
        raise _unmade(func, "this torch's lists can't write into", "torch._foreach_mul")
    try:
        found = func(*args, **kwargs)
    except RuntimeError as error:
        if not writes or "placement changes" not in str(error):
            raise
        raise _unmade(func, _NOT_LINEAR, "x.exp() for x.exp_()") from error
    if _casts(func, args, kwargs, [found]):
        return _closed(func, args, kwargs)
    return _kept(func, found)


def is_apart(x: DTensor) -> bool:
    """Whether ranks have something else each: parts, or shares of a sum."""
    return not all(p.is_replicate() for p in x.placements)


def _is_open(x: Any) -> bool:
    return isinstance(x, DTensor) and any(p.is_partial() for p in x.placements)


def _closed(func: Any, args: Any, kwargs: Any) -> Any:
    # below autograd, where torch 2.11 can't move what asks for a gradient
    args, kwargs = tree_map(lambda x: settled(x.detach()) if _is_open(x) else x, (args, kwargs))
    return _kept(func, func(*args, **kwargs))


def _kept(func: Any, found: Any) -> Any:
    """What an operator gives; closed, in a wider dtype, what its own dtype can't hold shares of.

    A sum that is whether there is one: torch adds the ranks' answers as bytes, which are then no
    bools, or (of bytes) how many said so. A norm of halves: the squares of shares are none.
    """
    if isinstance(found, list | tuple):
        return type(found)(_kept(func, x) for x in found)
    if not _is_open(found):
        return found
    kinds = [p for p in found.placements if p.is_partial()]
    sums = any(getattr(p, "reduce_op", "") == "sum" for p in kinds)
    norms = any(type(p) is not Partial for p in kinds)
    if sums and (func._schema.name == "aten::any" or found.dtype == torch.bool):
        counts = _placed(found._local_tensor.to(torch.int64), found, found.placements)
        return settled(counts).ne(0).to(found.dtype)
    if norms and found.dtype in (torch.float16, torch.bfloat16):
        wide = _placed(found._local_tensor.float(), found, found.placements)
        return settled(wide).to(found.dtype)
    return found


_NOT_LINEAR = "isn't that of what each rank would write"


def _unmade(func: Any, why: str, instead: str) -> ShardError:
    return ShardError(
        f"{func} writes into a sum over ranks that isn't made yet, which {why}. Use the operator "
        f"that gives a new tensor ({instead})."
    )


# --------------------------------------------------------------------------------- what passes
# Elements move and keep their values; whatever they are shares of, the others' move alike.
_MOVES = {
    *("cat", "stack", "is_same_size", "copy_", "detach_", "_to_copy", "zero_"),
    *("zeros_like", "ones_like", "full_like"),
    *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
}
_OF_THEIR_OWN = {"max": ("maximum", "amax"), "min": ("minimum", "amin")}


def _passes(func: Any, x: DTensor) -> bool:
    """Whether torch's rule of an operator is believed that leaves its result open as `x` is."""
    name = func._schema.name.removeprefix("aten::")
    if gives_views(func) or name in _MOVES:
        return True
    # who clones a sum is about to write into it, which one that is open can't take
    if name in ("_local_scalar_dense", "equal", "clone"):
        return False
    for placement in x.placements:
        if not placement.is_partial():
            continue
        kind = getattr(placement, "reduce_op", "")
        if type(placement) is not Partial:  # a norm
            return False
        linear = kind == "sum" or (kind == "avg" and (x.is_floating_point() or x.is_complex()))
        if not linear and name not in _OF_THEIR_OWN.get(kind, ()):
            return False
    return True


def _are_alike(tensors: list[Tensor]) -> bool:
    """Whether all that are open are shares of the same on each axis of the mesh."""
    opens = [x.placements for x in tensors if isinstance(x, DTensor) and _is_open(x)]
    axes = zip(*opens, strict=False)
    return all(len({p for p in axis if p.is_partial()}) <= 1 for axis in axes)


def _casts(func: Any, args: Any, kwargs: Any, found: list[Any]) -> bool:
    """Whether what is open stays so in another dtype.

    Bytes wrap around, halves overflow and round, and a sum of bools is whether there is one: the
    ranks' casts don't add up to that of the sum. Not even of a wider dtype, for the sum is one of
    the narrow dtype in plain PyTorch.
    """
    found = [x for out in found for x in (out if _is_list(out) else [out])]
    for i, together in enumerate(_together(func, args, kwargs)):
        outs = found[i : i + 1] if _is_foreach(func) else found
        if any(map(_is_open, outs)):
            kinds = {x.dtype for x in (*together, *outs) if _is_open(x)}
            if len(kinds) > 1:
                return True
    return False


def _meets_others(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a sum that is open is combined with a tensor that may be each rank's own.

    A plain one, or what was made of one: torch takes both for the same on all ranks, multiplies
    each rank's share by its own, and adds those up.
    """
    if func._schema.name == "aten::is_same_size":
        return False
    for tensors in _together(func, args, kwargs):
        own = any(not isinstance(x, DTensor) or not is_apart(x) for x in tensors)
        if own and any(map(_is_open, tensors)):
            return True
    return False


def _together(func: Any, args: Any, kwargs: Any) -> Iterable[list[Tensor]]:
    """The tensors that are combined: of lists, those in one place of each."""
    lists = [x for x in (args if _is_foreach(func) else ()) if _is_list(x)]
    alone = [x for x in args if not any(x is one for one in lists)]
    for together in zip(*lists, strict=False) if lists else [()]:
        found = tree_leaves((together, alone, kwargs))
        yield [x for x in found if isinstance(x, Tensor)]


def _is_foreach(func: Any) -> bool:
    return func._schema.name.startswith("aten::_foreach_")


def _is_list(x: Any) -> bool:
    return isinstance(x, list | tuple)


def _unread(x: DTensor) -> DTensor:
    """A DTensor of which nobody reads the values, with its sums made."""
    if not _is_open(x):
        return x
    closed = [Replicate() if p.is_partial() else p for p in x.placements]
    return _placed(x._local_tensor, x, closed)


def _placed(local: Tensor, like: DTensor, placements: Sequence[Placement]) -> DTensor:
    return DTensor.from_local(
        local, like.device_mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _beside_written(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Operands as torch's rules want them where a leaf of one row is written into."""
    into = written(func, args, kwargs)
    if not any(map(is_apart, dtensors(into))):
        return args, kwargs
    goal = into[0]

    def placed(x: Any) -> Any:
        if any(x is one for one in into):
            return x
        if _is_list(goal):  # combined place by place
            alike = _is_list(x) and len(x) == len(goal)
            return [beside(a, b) for a, b in zip(x, goal, strict=True)] if alike else x
        return beside(x, goal) if isinstance(x, DTensor) and isinstance(goal, DTensor) else x

    return tuple(map(placed, args)), {name: placed(x) for name, x in kwargs.items()}
