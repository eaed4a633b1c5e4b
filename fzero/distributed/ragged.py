"""DTensors whose rows lie on the ranks with any borders: a leaf can be whole on one rank.

`DTensor`'s `Shard(dim)` deals rows out as `torch.chunk` does. A layout that copies nothing lays
leaves end to end instead and puts the ranks' borders between rows, wherever balance wants them.
`Rows` is the placement of such a leaf, `RaggedDTensor` what the user holds of it between steps.

It knows three ways to run an operation, and none sees a rank's rows as the whole:

1. What works row by row (elementwise functions, copies, `torch.optim`'s lists and fused kernels)
   runs on this rank's rows. Other DTensors among its operands are cut to the same borders first.
2. Sums and norms of the whole are those of the ranks' own.
3. All else gets the full tensor, by one all-gather, and gives ordinary DTensors. Writes into a
   converted operand would be lost, so operations that write, or give views to write through, are
   refused by name.

What ranks send goes through operators, which a recording holds as it does an ordinary DTensor's.

References: veScale-FSDP's RaggedShard, arXiv:2602.22437. Unlike there, borders lie between rows of
dim 0, and the planner that chooses them is not part of the placement.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

# Private, as in dtensor.py, which holds it against the public constructor.
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._pytree import tree_flatten, tree_map

from fzero.distributed.collectives import as_wire, pad_rows
from fzero.distributed.mesh import Mesh, group_along
from fzero.errors import ShardError
from fzero.layout import Home, LeafLayout


class Rows(Placement):
    """Rank r of the axis has rows `borders[r]` to `borders[r + 1]` of dim 0; maybe none, or all.

    No `Shard`: code that knows only that takes the borders of `torch.chunk` for granted, and would
    be wrong without a word. What does not know `Rows` says so.

    >>> Rows((0, 3, 3, 8)), Rows((0, 8)) == Rows([0, 8]), Rows((0, 8)).is_shard()
    (Rows(borders=(0, 3, 3, 8)), True, False)
    """

    borders: tuple[int, ...]
    home: Home | None  # where the leaf travels; says nothing of values, so it is not compared

    def __init__(self, borders: Sequence[int], home: Home | None = None) -> None:
        super().__init__()
        self.borders, self.home = tuple(borders), home
        ordered = all(a <= b for a, b in itertools.pairwise(self.borders))
        if len(self.borders) < 2 or self.borders[0] != 0 or not ordered:
            raise ShardError(
                f"Rows(borders={self.borders}): borders start at 0, never fall, and are one more "
                "than the ranks of the axis, as in Rows((0, 3, 3, 8)) for three ranks and 8 rows."
            )

    def of(self, rank: int) -> tuple[int, int]:
        """The first row of a rank of the axis, and the one after its last.

        >>> Rows((0, 3, 3, 8)).of(1)
        (3, 3)
        """
        return self.borders[rank], self.borders[rank + 1]

    def __eq__(self, other: object) -> bool:
        return type(other) is Rows and self.borders == other.borders

    def __hash__(self) -> int:
        return hash((Rows, self.borders))

    def __repr__(self) -> str:
        return f"Rows(borders={self.borders})"

    __str__ = __repr__

    def __reduce__(self) -> tuple[Any, ...]:
        return Rows, (self.borders, self.home)


def placements_of(leaf: LeafLayout, mesh: Mesh) -> tuple[Placement, ...]:
    """The DTensor placements of a leaf.

    >>> from fzero.distributed.mesh import resolve_mesh
    >>> leaf = LeafLayout("w", (7, 3), torch.float32, dim=0, home=Home(0, 21, 0))
    >>> placements_of(leaf, resolve_mesh(None, "cpu"))
    (Rows(borders=(0, 7)),)
    """
    if leaf.home is None:
        return mesh.placements(leaf.dim)
    rows = Rows((0, *(leaf.bounds(rank)[1] for rank in range(leaf.world))), leaf.home)
    return (Replicate(), rows) if mesh.is_hybrid else (rows,)


def rows_of(x: DTensor) -> tuple[int, Home | None] | None:
    """Along which dim a leaf is split over the last axis of its mesh, and its place in a flat.

    None: it is not, or otherwise than a layout splits leaves.
    """
    *others, last = x.placements
    if not all(type(other) is Replicate for other in others):
        return None
    if type(last) is Shard:
        return last.dim % x.dim(), None
    if type(last) is not Rows or last.home is None:
        return None
    leaf = LeafLayout("", tuple(x.shape), x.dtype, 0, len(last.borders) - 1, home=last.home)
    # of another leaf's, if its rows were put elsewhere since
    same = all(leaf.bounds(rank) == last.of(rank) for rank in range(leaf.world))
    return (0, last.home) if same else None


class RaggedDTensor(DTensor):
    """A DTensor of which one placement is `Rows`; `from_spec` makes it."""

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # The base class would run on plain DTensors with our spec, of which it knows nothing.
        name = func._schema.name
        if name.startswith(("aten::_foreach_", "aten::_fused_")):
            return _run_lists(func, args, kwargs or {})
        return _run(func, args, kwargs or {})

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        **dtypes: torch.dtype | None,
    ) -> DTensor:
        """As `DTensor.redistribute`; `placements` may have other `Rows`. Every rank must call it.

        The full tensor is there for a moment, whatever the placements; where ranks have unequal
        parts, what they were sent in is, too: as many times the largest part as there are ranks.
        """
        if any(dtypes.values()):
            raise ShardError(f"a RaggedDTensor travels in its own dtype, and not as {dtypes}.")
        if placements is None:
            raise ShardError("redistribute needs placements, one per axis of the mesh.")
        return redistribute(self, device_mesh or self.device_mesh, placements)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """This rank's rows, sharing memory; gradients come back with the same borders."""
        if grad_placements is not None and tuple(grad_placements) != self.placements:
            raise ShardError(
                f"to_local(grad_placements={grad_placements}): the gradient of a rank's rows lies "
                f"as they do, {self.placements}. Call redistribute on it, or on the tensor before."
            )
        # The base class's own would give the gradient the borders of `torch.chunk`.
        return _ToLocal.apply(self) if torch.is_grad_enabled() else self._local_tensor

    @staticmethod
    def __tensor_unflatten__(inner_tensors: Any, flatten_spec: Any, *outer: Any) -> DTensor:
        plain = DTensor.__tensor_unflatten__(inner_tensors, flatten_spec, *outer)
        return RaggedDTensor(plain._local_tensor, plain._spec, requires_grad=plain.requires_grad)

    # What `torch.distributed.checkpoint` asks for before it looks at placements.
    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        (axis, rows), shape = _rows_of(self._spec), self.shape
        start, stop = rows.of(_coordinate(self.device_mesh)[axis])
        # A rank without rows has no chunk: its offset would be that of the next rank, of whose
        # chunk it would pass for a copy. A tensor without elements needs one to be stored at all.
        if start == stop and shape.numel():
            return []
        offsets = torch.Size((start,) + (0,) * (len(shape) - 1))
        return [ChunkStorageMetadata(offsets, torch.Size((stop - start, *shape[1:])))]

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self._local_tensor)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]


@functools.cache
def is_supported() -> bool:
    """Whether this torch asks a subclass of DTensor about its operations.

    2.13 does. 2.11 runs DTensor's own code, of which some takes a rank's rows for the whole; its
    DTensor refuses to be delegated to, which is what tells.
    """
    try:
        DTensor.__torch_dispatch__(torch.ops.aten.neg.default, (), (torch.ones(1, device="cpu"),))
    except NotImplementedError:
        return False
    return True


def check_rows(spec: DTensorSpec) -> None:
    """Refuse a spec with `Rows` that no `RaggedDTensor` can have.

    Raises:
        ShardError: they don't fit the leaf or the ranks; it is split once more, or not contiguous;
            or this torch can't have any.
    """
    found = [(axis, p) for axis, p in enumerate(spec.placements) if type(p) is Rows]
    if not found:
        return
    if not is_supported():
        raise ShardError(
            f"placements {spec.placements}: Rows need torch 2.13, and this is {torch.__version__}. "
            "Use Shard(0), or a newer torch."
        )
    (axis, rows), shape = found[0], tuple(spec.shape)
    others = [p for i, p in enumerate(spec.placements) if i != axis]
    if not all(p.is_replicate() for p in others):
        raise ShardError(
            f"placements {spec.placements}: a leaf with Rows is split over one axis of the mesh, "
            "and copied over the others. Replicate it there."
        )
    ranks = spec.mesh.size(axis)
    if not shape or len(rows.borders) != ranks + 1 or rows.borders[-1] != shape[0]:
        raise ShardError(
            f"{rows} on {ranks} ranks for a leaf of shape {shape}: borders are one more than the "
            "ranks, and the last is the number of rows; what has no dim 0 is replicated."
        )
    meta = torch.empty_strided(shape, spec.stride, device="meta")
    if not meta.is_contiguous():
        raise ShardError(f"{rows} for strides {spec.stride}: a leaf with Rows is contiguous.")


def redistribute(x: DTensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """`DTensor.redistribute` from and to `Rows`; gradients flow back. Every rank must call it.

    >>> from fzero.distributed.mesh import resolve_mesh
    >>> mesh = resolve_mesh(None, "cpu").device_mesh
    >>> x = DTensor.from_local(torch.arange(3.0), mesh, [Replicate()])
    >>> redistribute(x, mesh, [Replicate()]).full_tensor()
    tensor([0., 1., 2.])
    """
    if x.device_mesh != mesh:
        raise ShardError(f"a DTensor with Rows stays on its mesh: {x.device_mesh}, not {mesh}.")
    return _Redistribute.apply(x, tuple(placements))


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, placements: tuple[Placement, ...]) -> DTensor:
        ctx.placements = x.placements
        return _placed(x, placements)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor, None]:  # pyright: ignore
        return redistribute(grad, grad.device_mesh, ctx.placements), None


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: RaggedDTensor) -> Tensor:
        ctx.like = x._spec
        # a tensor of its own, for autograd writes what it knows into it
        return x._local_tensor.view_as(x._local_tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> DTensor:  # pyright: ignore
        return _wrap(grad.detach(), ctx.like)


# ------------------------------------------------------------------------- from and to full tensors
def _rows_of(spec: DTensorSpec) -> tuple[int, Rows]:
    """Over which axis a leaf is split, and how."""
    return next((axis, p) for axis, p in enumerate(spec.placements) if type(p) is Rows)


def _coordinate(mesh: DeviceMesh) -> Sequence[int]:
    # without a process group there is one rank, which has no coordinate
    return mesh.get_coordinate() or [0] * mesh.ndim


def _spec(like: DTensorSpec, placements: Sequence[Placement], shape: Any, dtype: Any) -> Any:
    strides = torch.empty(shape, device="meta").stride()
    meta = TensorMeta(torch.Size(shape), tuple(strides), dtype)
    return DTensorSpec(like.mesh, tuple(placements), tensor_meta=meta)


def _ragged(local: Tensor, spec: DTensorSpec) -> "RaggedDTensor":
    # torch's types say that the constructor gives the base class
    return RaggedDTensor(local, spec, requires_grad=False)  # pyright: ignore[reportReturnType]


def _wrap(local: Tensor, like: DTensorSpec) -> RaggedDTensor:
    """`local` as this rank's rows of a tensor with the borders of `like`."""
    shape = torch.Size((like.shape[0], *local.shape[1:]))
    if shape != like.shape or local.dtype != like.tensor_meta.dtype:  # pyright: ignore
        like = _spec(like, like.placements, shape, local.dtype)
    return _ragged(local.contiguous(), like)


def _full(x: DTensor) -> Tensor:
    """The full tensor, outside of autograd.

    A leaf of a flat whose ranks have unequal parts is padded to no more than the flat has.
    """
    if not isinstance(x, RaggedDTensor):
        return x.full_tensor()
    axis, rows = _rows_of(x._spec)
    ranks = x.device_mesh.size(axis)
    if ranks == 1:
        return x._local_tensor
    ends = [rows.of(rank) for rank in range(ranks)]
    longest = max(stop - start for start, stop in ends)
    if not x.numel():
        return x._local_tensor.new_empty(x.shape)
    every = _from_all(pad_rows(x._local_tensor, longest), x.device_mesh, axis)
    if len(every) == len(x):
        return every
    parts = zip(every.view(ranks, longest, *x.shape[1:]), ends, strict=True)
    return torch.cat([part[: stop - start] for part, (start, stop) in parts])


def _from_all(part: Tensor, mesh: DeviceMesh, axis: int) -> Tensor:
    """The tensors of all ranks of an axis, of one shape, end to end along dim 0."""
    ranks = mesh.size(axis)
    if ranks == 1:
        return part
    group = group_along(mesh, axis).group_name
    c10d = torch.ops._c10d_functional
    sent = as_wire(part)
    every = c10d.wait_tensor(c10d.all_gather_into_tensor(sent, ranks, group))
    return every if sent.dtype is part.dtype else every.view(part.dtype)


@torch.no_grad()
def _placed(x: DTensor, placements: tuple[Placement, ...]) -> DTensor:
    """`x` with other placements, outside of autograd."""
    if (Rows in map(type, x.placements)) is not isinstance(x, RaggedDTensor):
        raise ShardError(
            f"a DTensor has the placements {x.placements} and is no RaggedDTensor: something gave "
            "it Rows that does not know them, such as DTensor.redistribute. Go there with "
            "fzero.distributed.ragged.redistribute(x, mesh, placements)."
        )
    if x.placements == placements:
        return type(x)(x._local_tensor, x._spec, requires_grad=False)
    full = _full(x)
    spec = _spec(x._spec, placements, x.shape, x.dtype)
    check_rows(spec)
    if not any(type(p) is Rows for p in placements):
        whole = _spec(spec, [Replicate()] * len(placements), x.shape, x.dtype)
        return DTensor(full, whole, requires_grad=False).redistribute(spec.mesh, placements)
    axis, rows = _rows_of(spec)
    start, stop = rows.of(_coordinate(spec.mesh)[axis])
    # in memory of its own: a view would keep the full tensor
    local = full[start:stop].clone(memory_format=torch.contiguous_format)
    return _ragged(local, spec)


def _whole(x: Any) -> Any:
    if not isinstance(x, RaggedDTensor):
        return x
    return _placed(x, (Replicate(),) * x.device_mesh.ndim)


# ------------------------------------------------------------------------------------- operations
# Row by row without the tag. `clone` has it, and so have most that compute.
_COPIES = {
    *("detach", "alias", "zeros_like", "ones_like", "empty_like", "full_like", "_to_copy"),
    *("copy", "copy_", "fill", "fill_", "zero", "zero_", "masked_fill", "masked_fill_"),
    *("view_as_real", "view_as_complex", "_conj", "_neg_view"),
}
_FUSED = {"_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"}


@functools.cache
def _is_rowwise(func: Any) -> bool:
    """Whether each row of the result is a function of the same rows of the operands."""
    space, _, name = func._schema.name.partition("::")
    if space != "aten" or torch.Tag.nondeterministic_seeded in func.tags:
        return False  # random values would depend on the borders
    if name.startswith("_foreach_"):
        base = name.removeprefix("_foreach_").removesuffix("_")
        packet = getattr(torch.ops.aten, base, None)
        # `max` has a form of two operands that is tagged, `_foreach_max` has one and reduces
        return base in _COPIES or (
            packet is not None
            and base != "max"
            and any(torch.Tag.pointwise in getattr(packet, o).tags for o in packet.overloads())
        )
    # `equal` has the tag and gives one bool
    tensors = all(str(out.type) == "Tensor" for out in func._schema.returns)
    return name in _COPIES | _FUSED or (torch.Tag.pointwise in func.tags and tensors)


def _run_lists(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation on lists of tensors, for each place in them: the borders differ."""
    results = func._schema.returns
    assert len(results) <= 1, f"{func} gives several lists"  # functional forms of fused kernels
    count = next(len(arg) for arg in args if isinstance(arg, list | tuple))

    def at(i: int, arg: Any) -> Any:
        return arg[i : i + 1] if isinstance(arg, list | tuple) else arg

    found = [
        _run(func, [at(i, arg) for arg in args], {k: at(i, arg) for k, arg in kwargs.items()})
        for i in range(count)
    ]
    return [one for (one,) in found] if results else None


def runs_on_rows(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an operation with a `RaggedDTensor` is of the first two ways, or of lists."""
    if func._schema.name.startswith(("aten::_foreach_", "aten::_fused_")):
        return True
    tensors, written = _tensors((args, kwargs)), _written(func, args, kwargs)
    rowwise = _is_rowwise(func) and _borders(tensors, written) is not None
    return rowwise or _is_reduction(func, args, kwargs)


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    return _tensors(
        [
            args[i] if i < len(args) else kwargs.get(arg.name)
            for i, arg in enumerate(func._schema.arguments)
            if arg.alias_info is not None and arg.alias_info.is_write
        ]
    )


def _run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensors = _tensors((args, kwargs))
    if not any(isinstance(x, RaggedDTensor) for x in tensors):
        return func(*args, **kwargs)
    written = _written(func, args, kwargs)
    like = _borders(tensors, written) if _is_rowwise(func) else None
    if like is not None:
        return _run_on_rows(func, args, kwargs, like)
    if _is_reduction(func, args, kwargs):
        return _run_on_parts(func, args, kwargs)
    views = any(out.alias_info and not out.alias_info.is_write for out in func._schema.returns)
    if views or any(isinstance(x, RaggedDTensor) for x in written):
        raise ShardError(
            f"{func} {'gives a view of' if views else 'writes into'} a RaggedDTensor, whose rows "
            "lie on several ranks, and what is written would go into a copy of them. Call "
            "x.redistribute(placements=[Replicate()]) or x.full_tensor() first, and copy_ what "
            "is to be written back; or work on this rank's rows, x.to_local()."
        )
    if written:  # of fewer rows than ranks DTensor writes only what lies as they do
        placed = functools.partial(_as_it_lies, like=written[0])
    else:
        # DTensor asks all ranks there are whether it is `equal`; a number is everyone's own
        numbers = not any("Tensor" in str(out.type) for out in func._schema.returns)
        placed = _number_of if numbers else _whole
    return func(*tree_map(placed, args), **tree_map(placed, kwargs))


def _as_it_lies(x: Any, like: Tensor) -> Any:
    if not isinstance(x, RaggedDTensor) or not isinstance(like, DTensor) or x.shape != like.shape:
        return _whole(x)
    return _placed(x, like.placements)


def _number_of(x: Any) -> Any:
    return _full(x) if isinstance(x, DTensor) else x


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_flatten(tree)[0] if isinstance(x, Tensor)]


def _borders(tensors: list[Tensor], written: list[Tensor]) -> DTensorSpec | None:
    """Whose borders an operation can run in; None: the operands' rows are not the result's."""
    shape = torch.broadcast_shapes(*(x.shape for x in tensors))
    if any(not isinstance(x, RaggedDTensor) or x.shape != shape for x in written):
        return None
    for x in written or tensors:
        if isinstance(x, RaggedDTensor) and x.dim() == len(shape) and x.shape[0] == shape[0]:
            same = all(other.placements == x.placements for other in written)  # pyright: ignore
            return x._spec if same else None
    return None


def _run_on_rows(func: Any, args: Any, kwargs: Any, like: DTensorSpec) -> Any:
    def local(x: Any) -> Any:
        if isinstance(x, DTensor):
            if x.device_mesh != like.mesh:
                raise ShardError(
                    f"{func} mixes DTensors of {like.mesh} and {x.device_mesh}; they live on one."
                )
            if x.dim() == len(like.shape) and x.shape[0] == like.shape[0]:
                return _placed(x, like.placements)._local_tensor
            with torch.no_grad():
                return _full(x)
        if isinstance(x, Tensor) and x.numel() != 1:
            raise ShardError(
                f"{func} mixes a RaggedDTensor and a plain tensor of shape {tuple(x.shape)}; make "
                "it a DTensor first, with DTensor.from_local(x, mesh, [Replicate()])."
            )
        return x

    found = func(*tree_map(local, args), **tree_map(local, kwargs))
    # of what was written torch itself returns the very tensor that was given
    return tree_map(lambda out: _wrap(out, like) if isinstance(out, Tensor) else out, found)


# Of the whole tensor, and of the ranks' results once more.
_SUM = torch.ops.aten.sum.default
_NORM = torch.ops.aten.linalg_vector_norm.default
_NORMS = torch.ops.aten._foreach_norm.Scalar


def _is_reduction(func: Any, args: Any, kwargs: Any) -> bool:
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    whole = len(args) <= (3 if func is _NORMS else 2) and kwargs.keys() <= {"ord", "dtype"}
    return func is _SUM or (func in (_NORM, _NORMS) and whole and order > 0)


def _run_on_parts(func: Any, args: Any, kwargs: Any) -> Any:
    x, *rest = args
    lists = isinstance(x, list | tuple)
    x = x[0] if lists else x

    def reduce(x: Tensor) -> Any:
        return func([x] if lists else x, *rest, **kwargs)

    # the norm of nothing has no largest element to take; zeros add nothing to any of these
    local = x._local_tensor if x._local_tensor.numel() else x._local_tensor.new_zeros(1)
    (part,) = _tensors(reduce(local))
    mesh, (axis, _) = x.device_mesh, _rows_of(x._spec)
    parts = _from_all(part.reshape(1), mesh, axis)
    whole = _spec(x._spec, [Replicate()] * mesh.ndim, (), parts.dtype)
    return tree_map(lambda one: DTensor(one, whole, requires_grad=False), reduce(parts))
