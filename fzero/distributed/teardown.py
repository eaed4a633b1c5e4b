"""What has to end before torch's process groups do.

A save beside training has messages to exchange, and is lost with its group.

NCCL takes a communicator down once no CUDA graph is left that holds a collective of it. Torch's
`destroy_process_group()` waits for that, and where the graph belongs to a step function that lives
on, it waits for ever (pytorch/pytorch, issue 115388). Torch has no public way to be told before.
From 2.11 to 2.14 it first calls `finalize()` of what is in a list of its own, `_world.comms`, which
is for communicators of torchcomms: what is registered here is there, too. Whether torch still does
so `is_told` tries on torch's own code, with a world made up for it.
"""

import atexit
import builtins
import functools
import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch.distributed import distributed_c10d


class Releases(Protocol):
    """What lets go of something when it is told."""

    def release(self) -> None:
        """Let go of it; it may be taken up again."""
        ...


def before_teardown(what: Releases) -> None:
    """Have `what.release()` called before the process groups of this process are destroyed.

    It is held weakly, and told once: also when the program ends without destroying any.
    """
    comms = distributed_c10d._world.comms
    told = next((x for x in comms if type(x) is _Told), None)
    if told is None:
        told = _Told()
        comms.append(told)
    told.all.add(what)


@functools.cache
def is_told() -> bool:
    """Whether this torch lets `before_teardown` keep its word.

    >>> is_told()
    True
    """
    return _finalizes_first(distributed_c10d.destroy_process_group)


class _Told:
    """What torch believes to be one more communicator."""

    def __init__(self) -> None:
        self.all: weakref.WeakSet[Any] = weakref.WeakSet()
        atexit.register(_finalize, weakref.ref(self))

    def finalize(self) -> None:
        for what in list(self.all):
            what.release()
        self.all.clear()


def _finalize(told: "weakref.ref[_Told]") -> None:
    if (found := told()) is not None:
        found.finalize()


def _finalizes_first(destroy: Callable[..., Any]) -> bool:
    """Whether a `destroy_process_group` ends `_world.comms` before any group.

    Its code runs with a world of one group, and with no other name of torch's than those that it
    is known to need: what asks for more is not known.
    """
    ended: list[str] = []
    group = _Ended("group", ended)
    names = {
        "__builtins__": builtins,
        "_world": _World(_Ended("comm", ended), group),
        "GroupMember": types.SimpleNamespace(WORLD=group, NON_GROUP_MEMBER=None),
        "ProcessGroup": distributed_c10d.ProcessGroup,
        "_update_default_pg": lambda group: None,
        "_unregister_all_process_groups": lambda: None,
    }
    try:
        types.FunctionType(inspect.unwrap(destroy).__code__, names)(group)
    except Exception:
        return False
    return ended == ["comm", "group"]


class _Ended:
    def __init__(self, name: str, ended: list[str]) -> None:
        self.name, self.ended = name, ended

    def shutdown(self) -> None:
        self.ended.append(self.name)

    finalize = shutdown


class _World:
    def __init__(self, comm: _Ended, group: _Ended) -> None:
        self.comms, self.pg_map, self.pg_names = [comm], {group: ("", None)}, {group: "0"}

    def __getattr__(self, name: str) -> dict[Any, Any]:
        return {}
