"""What differs between ranks is found, and named, before a collective can hang on it.

These compare over the mesh's own collectives, where all ranks are known to come: at `init`, at the
first call. Where a rank may not come at all, see `rendezvous`. Who comes late is waited for.
"""

import hashlib
import itertools
import json
from collections.abc import Sequence

from torch.distributed import ProcessGroup

from fzero.distributed.exchange import exchange
from fzero.distributed.mesh import Mesh, group_along
from fzero.distributed.stations import ranks_text
from fzero.distributed.whereabouts import circle_of
from fzero.errors import RankMismatchError

Items = list[tuple[str, str]]

_ABSENT = "(nothing)"
_HINT = "Build it from the same code, configuration and seed on every rank."


def agree(
    what: str,
    items: Sequence[tuple[str, str]],
    mesh: Mesh,
    timeout: float | None = None,
    hint: str = _HINT,
) -> None:
    """Return if every rank of `mesh` passes the same items; raise on every rank if not.

    Costs two small messages per axis; the items travel only when they differ. All ranks of the mesh
    must call it, and in the same order as its other collectives.

    Args:
        what: what the items describe, as the message names it: "params", "config".
        items: (path, description) pairs, such as ("['head.weight']", "float32 (3, 4)").
        mesh: the ranks to compare, over both axes.
        timeout: seconds to wait for the other ranks; None: the process group's.
        hint: what the user can do about a difference.

    Raises:
        RankMismatchError: names the first path that differs and each rank's value there, or says
            that some rank is elsewhere, gone, or late beyond the limit.

    >>> from fzero.distributed.mesh import resolve_mesh
    >>> agree("params", [("['w']", "float32 (3, 4)")], resolve_mesh(None, "cpu"))
    """
    circle = circle_of(mesh)
    if circle.alone:
        return
    text, groups = json.dumps(list(items)).encode(), _groups(mesh)
    with circle.at(f"a comparison of {what}", timeout):
        if len(set(exchange(_digest(text), groups, circle))) == 1:
            return
        texts = exchange(text, groups, circle)
    of_ranks = [[(path, value) for path, value in json.loads(t)] for t in texts]
    # all ranks hold the same texts, so all raise, with the same words
    raise RankMismatchError(f"{first_difference(what, of_ranks, mesh.ranks)} {hint}")


def smallest(
    what: str, values: Sequence[int], mesh: Mesh, timeout: float | None = None
) -> list[int]:
    """The smallest of every rank's values, one by one: a choice that suits all ranks.

    Args:
        what: what the values are, as the message names it.
        values: one or more, from 0 to below 2**63; as many on every rank.
        mesh: the ranks that choose.
        timeout: seconds to wait for the other ranks; None: the process group's.

    Raises:
        RankMismatchError: some rank is elsewhere, gone, or late beyond the limit.

    >>> from fzero.distributed.mesh import resolve_mesh
    >>> smallest("bucket sizes", [3, 5], resolve_mesh(None, "cpu"))
    [3, 5]
    """
    circle = circle_of(mesh)
    if circle.alone:
        return list(values)
    sent = b"".join(value.to_bytes(8, "big") for value in values)
    with circle.at(f"a choice of {what}", timeout):
        by_rank = exchange(sent, _groups(mesh), circle)
    rows = [[int.from_bytes(b[i : i + 8], "big") for i in range(0, len(b), 8)] for b in by_rank]
    return list(map(min, zip(*rows, strict=True)))


def first_difference(what: str, by_rank: Sequence[Items], ranks: Sequence[int]) -> str:
    """The first path where the ranks' items differ, with each value and who has it.

    Args:
        what: what the items describe.
        by_rank: each rank's items; a path of "" where there is but one.
        ranks: their global ranks.

    >>> first_difference("config", [[("stage", "1")], [("stage", "2")]], [0, 1])
    'ranks differ in config at stage: rank 0: 1; rank 1: 2. It must be the same on all.'
    """
    found = [dict(items) for items in by_rank]
    paths = dict.fromkeys(path for items in by_rank for path, _ in items)
    different = [path for path in paths if len({d.get(path) for d in found}) > 1]
    if different:
        where = f" at {different[0]}" if different[0] else ""
        values = [d.get(different[0], _ABSENT) for d in found]
        more = f" ({len(different)} of {len(paths)} entries differ)" if len(paths) > 1 else ""
    else:  # the same entries in another order, or one of them twice
        rows = list(itertools.zip_longest(*by_rank, fillvalue=("", _ABSENT)))
        number, row = next((i, row) for i, row in enumerate(rows) if len(set(row)) > 1)
        where = f" in the order of its entries, at entry {number}"
        values = [path or value for path, value in row]
        more = ""
    holders: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        holders.setdefault(value, []).append(rank)
    listing = "; ".join(f"{ranks_text(who)}: {value}" for value, who in holders.items())
    return f"ranks differ in {what}{where}: {listing}{more}. It must be the same on all."


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()


def _groups(mesh: Mesh) -> list[ProcessGroup]:
    mesh_of = mesh.device_mesh
    return [group_along(mesh_of, i) for i in range(mesh_of.ndim) if mesh_of.size(i) > 1]
