"""What differs between ranks is found, and named, before a collective can hang on it.

`agree` compares over the mesh's own collectives, where all ranks are known to come: at `init`, at
the first call. `rendezvous` compares through the store, where a rank may not come at all: when one
rank stages a new Program, the others may be running the old one.
"""

import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from fzero.distributed.mesh import Mesh, default_store, is_simulated
from fzero.errors import RankMismatchError

Items = list[tuple[str, str]]

_ABSENT = "(nothing)"
_HINT = "Build it from the same code, configuration and seed on every rank."


def agree(
    what: str,
    items: Sequence[tuple[str, str]],
    mesh: Mesh,
    timeout: float = 60.0,
    hint: str = _HINT,
) -> None:
    """Return if every rank of `mesh` passes the same items; raise on every rank if not.

    Costs one all-gather of 16 bytes per axis; the items travel only when they differ. All ranks of
    the mesh must call it, and in the same order as its other collectives.

    Args:
        what: what the items describe, as the message names it: "params", "config".
        items: (path, description) pairs, such as ("['head.weight']", "float32 (3, 4)").
        mesh: the ranks to compare, over both axes.
        timeout: seconds to wait for the other ranks.
        hint: what the user can do about a difference.

    Raises:
        RankMismatchError: names the first path that differs and each rank's value there, or says
            that some rank never came.

    >>> from fzero.distributed.mesh import resolve_mesh
    >>> agree("params", [("['w']", "float32 (3, 4)")], resolve_mesh(None, "cpu"))
    """
    if mesh.world_size == 1 or is_simulated(mesh):
        return
    text = json.dumps(list(items)).encode()

    def texts() -> list[bytes]:
        if len(set(_all_gather_bytes(_digest(text), mesh, timeout))) == 1:
            return []
        lengths = _all_gather_bytes(len(text).to_bytes(8, "big"), mesh, timeout)
        length = [int.from_bytes(n, "big") for n in lengths]
        padded = _all_gather_bytes(text.ljust(max(length), b"\0"), mesh, timeout)
        return [t[:n] for t, n in zip(padded, length, strict=True)]

    if different := _exchange(what, mesh, timeout, texts):
        told = [[(path, value) for path, value in json.loads(t)] for t in different]
        raise RankMismatchError(f"{_first_difference(what, told, mesh.ranks)} {hint}")


def smallest(what: str, values: Sequence[int], mesh: Mesh, timeout: float = 60.0) -> list[int]:
    """The smallest of every rank's values, place by place: a choice that suits all ranks.

    Args:
        what: what the values are, as the message names it.
        values: one or more, from 0 to below 2**63; as many on every rank.
        mesh: the ranks that choose.
        timeout: seconds to wait for the other ranks.

    Raises:
        RankMismatchError: some rank never came.

    >>> from fzero.distributed.mesh import resolve_mesh
    >>> smallest("bucket sizes", [3, 5], resolve_mesh(None, "cpu"))
    [3, 5]
    """
    if mesh.world_size == 1 or is_simulated(mesh):
        return list(values)
    sent = b"".join(value.to_bytes(8, "big") for value in values)
    by_rank = _exchange(what, mesh, timeout, lambda: _all_gather_bytes(sent, mesh, timeout))
    rows = [[int.from_bytes(b[i : i + 8], "big") for i in range(0, len(b), 8)] for b in by_rank]
    return list(map(min, zip(*rows, strict=True)))


def first_says(key: str, text: str, mesh: Mesh, timeout: float = 60.0) -> str:
    """What the first rank of `mesh` passes, on every rank; through the store, no collectives.

    Args:
        key: names this question; used once in a run, and the same on all ranks.
        text: this rank's answer.
        mesh: the ranks.
        timeout: seconds to wait for the first rank.

    Raises:
        RankMismatchError: it never came.

    >>> from fzero.distributed.mesh import resolve_mesh
    >>> first_says("order", "1 2", resolve_mesh(None, "cpu"))
    '1 2'
    """
    if mesh.world_size == 1 or is_simulated(mesh):
        return text
    store, place = default_store(), f"{_place(mesh)}/first/{key}"
    if mesh.rank == 0:
        store.set(place, text)
        return text
    if _wait(store, {mesh.ranks[0]: place}, timeout):
        raise RankMismatchError(
            f"rank {_here(mesh)} asked rank {mesh.ranks[0]} about {key!r} and got no answer within "
            f"{timeout:g} s. Every rank must reach this point: look for a rank that raised."
        )
    return store.get(place).decode()


def rendezvous(key: str, text: str, mesh: Mesh, timeout: float = 20.0) -> None:
    """Return once every rank of `mesh` has come to `key` with the same text; no collectives.

    Unlike `agree` it can be called where some rank may not come: that rank is named.

    Args:
        key: names this meeting; used once in a run, and the same on all ranks.
        text: what must be equal, such as the listing of a Program's collectives; compared line by
            line.
        mesh: the ranks that must come.
        timeout: seconds to wait for them.

    Raises:
        RankMismatchError: names the ranks that did not come, or the first line that differs. On
            ranks that come later too.

    >>> from fzero.distributed.mesh import resolve_mesh
    >>> rendezvous("step 7", "all_gather 12 B", resolve_mesh(None, "cpu"))
    """
    if mesh.world_size == 1 or is_simulated(mesh):
        return
    store = default_store()
    place = f"{_place(mesh)}/rendezvous/{key}"
    entries = {rank: f"{place}/{rank}" for rank in mesh.ranks}
    gave_up = f"{place}/gave up"
    store.set(entries[_here(mesh)], text)
    missing = _wait(store, entries, timeout)
    if missing:
        store.set(gave_up, str(_here(mesh)))
        raise RankMismatchError(
            f"rank {_here(mesh)} came to {key!r}, and after {timeout:g} s {_ranks(missing)} had "
            "not. Either they still run the step as it was before, because their batch has the "
            "old shape or they took another branch, or they raised: look at their output. What "
            "changes the step on one rank must change it on all, in the same call."
        )
    if store.check([gave_up]):
        raise RankMismatchError(
            f"rank {_here(mesh)} came to {key!r} when rank {store.get(gave_up).decode()} had "
            f"waited for it and given up. Ranks must come within {timeout:g} s of each other."
        )
    texts = [value.decode() for value in _read(store, list(entries.values()))]
    if len(set(texts)) > 1:
        told = [[(f"line {i}", line) for i, line in enumerate(t.split("\n"), 1)] for t in texts]
        raise RankMismatchError(
            f"{_first_difference(key, told, mesh.ranks)} Their collectives would not match. Give "
            "every rank a batch of the same structure, shapes and dtypes in the same call."
        )


def check_meeting(key: str, mesh: Mesh, cause: BaseException) -> None:
    """Raise if other ranks came to `key` and gave up: why a collective of this rank broke off.

    Args:
        key: of the `rendezvous` that this rank did not go to.
        mesh: the ranks that would have met.
        cause: what the collective raised.

    Raises:
        RankMismatchError: from `cause`.
    """
    if mesh.world_size == 1 or is_simulated(mesh):
        return
    store = default_store()
    gave_up = f"{_place(mesh)}/rendezvous/{key}/gave up"
    try:
        if not store.check([gave_up]):
            return
        other = store.get(gave_up).decode()
    except RuntimeError:  # the store went with the rank that held it
        return
    raise RankMismatchError(
        f"rank {_here(mesh)} ran the step as it was before, and in the same call rank {other} had "
        f"other collectives to run, waited at {key!r} for all ranks to have them, and gave up. "
        "What changes the step on one rank must change it on all, in the same call: give every "
        "rank batches of the same structure, and let no rank take another branch alone."
    ) from cause


def _exchange(
    what: str, mesh: Mesh, timeout: float, talk: Callable[[], list[bytes]]
) -> list[bytes]:
    """What `talk` returns; a RankMismatchError that names who is missing if it times out."""
    store = default_store()
    counters = {rank: f"{_place(mesh)}/agree/{what}/{rank}" for rank in mesh.ranks}
    turn = store.add(counters[_here(mesh)], 1)
    try:
        return talk()
    except RuntimeError as error:
        late = [rank for rank in mesh.ranks if store.add(counters[rank], 0) < turn]
        raise RankMismatchError(
            f"rank {_here(mesh)} compared {what} with the other ranks of its mesh, and "
            f"{_ranks(late) if late else 'another rank'} did not come within {timeout:g} s. Every "
            "rank must reach this point: look for a rank that raised, that left its loop early, or "
            f"that took another branch. The collective said: {error}"
        ) from error


def _first_difference(what: str, told: Sequence[Items], ranks: Sequence[int]) -> str:
    """The first path where the ranks' items differ, with each value and who has it."""
    by_rank = [dict(items) for items in told]
    paths = dict.fromkeys(path for items in told for path, _ in items)
    different = [path for path in paths if len({d.get(path) for d in by_rank}) > 1]
    if different:
        where = f"at {different[0]}"
        values = [d.get(different[0], _ABSENT) for d in by_rank]
        more = f" ({len(different)} of {len(paths)} entries differ)" if len(paths) > 1 else ""
    else:  # the same entries in another order, or one of them twice
        rows = list(itertools.zip_longest(*told, fillvalue=("", _ABSENT)))
        place, row = next((i, row) for i, row in enumerate(rows) if len(set(row)) > 1)
        where = f"in the order of its entries, at entry {place}"
        values = [path or value for path, value in row]
        more = ""
    holders: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        holders.setdefault(value, []).append(rank)
    listing = "; ".join(f"{_ranks(who)}: {value}" for value, who in holders.items())
    return f"ranks differ in {what} {where}: {listing}{more}. It must be the same on all."


def _ranks(ranks: Sequence[int]) -> str:
    """`ranks 0-2, 5`: consecutive ranks as a range."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def _place(mesh: Mesh) -> str:
    """Where this mesh's entries are in the store, which it shares with other meshes."""
    return f"fzero/{_digest(repr(mesh.ranks).encode()).hex()}"


def _here(mesh: Mesh) -> int:
    return mesh.ranks[mesh.rank]


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()


def _all_gather_bytes(data: bytes, mesh: Mesh, timeout: float) -> list[bytes]:
    """Every rank's bytes, of one length, in the mesh's order."""
    gathered = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(mesh.device_type)
    axes = mesh.device_mesh.ndim
    # The last axis first: what comes out is then in the mesh's row-by-row order.
    for axis in reversed(range(axes)):
        size = mesh.device_mesh.size(axis)
        if size == 1:
            continue
        parts = [torch.empty_like(gathered) for _ in range(size)]
        work = dist.all_gather(
            parts, gathered, group=mesh.device_mesh.get_group(axis), async_op=True
        )
        assert work is not None  # this rank is in the group
        work.wait(timedelta(seconds=timeout))
        gathered = torch.cat(parts)
    flat = bytes(gathered.tolist())
    return [flat[i : i + len(data)] for i in range(0, len(flat), len(data))]


def _wait(store: Store, entries: dict[int, str], timeout: float) -> list[int]:
    """The ranks whose entry is not there after `timeout` seconds."""
    try:
        store.wait(list(entries.values()), timedelta(seconds=timeout))
    except RuntimeError:
        return [rank for rank, entry in entries.items() if not store.check([entry])]
    return []


def _read(store: Store, keys: list[str]) -> list[bytes]:
    # One round trip where the store can; the question is missing from torch's stubs.
    at_once = store.has_extended_api()  # pyright: ignore[reportAttributeAccessIssue]
    return store.multi_get(keys) if at_once else [store.get(key) for key in keys]
