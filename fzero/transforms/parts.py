"""Trees of shards, opened for a transform: local tensors, how each lives, and the way back.

[Note: whose value] A transform is differentiated as one map from all ranks' inputs to all ranks'
outputs, so each value has to say whose it is:

    split    each rank has its rows of one leaf; so does the cotangent
    whole    every rank holds one and the same value, which has one cotangent, the same everywhere
    own      a rank's own value (its loss, a full leaf while its batch uses it): cotangents are
             its own, and the objective is their sum over the ranks

`collectives` has the ways between them: `all_gather` (split or whole -> own), `replicate` (whole ->
own), `as_whole` (own, but equal -> whole). A parameter that comes in whole is opened as whole; one
that an outer function has gathered is its own, and opened through `as_whole`.
"""

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from fzero import tree
from fzero.config import Config
from fzero.distributed.collectives import as_whole, replicate
from fzero.distributed.dtensor import dtensor_spec, from_spec, local_tensor
from fzero.distributed.mesh import Mesh, resolve_mesh
from fzero.errors import ShardError
from fzero.functional.differentiate import is_differentiated
from fzero.layout import Layout, LeafLayout
from fzero.state.sharding import read_sharding
from fzero.tree import PyTree


@dataclass(frozen=True, eq=False)
class Part:
    """A leaf inside a transform of the library, where a `DTensor` can't go.

    Args:
        value: this rank's part, or all of it.
        leaf: how it is split; its dim is None for a whole leaf.
        spec: what makes it a DTensor; None for a plain tensor.
        mesh: over which ranks.
    """

    value: Tensor
    leaf: LeafLayout
    spec: DTensorSpec | None
    mesh: Mesh


@dataclass(frozen=True)
class Opened:
    """A tree of shards as local tensors.

    Args:
        spec: the tree's structure.
        paths: of its leaves.
        layout: of its leaves.
        mesh: over which ranks.
        dtensors: what makes each leaf a DTensor; None for a plain tensor.
        values: the local tensors.
        as_parts: whether the tree came as `Part`s, and goes as such.
        own: whether plain leaves are the rank's own: an outer function has gathered them.
    """

    spec: tree.Spec
    paths: tuple[str, ...]
    layout: Layout
    mesh: Mesh
    dtensors: tuple[DTensorSpec | None, ...]
    values: tuple[Tensor, ...]
    as_parts: bool
    own: bool

    def closed(self, values: Sequence[Tensor | None]) -> PyTree:
        """A tree that lives as this one does; None stays."""
        rows = zip(values, self.layout, self.dtensors, strict=True)
        return tree.unflatten(self.spec, [self._closed(*row) for row in rows])

    def parts(self, values: Sequence[Tensor]) -> PyTree:
        """The tree as a transform of the library takes it inside of another one."""
        rows = zip(values, self.layout, self.dtensors, strict=True)
        return tree.unflatten(self.spec, [Part(x, leaf, d, self.mesh) for x, leaf, d in rows])

    def _closed(self, x: Tensor | None, leaf: LeafLayout, spec: DTensorSpec | None) -> Any:
        if x is None:
            return None
        if self.as_parts:
            return Part(x, leaf, spec, self.mesh)
        if spec is not None:
            return _dtensor(x, spec)
        if self.own:
            axes = self.mesh.axes
            return replicate(replicate(x, axes.shard, leaf.name), axes.replicate, leaf.name)
        return x


def opened(values: PyTree, cfg: Config, what: str) -> Opened:
    """Open a tree of DTensors, of plain tensors, or of `Part`s; one that is open stays as it is.

    Raises:
        ShardError: a leaf is no tensor, or lives on another mesh or in another way.
    """
    if isinstance(values, Opened):
        return values
    leaves, spec = tree.flatten(values)
    paths = tuple(tree.paths(values))
    first = next((x for x in leaves if isinstance(x, Part)), None)
    if first is not None:
        for x, path in zip(leaves, paths, strict=True):
            if not isinstance(x, Part):
                raise ShardError(
                    f"{what}{path} is a {type(x).__name__} among shards; inside of a transform a "
                    "tree is passed on as a whole, as it came in."
                )
        layout = Layout(tuple(x.leaf for x in leaves), first.leaf.world)
        specs = tuple(x.spec for x in leaves)
        found = tuple(x.value for x in leaves)
        return Opened(spec, paths, layout, first.mesh, specs, found, as_parts=True, own=False)
    mesh = mesh_of(leaves, cfg)
    sharding = read_sharding(values, cfg, mesh, what)
    plain = [x for x in leaves if not isinstance(x, DTensor)]
    own = is_differentiated() or any(x.requires_grad for x in plain)
    found = tuple(_value(x, mesh, own) for x in leaves)
    return Opened(spec, paths, sharding.layout, mesh, sharding.dtensors, found, False, own)


def mesh_of(leaves: Sequence[Any], cfg: Config) -> Mesh:
    """The ranks that a function of these leaves runs on: the DTensors', or else the config's."""
    there = next((x.device_mesh for x in leaves if isinstance(x, DTensor)), None)
    wanted = cfg.mesh if cfg.mesh is not None else there
    outer = _OUTER.get()
    if outer is not None and wanted in (None, outer.device_mesh):
        return outer
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    return resolve_mesh(wanted, tensors[0].device.type if tensors else "cpu")


# Of the function that is being staged out: no mesh can be looked up on fake tensors.
_OUTER: ContextVar[Mesh | None] = ContextVar("fzero_outer_mesh", default=None)


@contextlib.contextmanager
def on_mesh(mesh: Mesh) -> Iterator[None]:
    """What runs inside runs on these ranks, unless it says otherwise."""
    token = _OUTER.set(mesh)
    try:
        yield
    finally:
        _OUTER.reset(token)


def has_parts(values: PyTree) -> bool:
    """Whether any leaf is a `Part`."""
    return any(isinstance(x, Part) for x in tree.leaves(values))


def joined(layouts: Sequence[Layout]) -> Layout:
    """The layout of several trees' leaves, one tree after the other."""
    return replace(layouts[0], leaves=tuple(leaf for layout in layouts for leaf in layout))


def from_part(x: Any) -> Any:
    """A `Part` as users hold it; what is none as it is."""
    if not isinstance(x, Part):
        return x
    return x.value if x.spec is None else _dtensor(x.value, x.spec)


def _dtensor(x: Tensor, spec: DTensorSpec) -> DTensor:
    if spec.tensor_meta is None or spec.tensor_meta.dtype != x.dtype:
        stride = torch.empty(spec.shape, device="meta").stride()
        spec = dtensor_spec(spec.mesh, spec.placements, spec.shape, stride, x.dtype)
    return from_spec(x.contiguous(), spec)


def _value(x: Tensor, mesh: Mesh, own: bool) -> Tensor:
    if isinstance(x, DTensor) or not own:
        return local_tensor(x)
    axes = mesh.axes
    return as_whole(as_whole(x, axes.shard), axes.replicate)
