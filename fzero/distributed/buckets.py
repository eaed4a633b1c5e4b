"""Buckets: several leaves in one collective, and the copies in and out of its buffer.

[Note: a bucket's buffer] Every rank's part is laid end to end, the leaves one after another inside
a part, each padded to the same rows on every rank:

    rank 0: [leaf a, padded rows of rank 0][leaf b, ...] | rank 1: [leaf a, ...][leaf b, ...] | ...

A single leaf that is split evenly along dim 0 is laid out so already; it travels without a copy.
Large leaves of this kind have buckets of their own: see `goes_alone`. Leaves of a flat travel by
themselves, and their buffer is the flat, whichever of its leaves are asked for: see `layout.flats`,
[Note: flats]. There a leaf is in one piece, and what comes is not copied.

[Note: what carries a bucket] A kind has a row in `KINDS`: how its buffer is filled and read, and
which operators ask for one leaf of it. `bucket_of` settles how the bucket travels, `carrier` names
the operator of torch's that carries it. The Program's pass writes that operator into the graph, and
`launch` calls it: so every executor sends the same.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import eq
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fzero.distributed import works
from fzero.distributed.collectives import as_wire, leaf_of, pad_rows
from fzero.distributed.mesh import Axis, is_gloo
from fzero.distributed.whereabouts import Circle
from fzero.layout import LeafLayout
from fzero.layout.flats import by_flat

GATHER, REDUCE_SCATTER, ALL_REDUCE = "all_gather", "reduce_scatter", "all_reduce"
EXCHANGE = "all_to_all"


@dataclass(frozen=True)
class Bucket:
    """Leaves of one dtype that share one collective over one axis.

    Args:
        kind: GATHER, REDUCE_SCATTER, ALL_REDUCE or EXCHANGE.
        leaves: in the order of the buffer.
        dtype: of all of them.
        world: ranks on the axis.
        group: name of its process group.
        rank: this rank's number on it.
        gloo: whether gloo carries it: its threads let go of a buffer only after they say that they
            are done.
        exchanged: carried by an all-to-all, which has the same result. Gloo's own reduce-scatter is
            an all-reduce whose rest is thrown away, and its all-gather takes twice the processor
            time of its all-to-all. Two ranks have no need of it: see `works`.
        parts: of an EXCHANGE, the elements that come from each rank, and that go to each.
        apart: of a REDUCE_SCATTER, whether it travels beside gathers: see [Note: two lanes].
        over: of a GATHER of one leaf, or of a flat, whether the memory of the leaves that are
            written over is the buffer: what comes is written where it belongs.
    """

    kind: str
    leaves: tuple[LeafLayout, ...]
    dtype: torch.dtype
    world: int
    group: str
    rank: int = 0
    gloo: bool = False
    exchanged: bool = False
    parts: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    apart: bool = False
    over: bool = False

    @property
    def gathers(self) -> bool:
        """Whether it brings full leaves; others bring sums."""
        return KINDS[self.kind].gathers

    @property
    def lane(self) -> str:
        """Name of what carries it: its group, or the lane of reductions beside it."""
        return f"{self.group}, reductions" if self.apart else self.group

    @property
    def nbytes(self) -> int:
        """Bytes of the full side, without padding; of a flat all that travels, asked for or not."""
        if self.is_flat:
            return self.part * self.world * self.dtype.itemsize
        return sum(leaf.numel for leaf in self.leaves) * self.dtype.itemsize

    @property
    def wire_bytes(self) -> int:
        """Bytes that each rank sends in a ring: what bandwidth-optimal collectives move."""
        if self.kind == EXCHANGE:
            sends = self.parts[1]
            return (sum(sends) - sends[self.rank]) * self.dtype.itemsize
        # a ring's all-reduce is a reduce-scatter and then an all-gather
        hops = 2 if self.kind == ALL_REDUCE else 1
        return hops * self.nbytes * (self.world - 1) // self.world

    def __repr__(self) -> str:
        first = self.leaves[0].name
        more = f" +{len(self.leaves) - 1}" if len(self.leaves) > 1 else ""
        return f"{self.kind}[{first}{more}]"

    @functools.cached_property
    def line(self) -> str:
        """What ranks tell each other that they are about to run."""
        return f"{self.kind} of {', '.join(leaf.name for leaf in self.leaves)}"

    @functools.cached_property
    def is_flat(self) -> bool:
        """Whether its leaves are of one flat."""
        return self.kind != ALL_REDUCE and self.leaves[0].home is not None

    @functools.cached_property
    def part(self) -> int:
        """Elements that each rank has of its buffer; not of an all-reduce or exchange."""
        home = self.leaves[0].home
        return home.part if home is not None else sum(self.parts_of.sizes)

    @functools.cached_property
    def is_plain(self) -> bool:
        """Whether the leaf's own memory is the buffer."""
        return len(self.leaves) == 1 and self.is_even

    @functools.cached_property
    def is_even(self) -> bool:
        """Whether every leaf's rows lie in the buffer as in its shards: none is padded or moved."""
        return not self.is_flat and all(is_laid_out(leaf, self.world) for leaf in self.leaves)

    @functools.cached_property
    def is_around(self) -> bool:
        """Whether what comes is written around this rank's own part, which is packed in its place.

        It saves the buffer that would be sent, and a copy of it.
        """
        return self.gathers and (self.over or not self.is_plain) and not self.exchanged

    @functools.cached_property
    def holds_leaves(self) -> bool:
        """Whether full leaves, each in one piece, are copied together into the buffer to send."""
        if self.kind == ALL_REDUCE:
            return len(self.leaves) > 1
        return self.kind == REDUCE_SCATTER and self.is_flat

    @functools.cached_property
    def full(self) -> "Places":
        """The full leaves, end to end; of a flat, as they lie in it."""
        places = Places.of([leaf.shape for leaf in self.leaves])
        return places.at(leaf.home.offset for leaf in self.leaves if leaf.home and self.is_flat)

    @functools.cached_property
    def fills(self) -> "tuple[Fill, Fill]":
        """How full leaves fill a flat, and this rank's shards its part of it."""
        return Fill.of(self.full, self.part * self.world), Fill.of(self.own, self.part)

    @functools.cached_property
    def own(self) -> "Places":
        """This rank's shards, as they lie in its part of a flat."""
        places = Places.of([leaf.shard_shape(self.rank) for leaf in self.leaves])
        start = self.rank * self.part
        return places.at(max(leaf.home.offset - start, 0) for leaf in self.leaves if leaf.home)

    @functools.cached_property
    def there(self) -> tuple[list[int], list[int]]:
        """Which of `own` have elements, by index, and where they begin."""
        indices = self.fills[1].order
        return indices, [self.own.starts[i] for i in indices]

    @functools.cached_property
    def parts_of(self) -> "Places":
        """A rank's padded shards, end to end."""
        return Places.of([leaf.padded_shape for leaf in self.leaves])


class Places(NamedTuple):
    """Where dense tensors lie that are laid end to end: what `as_strided` takes, by tensor.

    >>> Places.of([(2, 3), (4,)])
    Places(shapes=[(2, 3), (4,)], strides=[(3, 1), (1,)], starts=[0, 6], sizes=[6, 4])
    """

    shapes: list[tuple[int, ...]]
    strides: list[tuple[int, ...]]
    starts: list[int]
    sizes: list[int]

    @classmethod
    def of(cls, shapes: Sequence[tuple[int, ...]]) -> Self:
        """Of tensors of these shapes."""
        sizes = list(map(math.prod, shapes))
        # empty leaves, whose strides are not these, are in no bucket
        strides = [
            tuple(math.prod(shape[dim:]) for dim in range(1, len(shape) + 1)) for shape in shapes
        ]
        return cls(list(shapes), strides, list(accumulate(sizes, initial=0))[:-1], sizes)

    def at(self, starts: Iterable[int]) -> "Places":
        """The same tensors elsewhere; where they are, if no places are given."""
        return self._replace(starts=list(starts) or self.starts)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The tensors that lie there."""
        first = buffer.storage_offset()
        starts = [first + start for start in self.starts] if first else self.starts
        return [*map(buffer.as_strided, self.shapes, self.strides, starts)]


class Fill(NamedTuple):
    """How a flat buffer is filled with tensors and, between them, zeros.

    Args:
        order: the tensors in which there is something, by index, as they lie.
        gaps: elements before each of them, and after the last.
    """

    order: list[int]
    gaps: list[int]

    @classmethod
    def of(cls, places: Places, numel: int) -> Self:
        """Of a buffer of so many elements.

        >>> Fill.of(Places([(2,), (0,), (4,)], [], [6, 0, 1], [2, 0, 4]), 9)
        Fill(order=[2, 0], gaps=[1, 1, 1])
        """
        order = [i for i, size in enumerate(places.sizes) if size]
        order.sort(key=places.starts.__getitem__)
        starts = [*(places.starts[i] for i in order), numel]
        ends = [0, *(places.starts[i] + places.sizes[i] for i in order)]
        return cls(order, [start - end for start, end in zip(starts, ends, strict=True)])

    def into(self, buffer: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """Fill it; it is returned."""
        parts = [tensors[i].flatten() for i in self.order]
        if any(self.gaps):
            zeros = buffer.new_zeros(max(self.gaps))
            spaces = [zeros[:gap] for gap in self.gaps]
            parts = [x for pair in zip(spaces, [*parts, zeros[:0]], strict=True) for x in pair]
        return torch.cat(parts, out=buffer)


# ---------------------------------------------------------------------- what carries a bucket
def bucket_of(
    kind: str,
    leaves: Sequence[LeafLayout],
    dtype: torch.dtype,
    axis: Axis,
    parts: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
    *,
    gathers: bool = False,
) -> Bucket:
    """The bucket in which these leaves travel over an axis, which has more than one rank.

    Args:
        gathers: whether gathers may be under way over the axis meanwhile.
    """
    gloo = is_gloo(axis.group)
    exchanged = gloo and kind != ALL_REDUCE and axis.size > 2
    leaves = tuple(leaves)
    apart = gathers and kind == REDUCE_SCATTER
    return Bucket(
        kind, leaves, dtype, axis.size, axis.group, axis.rank, gloo, exchanged, parts, apart
    )


def carrier(bucket: Bucket, numel: int) -> tuple[Any, tuple[Any, ...]]:
    """The operator that carries a bucket, and its arguments after the buffer.

    Args:
        bucket: from `bucket_of`.
        numel: elements of the buffer to send.

    >>> leaf = LeafLayout("w", (4,), torch.float32, dim=0)
    >>> carrier(Bucket(GATHER, (leaf,), torch.float32, 2, "g"), 2)
    (<OpOverload(op='_c10d_functional.all_gather_into_tensor', overload='default')>, (2, 'g'))
    """
    c10d = torch.ops._c10d_functional
    if bucket.kind == EXCHANGE:
        receives, sends = map(list, bucket.parts)
        return c10d.all_to_all_single.default, (receives, sends, bucket.group)
    if bucket.apart:
        arguments = ("sum", bucket.world, bucket.group, bucket.exchanged)
        return torch.ops.fzero.reduce_apart.default, arguments
    if bucket.exchanged:
        parts = [numel // bucket.world] * bucket.world
        return c10d.all_to_all_single.default, (parts, parts, bucket.group)
    if bucket.is_around:
        return torch.ops.fzero.gather_in_place.default, (bucket.world, bucket.rank, bucket.group)
    if bucket.gathers:
        return c10d.all_gather_into_tensor.default, (bucket.world, bucket.group)
    if bucket.kind == REDUCE_SCATTER:
        return c10d.reduce_scatter_tensor.default, ("sum", bucket.world, bucket.group)
    return c10d.all_reduce.default, ("sum", bucket.group)


def launch(bucket: Bucket, send: Tensor, circle: Circle, *, over: bool = False) -> Any:
    """Start a bucket's collective; `works.wait` gives what it brings.

    Args:
        bucket: from `bucket_of`.
        send: its buffer, packed.
        circle: the ranks to look at while it is waited for.
        over: whether an all-reduce may write its sum over `send`.
    """
    if over and bucket.kind == ALL_REDUCE:
        return works.all_reduce_(send, "sum", bucket.group, circle)
    operator, arguments = carrier(bucket, send.numel())
    # by the operator's name: what `carrier` says, which a Program has in its graph, is what runs
    return works.LAUNCHES[operator._schema.name](send, *arguments, circle=circle)


def asked_for(operator: str, x: Tensor, arguments: Sequence[Any]) -> tuple[str, LeafLayout, Axis]:
    """The kind of bucket, the leaf and the axis that an operator of one leaf asks for.

    Args:
        operator: its qualified name.
        x: what it sends.
        arguments: the rest, as `collectives` defines the operator.
    """
    kind = next(kind for kind, row in KINDS.items() if operator in row.operators)
    if kind == ALL_REDUCE:
        world, group, name = arguments
        return kind, LeafLayout(name, tuple(x.shape), x.dtype), Axis(group, world)
    if kind == EXCHANGE:
        _, _, world, group, names, rank, numel = arguments
        return kind, LeafLayout(names, (numel,), x.dtype), Axis(group, world, rank)
    shape, dim, world, group, name, rank, home = arguments
    return kind, leaf_of(x, shape, dim, world, name, home), Axis(group, world, rank)


def is_laid_out(leaf: LeafLayout, world: int) -> bool:
    """Whether a leaf's memory is that of a bucket of its own: it travels without a copy."""
    return leaf.dim == 0 and leaf.home is None and leaf.shape[0] % world == 0


def goes_alone(leaf: LeafLayout, nbytes: int, axis: Axis) -> bool:
    """Whether a leaf has a bucket of its own, as copying it takes longer than a collective.

    Args:
        leaf: how it is split.
        nbytes: of the full leaf, as it travels.
        axis: over which ranks.
    """
    if nbytes < ALONE_FROM or not is_laid_out(leaf, axis.size):
        return False
    return nbytes >= ALONE_FROM_ON_DEVICES or is_gloo(axis.group)


# What a collective costs beside its bytes is some 0.1 ms of gloo's threads, in which a core copies
# half a megabyte, and some 20 us of a device's, in which it copies tens of megabytes.
ALONE_FROM = 2**19
ALONE_FROM_ON_DEVICES = 2**24


# ------------------------------------------------------------------- in and out of its buffer
def pack_shards(shards: Sequence[Tensor], bucket: Bucket, targets: Sequence[Tensor] = ()) -> Tensor:
    """The buffer to gather from, in a dtype that travels: see `Bucket.is_around`.

    Args:
        shards: this rank's.
        bucket: in which they travel.
        targets: of a bucket that is gathered over its leaves, the full leaves. Those of a flat
            that lie otherwise than it does are not gathered over, but copied from a buffer.
    """
    if targets and (buffer := _packed_over(shards, bucket, targets)) is not None:
        return buffer
    if bucket.is_plain and not bucket.exchanged:
        return as_wire(shards[0])
    if bucket.is_flat:
        if bucket.exchanged:
            own = bucket.fills[1].into(shards[0].new_empty(bucket.part), shards)
            return as_wire(own.repeat(bucket.world))
        buffer = shards[0].new_empty(bucket.world, bucket.part)
        bucket.fills[1].into(buffer[bucket.rank], shards)
        return as_wire(buffer.view(-1))
    if bucket.is_even:  # without a line of Python for each leaf, as below for all even buckets
        parts = [*map(Tensor.flatten, shards)]
    else:
        parts = []
        for shard, leaf in zip(shards, bucket.leaves, strict=True):
            assert leaf.dim is not None
            front = shard.movedim(leaf.dim, 0) if leaf.dim else shard
            parts.append(pad_rows(front, leaf.padded_rows).reshape(-1))
    if bucket.is_around:
        buffer = parts[0].new_empty(bucket.world, bucket.part)
        torch.cat(parts, out=buffer[bucket.rank])
        return as_wire(buffer.view(-1))
    # an all-to-all has a part for every rank
    return as_wire(torch.cat(parts * bucket.world))


def _packed_over(
    shards: Sequence[Tensor], bucket: Bucket, targets: Sequence[Tensor]
) -> Tensor | None:
    """The memory of full leaves as a buffer, with this rank's part in its place."""
    if not bucket.is_flat:
        own = targets[0].view(bucket.world, -1)[bucket.rank]
        if not _is_at(shards[0], own):
            own.copy_(shards[0].reshape(-1))
        return as_wire(targets[0].view(-1))
    flat = flat_of(targets, bucket.full.starts, bucket.part * bucket.world)
    if flat is None or isinstance(flat, FakeTensor):
        return flat
    own = flat.narrow(0, bucket.rank * bucket.part, bucket.part)
    indices, starts = bucket.there
    if not lie_at([shards[i] for i in indices], own.data_ptr(), starts):
        torch._foreach_copy_(bucket.own.views(own), list(shards))
    return as_wire(flat)


def flat_of(leaves: Sequence[Tensor], starts: Sequence[int], numel: int) -> Tensor | None:
    """The flat in which full leaves lie; None where they lie otherwise.

    Args:
        leaves: none of them empty.
        starts: the elements of the flat at which they begin, if they lie in it.
        numel: of the flat.

    >>> x = torch.arange(6)
    >>> flat_of([x[1:3], x[3:]], [0, 2], 5), flat_of([x[1:3], x[3:]], [0, 2], 6)
    (tensor([1, 2, 3, 4, 5]), None)
    """
    first = leaves[0]
    if isinstance(first, FakeTensor):  # has no memory: it only says whose memory that is
        return first.flatten()[:1].expand(numel)
    if type(first) not in (Tensor, torch.nn.Parameter):  # a wrapper
        return None
    start = first.storage_offset() - starts[0]
    end = (start + numel) * first.itemsize
    if start < 0 or end > first.untyped_storage().nbytes():
        return None
    if not lie_at(leaves, first.data_ptr() - starts[0] * first.itemsize, starts):
        return None
    return first.as_strided((numel,), (1,), start)


def lie_at(tensors: Sequence[Tensor], address: int, starts: Sequence[int]) -> bool:
    """Whether tensors are dense, and begin so many elements behind an address; none is empty."""
    if not tensors:
        return True
    size = tensors[0].itemsize
    there = map(address.__add__, map(size.__mul__, starts))
    return all(map(eq, map(Tensor.data_ptr, tensors), there)) and all(
        map(Tensor.is_contiguous, tensors)
    )


def unpack_full(buffer: Tensor, bucket: Bucket) -> list[Tensor]:
    """The full leaves from the gathered buffer, each contiguous; views of it where that allows."""
    buffer = buffer.view(bucket.dtype)
    if bucket.is_flat:
        return bucket.full.views(buffer)
    if bucket.is_plain:
        return [buffer.view(bucket.leaves[0].shape)]
    sizes = bucket.parts_of.sizes
    table = buffer.view(bucket.world, -1)
    # copied: the rows that ranks have of a leaf lie apart in the buffer, and no view joins them
    columns: Any = torch.split_with_sizes_copy(table, sizes, dim=1) if len(sizes) > 1 else [table]
    if bucket.is_even:
        return [*map(Tensor.as_strided, columns, bucket.full.shapes, bucket.full.strides)]
    full = []
    for column, leaf in zip(columns, bucket.leaves, strict=True):
        assert leaf.dim is not None
        rows, *rest = leaf.padded_shape
        x = column.view(rows * bucket.world, *rest)
        # only the last ranks have padding, so all real rows come first
        if rows * bucket.world != leaf.shape[leaf.dim]:
            x = x.narrow(0, 0, leaf.shape[leaf.dim])
        full.append(x.movedim(0, leaf.dim).contiguous() if leaf.dim else x)
    return full


def _is_at(x: Tensor, place: Tensor) -> bool:
    """Whether a tensor lies where another begins."""
    return x.storage_offset() == place.storage_offset() and _share_memory(x, place)


def _share_memory(x: Tensor, other: Tensor) -> bool:
    return x.untyped_storage()._cdata == other.untyped_storage()._cdata


def unpack_into(buffer: Tensor, bucket: Bucket, targets: Sequence[Tensor]) -> None:
    """Write the gathered leaves over `targets`, with no copy in between where memory allows it."""
    if bucket.over and _share_memory(buffer, targets[0]):
        return
    direct = bucket.kind == GATHER and all(
        is_laid_out(leaf, bucket.world) and target.is_contiguous() and target.dtype == bucket.dtype
        for leaf, target in zip(bucket.leaves, targets, strict=True)
    )
    # then the rows that a rank has of a leaf are as long in the buffer as in the leaf: no padding,
    # and one kernel writes all of them
    if direct:
        rows = [target.view(bucket.world, -1) for target in targets]
        sizes = [x.shape[1] for x in rows]
        table = buffer.view(bucket.dtype).view(bucket.world, -1)
        torch.split_with_sizes_copy(table, sizes, dim=1, out=rows)
    else:
        torch._foreach_copy_(list(targets), KINDS[bucket.kind].unpack(buffer, bucket))


def buffer_of(bucket: Bucket, device: torch.device) -> Tensor:
    """The buffer of a bucket that `holds_leaves`, before they are in it: zeros between them."""
    places = bucket.full
    if not bucket.is_flat:
        return torch.empty(sum(places.sizes), dtype=bucket.dtype, device=device)
    buffer = torch.empty(bucket.part * bucket.world, dtype=bucket.dtype, device=device)
    order, gaps = bucket.fills[0]
    ends = [0, *(places.starts[i] + places.sizes[i] for i in order)]
    for end, gap in zip(ends, gaps, strict=True):
        if gap:
            buffer.narrow(0, end, gap).zero_()
    return buffer


def _completed(
    buffer: Tensor, leaves: Sequence[Tensor], missing: Sequence[int], bucket: Bucket
) -> Tensor:
    """A buffer with those leaves copied into it that are not there yet."""
    if missing:
        shapes, strides, starts, _ = bucket.full
        there = [buffer.as_strided(shapes[i], strides[i], starts[i]) for i in missing]
        torch._foreach_copy_(there, [leaves[i] for i in missing])
    return buffer


def pack_full(
    grads: Sequence[Tensor],
    bucket: Bucket,
    buffer: Tensor | None = None,
    missing: Sequence[int] = (),
) -> Tensor:
    """The buffer to reduce and scatter, from full gradients.

    Args:
        grads: one a leaf.
        bucket: in which they travel.
        buffer: from `buffer_of`, in which gradients are in their places already; None: in none.
        missing: of which of them that is not so.
    """
    if buffer is not None:
        return _completed(buffer, grads, missing, bucket)
    if bucket.is_plain:
        return grads[0].contiguous().view(-1)
    if bucket.is_flat:
        return bucket.fills[0].into(grads[0].new_empty(bucket.world * bucket.part), grads)
    fronts = [
        grad.movedim(leaf.dim, 0) if leaf.dim else grad
        for grad, leaf in zip(grads, bucket.leaves, strict=True)
    ]
    # Private; FSDP2 uses it, too. One kernel pads each leaf, cuts it by rank and joins the parts.
    return torch._chunk_cat(fronts, 0, bucket.world).view(-1)


def summed(buffer: Tensor, bucket: Bucket) -> Tensor:
    """What a reduce-scatter brings, from what carried it."""
    # an all-to-all brings every rank's part of what is ours, still to be summed
    return buffer.view(bucket.world, -1).sum(0) if bucket.exchanged else buffer


def unpack_shards(buffer: Tensor, bucket: Bucket) -> list[Tensor]:
    """This rank's gradient shards from what carried them; see `cut_shards`."""
    return cut_shards(summed(buffer, bucket).view(-1), bucket)


def cut_shards(buffer: Tensor, bucket: Bucket) -> list[Tensor]:
    """Shards from their sums, each contiguous; views of the flat buffer where that allows.

    See [Note: strides are part of a value].
    """
    if bucket.is_flat:
        return bucket.own.views(buffer)
    shapes, strides, starts, sizes = bucket.parts_of
    if bucket.is_even and not buffer.storage_offset():
        return [*map(buffer.as_strided, shapes, strides, starts)]
    shards = []
    for part, leaf in zip(buffer.split(sizes), bucket.leaves, strict=True):
        assert leaf.dim is not None
        start, stop = leaf.bounds(bucket.rank)
        x = part.view(leaf.padded_shape)
        # the last ranks have fewer rows, or none; the rest of their part is padding
        x = x if stop - start == leaf.padded_rows else x.narrow(0, 0, stop - start)
        shards.append(x.movedim(0, leaf.dim).contiguous() if leaf.dim else x)
    return shards


def pack_flat(
    tensors: Sequence[Tensor],
    bucket: Bucket,
    buffer: Tensor | None = None,
    missing: Sequence[int] = (),
) -> Tensor:
    """Whole tensors end to end, for an all-reduce; arguments as of `pack_full`."""
    if buffer is not None:
        return _completed(buffer, tensors, missing, bucket)
    if len(tensors) == 1:
        return tensors[0].contiguous()
    return torch.cat([*map(Tensor.flatten, tensors)])


def unpack_flat(buffer: Tensor, bucket: Bucket) -> list[Tensor]:
    """The inverse of `pack_flat`, as views."""
    if len(bucket.leaves) == 1:
        return [buffer.view(bucket.leaves[0].shape)]
    return bucket.full.views(buffer)


def pack_parts(tensors: Sequence[Tensor], bucket: Bucket) -> Tensor:
    """What an exchange sends; it is laid out by rank already."""
    (parts,) = tensors
    return parts.contiguous()


def unpack_parts(buffer: Tensor, bucket: Bucket) -> list[Tensor]:
    """What an exchange brings, by rank, as a view."""
    return [buffer.view(-1)]


class Kind(NamedTuple):
    """A kind of bucket.

    Args:
        pack: from tensors and their bucket to the buffer that is sent.
        unpack: from the buffer that comes to tensors.
        operators: that ask for it leaf by leaf; see `collectives`.
        gathers: whether it brings full leaves; others bring sums.
    """

    pack: Callable[..., Tensor]
    unpack: Callable[[Tensor, Bucket], list[Tensor]]
    operators: tuple[str, ...]
    gathers: bool = False


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        GATHER: Kind(pack_shards, unpack_full, ("fzero::gather",), gathers=True),
        REDUCE_SCATTER: Kind(pack_full, unpack_shards, ("fzero::reduce_scatter",)),
        ALL_REDUCE: Kind(pack_flat, unpack_flat, ("fzero::all_reduce",)),
        EXCHANGE: Kind(pack_parts, unpack_parts, ("fzero::exchange",)),
    }
)
"""In the order in which a Program's collectives are put into buckets."""

PACKS = frozenset(kind.pack for kind in KINDS.values())
UNPACKS = frozenset(kind.unpack for kind in KINDS.values())
"""What fills a buffer, and what takes one apart."""


# ----------------------------------------------------------------------- which leaves share one
def plan_buckets(
    leaves: Sequence[LeafLayout], nbytes: Sequence[int], order: Sequence[int], limit: int
) -> list[list[int]]:
    """Indices in this order, in groups of at most `limit` bytes, one leaf or one flat.

    >>> leaves = [LeafLayout("w", (4,), torch.uint8)] * 3
    >>> plan_buckets(leaves, [4, 4, 8], [2, 1, 0], limit=8)
    [[2], [1, 0]]
    """
    groups: list[list[int]] = []
    filled = 0
    for part in by_flat(leaves, order):
        size = sum(nbytes[index] for index in part)
        # what is larger than the limit has a group of its own: it can't be cut
        if not groups or filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1] += part
        filled += size
    return groups
