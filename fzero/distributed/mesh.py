"""How a step knows its ranks: one value, found once and passed on.

The library reads `torch.distributed` here and nowhere else. A `Mesh` says along which axes ranks
share work: every leaf is split over the *shard* axis; the *replicate* axis, of one rank unless the
user asks for HSDP, holds copies of that split.
"""

import atexit
import functools
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import Store
from torch.distributed.tensor import Placement, Replicate, Shard

from fzero.errors import ConfigError, ShardError


@dataclass(frozen=True)
class Mesh:
    """The ranks that train together, as this rank sees them.

    A group is the name that `torch.ops._c10d_functional.*` take; it is "" for an axis of one rank,
    where a collective is the identity. Ranks count from 0 along their axis.

    >>> mesh = resolve_mesh(None, "cpu")
    >>> mesh.world_size, mesh.shard_group, mesh.is_hybrid
    (1, '', False)
    """

    device_mesh: DeviceMesh
    shard_group: str
    shard_size: int
    shard_rank: int
    replicate_group: str
    replicate_size: int
    replicate_rank: int

    @property
    def world_size(self) -> int:
        """How many ranks the mesh has, over both axes."""
        return self.shard_size * self.replicate_size

    @property
    def rank(self) -> int:
        """This rank's number in the mesh, row by row; not its global rank."""
        return self.replicate_rank * self.shard_size + self.shard_rank

    @property
    def axes(self) -> "Axes":
        """The mesh, as the transforms take it."""
        return Axes(
            Axis(self.shard_group, self.shard_size, self.shard_rank),
            Axis(self.replicate_group, self.replicate_size, self.replicate_rank),
        )

    @functools.cached_property  # torch computes its tensor of ranks anew each time
    def ranks(self) -> tuple[int, ...]:
        """The global ranks, in the mesh's order."""
        return tuple(self.device_mesh.mesh.flatten().tolist())

    @property
    def device_type(self) -> str:
        """The kind of device that the mesh's collectives run on, such as "cpu"."""
        return self.device_mesh.device_type

    @property
    def is_hybrid(self) -> bool:
        """Whether the mesh has both axes (HSDP)."""
        return self.device_mesh.ndim == 2

    def placements(self, shard_dim: int | None) -> tuple[Placement, ...]:
        """The DTensor placements of a leaf split along `shard_dim`; None: not split.

        >>> resolve_mesh(None, "cpu").placements(0)
        (Shard(dim=0),)
        """
        along_shard_axis = Replicate() if shard_dim is None else Shard(shard_dim)
        return (Replicate(), along_shard_axis) if self.is_hybrid else (along_shard_axis,)


def resolve_mesh(mesh: DeviceMesh | None, device_type: str) -> Mesh:
    """The ranks that train together.

    Under torchrun this starts `torch.distributed` if nobody has, and ends it with the process. A
    process that is alone starts nothing; its mesh of one rank carries DTensors all the same.

    Args:
        mesh: None for all ranks on one axis; 1 axis: shard; 2 axes: (replicate, shard), HSDP.
        device_type: where the tensors live, such as "cpu" or "cuda"; "meta" will live on the
            ranks' device.

    Raises:
        ConfigError: the mesh has more than 2 axes, lacks this rank, is for another kind of device
            or has ranks in another order than that of their numbers along its shard axis; or
            torchrun's environment is incomplete.

    >>> resolve_mesh(None, "cpu").ranks
    (0,)
    """
    if device_type == "meta":  # such tensors travel nowhere: where their ranks have values
        ours = "cuda" if torch.cuda.is_available() else "cpu"
        device_type = ours if mesh is None else mesh.device_type
    if mesh is None:
        _start_from_environment(os.environ, device_type)
        mesh = _all_ranks(device_type) if dist.is_initialized() else _mesh_of_one(device_type)
    _check(mesh, device_type)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None  # checked above
    hybrid = mesh.ndim == 2
    return Mesh(
        device_mesh=mesh,
        shard_group=_group_name(mesh, mesh.ndim - 1),
        shard_size=mesh.size(mesh.ndim - 1),
        shard_rank=coordinate[-1],
        replicate_group=_group_name(mesh, 0) if hybrid else "",
        replicate_size=mesh.size(0) if hybrid else 1,
        replicate_rank=coordinate[0] if hybrid else 0,
    )


def default_store() -> Store:
    """The key-value store that the ranks met at, without what earlier attempts left in it."""
    # Private. The public alternative, a `dist.TCPStore` of our own, needs a port that all know.
    return _of_attempt(dist.distributed_c10d._get_default_store(), os.environ)


def is_simulated(mesh: Mesh) -> bool:
    """Whether the other ranks are made up: a fake process group, which moves no data."""
    return mesh.world_size > 1 and dist.get_backend() == "fake"


def is_gloo(group: str) -> bool:
    """Whether the process group of this name moves its data with gloo."""
    return backend_of(group) == "gloo"


def backend_of(group: str) -> str:
    """What moves the data of the process group of this name, such as "nccl"."""
    return dist.get_backend(group_of(group))


def group_of(name: str) -> dist.ProcessGroup:
    """The process group of this name.

    Raises:
        ShardError: there is none any more.
    """
    try:
        # Private. Only this finds the group of a name.
        return dist.distributed_c10d._resolve_process_group(name)  # pyright: ignore
    except RuntimeError as error:
        raise _destroyed() from error


def group_along(mesh: DeviceMesh, axis: int) -> dist.ProcessGroup:
    """The process group of an axis of several ranks.

    Raises:
        ShardError: there is none any more.
    """
    try:
        return mesh.get_group(axis)
    except RuntimeError as error:
        raise _destroyed() from error


def backends_of(group: dist.ProcessGroup | None) -> str:
    """What moves the data of a process group, by device, such as "cpu:gloo,cuda:nccl".

    Args:
        group: None: that of all ranks.

    Raises:
        ShardError: it was destroyed.
    """
    try:
        return str(dist.get_backend_config(group))
    except (TypeError, ValueError) as error:  # torch's, of a group that it has forgotten
        raise _destroyed() from error


def _destroyed() -> ShardError:
    return ShardError(
        "the process group that params and states are sharded over was destroyed. Save, unshard "
        "and evaluate before dist.destroy_process_group(); what lives on it can't be gathered any "
        "more: start again from the last checkpoint."
    )


def _check(mesh: DeviceMesh, device_type: str) -> None:
    names = mesh.mesh_dim_names
    found = f"mesh has {mesh.ndim} axes {names or tuple(mesh.shape)}"
    if mesh.ndim not in (1, 2):
        raise ConfigError(
            f"{found}; a step takes 1 axis (shard) or 2 (replicate, shard). Slice the axes that "
            "share data parallel work out of it, as in mesh['replicate', 'shard'], or make them "
            "one with mesh['a', 'b']._flatten()."
        )
    if mesh.get_coordinate() is None:
        raise ConfigError(
            f"mesh holds ranks {mesh.mesh.flatten().tolist()}, and this is rank "
            f"{dist.get_rank()}; a step runs only on the ranks of its mesh. Call it on those "
            "ranks alone, or pass a mesh that holds this one (mesh=None: all ranks)."
        )
    if mesh.device_type != device_type:
        raise ConfigError(
            f"mesh is for {mesh.device_type!r} devices and the tensors are on {device_type!r}; "
            f"they must agree. Pass init_device_mesh({device_type!r}, {tuple(mesh.shape)}), or "
            f"move the tensors to {mesh.device_type!r}."
        )
    lines = mesh.mesh.reshape(-1, mesh.size(mesh.ndim - 1)).tolist()
    if unsorted := [line for line in lines if line != sorted(line)]:
        raise ConfigError(
            f"mesh has ranks {unsorted[0]} along its shard axis, in this order; a process group "
            "has its ranks in the order of their numbers whatever the mesh says, so what is "
            f"gathered would have its parts in other places. Pass them as {sorted(unsorted[0])}."
        )


def _group_name(mesh: DeviceMesh, axis: int) -> str:
    return "" if mesh.size(axis) == 1 else group_along(mesh, axis).group_name


def _all_ranks(device_type: str) -> DeviceMesh:
    return init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("shard",))


def _mesh_of_one(device_type: str) -> DeviceMesh:
    """A mesh of one rank without a process group.

    `_init_backend` and `_rank` are private. The public way is `init_device_mesh(device_type,
    (1,))`, which starts a process group in a program that may want to start its own later.
    """
    mesh = DeviceMesh(device_type, [0], mesh_dim_names=("shard",), _init_backend=False, _rank=0)
    mesh._dim_group_names = []  # private, too: without it torch.compile takes no DTensor
    return mesh


def _start_from_environment(environ: Mapping[str, str], device_type: str) -> None:
    """Start `torch.distributed` where torchrun's variables ask for it and nobody has."""
    if dist.is_initialized() or int(environ.get("WORLD_SIZE", "1")) == 1:
        return
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in environ]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE={environ['WORLD_SIZE']} asks for several ranks, but {', '.join(missing)} "
            "is not set. Start the program with torchrun, or call "
            "torch.distributed.init_process_group first, or unset WORLD_SIZE for a single process."
        )
    if device_type == "cpu":
        backend = "gloo"
    else:
        backend = f"cpu:gloo,{device_type}:{dist.get_default_backend_for_device(device_type)}"
        # a rank's collectives run on its current device, which is the first one on all unless set
        torch.accelerator.set_device_index(int(environ.get("LOCAL_RANK", environ["RANK"])))
    dist.init_process_group(backend, **_meeting_place(environ))
    # not held: a program may end it, and start another, which meets anew only if nothing is left
    atexit.register(functools.partial(_end, weakref.ref(dist.group.WORLD)))


def _meeting_place(environ: Mapping[str, str]) -> dict[str, Any]:
    """Where the ranks meet, as `init_process_group` takes it.

    torchrun's ranks share its own store, which outlives a restart, and process groups that were
    destroyed. Their addresses are still there, and gloo would connect to them: so the keys get a
    prefix of the attempt and, in it, of how often this rank has started.
    """
    if not _shares_store(environ):
        return {}
    address = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    # a store by itself has five minutes, and how long ranks wait for each other goes by it
    limit = dist.default_pg_timeout
    store: Store = TCPStore(*address, is_master=False, timeout=limit)
    rank, world = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    store = _of_attempt(store, environ)
    start = store.add(f"fzero/starts of rank {rank}", 1)  # all ranks start equally often
    store = PrefixStore(f"fzero/start {start}", store)
    return {"store": store, "rank": rank, "world_size": world}


def _of_attempt(store: Store, environ: Mapping[str, str]) -> Store:
    attempt = _attempt(environ)
    return PrefixStore(f"fzero/attempt {attempt}", store) if attempt else store


def _shares_store(environ: Mapping[str, str]) -> bool:
    """Whether these ranks, all of one node, meet at torchrun's own store."""
    own = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return own and environ.get("LOCAL_WORLD_SIZE") == environ.get("WORLD_SIZE")


def _attempt(environ: Mapping[str, str]) -> int:
    """How often torchrun has restarted these ranks on its own store.

    0 where they are on several nodes, whose launchers count for themselves.
    """
    return int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")) if _shares_store(environ) else 0


def _end(started: weakref.ref[Any]) -> None:
    # The program may have ended our group and started its own, which is not ours to end.
    if dist.is_initialized() and dist.group.WORLD is started():
        dist.destroy_process_group()


class Axis(NamedTuple):
    """One mesh axis as this rank sees it. `Axis()` is the axis of a single rank.

    Args:
        group: name of the process group, as `torch.ops._c10d_functional` takes it.
        size: ranks along the axis.
        rank: this rank's number on it.
    """

    group: str = ""
    size: int = 1
    rank: int = 0


class Axes(NamedTuple):
    """The mesh as the transforms see it: leaves are split over `shard`, copied over `replicate`."""

    shard: Axis = Axis()
    replicate: Axis = Axis()

    @property
    def world(self) -> int:
        """Ranks over both axes."""
        return self.shard.size * self.replicate.size

    @property
    def groups(self) -> tuple[str, ...]:
        """The process groups over which gradients are summed."""
        return tuple(axis.group for axis in self if axis.size > 1)
