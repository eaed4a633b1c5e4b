"""Ranks meet through the store, where one of them may not come at all; no collectives.

When one rank stages out a new Program, the others may be running the old one: a collective that
asked them would be the very one that hangs. Where all ranks are known to come, `agree` costs less.
"""

from fzero.distributed.agree import first_difference
from fzero.distributed.mesh import Mesh
from fzero.distributed.stations import who_joins
from fzero.distributed.whereabouts import circle_of
from fzero.errors import RankMismatchError


def rendezvous(
    key: str,
    text: str,
    mesh: Mesh,
    timeout: float | None = None,
    hint: str = "",
    *,
    calls: bool = False,
) -> None:
    """Return once every rank of `mesh` has come to `key` with the same text; no collectives.

    Unlike `agree` it can be called where some rank may not come: that rank is named.

    Args:
        key: names this meeting; used once in a run, and the same on all ranks.
        text: what must be equal, such as the listing of a Program's collectives; compared line by
            line.
        mesh: the ranks that must come.
        timeout: seconds to wait for them while they live and are nowhere else; None: the process
            group's.
        hint: what the user can do about a difference, besides.
        calls: whether the texts say what is called, and not which collectives that runs.

    Raises:
        RankMismatchError: names a rank that is elsewhere, gone or late, or the first line that
            differs; on every rank.

    >>> from fzero.distributed.mesh import resolve_mesh
    >>> rendezvous("step 7", "all_gather 12 B", resolve_mesh(None, "cpu"))
    """
    circle = circle_of(mesh)
    if circle.alone:
        return
    circle.limit = timeout
    texts = circle.meet(key, text, hint)
    if len(set(texts)) > 1:
        lines = [t.split("\n") for t in texts]
        if len({first for first, *_ in lines}) > 1:  # other meetings altogether
            items, calls = [[("", ": ".join(t[:2]))] for t in lines], True
        elif max(map(len, lines)) == 2:
            items = [[("", line)] for _, line in lines]
        else:
            rows = [enumerate(t[1:], 1) for t in lines]
            items = [[(f"row {i} of the collectives", line) for i, line in row] for row in rows]
        by_rank = dict(zip(mesh.ranks, texts, strict=True))
        advice = who_joins(by_rank) or (_CALLS if calls else _BATCHES) + hint
        raise RankMismatchError(
            f"{first_difference(key, items, mesh.ranks)} Their collectives would not match.{advice}"
        )


_CALLS = (
    " All ranks must call the same functions and methods in the same order, also those that only "
    "read (full_grad, state_dict): look for one under `if rank == 0:`, or a loop that is longer."
)
_BATCHES = " Give every rank a batch of the same structure, shapes and dtypes in the same call."


def says(key: str, text: str, mesh: Mesh, rank: int = 0, timeout: float | None = None) -> str:
    """What one rank of `mesh` passes, on every rank; through the store, no collectives.

    Args:
        key: names this question; the same on all ranks.
        text: this rank's answer.
        mesh: the ranks.
        rank: whose answer it is, as a number in the mesh.
        timeout: seconds to wait for that rank; None: the process group's.

    Raises:
        RankMismatchError: it is elsewhere, gone, or late beyond the limit.

    >>> from fzero.distributed.mesh import resolve_mesh
    >>> says("order", "1 2", resolve_mesh(None, "cpu"))
    '1 2'
    """
    circle = circle_of(mesh)
    if circle.alone:
        return text
    with circle.at(key, timeout):
        name = f"said at {circle.here.number}: {key}"
        if mesh.rank == rank:
            circle.set(name, text)
            return text
        return circle.get(name)
