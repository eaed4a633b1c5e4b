"""Operators on DTensors as if every tensor were whole: torch's rules where they hold for any split.

Where torch has no rule of how an operator runs on shards, it makes one up: it runs the operator's
decomposition on a mesh of one rank, where any split is even, and then the operator itself on each
rank's part. What counts elements counts this rank's: `mse_loss` became the mean of the ranks'
means, which is another number where they have unequal parts, and its gradient was divided by the
wrong count on any number of ranks. Some rules that torch has are wrong, too: `cumsum(-1)` stays
within a rank, for the rule compares -1 with the dim that is split.

So rules are believed by their kind: what works element by element, reductions, views, products of
matrices. All else gets full tensors, by one all-gather each.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from fzero import tree
from fzero.distributed.collectives import all_reduce
from fzero.distributed.dtensor import beside
from fzero.distributed.mesh import Axis
from fzero.distributed.ragged import RaggedDTensor, runs_on_rows
from fzero.errors import ShardError
from fzero.functional.uncompiled import not_compiled_alone
from fzero.transforms.open_sums import by_rule, is_apart
from fzero.transforms.view_copies import (
    ViewCopies,
    dtensors,
    full_local,
    gives_views,
    whole_dtensor,
    written,
)


class WholeLeaves(TorchDispatchMode):
    """While it is on, what operators compute of DTensors is that of the whole tensors.

    Raises:
        ShardError: an operator gives a view that shards can't have, or writes into them what they
            can't hold.

    >>> from fzero.distributed.mesh import resolve_mesh
    >>> mesh = resolve_mesh(None, "cpu")
    >>> x = DTensor.from_local(torch.ones(3), mesh.device_mesh, mesh.placements(0))
    >>> with WholeLeaves():
    ...     torch.nn.functional.mse_loss(x, x * 3).full_tensor()
    tensor(4.)
    """

    def __init__(self) -> None:
        super().__init__()
        self._copies = ViewCopies()

    def renewed(self, given: Any) -> Any:
        """The same, once views among it have what was written into their bases; on all ranks."""
        # outside nobody sees to it that they all read them
        self._copies.refresh(tree.leaves(given))
        return given

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled parts of a function stay compiled: DTensors are none of theirs."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch's own way to leave it alone costs a context for every operator."""
        return False

    @not_compiled_alone
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not any(issubclass(kind, DTensor) for kind in types):
            return func(*args, **kwargs)
        # inference mode: its parts come one by one otherwise. Whole it may copy (`reshape`), on one
        # rank and not on another, where the schema promises a view
        if _in_parts(func) and (gives_views(func) or not _is_sound(func, args, kwargs)):
            with self:
                return func.decompose(*args, **kwargs)
        self._copies.refresh((args, kwargs))
        try:
            found = _run(func, args, kwargs)
            if torch.Tag.nondeterministic_seeded in func.tags:
                found = tree_map(
                    lambda x: _as_drawn_once(x) if isinstance(x, DTensor) else x, found
                )
        except DataDependentOutputException as error:
            # torch reads sizes of such parts as values of a tensor, which has none while recorded
            if not any(map(_is_strided, dtensors((args, kwargs)))):
                raise
            raise ShardError(
                f"{func} needs other ranks' elements of a view that crosses a split (the flatten "
                "of rows that ranks share), which torch can't stage out. Take the view of the full "
                "tensor, x.full_tensor().flatten(), or use Config(executor='eager')."
            ) from error
        self._copies.note(func, args, kwargs, found)
        return found


# ------------------------------------------------------------------------------- which rules hold
# Beside what torch tags as pointwise or as a reduction, and views: each is tried on every split in
# tests/transforms/test_whole.py.
_SOUND = {
    *("sum", "mean", "amax", "amin", "linalg_vector_norm"),  # torch 2.11 doesn't tag them
    *("mm", "addmm", "bmm", "baddbmm", "dot"),
    *("cat", "stack", "_softmax", "_softmax_backward_data"),
    *("_log_softmax", "_log_softmax_backward_data"),
    *("copy_", "fill_", "zero_", "masked_fill_", "clone", "_to_copy", "copy"),
    *("detach_", "empty_like", "zeros_like", "ones_like", "full_like"),
    *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
    *("_local_scalar_dense", "is_same_size", "is_pinned", "equal"),
}


def _is_sound(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether torch has a rule of its own for this operator, of a kind that holds."""
    if not _has_rule(func) or not _is_known(func):
        return False
    if _needs_elements(func, args, kwargs) and any(map(_is_empty_somewhere, dtensors(args))):
        return False  # that rank alone would raise, and the others wait for it
    # an empty list of dims stands for all of them, or for none: rules take it for none
    named = zip(func._schema.arguments, args, strict=False)
    dims = next((x for arg, x in named if arg.name == "dim"), kwargs.get("dim"))
    return not isinstance(dims, list | tuple) or len(dims) > 0


def _needs_elements(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether it is a reduction that nothing has none of, as a maximum, but for sums."""
    name = func._schema.name.removeprefix("aten::").removeprefix("_foreach_")
    if name in ("norm", "linalg_vector_norm"):
        given = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2))
        order = 2 if given is None else given
        return not isinstance(order, int | float) or not 0 <= order < float("inf")
    tag = getattr(torch.Tag, "reduction", None)
    return name in ("max", "amax", "amin") or (tag in func.tags and name not in ("sum", "mean"))


def _is_empty_somewhere(x: DTensor) -> bool:
    """Whether some rank has nothing of a tensor that has elements; every rank knows."""
    rows = [{size} for size in x.shape]  # the sizes that ranks have
    for axis, placement in enumerate(x.placements):
        if placement.is_shard():
            dim, ranks = placement.dim, x.device_mesh.size(axis)  # pyright: ignore
            # as torch.chunk has it: all but the last ones the same, rounded up
            parts = {(size, -(-size // ranks)) for size in rows[dim]}
            rows[dim] = {
                min(most, max(size - i * most, 0)) for size, most in parts for i in range(ranks)
            }
            if 0 in rows[dim] and x.numel():
                return True
    return False


def _has_rule(func: Any) -> bool:
    """Whether torch has a rule for an operator that isn't made up from its decomposition.

    Private. There is no public question; `torch.distributed.tensor.experimental.register_sharding`
    adds to these. Where torch has moved them there are no rules, and all gets full tensors.
    """
    dispatcher = DTensor._op_dispatcher
    rules = dispatcher.sharding_propagator
    kinds = ("op_strategy_funcs", "op_single_dim_strategy_funcs", "op_to_rules")
    known = any(func in getattr(rules, kind, ()) for kind in kinds)
    return known or func in getattr(dispatcher, "_custom_op_handlers", ())


@functools.cache
def _is_known(func: Any) -> bool:
    space, _, name = func._schema.name.partition("::")
    if name in ("argmax", "argmin"):
        return False  # torch's code for them breaks off in several dims
    if space != "aten" or name.startswith(("_foreach_", "_fused_")):
        return True  # who has registered it answers for it; lists are pointwise, or norms
    # what is random stays as random as it was
    kinds = {torch.Tag.pointwise, torch.Tag.inplace_view, torch.Tag.nondeterministic_seeded}
    kinds |= {tag for tag in [getattr(torch.Tag, "reduction", None)] if tag is not None}
    return name in _SOUND or bool(kinds & {*func.tags}) or gives_views(func)


@functools.cache
def _reshapes(func: Any) -> bool:
    """Whether it changes a tensor and not its memory, by what a rank has of it."""
    return torch.Tag.inplace_view in func.tags and func._schema.name != "aten::detach_"


@functools.cache
def _in_parts(func: Any) -> bool:
    """Whether autograd would have taken it apart, as it does outside of inference mode."""
    composite = torch._C.DispatchKey.CompositeImplicitAutograd  # pyright: ignore
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), composite)


# -------------------------------------------------------------------------------- how they are run
def _run(func: Any, args: Any, kwargs: Any) -> Any:
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, DTensor)]
    if func is torch.ops.aten.as_strided.default:
        raise ShardError(
            f"{func} takes a DTensor for memory, of which each rank has its part. Use other views: "
            "x.diagonal().fill_(v) for x.fill_diagonal_(v), which is made of it; or call "
            "x.full_tensor() first."
        )
    if _reshapes(func) and any(
        not p.is_replicate() and not p.is_partial() for x in tensors for p in x.placements
    ):
        raise _no_reshape(func)
    ragged = [x for x in tensors if isinstance(x, RaggedDTensor)]
    plain = [x for x in tensors if not isinstance(x, RaggedDTensor)]
    if not any(map(is_apart, plain)):
        try:
            return func(*args, **kwargs)  # a RaggedDTensor knows what to do beside whole ones
        except NotImplementedError:  # of DTensors that are whole, by an older torch
            if ragged:
                raise
            return _on_full(func, args, kwargs)
    if ragged and (gives_views(func) or runs_on_rows(func, args, kwargs)):
        return func(*args, **kwargs)
    if not _is_sound(func, args, kwargs):
        return _on_full(func, args, kwargs)
    try:
        return by_rule(func, args, kwargs)
    except RuntimeError as error:
        # torch's advice, which it has for shards alone
        if gives_views(func) and "redistribut" in str(error):
            raise _no_view(func) from error
        raise


def _as_drawn_once(x: DTensor) -> DTensor:
    """What each rank has drawn for itself, where they hold the same elements: the first one's.

    All ranks that hold them must call it. It is written over the others', which nobody has read.
    """
    local, drawn = x._local_tensor, x._local_tensor
    coordinate = x.device_mesh.get_coordinate()
    for dim, placement in enumerate(x.placements):
        size = x.device_mesh.size(dim)
        if not placement.is_replicate() or size == 1:
            continue
        assert coordinate is not None
        axis = Axis(x.device_mesh.get_group(dim).group_name, size, coordinate[dim])
        # a sum, of which one rank has the only share; truth values are no numbers
        kind = torch.uint8 if drawn.dtype == torch.bool else drawn.dtype
        mine = drawn.to(kind) if axis.rank == 0 else torch.zeros_like(drawn, dtype=kind)
        drawn = all_reduce(mine, axis, "random numbers").to(drawn.dtype)
    if drawn is not local:
        local.copy_(drawn)
    return x


def _is_strided(x: DTensor) -> bool:
    return any("StridedShard" in type(placement).__name__ for placement in x.placements)


def _mixed(func: Any, plain: Sequence[Tensor]) -> RuntimeError:
    """In torch's words, which others look for."""
    return RuntimeError(
        f"{func} got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor "
        f"before calling distributed operators: {', '.join(str(tuple(x.shape)) for x in plain)}."
    )


def _plain(given: Any) -> list[Tensor]:
    """Tensors of more than one number among arguments that are no DTensors."""
    tensors = [x for x in tree_leaves(given) if isinstance(x, Tensor)]
    return [x for x in tensors if not isinstance(x, DTensor) and x.numel() != 1]


def _no_view(func: Any) -> ShardError:
    return ShardError(
        f"{func} gives a view of a DTensor, whose elements lie on several ranks, and what is "
        "written into it would be lost. Call x.redistribute(placements=[Replicate()]) or "
        "x.full_tensor() first."
    )


def _no_reshape(func: Any) -> ShardError:
    return ShardError(
        f"{func} gives a DTensor another shape, or other strides, in place, which its parts on "
        "several ranks and the views of it don't follow. Use what returns a new tensor (x = x.t() "
        "for x.t_())."
    )


def _on_full(func: Any, args: Any, kwargs: Any) -> Any:
    """On full tensors; what is written comes back into the shards."""
    if gives_views(func):
        raise _no_view(func)
    if _reshapes(func):  # their memory, which views share, must stay as it is
        raise _no_reshape(func)
    if plain := _plain((args, kwargs)):
        raise _mixed(func, plain)
    whole: dict[int, Tensor] = {}
    mesh = next(x.device_mesh for x in tree_leaves((args, kwargs)) if isinstance(x, DTensor))

    # not as DTensors that are whole on all ranks: an older torch has no rule for some operators
    def full(x: Any) -> Any:
        if not isinstance(x, DTensor):
            return x
        if id(x) not in whole:
            whole[id(x)] = full_local(x)
        return whole[id(x)]

    found = func(*tree_map(full, args), **tree_map(full, kwargs))
    given: dict[int, Tensor] = {}
    for x in dtensors(written(func, args, kwargs)):
        new = whole[id(x)]
        if new.shape != x.shape:
            raise ShardError(
                f"{func} gives a DTensor of shape {tuple(x.shape)} the shape "
                f"{tuple(new.shape)}; use what returns a new tensor."
            )
        x.copy_(beside(whole_dtensor(new, mesh), x))
        given[id(new)] = x
    return tree_map(lambda out: given.get(id(out), whole_dtensor(out, mesh)), found)
