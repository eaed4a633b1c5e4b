"""Many ranks in a test, three ways. From cheap to real:

    with fake_ranks(1024, rank=3): ...       # a world that isn't there: shapes, staging out, memory
    with local_ranks(4) as mode: ...         # 4 ranks in this process: values of eager functions
    run_ranks(2, fn, *args) -> [r0, r1]      # 2 real processes with gloo: everything
    run_fresh(2, fn, *args, env={...})       # the same as torchrun starts them: no group yet

`run_ranks` calls `fn(*args)` on every rank and returns what each rank returned:

    from tests.ranks import run_ranks

    def _sum(x):                             # a function of a module: ranks import it by name
        dist.all_reduce(x)
        return x

    def test_sum():
        assert run_ranks(2, _sum, torch.ones(1)) == [torch.tensor([2.0])] * 2

The processes of a world size are started once a session and reused: keep no state in them, and
leave no collective half done (a rank that doesn't come, on purpose: `run_fresh`). An exception on
any rank fails the test with that rank's traceback and output; ranks that hang are killed after
`timeout` seconds and their stacks shown.
Put an `__init__.py` into every folder below tests/, or ranks can't import its modules.
"""

import contextlib
import faulthandler
import functools
import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.tensor import _redistribute, debug
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.testing._internal.distributed.fake_pg import FakeStore

from fzero.distributed.collectives import as_wire

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
# Other ranks wait in a collective for one that raised; they get this long to fail by themselves.
GRACE_SECONDS = 2.0


class RanksFailed(AssertionError):
    """At least one rank raised, died or hung; the message shows every rank that did."""


def run_ranks(world: int, fn: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
    """What `fn(*args)` returns on each of `world` real ranks, joined by gloo; rank 0's first."""
    ranks = _shared.get(world)
    if ranks is None:
        ranks = _shared[world] = Ranks.start(world, {}, joined=True)
    try:
        return ranks.call(fn, args, timeout)
    except BaseException:
        # After a failure nobody knows which collectives are half done.
        ranks.kill()
        del _shared[world]
        raise


def run_fresh(
    world: int,
    fn: Callable[..., Any],
    *args: Any,
    env: Mapping[str, str | None] | None = None,
    timeout: float = 60,
) -> list[Any]:
    """`run_ranks` on new processes in torchrun's environment, no process group started.

    `env` adds variables to it; None takes one out.
    """
    ranks = Ranks.start(world, env or {}, joined=False)
    try:
        return ranks.call(fn, args, timeout)
    finally:
        ranks.kill()


def close_ranks() -> None:
    """End the shared processes; conftest.py calls it when the session ends."""
    while _shared:
        _shared.popitem()[1].kill()


@contextlib.contextmanager
def fake_ranks(world: int, rank: int = 0) -> Iterator[None]:
    """This process as one rank of a world whose collectives move nothing (any size, no cost)."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def local_ranks(world: int) -> Iterator[Any]:
    """All ranks in this process: tensors hold a value per rank, collectives are exact.

    `mode.rank_map(lambda rank: tensor)` makes such a tensor, `mode.tensor_map(x, lambda rank, t:
    t)` visits one, `x.reconcile()` is the value that all ranks agree on. Works eagerly, under
    `torch.func.grad` and nested. Not under `torch.func.jvp` (it crashes) nor `make_fx` (the values
    become constants): stage out under `fake_ranks`, outside the mode, and run the graph here.
    """
    # Private in torch, without a public alternative; nothing else in the tests imports it.
    from torch.distributed._local_tensor import LocalTensorMode

    with fake_ranks(world), LocalTensorMode(world) as mode:
        yield mode


_shared: dict[int, "Ranks"] = {}
_END_GROUPS = b"end groups"  # what a rank is sent beside pickled calls


@dataclass
class Ranks:
    """`world` processes that wait for functions to run."""

    processes: list[BaseProcess]
    connections: list[Connection]
    logs: list[Path]
    store: TCPStore
    folder: tempfile.TemporaryDirectory
    printed: list[int] = field(default_factory=list)

    @classmethod
    def start(cls, world: int, env: Mapping[str, str | None], joined: bool) -> "Ranks":
        # A forkserver imports torch once; each rank is then a fork of it, milliseconds instead of
        # seconds. Unlike a fork of this process, it has no threads that a fork would lose.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        # Port 0: the system picks a free one, and we hold it from then on.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        folder = tempfile.TemporaryDirectory(prefix="ranks-")
        processes, connections, logs = [], [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            log = Path(folder.name) / f"rank{rank}.log"
            full_env = _torchrun_env(rank, world, store.port) | dict(env)
            process = context.Process(
                target=_serve, args=(theirs, full_env, str(log), joined), daemon=True
            )
            process.start()
            theirs.close()
            processes.append(process)
            connections.append(ours)
            logs.append(log)
        return cls(processes, connections, logs, store, folder, [0] * world)

    def call(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        timeout: float,
        grace: float = GRACE_SECONDS,
    ) -> list[Any]:
        """What `fn(*args)` returns on each rank; `RanksFailed` after `timeout` seconds.

        Args:
            grace: seconds that the others have to end once one has failed.
        """
        # Bytes, not objects: torch's own way to send tensors needs the sender to stay alive.
        request = pickle.dumps((fn, args))
        for connection in self.connections:
            with contextlib.suppress(BrokenPipeError):  # told below, by the exit code
                connection.send_bytes(request)
        deadline = time.monotonic() + timeout
        waiting = dict(zip(self.connections, range(len(self.connections)), strict=True))
        results: list[Any] = [None] * len(waiting)
        failures: dict[int, str] = {}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for ready in multiprocessing.connection.wait(list(waiting), left):
                assert isinstance(ready, Connection)
                rank = waiting.pop(ready)
                try:
                    ok, value = pickle.loads(ready.recv_bytes())
                except EOFError:
                    self.processes[rank].join(5)
                    ok, value = False, f"died with exit code {self.processes[rank].exitcode}\n"
                if ok:
                    results[rank] = value
                else:
                    failures[rank] = value
                    deadline = min(deadline, time.monotonic() + grace)
        if failures or waiting:
            why = f"{fn.__module__}.{fn.__qualname__} on {len(results)} ranks"
            raise RanksFailed(
                f"{why}\n{self._report(failures, sorted(waiting.values()), timeout, grace)}"
            )
        for connection in self.connections:  # all have answered: nobody waits in a group any more
            with contextlib.suppress(BrokenPipeError):  # the function ended its process
                connection.send_bytes(_END_GROUPS)
        self.printed = [log.stat().st_size for log in self.logs]
        return results

    def kill(self) -> None:
        """End the processes at once; nothing they hold is worth a goodbye."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for connection in self.connections:
            connection.close()
        self.folder.cleanup()

    def _report(
        self, failures: dict[int, str], hung: list[int], timeout: float, grace: float
    ) -> str:
        for rank in hung:
            os.kill(self.processes[rank].pid or 0, signal.SIGUSR1)
        time.sleep(0.5 if hung else 0)  # for the stacks to be written
        parts = [f"--- rank {rank} ---\n{text}" for rank, text in sorted(failures.items())]
        if hung and failures:
            parts.append(f"--- ranks {hung} still waited {grace:g} s later ---")
        elif hung:
            parts.append(f"--- ranks {hung} did not return within {timeout:g} s ---")
        for rank, (log, start) in enumerate(zip(self.logs, self.printed, strict=True)):
            text = log.read_bytes()[start:].decode(errors="replace") if log.exists() else ""
            if text:
                if len(text) > 8000:  # why it aborted comes first, where it was comes last
                    text = f"{text[:4000]}\n[...]\n{text[-4000:]}"
                parts.append(f"--- rank {rank} printed ---\n{text}")
        return "\n".join(parts)


_PRELOAD = [
    "torch",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "torch._dynamo",  # imported by the first operation on a DTensor
    "torch.fx.experimental.proxy_tensor",
    "torch.testing._internal.distributed.fake_pg",
    "fzero",
    "optree",
    "hypothesis",
    "pytest",
]


def _torchrun_env(rank: int, world: int, port: int) -> dict[str, str | None]:
    return {
        "GLOO_SOCKET_IFNAME": LOOPBACK,  # looking our own host name up can take seconds
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 joins our store, it does not open one
    }


def _serve(connection: Connection, env: Mapping[str, str | None], log: str, joined: bool) -> None:
    """A rank's process: run what arrives, answer, until the other side is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is for pytest, which then ends us
    output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    for name, value in env.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    torch.set_num_threads(1)
    _kept = _gather_by_a_short_name()
    gc.freeze()  # what has been imported stays: nobody has to look through it again and again
    with contextlib.suppress(EOFError):  # the other side closed its end
        if joined:
            dist.init_process_group("gloo")
        while True:
            request = connection.recv_bytes()
            if request == _END_GROUPS:
                _end_groups()
            else:
                connection.send_bytes(_answer(request))


def _gather_by_a_short_name() -> torch.library.Library:
    """Have torch's functional all-gather done as its `out=` form is, while what returns lives.

    Gloo's two threads write the name of what each has done into one string, without a lock
    (`ProcessGroupGloo::runLoop`, torch 2.13). Of up to 15 characters they lie in the string itself.
    This one's is "ALLGATHER_COALESCED": both threads free the memory of the last, and a rank that
    asks for one `full_tensor` after another dies of it, once in thousands on a busy machine. What
    the other form starts is an "ALLGATHER".
    """

    def gather(x: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
        if not x.numel():  # bytes of nothing have strides that no wider dtype takes
            return x.new_empty((len(x) * ranks, *x.shape[1:]))
        sent = as_wire(x)
        out = sent.new_empty((len(sent) * ranks, *sent.shape[1:]))
        torch.ops._c10d_functional.all_gather_into_tensor_out(sent, ranks, group, out=out)
        return out.view(x.dtype)

    library = torch.library.Library("_c10d_functional", "IMPL")
    library.impl("all_gather_into_tensor", gather, "CPU")
    return library


def _answer(request: bytes) -> bytes:
    try:
        fn, args = pickle.loads(request)
        # ranks may have drawn different numbers for the test before
        torch.manual_seed(0)
        return pickle.dumps((True, fn(*args)))
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))
    finally:
        sys.stdout.flush()


def _end_groups() -> None:
    """Destroy the process groups that a call has made, once it has ended on every rank.

    Each has a thread that wakes up a hundred times a second: four ranks with a hundred groups took
    a quarter of two cores, and made everything else wait.
    """
    if dist.is_initialized() and _destroyed():
        _forget_meshes()
        gc.collect()


def _destroyed() -> int:
    """How many groups there were."""
    world = dist.distributed_c10d._world  # private; only it knows all groups
    # checkpoints in the background keep one for as long as the process lives
    keep = [dist.group.WORLD, *(g for g in world.pg_map if g.group_desc == "fzero checkpoints")]
    others = [group for group in world.pg_map if group not in keep]
    for group in others:
        dist.destroy_process_group(group)
    return len(others)


def _forget_meshes() -> None:
    """What DTensor remembers of its operators holds meshes, and these hold their groups.

    Private in torch, without a public way to have it forget.
    """
    debug._clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()
    remembered = [*vars(_redistribute).values(), MeshTopoInfo.build_from_mesh]
    for function in remembered:
        if isinstance(function, functools._lru_cache_wrapper):
            function.cache_clear()


def _end_with_parent() -> None:
    """A rank that hangs in a collective must not outlive a killed pytest."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)
