"""A second process group over the same ranks: reductions travel in it, beside gathers.

[Note: two lanes] The collectives of one process group run one after the other: over NCCL in one
stream, over gloo in two threads. In backward the reduction of one layer's gradients would stand
behind the gathers of the layers to come, which were launched early, and whoever waits for it would
wait for those too. In a group of their own reductions go as soon as they can.

A lane is made when the first reduction that wants it is launched: there all its ranks come, in the
order in which they launch everything else.
"""

import secrets
import threading
import weakref
import zlib
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    ProcessGroup,
    Store,  # pyright: ignore[reportPrivateImportUsage]
)

from fzero.distributed import whereabouts
from fzero.distributed.mesh import default_store, group_of
from fzero.distributed.store import group_limit
from fzero.distributed.whereabouts import Circle
from fzero.errors import ShardError

Gather = Callable[[int], list[int]]
"""Every rank's number, in the order of the group; a collective."""


def gloo_lane(group: ProcessGroup, circle: Circle, gather: Gather) -> ProcessGroup:
    """What carries reductions beside a group of gloo's; the same from then on.

    Args:
        group: what carries gathers.
        circle: its ranks; the lane lives with it.
        gather: over the group.
    """
    lane = circle.lanes.get(group)
    if lane is None:
        # a place in the store that no earlier one has used: gloo would connect to its addresses
        number = gather(secrets.randbits(62))[0]
        # a connection of its own: who waits in one keeps all others from asking
        own = default_store().clone()  # pyright: ignore[reportAttributeAccessIssue]
        store = PrefixStore(f"fzero/lane {number}", own)
        lane = circle.lanes[group] = _looking(lambda: _gloo_group(store, group), circle)
    return lane


def _looking(made: Callable[[], ProcessGroup], circle: Circle) -> ProcessGroup:
    """What `made` gives, unless a rank dies or goes another way before it has come.

    Ranks connect inside, and gloo waits for each as long as for a collective, without looking up.
    """
    found: Future[ProcessGroup] = Future()

    def make() -> None:
        try:
            found.set_result(made())
        except BaseException as error:
            found.set_exception(error)

    # a daemon: nobody waits for a connection to a rank that is gone
    threading.Thread(target=make, name="fzero lane", daemon=True).start()
    with circle.explained(certain=True):
        seconds = whereabouts.PATIENCE
        while not wait([found], seconds).done:
            circle.look()
            seconds = circle.pause()
        return found.result()


_BESIDE: "weakref.WeakKeyDictionary[ProcessGroup, str]" = (
    # The same for all programs of a process: it lives and ends with torch's own process group,
    # which takes no attributes.
    weakref.WeakKeyDictionary()
)


def beside(name: str, device: torch.device, gather: Gather) -> str:
    """The name of the group that reductions travel in, beside one of another backend than gloo.

    Args:
        name: of what carries gathers.
        device: of what travels.
        gather: over that group.

    Returns:
        `name` itself where there can be no second group.
    """
    group = group_of(name)
    found = _BESIDE.get(group)
    if found is None:
        found = _BESIDE[group] = _made(group, name, device, gather)
    elif found != name and not _is_there(found):
        # not made again: torch could give it the same name, under which the old one's keys are
        found = _BESIDE[group] = name
    return found


def _is_there(name: str) -> bool:
    """Whether nobody has destroyed it: a program may end all groups but the world's."""
    try:
        group_of(name)
    except ShardError:
        return False
    return True


def _made(group: ProcessGroup, name: str, device: torch.device, gather: Gather) -> str:
    if dist.get_backend(group) == "fake":  # it moves nothing
        return name
    bound = getattr(dist.group.WORLD, "bound_device_id", None)
    if bound is not None and group.size() < dist.get_world_size():
        return name  # NCCL would split the world's communicator, for which all ranks must come
    made = group_of_own(
        dist.get_process_group_ranks(group),
        gather,
        timeout=_timeout_of(group, device),
        backend=dist.get_backend(group),
        group_desc="fzero reductions",
    )
    return name if made is None else made.group_name


def group_of_own(ranks: list[int], gather: Gather, **options: Any) -> ProcessGroup | None:
    """A new group of these ranks, for which only they need to come; None if they would not meet.

    Args:
        ranks: global ones, this one among them.
        gather: over them.
        options: of `dist.new_group`.
    """
    if len(set(gather(zlib.crc32(_name_of_next(ranks).encode())))) > 1:
        return None
    made = dist.new_group(ranks, use_local_synchronization=True, **options)
    assert isinstance(made, ProcessGroup)  # this rank is in it
    return made


# ------------------------------------------------------------------- what is torch's and private
def _name_of_next(ranks: list[int]) -> str:
    """What torch will call the next group of these ranks.

    Ranks find each other under that name, which up to torch 2.14 counts the groups that a rank is
    in: where these differ, ranks would wait for each other under different names. There is no
    public way to give a group a name, nor to ask for it before it is there.
    """
    return dist.distributed_c10d._hash_ranks_to_str(ranks)


def _gloo_group(store: Store, like: ProcessGroup) -> ProcessGroup:
    """A group of gloo's over a store, with the ranks of another.

    The public `dist.new_group` takes no store, and meets where a group of that name met before. It
    does no more than this, and enters the group into a table, which nobody needs who has it.
    """
    limit = timedelta(seconds=group_limit())  # that of `like`, of a mesh, may be half an hour
    backend = dist.ProcessGroupGloo(store, like.rank(), like.size(), timeout=limit)  # pyright: ignore
    made = ProcessGroup(store, like.rank(), like.size())  # pyright: ignore
    kind = ProcessGroup.BackendType.GLOO
    made._set_default_backend(kind)
    for device in like._device_types:
        made._register_backend(device, kind, backend)
    return made


def _timeout_of(group: ProcessGroup, device: torch.device) -> timedelta | None:
    """A group's own time limit; None, torch's default, where its backend doesn't tell."""
    options = getattr(group._get_backend(device), "options", None)
    return getattr(options, "_timeout", None)
