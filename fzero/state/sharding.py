"""Trees between steps: which leaves are DTensors, and the way there and back.

Inside a step every tensor is a plain local one; outside, a sharded leaf is a `DTensor`, whose
global shape `torch.distributed.checkpoint`, `full_tensor()` and `torch.optim` understand.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from fzero import tree
from fzero.config import Config, as_config
from fzero.distributed.collectives import gather_leaf
from fzero.distributed.dtensor import dtensor_spec, from_spec, local_tensor
from fzero.distributed.mesh import Axis, Mesh, group_along, resolve_mesh
from fzero.distributed.ragged import is_supported, placements_of, rows_of
from fzero.distributed.whereabouts import circle_of
from fzero.errors import ConfigError, ShardError, arguments_by_name
from fzero.functional.owners import (
    STATISTICS,
    Owners,
    keeps_dtype,
    noted,
    noted_like,
    owners_of,
)
from fzero.functional.transforms import is_recorded
from fzero.functional.uncompiled import never_compiled
from fzero.inference import makes_normal
from fzero.layout import Home, Layout, LeafLayout, plan_layout
from fzero.layout.flats import are_many_and_small, plan_flats
from fzero.numerics.precision import Precision
from fzero.optim.base import Optimizer
from fzero.state.agreement import agree_on_tree
from fzero.tree import PyTree


@dataclass(frozen=True)
class Sharding:
    """How the leaves of one tree live on a mesh.

    Args:
        spec: the tree's structure.
        paths: of its leaves, for messages.
        layout: how each leaf is split.
        mesh: over which ranks.
        dtensors: what makes a shard a DTensor; None for a leaf that stays a plain tensor.
        owners: which kinds of modules each leaf belongs to, as far as that is known.
        orders: keys of the tree's dicts, as they stand there.
    """

    spec: tree.Spec
    paths: tuple[str, ...]
    layout: Layout
    mesh: Mesh
    dtensors: tuple[DTensorSpec | None, ...]
    owners: tuple[Owners, ...]
    orders: tuple[tuple[Any, ...], ...] = ()

    def wrap(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Local tensors as users hold them."""
        return [
            noted(shard if spec is None else from_spec(shard, spec), owners)
            for shard, spec, owners in zip(shards, self.dtensors, self.owners, strict=True)
        ]

    def split(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """This rank's shards of full leaves, in memory of their own."""
        return [self.split_one(i, x) for i, x in enumerate(leaves)]

    def split_one(self, index: int, full: Tensor) -> Tensor:
        """`split` for the leaf at one index."""
        leaf = self.layout.leaves[index]
        sharded = self.dtensors[index] is not None
        part = leaf.split(full.detach(), self.mesh.shard_rank) if sharded else full.detach()
        return part.clone(memory_format=torch.contiguous_format)


def plan_sharding(
    params: PyTree,
    cfg: Config,
    mesh: Mesh,
    *,
    sharded: bool,
    opt: Optimizer | None = None,
    inside: bool = False,
) -> Sharding:
    """How `params` (full leaves, or DTensors) lives on `mesh`; as DTensors if `sharded`.

    Args:
        opt: what will update them, if it is known.
        inside: they stay inside of an engine.

    Raises:
        ConfigError: autocast depends on modules, and a leaf doesn't know its own.
        ShardError: a leaf is not a tensor.
    """
    leaves, spec = tree.flatten(params)
    paths = tree.paths(params)
    check_tensors("params", leaves, paths)
    dtypes = cfg.dtypes
    layout = plan_layout(
        tree.names(params),
        leaves,
        mesh.shard_size,
        frozen=cfg.is_frozen,
        compute=dtypes.param,
        reduce=dtypes.reduce,
    )
    owners = tuple(map(owners_of, leaves))
    layout = _by_owners(layout, owners, paths, dtypes)
    if lies_flat(cfg, opt, small=inside and are_many_and_small(leaves)):
        if not is_supported():
            raise ConfigError(
                f"Config.layout='flat' needs torch 2.13 or later, and this is {torch.__version__}: "
                "its DTensors are of a kind that an older torch can't run operators on. Use 'rows'."
            )
        # below stage 3 full leaves are there in any case, and flats may as well be large
        least = 3 * 2**19 if sharded else 2**22
        layout = plan_flats(layout, int(cfg.bucket_mb * 2**20), least, cfg.gather_together)
    specs = [_dtensor(leaf, mesh) if sharded else None for leaf in layout]
    orders = tree.orders(params)
    return Sharding(spec, tuple(paths), layout, mesh, tuple(specs), owners, orders)


def lies_flat(cfg: Config, opt: Optimizer | None, *, small: bool = False) -> bool:
    """Whether parameters that `opt` updates are laid end to end.

    Args:
        small: they are many and small, and whoever asks keeps them to itself.

    >>> from fzero.optim import sgd
    >>> [lies_flat(Config(stage=stage), sgd(0.1)) for stage in (0, 1, 2, 3)]
    [False, True, True, False]
    >>> lies_flat(Config(stage=3, layout="flat"), sgd(0.1))
    True
    """
    if cfg.layout != "auto":
        return cfg.layout == "flat"
    # at stage 3 users hold them as DTensors, of which torch's own can do more
    fits = cfg.stage in (1, 2) or (cfg.stage == 3 and small)
    return fits and opt is not None and not opt.foreign and is_supported()


def read_sharding(values: PyTree, cfg: Config, mesh: Mesh, what: str = "params") -> Sharding:
    """How a tree lives, as its leaves tell: DTensors are split, plain tensors whole on every rank.

    Args:
        values: DTensors as `shard` or `init` make them, plain tensors that are the same on every
            rank, or both.
        cfg: says which leaves are frozen, and in which dtypes they travel.
        mesh: the ranks.
        what: the tree's name, for messages.

    Raises:
        ShardError: a leaf is no tensor, or a DTensor of another mesh or of other placements.
    """
    leaves, spec = tree.flatten(values)
    paths = tree.paths(values)
    check_tensors(what, leaves, paths)
    splits = [_split(x, mesh, f"{what}{path}") for x, path in zip(leaves, paths, strict=True)]
    dtypes = cfg.dtypes
    layout = plan_layout(
        tree.names(values),
        leaves,
        mesh.shard_size,
        frozen=cfg.is_frozen,
        compute=dtypes.param,
        reduce=dtypes.reduce,
    )
    pairs = zip(layout, splits, strict=True)
    layout = replace(
        layout, leaves=tuple(replace(leaf, dim=dim, home=home) for leaf, (dim, home) in pairs)
    )
    owners = tuple(map(owners_of, leaves))
    layout = _by_owners(layout, owners, paths, dtypes)
    specs = [x._spec if isinstance(x, DTensor) else None for x in leaves]
    orders = tree.orders(values)
    return Sharding(spec, tuple(paths), layout, mesh, tuple(specs), owners, orders)


def refuse_complex(layout: Layout, paths: Sequence[str], what: str) -> None:
    """Raise a ShardError that names the first trained leaf that is complex."""
    for path, leaf in zip(paths, layout, strict=True):
        if leaf.trainable and leaf.dtype.is_complex:
            raise ShardError(
                f"{what}{path} is {leaf.dtype}, and a trained leaf must be real: optimizers and "
                "norms work on real numbers. Pass torch.view_as_real of it and go back with "
                "torch.view_as_complex in the model function, or name it in Config(frozen=...)."
            )


def _split(x: Tensor, mesh: Mesh, where: str) -> tuple[int | None, Home | None]:
    """The dim that a leaf is split along, and its place in a flat; None: whole on every rank."""
    if not isinstance(x, DTensor):
        return None, None
    if x.device_mesh != mesh.device_mesh:
        raise ShardError(
            f"{where} is a DTensor on {x.device_mesh}, and this function runs on "
            f"{mesh.device_mesh}; all trees of one function live on one mesh. Pass "
            "Config(mesh=...) with the mesh that fzero.shard was given, or shard both alike."
        )
    if (found := rows_of(x)) is not None:
        return found
    if all(type(placement) is Replicate for placement in x.placements):
        return None, None
    raise ShardError(
        f"{where} is a DTensor with the placements {x.placements}; a leaf is split along one dim "
        "over the last axis of the mesh, or whole. Make it with fzero.shard(x.full_tensor(), cfg)."
    )


def _by_owners(
    layout: Layout, owners: Sequence[Owners], paths: Sequence[str], dtypes: Precision
) -> Layout:
    """A layout whose leaves travel in the dtypes that the modules which hold them ask for."""
    rows = list(zip(layout, owners, paths, strict=True))
    if dtypes.autocast is not None:
        return replace(layout, leaves=tuple(_autocast(*row, dtypes) for row in rows))
    kept = (replace(leaf, compute=None) if keeps_dtype(of) else leaf for leaf, of, _ in rows)
    return replace(layout, leaves=tuple(kept))


def _autocast(leaf: LeafLayout, owners: Owners, path: str, dtypes: Precision) -> LeafLayout:
    """How a leaf travels under autocast: in the low dtype if only safe modules use it."""
    safe = dtypes.safe_modules
    if not safe or not leaf.dtype.is_floating_point:
        return leaf
    if owners is None:
        raise ConfigError(
            f"params{path} says nothing of the module that uses it, so Precision."
            "lower_precision_safe_modules can't tell whether it may travel in "
            f"{dtypes.autocast}. Only fzero.functionalize notes that, and copies made since "
            "(.to(device), .clone()) have lost it: move the module before you functionalize it, "
            "and pass the params as they come. For parameters of no module set "
            "Precision(autocast=..., lower_precision_safe_modules=()): all travel in float32."
        )
    low = dtypes.autocast if safe.issuperset(set(owners) - {STATISTICS}) else None
    return replace(leaf, compute=low, reduce=low or leaf.reduce)


@never_compiled
@makes_normal
def shard(full: PyTree, cfg: Config | None = None) -> PyTree:
    """Full leaves as DTensors that are split over `cfg.mesh`; every rank must call it.

    Args:
        full: pytree of tensors of any shape and dtype, the same on every rank: each keeps its part
            of its own. Ranks compare them first.
        cfg: only its mesh, layout, `bucket_mb` and `timeout` are used; None means all ranks, by
            rows.

    Returns:
        The same tree; every leaf a `DTensor` of its own memory.

    Raises:
        ShardError: a leaf is not a tensor, or is a DTensor.
        RankMismatchError: ranks differ in structure, shapes, dtypes or values.

    Examples:
        >>> sharded = shard({"w": torch.ones(4, 2)})
        >>> sharded["w"].shape, torch.equal(unshard(sharded)["w"], torch.ones(4, 2))
        (torch.Size([4, 2]), True)
    """
    cfg = as_config("shard", cfg)
    timeout = cfg.timeout
    cfg = Config(mesh=cfg.mesh, layout=cfg.layout, bucket_mb=cfg.bucket_mb)
    leaves = tree.leaves(full)
    check_tensors("full", leaves, tree.paths(full))
    refuse_shards("full", leaves, tree.paths(full), "fzero.shard")
    mesh = resolve_mesh(cfg.mesh, leaves[0].device.type if leaves else "cpu")
    agree_on_tree("full", full, mesh, timeout)
    plan = plan_sharding(full, cfg, mesh, sharded=True)
    return tree.unflatten(plan.spec, plan.wrap(plan.split(leaves)))


@never_compiled
@arguments_by_name
def unshard(sharded: PyTree, *, rank0_only: bool = False, copy: bool = True) -> PyTree:
    """Full tensors from a tree with DTensors; every rank must call it. The inverse of `shard`.

    Args:
        sharded: pytree, any of whose leaves are DTensors; leaves that are no tensors come back as
            they are.
        rank0_only: the other ranks get None instead, and hold one leaf at a time on the way.
        copy: every tensor has memory of its own, so the next step leaves it alone. False: what is
            whole on this rank already comes back as it is, in the memory that a step reuses.

    Raises:
        ShardError: a leaf is a module, an engine or an iterator, which no tree can be looked into.

    Examples:
        >>> unshard({"w": torch.ones(2), "n": 3})
        {'w': tensor([1., 1.]), 'n': 3}
        >>> params = {"w": torch.ones(2)}
        >>> best = unshard(params)
        >>> params["w"].zero_() is unshard(params, copy=False)["w"], best["w"]
        (True, tensor([1., 1.]))
    """
    leaves, spec = tree.flatten(sharded)
    for leaf, path in zip(leaves, tree.paths(sharded), strict=True):
        if isinstance(leaf, nn.Module | Iterator) or _is_engine(leaf):
            raise ShardError(f"sharded{path} is a {type(leaf).__name__}. {_ways_to_full(leaf)}")
    # what is recorded asks nobody: whoever runs it tells the others
    there = [leaf for leaf in leaves if isinstance(leaf, DTensor) and not _is_recorded(leaf)]
    meshes = {leaf.device_mesh: None for leaf in there}
    for mesh in meshes:
        circle_of(mesh).announce(f"unshard({len(leaves)} leaves)")
    keep = not rank0_only or not torch.distributed.is_initialized()
    keep = keep or torch.distributed.get_rank() == 0
    full = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            full.append(leaf if keep else None)
            continue
        # also where it is dropped at once: a gather needs all ranks
        whole = _whole(leaf) if isinstance(leaf, DTensor) else leaf
        if keep and copy and _in_its_memory(whole, leaf):
            whole = whole.clone()
        full.append(noted_like(whole, leaf) if keep else None)
    return tree.unflatten(spec, full) if keep else None


def _is_recorded(leaf: DTensor) -> bool:
    return is_recorded(local_tensor(leaf))


def _in_its_memory(whole: Tensor, leaf: Tensor) -> bool:
    """Whether gathering a leaf has moved nothing: it was whole on this rank."""
    if not isinstance(leaf, DTensor):
        return True
    return whole.untyped_storage()._cdata == local_tensor(leaf).untyped_storage()._cdata


def _whole(leaf: DTensor) -> Tensor:
    """The full tensor; as `full_tensor`, but its wait sees what becomes of the other ranks."""
    mesh = leaf.device_mesh
    last = mesh.ndim - 1
    found = None if _is_recorded(leaf) else rows_of(leaf)
    # DTensor's own way leads back to a gradient, and knows every other placement.
    if found is None or leaf.requires_grad or circle_of(mesh).alone:
        return leaf.full_tensor()
    dim, home = found
    layout = LeafLayout("", tuple(leaf.shape), leaf.dtype, dim, mesh.size(last), home=home)
    axis = Axis(group_along(mesh, last).group_name, mesh.size(last), mesh.get_local_rank(last))
    return gather_leaf(local_tensor(leaf), layout, axis)


def locals_of(leaves: Sequence[Any]) -> list[Any]:
    """This rank's part of each leaf."""
    # `local_tensor` of each without a line of Python: every call of a step asks for every leaf
    if not any(issubclass(kind, DTensor) for kind in {*map(type, leaves)}):
        return list(leaves)
    return list(map(getattr, leaves, repeat("_local_tensor"), leaves))


def check_tensors(what: str, leaves: Sequence[Any], paths: Sequence[str]) -> None:
    """Raise a ShardError that names the first leaf that is not a tensor."""
    for leaf, path in zip(leaves, paths, strict=True):
        if not isinstance(leaf, Tensor):
            raise ShardError(
                f"{what}{path} is a {type(leaf).__name__} ({leaf!r:.60}); every leaf must be a "
                f"torch.Tensor. {_remedy(leaf)}"
            )


def refuse_shards(what: str, leaves: Sequence[Tensor], paths: Sequence[str], taker: str) -> None:
    """Raise a ShardError that names the first leaf that is sharded already."""
    for leaf, path in zip(leaves, paths, strict=True):
        if isinstance(leaf, DTensor):
            raise ShardError(
                f"{what}{path} is a DTensor, sharded over ranks already; {taker} takes full "
                f"tensors. Pass fzero.unshard({what}), which every rank must call."
            )


def _is_engine(leaf: Any) -> bool:
    return callable(getattr(type(leaf), "full_params", None))  # it is above this package


def _ways_to_full(leaf: Any) -> str:
    """What to call instead of `unshard` for what is no tree of shards."""
    if _is_engine(leaf):
        return (
            "unshard takes a tree of shards. Of an engine take engine.full_params(), or "
            "engine.state_dict() with buffers; every rank must call it."
        )
    if isinstance(leaf, nn.Module):
        return (
            "unshard takes a tree of shards: the params of step_fn or fzero.shard. The module that "
            "an engine has: engine.full_params(), or engine.state_dict() with buffers; every rank "
            "must call it."
        )
    return _remedy(leaf)


def _remedy(leaf: Any) -> str:
    """What to do with a leaf that is no tensor."""
    if _is_engine(leaf):
        return "An engine shards by itself: its shards are engine.state[0]."
    if isinstance(leaf, nn.Module):
        return (
            "Pass the parameters, not the module: apply, params = fzero.functionalize(module); or "
            "use fzero.Engine(module, opt, cfg), which takes it as it is."
        )
    if isinstance(leaf, Iterator):
        return "Pass a tree, which can be read again: dict(module.named_parameters()), or a list."
    name = type(leaf).__name__
    if tree.is_node_of_torch(leaf):
        how = (
            f"optree.dataclasses.register_node({name}, namespace='')"
            if dataclasses.is_dataclass(leaf)
            else f"optree.register_pytree_node({name}, flatten, unflatten, namespace='')"
        )
        return (
            f"{name} is registered with torch.utils._pytree, and trees here are optree's, which "
            f"asks no other registry: say, beside that, {how}."
        )
    if dataclasses.is_dataclass(leaf):
        return (
            f"A dataclass is a tree once it is registered, after its class: "
            f"optree.dataclasses.register_node({name}, namespace=''). Then each field is a subtree."
        )
    return "Make it one with torch.as_tensor, or keep it out of the tree."


def _dtensor(leaf: LeafLayout, mesh: Mesh) -> DTensorSpec:
    stride = torch.empty(leaf.shape, device="meta").stride()
    placements = placements_of(leaf, mesh)
    return dtensor_spec(mesh.device_mesh, placements, leaf.shape, stride, leaf.dtype)


def like(new: Any, old: Any) -> Any:
    """`new` wrapped and noted as `old` is; a number as it is."""
    if not isinstance(new, Tensor):
        return new
    if isinstance(old, DTensor) and not isinstance(new, DTensor):
        new = from_spec(new, old._spec)
    return noted_like(new, old)
