"""A world of ranks that aren't there, beside whatever world this process is in.

`torch.distributed` keeps its process groups in one place per process. While a simulation runs, that
place shows the thread that simulates another one, empty but for a fake group of the world's size,
whose collectives move nothing; afterwards it is what it was. All other threads see the real world
meanwhile, and its groups go on with what they have under way: a step may train beside a simulation.
"""

import contextlib
import itertools
import math
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fzero.errors import FzeroError


@contextlib.contextmanager
def made_up_ranks(*shape: int) -> Iterator[DeviceMesh]:
    """This process as rank 0 of ranks that are made up.

    Args:
        shape: ranks along the mesh's axes: `(ranks,)`, or `(replicate, shard)`.

    Yields:
        Their mesh on the CPU. One rank alone has a mesh, too: without it would look for the world
        that this process was started in.

    Raises:
        FzeroError: this torch keeps its process groups elsewhere.

    Examples:
        >>> with made_up_ranks(64, 8) as mesh:
        ...     mesh.size(0), mesh.size(1), dist.get_world_size()
        (64, 8, 512)
        >>> dist.is_initialized()
        False
    """
    with _another_world():
        # registers the backend "fake"; imported here, since only a simulation needs it
        from torch.testing._internal.distributed.fake_pg import FakeStore

        hook = sys.excepthook
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=math.prod(shape))
        sys.excepthook = hook  # which would name a rank before each line of all later errors
        names = ("replicate", "shard")[-len(shape) :]
        yield init_device_mesh("cpu", shape, mesh_dim_names=names)


# Groups are known to C++ by name too, and torch names them by counting: ours start elsewhere.
_FIRST = itertools.count(10**9, 10**6)


class _World(c10d._World):
    """What `torch.distributed` knows about groups, in dicts of its own instead of the module's."""

    def __init__(self) -> None:
        super().__init__()
        self._maps: tuple[dict[Any, Any], ...] = ({}, {}, {}, {}, {}, {})
        self._count = next(_FIRST)

    pg_map = property(lambda self: self._maps[0])  # pyright: ignore
    pg_names = property(lambda self: self._maps[1])  # pyright: ignore
    pg_group_ranks = property(lambda self: self._maps[2])  # pyright: ignore
    pg_backend_config = property(lambda self: self._maps[3])  # pyright: ignore
    tags_to_pg = property(lambda self: self._maps[4])  # pyright: ignore
    pg_to_tag = property(lambda self: self._maps[5])  # pyright: ignore

    @property
    def group_count(self) -> int:
        return self._count

    @group_count.setter
    def group_count(self, value: int) -> None:
        self._count = value


class _ByThread:
    """What `torch.distributed` knows about groups, for the thread that asks."""

    def __init__(self, real: Any) -> None:
        self.__dict__.update(real=real, mine=threading.local(), inside=0)

    def there(self) -> Any:
        """The world of this thread: the made-up one that it is in, else the real one."""
        return getattr(self.mine, "world", None) or self.real

    def __getattr__(self, name: str) -> Any:
        return getattr(self.there(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.there(), name, value)


@contextlib.contextmanager
def _another_world() -> Iterator[None]:
    # Private, and what torch's own tests of many ranks in one process use: "extension point to
    # override it", its source says. The public way would end the caller's process group.
    place, ours = _entered(), _World()
    before, place.mine.world = getattr(place.mine, "world", None), ours
    try:
        if dist.is_initialized():
            raise FzeroError(
                "torch.distributed has a process group, and this version of torch offers no place "
                "to put a second world beside it. Simulate in a process of its own."
            )
        yield
    finally:
        names = set(ours.pg_names.values())
        for group in ours.pg_names:
            group.shutdown()
            c10d._unregister_process_group(group.group_name)
        place.mine.world = before
        _left(place)
        # other threads may have made groups of the real world meanwhile
        left = names & set(c10d._pg_names.values())
        assert not left, "the simulated world left groups in the real one"


_DOORS = threading.Lock()


def _entered() -> _ByThread:
    """The place of all worlds, which is there while any thread is in a made-up one."""
    with _DOORS:
        place: Any = c10d._world
        if not isinstance(place, _ByThread):
            c10d._world = place = _ByThread(place)  # pyright: ignore
        place.__dict__["inside"] += 1
        return place


def _left(place: _ByThread) -> None:
    with _DOORS:
        place.__dict__["inside"] -= 1
        if not place.__dict__["inside"] and c10d._world is place:
            c10d._world = place.real
