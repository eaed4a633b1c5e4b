"""What is known about a step before any batch: where every leaf lives, and how states look."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter, eq, is_
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fzero import tree
from fzero.config import Config
from fzero.distributed.buckets import GATHER, bucket_of
from fzero.distributed.dtensor import dtensor_spec, from_spec, local_tensor, type_of
from fzero.distributed.mesh import Axes, Mesh
from fzero.distributed.ragged import placements_of
from fzero.errors import ShardError
from fzero.layout import LeafLayout
from fzero.numerics.noise import WholeLeafNoise, noted
from fzero.optim.base import Optimizer
from fzero.optim.counts import common_count
from fzero.optim.whole import Leaves, Whole, whole_leaves
from fzero.state.homes import Homes
from fzero.state.sharding import Sharding, locals_of, refuse_complex
from fzero.tree import PyTree

_shape, _dtype = attrgetter("shape"), attrgetter("dtype")


@dataclass(frozen=True)
class Plan:
    """One step function on one mesh for one tree of parameters.

    Args:
        cfg: the step's.
        opt: its optimizer.
        mesh: its ranks.
        sharding: how the parameters live between steps.
    """

    cfg: Config
    opt: Optimizer
    mesh: Mesh
    sharding: Sharding

    def __post_init__(self) -> None:
        refuse_complex(self.sharding.layout, self.sharding.paths, "params")

    @property
    def axes(self) -> Axes:
        """The mesh, as the transforms take it."""
        return self.mesh.axes

    @property
    def trained(self) -> list[LeafLayout]:
        """The leaves that get a gradient."""
        return self.sharding.layout.trained

    @property
    def names(self) -> tuple[list[str], list[str]]:
        """Names of the trained and of the frozen leaves."""
        layout = self.sharding.layout
        trained = [leaf.name for leaf in layout if leaf.trainable]
        return trained, [leaf.name for leaf in layout if not leaf.trainable]

    @property
    def splits_state(self) -> bool:
        """Whether each rank keeps only its part of the optimizer's state."""
        return self.cfg.stage > 0

    def part(self, full: Tensor, leaf: LeafLayout) -> Tensor:
        """The part of a full leaf whose optimizer state lives on this rank."""
        return leaf.split(full, self.mesh.shard_rank) if self.splits_state else full

    def parts(self, trained: Sequence[Tensor]) -> Sequence[Tensor]:
        """What of the trained leaves, as they live between steps, is this rank's; as views."""
        # Stage 0 updates whole leaves; at stage 3 they live as shards already.
        if self.cfg.stage in (0, 3) or self.mesh.shard_size == 1:
            return trained
        return [self.part(x, leaf) for x, leaf in zip(trained, self.trained, strict=True)]

    def targets(self, trained: Sequence[Tensor]) -> list[Tensor]:
        """What the optimizer updates, from the trained leaves as they live between steps."""
        if self.cfg.stage in (0, 3):
            return list(trained)
        return [x.contiguous() for x in self.parts(trained)]

    @functools.cached_property
    def homes(self) -> Homes | None:
        """Where the trained leaves live between steps, if that matters: see [Note: at home]."""
        axis = self.axes.shard
        if self.cfg.stage not in (1, 2) or axis.size == 1 or self.opt.foreign:
            return None
        # carried by an all-to-all, whose parts to send are a buffer of their own
        exchanged = bucket_of(GATHER, self.trained[:1], torch.float32, axis).exchanged
        homes = None if exchanged else Homes(self.trained)
        return homes if homes and homes.flats else None

    def trained_tree(self, leaves: Sequence[Any]) -> PyTree:
        """Trained leaves in the structure of the parameters, None in place of frozen ones."""
        frozen = [None] * (len(self.sharding.layout) - len(leaves))
        return tree.unflatten(self.sharding.spec, self.sharding.layout.merge(leaves, frozen))

    def foreign_tree(self, leaves: Sequence[Tensor]) -> PyTree:
        """The same for an optimizer that knows nothing of shards: DTensors, which it gathers."""
        return self.trained_tree(self.wrap(leaves))

    def wrap(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """One part per trained leaf, as users hold them."""
        return [self._wrap(x, leaf) for x, leaf in zip(parts, self.trained, strict=True)]

    def wrap_inner(self, inner: PyTree) -> PyTree:
        """An optimizer's state; leaves shaped and named like parameters become DTensors."""
        if not self.splits_state or self.opt.foreign:  # which has done so itself
            return inner
        leaves, spec = tree.flatten(inner)
        pairs = zip(leaves, self.leaves_of(inner), strict=True)
        wrapped = [x if leaf is None else self._wrap(x, leaf) for x, leaf in pairs]
        return tree.unflatten(spec, wrapped)

    def leaves_of(self, inner: PyTree) -> list[LeafLayout | None]:
        """The parameter that each leaf of an optimizer's state is shaped and named like, if any."""
        rank = self.mesh.shard_rank
        found = []
        for x, leaf in zip(tree.leaves(inner), self._named_like(inner), strict=True):
            alike = leaf and isinstance(x, Tensor) and tuple(x.shape) == leaf.shard_shape(rank)
            found.append(leaf if alike else None)
        return found

    def numbers(self, inner: PyTree) -> Iterator[tuple[str, Tensor]]:
        """The real 0-d leaves of an optimizer's state that are none of a parameter's, with their
        paths: what every rank has alike, such as counts.

        A moment of a 0-d parameter is named like it, and so is each leaf's own count.
        """
        if "" in self.sharding.paths:  # one tensor without a name: all are named like it
            return
        rows = zip(tree.leaves(inner), self._named_like(inner), tree.paths(inner), strict=True)
        for x, leaf, path in rows:
            if leaf is None and isinstance(x, Tensor) and not x.dim() and not x.is_complex():
                yield path, local_tensor(x)

    def _named_like(self, inner: PyTree) -> Iterator[LeafLayout | None]:
        paths = dict(zip(self.sharding.paths, self.sharding.layout, strict=True))
        for path in tree.paths(inner):
            # a moment's path ends with its parameter's, .mu['w'] with ['w']: the longest first
            starts = (i for i, char in enumerate(path) if char in "[.")
            yield next((paths[path[i:]] for i in starts if path[i:] in paths), None)

    def _wrap(self, x: Tensor, leaf: LeafLayout) -> Tensor:
        if not self.splits_state or isinstance(x, DTensor):
            return x
        stride = torch.empty(leaf.shape, device="meta").stride()
        placements = placements_of(leaf, self.mesh)
        spec = dtensor_spec(self.mesh.device_mesh, placements, leaf.shape, stride, x.dtype)
        return from_spec(x, spec)

    @functools.cached_property
    def whole(self) -> Leaves:
        """The whole leaves, for functions of users that the optimizer calls."""
        rank, high = self.mesh.shard_rank, self.cfg.dtypes.master
        found = {
            path: Whole(
                leaf.shape,
                # of masters: at stage 3 the parameters are those, below it they may be lower
                (high if leaf.trainable else None) or leaf.dtype,
                leaf.shard_shape(rank) if self.splits_state else leaf.shape,
                leaf.dim if self.splits_state else None,
                leaf.home,
            )
            for path, leaf in zip(self.sharding.paths, self.sharding.layout, strict=True)
        }
        if self.opt.foreign:  # its parts are given DTensors, which know their mesh, or all
            return Leaves(self.sharding.spec, found)
        return Leaves(self.sharding.spec, found, self.axes.shard, self.mesh.device_type)

    def noise(
        self,
        *groups: Sequence[Tensor],
        around: Callable[[int], contextlib.AbstractContextManager[object]] = noted,
    ) -> contextlib.AbstractContextManager[Any]:
        """The optimizer's random numbers inside are those of whole leaves, on every rank.

        Args:
            groups: of this rank's parts of the trained leaves.
            around: see `WholeLeafNoise`.
        """
        if self.opt.foreign:  # it has whole leaves
            return contextlib.nullcontext()
        shard = self.axes.shard
        rank = shard.rank if self.splits_state and shard.size > 1 else None
        return WholeLeafNoise(self.sharding.layout.trained, groups, rank, around)

    @property
    def inner_spec(self) -> tree.Spec | None:
        """Structure of the optimizer's state; None for one that knows nothing of shards."""
        return None if self.opt.foreign else self._inner[1]

    @functools.cached_property
    def _inner(self) -> tuple[list[Any], tree.Spec]:
        """Shapes of this rank's leaves of the optimizer's state, None of no tensor; and its spec.

        Of one that knows of shards.
        """
        pairs = zip(self._parts, self.trained, strict=True)
        empty = [torch.empty(shape, dtype=leaf.dtype, device="meta") for shape, leaf in pairs]
        with whole_leaves(self.whole):
            leaves, spec = tree.flatten(self.opt.init(self.trained_tree(empty)))
        return [getattr(x, "shape", None) for x in leaves], spec

    @functools.cached_property
    def known_params(self) -> tree.Known:
        """What parameters look like, for `tree.flatten`."""
        return tree.Known(self.sharding.spec)

    @functools.cached_property
    def known_inner(self) -> tree.Known | None:
        """What the optimizer's state looks like, if that is known."""
        return None if self.inner_spec is None else tree.Known(self.inner_spec)

    def check_state(self, spec: tree.Spec, inner: Sequence[Any], masters: Sequence[Tensor]) -> None:
        """Raise a ShardError unless the optimizer keeps such a state, and masters lie so.

        Args:
            spec: structure of its state.
            inner: this rank's leaves of it.
            masters: this rank's, or none.
        """
        self._check_structure(spec)
        parts = self._parts
        if masters and not _have_shapes(masters, parts):
            paths = tree.paths(self.trained_tree(range(len(parts))))
            _refuse_shapes("opt_state.master", masters, parts, paths)
        if self.opt.foreign or _have_shapes(inner, wanted := self._inner[0]):
            return
        _refuse_shapes("opt_state.inner", inner, wanted, _paths(spec))

    def check_master(self, master: tree.PyTree) -> None:
        """Raise a ShardError if masters come in another order than the parameters that train."""
        if master is None or tree.flatten(master)[1] == self._master_spec:
            return
        found, wanted = tree.paths(master), _paths(self._master_spec)
        if found != wanted:
            raise ShardError(
                "opt_state.master has another structure than the parameters that are trained: it "
                f"{_difference('opt_state.master', found, wanted)}. Pass the state that "
                "step_fn.init or the last call of step_fn returned."
            )

    @functools.cached_property
    def _master_spec(self) -> tree.Spec:
        return tree.flatten(self.trained_tree(range(len(self.trained))))[1]

    def _check_structure(self, spec: tree.Spec) -> None:
        if self.inner_spec not in (None, spec):
            if self.inner_spec == _without_counts(spec):
                raise ShardError(
                    "opt_state.inner counts the updates of each leaf, as an Engine's state does "
                    "once parameters were frozen between steps; a step function has one count for "
                    "all. Go on with an Engine, or let its step be that of all: "
                    "opt_state._replace(inner=fzero.optim.common_count(opt_state.inner))."
                )
            found, kept = map(_paths, (spec, self.inner_spec))
            raise ShardError(
                "opt_state.inner has another structure than what this step function's optimizer "
                f"keeps: it {_difference('opt_state.inner', found, kept)}. Pass the state of the "
                "same optimizer and Config(frozen=...), or start a new one with step_fn.init; "
                "fzero.checkpoint.load_partial(..., state=True) takes over what has a place in it."
            )

    def check(self, leaves: Sequence[Any], spec: tree.Spec) -> None:
        """Raise a ShardError unless `leaves` are parameters as `init` returned them."""
        sharding = self.sharding
        if spec != sharding.spec:
            raise ShardError(_structure_message(tree.paths(tree.unflatten(spec, leaves)), sharding))
        local = locals_of(leaves)
        kinds, shapes, dtypes = self._wanted
        # nearly always: without a line of Python for each leaf
        alike = all(map(is_, map(type, leaves), kinds)) and all(
            map(is_, map(_dtype, local), dtypes)
        )
        # one by one: a list of so many shapes would be work for the collector
        if alike and all(map(eq, map(_shape, local), shapes)):
            return
        wanted = zip(kinds, shapes, dtypes, strict=True)
        for x, (kind, shape, dtype), path in zip(leaves, wanted, sharding.paths, strict=True):
            split = issubclass(kind, DTensor)
            if not isinstance(x, Tensor) or isinstance(x, DTensor) != split:
                wanted, way = (
                    ("a DTensor", "fzero.shard(params, step_fn.cfg) splits full ones")
                    if split
                    else ("a plain tensor, whole on every rank", "fzero.unshard(params) gives such")
                )
                raise ShardError(
                    f"params{path} is a {type(x).__name__}, and at stage {self.cfg.stage} it must "
                    f"be {wanted}. Pass what step_fn.init or the last call of step_fn returned, "
                    f"changed as you like: {way}."
                )
            if local_tensor(x).shape != shape or x.dtype != dtype:
                raise ShardError(
                    f"params{path} is {x.dtype} with {tuple(local_tensor(x).shape)} on this rank, "
                    f"and was {dtype} with {shape} in the tree that this step function was made "
                    "for. Make another step function for other shapes."
                )

    def check_placements(self, params: PyTree, inner: PyTree) -> None:
        """Raise a ShardError, on all ranks, unless DTensors from elsewhere lie as planned.

        A rank's own part may be as large by chance, and then that rank would wait for the others.
        """
        if self.mesh.shard_size == 1:
            return
        # a foreign optimizer's state lies as that likes
        inner = None if self.opt.foreign else inner
        for what, values in (("params", params), ("opt_state.inner", inner)):
            rows = zip(
                tree.leaves(values), self._named_like(values), tree.paths(values), strict=True
            )
            for x, leaf, path in rows:
                # other shapes, and plain tensors, are refused elsewhere, or are the optimizer's own
                if leaf is None or not isinstance(x, DTensor) or tuple(x.shape) != leaf.shape:
                    continue
                if x.placements != (wanted := placements_of(leaf, self.mesh)):
                    raise ShardError(
                        f"{what}{path} lies on the ranks as {x.placements}, and this step function "
                        f"has {wanted} for it. Where leaves lie end to end, that depends on the "
                        "whole tree, the optimizer, and Config's layout, bucket_mb, frozen and "
                        "gather_together. Make the step function with those that step_fn.init had, "
                        "use Config(layout='rows') for both, or lay them anew: "
                        "step_fn.init(fzero.unshard(params)); a state goes through a checkpoint."
                    )

    @functools.cached_property
    def _parts(self) -> list[tuple[int, ...]]:
        """Shape of this rank's part of each trained leaf, as an update works on it."""
        rank = self.mesh.shard_rank
        return [
            leaf.shard_shape(rank) if self.splits_state else leaf.shape for leaf in self.trained
        ]

    @functools.cached_property
    def _wanted(self) -> tuple[list[type], list[tuple[int, ...]], list[torch.dtype]]:
        """Of each leaf whether it is a DTensor or plain, this rank's shape, and its dtype.

        Made once: every call of the step asks.
        """
        rank, layout, dtensors = self.mesh.shard_rank, self.sharding.layout, self.sharding.dtensors
        pairs = list(zip(layout, dtensors, strict=True))
        return (
            [Tensor if dtensor is None else type_of(dtensor) for _, dtensor in pairs],
            [leaf.shape if dtensor is None else leaf.shard_shape(rank) for leaf, dtensor in pairs],
            [leaf.dtype for leaf in layout],
        )


def _have_shapes(leaves: Sequence[Any], shapes: Sequence[Any]) -> bool:
    # what is no tensor is refused elsewhere; without a line of Python for each
    found = map(getattr, leaves, repeat("shape"), repeat(None))
    return len(leaves) == len(shapes) and all(map(eq, found, shapes))


def _refuse_shapes(
    what: str, leaves: Sequence[Any], shapes: Sequence[Any], paths: Sequence[str]
) -> None:
    remedy = (
        "Each leaf lies on the ranks as step_fn.init laid it: what is made of full tensors goes "
        "through there, or into the tensors that are there (leaf.copy_, of a DTensor too)."
    )
    if len(leaves) != len(shapes):
        raise ShardError(
            f"{what} has {len(leaves)} leaves, and {len(shapes)} parameters are trained. {remedy}"
        )
    for x, shape, path in zip(leaves, shapes, paths, strict=True):
        if isinstance(x, Tensor) and x.shape != shape:
            wanted = "no tensor" if shape is None else tuple(shape)
            raise ShardError(
                f"{what}{path} is {tuple(x.shape)} on this rank, and must be {wanted}. {remedy}"
            )


def _without_counts(spec: tree.Spec) -> tree.Spec:
    return tree.flatten(common_count(tree.unflatten(spec, range(spec.num_leaves))))[1]


def _structure_message(found: Sequence[str], sharding: Sharding) -> str:
    return (
        f"params has another structure than the tree that this step function was made for: it "
        f"{_difference('params', found, sharding.paths)}. Pass what "
        "step_fn.init or the last call of step_fn returned, or make another step function."
    )


def _difference(name: str, found: Sequence[str], wanted: Sequence[str]) -> str:
    missing = [path for path in wanted if path not in set(found)]
    extra = [path for path in found if path not in set(wanted)]
    said = [f"lacks {_some(name, missing)}"] if missing else []
    said += [f"has {_some(name, extra)} besides"] if extra else []
    if said:
        return " and ".join(said)
    for one, other in zip(found, wanted, strict=False):
        if one != other:
            return (
                f"has {name}{one} where {name}{other} was (keys of an OrderedDict count in their "
                "order, those of a dict do not)"
            )
    return "nests the same leaves in other containers"


def _some(name: str, paths: Sequence[str]) -> str:
    more = f" (and {len(paths) - 3} more)" if len(paths) > 3 else ""
    return ", ".join(f"{name}{path}" for path in paths[:3]) + more


def _paths(spec: Any) -> list[str]:
    return tree.paths(tree.unflatten(spec, range(spec.num_leaves)))
