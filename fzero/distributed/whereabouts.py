"""Where the ranks are: which is late, which went another way, which is gone.

[Note: stations] Ranks that train together go through the same stations in the same order: this
call of a step, this gather, this checkpoint. Each rank counts its own and says nothing. Only who
has waited for some seconds writes into the store where it is, and reads where the others are:

    elsewhere   another station than this rank's of the same number: an error on every rank
    left, dead  at an earlier station, and its program ended or its process is gone: an error
    late        at an earlier station, and its process lives: it is waited for, to the time limit

Who raises leaves its reason in the store first, and who waits reads it, so that all raise. Who left
a station by another exception, with collectives of it sent, meets all others before the next one:
they may be waiting for what it no longer sends, and gloo aborts a process that gets something else.
If all left alike, they go on. Nothing
runs in the background, and a step that waits for nobody costs no word to anybody. No decision rests
on how long a collective takes: only on what ranks have said, and on the time limit.
"""

import atexit
import contextlib
import os
import time
import warnings
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fzero.distributed.keepalive import keep_alive
from fzero.distributed.mesh import Mesh, group_along
from fzero.distributed.processes import GRACE_SECONDS, Processes, is_of_collective, time_is_up
from fzero.distributed.stations import ADVICE, Station, Stations, differ, ranks_text
from fzero.distributed.store import StoreSilent, group_limit
from fzero.distributed.workers import rest
from fzero.errors import RankMismatchError, users_line

PATIENCE = 3.0  # seconds that a rank waits before it says where it is
PAUSE = 1.0  # seconds between two looks at where the others are
TELLS = 60.0  # seconds that a rank waits before it warns its user
_REMEMBERED = 1000  # stations; ranks that share collectives are never that far apart

_RAISED = " (raised)"
_AGAIN = (
    " What raised can be run again only where it raised on all ranks, at the same place. Raise on "
    "all of them, or start again from the last checkpoint."
)


class Circle:
    """Ranks that go through the same stations, as one of them sees it.

    Args:
        ranks: their global ranks.
        rank: this one's. A circle of one rank does nothing.
        groups: the process groups that their collectives run on.
        name: tells it from other circles of the same ranks.
    """

    def __init__(
        self, ranks: Sequence[int], rank: int, groups: Sequence[ProcessGroup] = (), name: str = ""
    ) -> None:
        self.ranks, self.rank = tuple(ranks), rank
        self.alone = len(self.ranks) == 1
        # `works` counts what gloo sends; of other backends nothing is known
        self.counted = True
        self._groups: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()
        self.add(groups)
        # what carries reductions beside each: see [Note: two lanes]
        self.lanes: weakref.WeakKeyDictionary[ProcessGroup, Any] = weakref.WeakKeyDictionary()
        self.here = Station(0, 0, "the start")
        self.hint = ""
        self.limit: float | None = None  # seconds; None: that of `init_process_group`
        self.sent = 0  # collectives so far
        self._sent_before = 0  # before those of this station
        self._broke_off: int | None = None  # after so many of its collectives, by an exception
        self.verdict = ""  # why these ranks can't go on
        self._warned = 0  # the last station at which it has told its user that it waits
        self._past: deque[Station] = deque([self.here], maxlen=_REMEMBERED)
        self._unexplained: BaseException | None = None
        self._usual = group_limit()
        if self.alone:
            return
        self._said = Stations(self.ranks, rank, name)
        self._tell()
        atexit.register(_leave, weakref.ref(self), os.getpid())

    def add(self, groups: Sequence[ProcessGroup]) -> None:
        """Have their collectives run on these groups as well."""
        self.counted &= all(dist.get_backend(group) == "gloo" for group in groups)
        self._groups.update(groups)

    @property
    def time_limit(self) -> float:
        """Seconds that a rank may come later than others, whichever group a collective runs on."""
        return self._usual if self.limit is None else self.limit

    # --- what a rank does ---

    def announce(self, text: str, hint: str = "") -> None:
        """Note that this rank comes to its next station; nothing is sent.

        Args:
            text: what all ranks do here, the same on each.
            hint: what the message says besides if they don't.

        Raises:
            RankMismatchError: these ranks were found to differ before.
        """
        if self.alone:
            return
        if self.verdict:
            raise RankMismatchError(self.verdict)
        self._rejoin()
        self._sent_before = self.sent
        number, chain, *_ = self.here
        # of all texts so far: who took another way is told even where the texts are equal again
        self.here = Station(number + 1, zlib.crc32(text.encode(), chain), text)
        self.hint = hint
        self._past.append(self.here)

    @contextlib.contextmanager
    def at(self, text: str, limit: float | None = None) -> Iterator[None]:
        """Come to the next station, and run its collectives inside.

        An exception before the first of them leaves this rank where it was. After one, the others
        learn of it when they wait: they can't have what this rank no longer sends.

        Args:
            text: as for `announce`.
            limit: seconds that ranks may come later than others; None: the process group's.
        """
        self.limit = limit
        self._rejoin()
        before, sent = self.here, self.sent
        self.announce(text)
        try:
            with self.explained():
                yield
        except RankMismatchError:
            raise
        except BaseException:
            if self.sent == sent and self.counted:
                # nobody can have waited for what was not sent: the next call is this station
                self._return_to(before)
            else:
                self.raised()
            raise
        if not self.alone and len(self._said.names) < len(self.ranks):
            with contextlib.suppress(RuntimeError):
                self._said.read()  # all are there now: who they are, in case the store is lost

    @contextlib.contextmanager
    def within(self) -> Iterator[None]:
        """Run more collectives of a station that has sent some. An exception is told as in `at`."""
        try:
            with self.explained():
                yield
        except RankMismatchError:
            raise
        except BaseException:
            self.raised()
            raise

    @contextlib.contextmanager
    def explained(self, *, certain: bool = False) -> Iterator[None]:
        """Where a collective fails inside, say which rank is to blame.

        Args:
            certain: nothing but a collective can fail inside.

        Raises:
            RankMismatchError: a rank is gone, late beyond the limit, or elsewhere.
        """
        try:
            yield
        except RuntimeError as error:
            known = certain or is_of_collective(error)
            # seen before, it passed an inner `explained`, which waited and found nothing
            if not self.alone and known and error is not self._unexplained:
                self._explain(error, certain)
                self._unexplained = error
            raise

    def raised(self) -> None:
        """Tell that this rank leaves its station by an exception, with some collectives sent."""
        if self.alone or self.verdict:
            return
        self._broke_off = self.sent - self._sent_before
        number, chain, text, _ = self.here
        # another chain at the same number: whoever looks finds that the two ranks differ
        self.here = Station(number, zlib.crc32(_RAISED.encode(), chain), text + _RAISED)
        self._past[-1] = self.here
        with contextlib.suppress(RuntimeError):  # the store went with the rank that held it
            self._tell()

    def meet(self, key: str, text: str, hint: str = "") -> list[str]:
        """Wait at a station until all ranks have come to it with their texts. No collective runs.

        Args:
            key: names it; the same on all ranks.
            text: what they bring.
            hint: as for `announce`.

        Returns:
            Each rank's `key` and text, by line.

        Raises:
            RankMismatchError: a rank is elsewhere, gone, or late beyond the limit.
        """
        if self.alone:
            return [f"{key}\n{text}"]
        self._rejoin()
        before = self.here
        self.announce(key, hint)
        if len(text) < 200 and "\n" not in text:  # for messages alone: the chain has the key
            self.here = self._past[-1] = self.here._replace(text=f"{key}: {text}")
        number = self.here.number
        entries = {rank: f"station {number}/{rank}" for rank in self.ranks}
        mine = f"{key}\n{text}"

        def differs() -> None:
            for rank, entry in entries.items():
                if self._said.has([entry]) and self._said.get(entry) != mine:
                    self._give_up(
                        f"rank {self.rank} and rank {rank} came to {key!r} with other collectives "
                        f"to run, which would not match.{ADVICE}{hint}"
                    )

        try:
            self._said.set(entries[self.rank], mine)
            self._wait_for(list(entries.values()), differs)
        except RankMismatchError:
            raise
        except BaseException:  # the others may meet all the same: the next call is this meeting
            self._return_to(before)
            raise
        texts = [self._said.get(entry) for entry in entries.values()]
        if len(set(texts)) > 1:  # all know, and nobody has done anything: they may go on
            self.here = Station(number, self._past[-2].chain, f"{key} (ranks differed)")
            self._past[-1] = self.here
            self._tell()
        return texts

    def _rejoin(self) -> None:
        """See that all left the last station as this rank did, if that was by an exception."""
        if (sent := self._broke_off) is None:
            return
        where = self.here.text
        self._broke_off = None
        try:
            texts = self.meet(f"after an exception at {where}", f"{sent} collectives sent", _AGAIN)
        except BaseException:
            self._broke_off = sent
            raise
        if len(set(texts)) > 1:
            told = dict(zip(self.ranks, (text.split("\n")[1] for text in texts), strict=True))
            listing = ", ".join(f"rank {rank}: {text}" for rank, text in told.items())
            self._give_up(f"ranks left {where!r} at different places: {listing}.{_AGAIN}")

    def _return_to(self, before: Station) -> None:
        """Have come to nothing since that station."""
        while len(self._past) > 1 and self._past[-1].number > before.number:
            self._past.pop()
        self.here = before

    def _wait_for(self, keys: Sequence[str], also: Callable[[], None] | None = None) -> None:
        """Return once all these keys, which are written at this station, are in the store."""
        started = looked = time.monotonic()
        # asked again and again, as a wait that times out prints a warning
        while not self._there(keys):
            now = time.monotonic()
            waited = now - started
            if waited > PATIENCE and now - looked > self.pause():
                looked = now
                if also is not None:
                    also()
                self.look(waited)
            if waited > self.time_limit:
                self._give_up_late(waited)
            # soon there where the others are about to come, few questions where they are late
            time.sleep(min(max(waited / 8, 0.001), PAUSE))

    def _there(self, keys: Sequence[str]) -> bool:
        with contextlib.suppress(RuntimeError):  # the store went: `look` sees with whom
            return self._said.has(keys)
        return False

    def set(self, key: str, text: str) -> str:
        """Write a text under a key of these ranks, and return the key's full name."""
        return self._said.set(key, text)

    def get(self, key: str) -> str:
        """Wait until some rank has `set` the key, and return its text."""
        self._wait_for([key])
        return self._said.get(key)

    # --- what it learns of the others ---

    def look(self, waited: float = 0.0) -> None:
        """Say where this rank is, and see whether the others can still come.

        Args:
            waited: seconds for them so far.

        Raises:
            RankMismatchError: one can't.
        """
        try:
            self._tell()
            stations = self._look()
            if waited > TELLS and self._warned < self.here.number:
                self._warned = self.here.number
                self._warn(waited, stations)
        except RuntimeError:  # the store went with the rank that held it
            self._blame_the_gone({})

    def _warn(self, waited: float, stations: Mapping[int, Station]) -> None:
        """Tell who is waited for; one of those that wait does, or of two that may."""
        late = [rank for rank, there in stations.items() if there.number < self.here.number]
        speak = [min(set(self.ranks) - set(late))]
        if not late:  # they have come here, and not to what follows
            late, speak = [rank for rank in stations if rank != self.rank], self.ranks[:2]
        if not late or self.rank not in speak:
            return
        seen = "; ".join(f"rank {rank} after {stations[rank].text!r}" for rank in late[:3])
        warnings.warn(
            f"rank {self.rank} has waited {waited:.0f} s at {self.here.text!r} for "
            f"{ranks_text(late)}, which last said where they are: {seen}. They may take their "
            "time, or be in a collective of your own (dist.barrier, dist.all_reduce, a DTensor's "
            f"full_tensor) that not all ranks call. After {self.time_limit:.0f} s this is an "
            "error: Config(timeout=seconds).",
            stacklevel=users_line(),
        )

    def pause(self) -> float:
        """Seconds from one look to the next: less often where many ask."""
        return max(PAUSE, len(self.ranks) / 100)

    def _look(self) -> dict[int, Station]:
        if self._said.has(["verdict"]):
            self._raise(self._said.get("verdict"))
        stations, hints = self._said.read()
        for rank, there in stations.items():
            mine = self._passed(there.number)
            # where the one that is behind stands: the other has been there, and remembers
            if mine is not None and mine.chain != there.chain:
                hint = hints[rank] or self.hint
                self._give_up(differ((self.rank, mine), (rank, there), hint=hint))
        behind = {r: there for r, there in stations.items() if there.number < self.here.number}
        for rank, there in behind.items():
            if there.left:
                self._give_up(
                    f"rank {rank} has left: its program ended after {there.text!r}, and rank "
                    f"{self.rank} waits for it at {self.here.text!r}.{ADVICE}"
                )
        self._blame_the_gone(stations)
        return stations

    def _blame_the_gone(self, stations: Mapping[int, Station], *, stopped: bool = False) -> None:
        gone = {
            rank: what
            for rank, what in Processes(self._said.names).gone().items()
            if (stopped or what == "ended") and not (rank in stations and stations[rank].left)
        }
        if gone:
            blame = " and ".join(f"rank {rank} {what}" for rank, what in gone.items())
            self._give_up(
                f"a collective failed: {blame}. The other ranks cannot go on without it: look at "
                "its output, or at the system's log if the memory ran out, and start again from "
                "the last checkpoint (torchrun --max-restarts does so by itself)."
            )

    def _explain(self, error: RuntimeError, certain: bool) -> None:
        """Raise if it can be told why a collective of this rank failed."""
        started = time.monotonic()
        timed_out = certain and time_is_up(error)
        # who has just come waits for its own patience before it says so
        until = started + (PATIENCE + 2 * PAUSE if timed_out else GRACE_SECONDS)
        try:
            while True:
                self.look()
                if time.monotonic() > until:
                    break
                time.sleep(0.1)
            if timed_out:
                self._give_up_late(self.time_limit)
            if certain and (far := Processes(self._said.names).elsewhere()):
                self._give_up(
                    f"a collective failed: no process on rank {self.rank}'s host is gone; look at "
                    f"ranks {far} on other hosts. It said: {error}"
                )
        except RankMismatchError as reason:
            raise reason from error

    def part(self) -> NoReturn:
        """Raise, as not all ranks are at this station: they have said so."""
        until = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < until:
            self.look()  # finds who is where, once that rank has told
            time.sleep(0.1)
        self._give_up(
            f"rank {self.rank} has come to {self.here.text!r}, and not all ranks have.{ADVICE}"
            f"{self.hint}"
        )

    def _give_up_late(self, waited: float) -> None:
        try:
            stations = self._look()
        except StoreSilent as silence:
            self._give_up(
                f"rank {self.rank} waited {waited:.0f} s at {self.here.text!r}, and neither the "
                f"others' messages came nor an answer of the store: {silence} Start again from the "
                "last checkpoint (torchrun --max-restarts does so by itself)."
            )
        except RuntimeError:
            stations = {}
        # a stopped process may go on, so it is to blame only when the time is up
        self._blame_the_gone(stations, stopped=True)
        behind = [rank for rank, there in stations.items() if there.number < self.here.number]
        if not behind:  # they have all come by now; what is missing is one of their messages
            behind = list(stations)
        far = [rank for rank in behind if rank in Processes(self._said.names).elsewhere()]
        lives = "Its process lives, as far as can be told from here, and it"
        if far:
            lives = (
                f"Of {ranks_text(far)}, on another host, nothing is known; it may be cut off. It"
            )
        seen = "; ".join(f"rank {rank} after {stations[rank].text!r}" for rank in behind)
        self._give_up(
            f"rank {self.rank} waited {waited:.0f} s at {self.here.text!r}, and "
            f"{ranks_text(behind)} did not come. {lives} last said where it is: "
            f"{seen or 'never'}. Look at what it does. If it needs the time, set "
            "Config(timeout=seconds), or the timeout of init_process_group."
        )

    def _give_up(self, text: str) -> NoReturn:
        """Raise on this rank, and on all that look from now on; the first one's words hold."""
        with contextlib.suppress(RuntimeError):  # without a store it has its own words
            text = self._said.first("verdict", text)
        self._raise(text)

    def _raise(self, text: str) -> NoReturn:
        self.verdict = text
        # their operations will never end, so they must not be destroyed
        for group in (*self._groups, *self.lanes.values()):
            keep_alive(group)
        raise RankMismatchError(text)

    def _tell(self, *, left: bool = False) -> None:
        self._said.say(self.here._replace(left=left), self.hint)

    def _passed(self, number: int) -> Station | None:
        """This rank's own station of that number; None if it was not there, or long ago."""
        back = self.here.number - number
        return self._past[-1 - back] if 0 <= back < len(self._past) else None


_CIRCLES: "weakref.WeakKeyDictionary[ProcessGroup, dict[Any, Circle]]" = (
    # One a process and mesh, whoever asks: it lives and ends with torch's own process group,
    # which takes no attributes.
    weakref.WeakKeyDictionary()
)
_BY_GROUP: "weakref.WeakKeyDictionary[ProcessGroup, Circle]" = weakref.WeakKeyDictionary()


def circle_of(mesh: Mesh | DeviceMesh) -> Circle:
    """The circle of a mesh's ranks, the same one for all who ask.

    >>> from fzero.distributed.mesh import resolve_mesh
    >>> circle_of(resolve_mesh(None, "cpu")).alone
    True
    """
    if isinstance(mesh, Mesh):
        ranks, mesh = mesh.ranks, mesh.device_mesh
    else:
        ranks = tuple(mesh.mesh.flatten().tolist())
    if len(ranks) == 1:
        return Circle(ranks[:1], ranks[0])
    groups = [group_along(mesh, i) for i in range(mesh.ndim) if mesh.size(i) > 1]
    apart = mesh.ndim == 1 and len(ranks) < dist.get_world_size()
    return circle_for(ranks, groups, groups[0].group_name if apart else "")


def circle_for(ranks: Sequence[int], groups: Sequence[ProcessGroup], name: str = "") -> Circle:
    """The circle of these ranks, whose collectives run on these groups."""
    if len(ranks) == 1 or dist.get_backend() == "fake":  # a fake group moves no data
        return Circle(ranks[:1], ranks[0])
    world: Any = dist.group.WORLD
    circles = _CIRCLES.setdefault(world, {})
    key = (tuple(ranks), name)
    if key not in circles:
        circles[key] = Circle(ranks, dist.get_rank(), name=name)
    circles[key].add(groups)
    for group in groups:
        if group not in _BY_GROUP and dist.get_backend(group) == "gloo":
            _BY_GROUP[group] = circles[key]
    return circles[key]


def circle_on(group: ProcessGroup) -> Circle | None:
    """The circle whose collectives run on this group with gloo; None for any other."""
    return _BY_GROUP.get(group)


def _leave(circle: "weakref.ref[Circle]", pid: int) -> None:
    """The program ends: say so, to whoever waits for this rank."""
    self = circle()
    # a fork inherits this handler, and its end is not the rank's
    if os.getpid() != pid:
        return
    rest()
    if self is None or self.verdict:
        return
    gone = Processes(self._said.names).gone()
    if gone:  # the store may be gone too
        return
    with contextlib.suppress(RuntimeError):
        self._tell(left=True)
