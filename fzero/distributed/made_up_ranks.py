"""A world of ranks that aren't there, beside whatever world this process is in.

`torch.distributed` keeps its process groups in one place per process. While a simulation runs, that
place is another one, empty but for a fake group of the world's size, whose collectives move
nothing; afterwards it is what it was. The groups of the real world are not touched, and go on with
what they have under way; a thread that asks for the default group meanwhile gets the fake one.
"""

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fzero.errors import FzeroError


@contextlib.contextmanager
def made_up_ranks(*shape: int) -> Iterator[DeviceMesh | None]:
    """This process as rank 0 of ranks that are made up.

    Args:
        shape: ranks along the mesh's axes: `(ranks,)`, or `(replicate, shard)`.

    Yields:
        Their mesh on the CPU; None for one rank alone, which needs none.

    Raises:
        FzeroError: this torch keeps its process groups elsewhere.

    Examples:
        >>> with made_up_ranks(64, 8) as mesh:
        ...     mesh.size(0), mesh.size(1), dist.get_world_size()
        (64, 8, 512)
        >>> dist.is_initialized()
        False
    """
    with _ONE_AT_A_TIME, _another_world():
        world = 1
        for size in shape:
            world *= size
        if world == 1:
            yield None
            return
        # registers the backend "fake"; imported here, since only a simulation needs it
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
        names = ("replicate", "shard")[-len(shape) :]
        yield init_device_mesh("cpu", shape, mesh_dim_names=names)


_ONE_AT_A_TIME = threading.RLock()
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


@contextlib.contextmanager
def _another_world() -> Iterator[None]:
    # Private, and what torch's own tests of many ranks in one process use: "extension point to
    # override it", its source says. The public way would end the caller's process group.
    before, known = c10d._world, dict(c10d._pg_map)
    ours: Any = _World()
    c10d._world = ours
    try:
        if dist.is_initialized():
            raise FzeroError(
                "torch.distributed has a process group, and this version of torch offers no place "
                "to put a second world beside it. Simulate in a process of its own."
            )
        yield
    finally:
        for group in ours.pg_names:
            group.shutdown()
            c10d._unregister_process_group(group.group_name)
        c10d._world = before
        assert c10d._pg_map == known, "the simulated world left groups in the real one"
