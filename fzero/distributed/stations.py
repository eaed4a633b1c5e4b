"""What ranks say of where they are: stations, in the store and in words. See whereabouts.py."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch.distributed.distributed_c10d import Store

from fzero.distributed.processes import own_name
from fzero.distributed.store import Asked

SOON = 5.0  # seconds that a question may take whose answer somebody can do without

ADVICE = (
    " What changes the collectives on one rank must change them on all, in the same call: look for "
    "a branch, a batch or an end of the loop that differs between ranks, or for an exception. "
    "`unshard` and `save` are for all ranks, never under `if rank == 0:`."
)


class Station(NamedTuple):
    """Where a rank is.

    Args:
        number: how many stations it has come to.
        chain: a checksum of all of them.
        text: what it does there.
        left: whether its program has ended, as programs end.
    """

    number: int
    chain: int
    text: str
    left: bool = False


class Stations:
    """The entries of some ranks in the store, where all of them can read them.

    Args:
        ranks: their global ranks.
        rank: this one's.
        name: tells them from other entries of the same ranks.
    """

    def __init__(self, ranks: Sequence[int], rank: int, name: str = "") -> None:
        self.ranks, self.rank = tuple(ranks), rank
        self.names: dict[int, Mapping[str, str]] = {}  # of their processes, as far as they are read
        self._last: Station | None = None
        self._ask = Asked()
        key = hashlib.blake2b(f"{self.ranks} {name}".encode(), digest_size=8).hexdigest()
        # a process group may be ended and started again on the same store
        turn = self._ask(lambda store: store.add(f"fzero/circle {key}/made by {rank}", 1))
        self._prefix = f"fzero/circle {key}/{turn}"

    def say(self, here: Station, hint: str) -> None:
        """Write where this rank is, and what a message about it says besides."""
        if here != self._last:  # who waits looks each second, and mostly has not moved
            entry = json.dumps({"at": here, "process": own_name(), "hint": hint})
            self.set(f"at {self.rank}", entry, SOON)
            self._last = here

    def read(self) -> tuple[dict[int, Station], dict[int, str]]:
        """Where the other ranks last said they are, and their hints."""
        stations = {r: Station(0, 0, "(nothing)") for r in self.ranks if r != self.rank}
        hints = dict.fromkeys(stations, "")
        keys = {rank: f"{self._prefix}/at {rank}" for rank in stations}
        # a key that is not there would be waited for

        def ask(store: Store) -> list[tuple[int, bytes]]:
            there = {r: k for r, k in keys.items() if r in self.names or store.check([k])}
            return list(zip(there, _read(store, list(there.values())), strict=True))

        for rank, value in self._ask(ask, SOON):
            entry = json.loads(value)
            stations[rank] = Station(*entry["at"])
            self.names[rank], hints[rank] = entry["process"], entry["hint"]
        self.names[self.rank] = own_name()
        return stations, hints

    def set(self, key: str, text: str, seconds: float | None = None) -> str:
        """Write a text under a key of these ranks, and return the key's full name."""
        name = self._full(key)
        self._ask(lambda store: store.set(name, text), seconds)
        return name

    def get(self, key: str) -> str:
        """The text under a key; waits for it, as long as the process group does."""
        return self._ask(lambda store: store.get(self._full(key))).decode()

    def has(self, keys: Sequence[str]) -> bool:
        """Whether all these keys are there."""
        return self._ask(lambda store: store.check([self._full(key) for key in keys]), SOON)

    def first(self, key: str, text: str) -> str:
        """The text that some rank was the first to write under a key: this one, or another's."""
        full = self._full(key)
        return self._ask(lambda store: store.compare_set(full, "", text), SOON).decode() or text

    def _full(self, key: str) -> str:
        return f"{self._prefix}/{key}"


def ranks_text(ranks: Sequence[int]) -> str:
    """`ranks 0-2, 5`: consecutive ranks as a range.

    >>> ranks_text([5, 0, 1, 2]), ranks_text([3])
    ('ranks 0-2, 5', 'rank 3')
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def differ(*pairs: tuple[int, Station], hint: str = "") -> str:
    """The message about two ranks at different stations of one number.

    Args:
        pairs: rank, and where it was.
        hint: what to say besides where nothing more special is known.
    """
    (one, here), (other, there) = sorted(pairs)
    what = [f"rank {one} came to {here.text!r}", f"rank {other} to {there.text!r}"]
    if here.text == there.text:  # they parted before, or brought other texts
        what[1] += " by another way"
    texts = {rank: station.text for rank, station in pairs}
    advice = who_joins(texts) or who_freezes(texts) or ADVICE + hint
    return f"{what[0]}, and {what[1]}: their collectives would not match.{advice}"


def who_joins(texts: Mapping[int, str]) -> str:
    """What to say where only some ranks loop over `engine.join`; "" otherwise.

    Args:
        texts: what each rank is about to do.

    >>> who_joins({0: "engine 1, backward", 1: "engine 1, join"})  # doctest: +ELLIPSIS
    ' Rank 0 trains without engine.join, over which rank 1 loops: ...'
    """
    at = [rank for rank, text in texts.items() if _JOIN.search(text)]
    others = [rank for rank in texts if rank not in at]
    if not at or not others:
        return ""
    verb = "trains" if len(others) == 1 else "train"
    return (
        f" {ranks_text(others).capitalize()} {verb} without engine.join, over which "
        f"{ranks_text(at)} {'loops' if len(at) == 1 else 'loop'}: say `for batch in "
        "engine.join(loader):` on every rank, whatever the length of its loader, or on none."
    )


def who_freezes(texts: Mapping[int, str]) -> str:
    """What to say where only some ranks have changed what is trained; "" otherwise.

    Args:
        texts: what each rank is about to do.

    >>> who_freezes({0: "engine 1, forward", 1: COMPARES_TRAINED})  # doctest: +ELLIPSIS
    ' requires_grad of some parameter has changed on rank 1 and not on rank 0. Freeze ...'
    """
    at = [rank for rank, text in texts.items() if text == COMPARES_TRAINED]
    others = [rank for rank in texts if rank not in at]
    if not at or not others:
        return ""
    return (
        f" requires_grad of some parameter has changed on {ranks_text(at)} and not on "
        f"{ranks_text(others)}. {FREEZE_ALIKE}"
    )


TRAINED = "what is trained"  # as `agree` calls it
COMPARES_TRAINED = f"a comparison of {TRAINED}"
FREEZE_ALIKE = "Freeze and unfreeze the same parameters on every rank, before the same forward."
_JOIN = re.compile(r"\bjoin$|^engine\.join\b")


def _read(store: Store, keys: list[str]) -> list[bytes]:
    if not keys:
        return []
    # One round trip where the store can; the question is missing from torch's stubs.
    at_once = store.has_extended_api()  # pyright: ignore[reportAttributeAccessIssue]
    return store.multi_get(keys) if at_once else [store.get(key) for key in keys]
