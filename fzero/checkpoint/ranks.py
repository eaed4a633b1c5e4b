"""The ranks that save or load together, and how they tell each other how it went.

What they exchange is JSON in byte tensors: nothing is pickled, not even between ranks.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from fzero.distributed.exchange import exchange
from fzero.distributed.lanes import group_of_own
from fzero.distributed.mesh import group_along
from fzero.distributed.whereabouts import Circle, circle_for, circle_of
from fzero.errors import CheckpointError, RankMismatchError


@dataclass(frozen=True)
class Ranks:
    """Ranks that save or load together.

    Args:
        members: their global ranks.
        index: this rank's among them.
        group: for their messages; None for a rank that is alone.
        timeout: seconds that the others are waited for; None: the process group's.
        circle: the same ranks, to see who is gone or elsewhere.
        by_default: whether nothing has said which ranks: then they are all.
    """

    members: tuple[int, ...]
    index: int
    group: ProcessGroup | None
    timeout: float | None
    circle: Circle = field(default_factory=lambda: Circle((0,), 0))
    by_default: bool = False

    @classmethod
    def alone(cls) -> "Ranks":
        """This rank by itself, whatever others there are: what it does needs none of them."""
        return cls((dist.get_rank() if dist.is_initialized() else 0,), 0, None, None)

    @property
    def rank(self) -> int:
        """This rank's global rank."""
        return self.members[self.index]

    @property
    def leads(self) -> bool:
        """Whether this is the one rank that does what must be done once."""
        return self.index == 0

    def gather(self, what: str, value: Any) -> list[Any]:
        """Every rank's value, in the order of `members`; all must call it.

        Args:
            what: what the value is, as the message names it.
            value: anything that JSON takes.

        Raises:
            CheckpointError: some rank did not come within the timeout, is gone, or elsewhere.
        """
        if self.group is None:
            return [value]
        data = json.dumps(value).encode()
        try:
            with self.circle.at(f"a checkpoint's exchange of {what}", self.timeout):
                texts = exchange(data, [self.group], self.circle)
        except (RuntimeError, RankMismatchError) as error:
            raise CheckpointError(
                f"rank {self.rank} waited for {what} of ranks {list(self.members)}: {error} "
                f"{self._why}Earlier checkpoints are as they were."
            ) from error
        return [json.loads(text) for text in texts]

    def same(self, what: str, items: Mapping[str, str]) -> None:
        """Return if all ranks pass the same items.

        Raises:
            CheckpointError: on every rank, with the first difference.
        """
        # Digests first: as a rule all is well, and a few bytes have told so.
        digests = self.gather(what, _digest(items))
        if len(set(digests)) == 1:
            return
        by_rank = self.gather(what, dict(items))
        for key in dict.fromkeys(key for there in by_rank for key in there):
            values = {
                rank: there.get(key) for rank, there in zip(self.members, by_rank, strict=True)
            }
            if len(set(values.values())) > 1:
                listing = "; ".join(f"rank {rank}: {value}" for rank, value in values.items())
                raise CheckpointError(
                    f"ranks differ in {what} at {key}: {listing}. It must be the same on all. "
                    f"{self._why}".rstrip()
                )

    @property
    def _why(self) -> str:
        if not self.by_default:
            return ""
        return (
            "(No DTensor in it says which ranks hold it, as at stage 0: so these are all ranks of "
            "the process group. Ranks of a mesh that has not all of them save at stage 3, or at 1 "
            "and 2 with an optimizer that has state.) "
        )

    def apart(self) -> "Ranks | None":
        """The same ranks with a group of their own, for use beside training; all must call it.

        None if there can be none: see `group_of_own`.
        """
        if self.group is None:
            return self
        # Gloo, whatever training uses: a thread's messages must not queue on its device.
        group = group_of_own(
            list(self.members),
            lambda number: self.gather("the next group's name", number),
            timeout=None if self.timeout is None else timedelta(seconds=self.timeout),
            backend="gloo",
            group_desc="fzero checkpoints",
        )
        if group is None:
            return None
        circle = Circle(self.members, self.rank, [group], group.group_name)
        return replace(self, group=group, circle=circle)


def ranks_of(tensors: Iterable[Tensor], timeout: float | None = None) -> Ranks:
    """The ranks that the DTensors among `tensors` live on; without any, all ranks.

    >>> ranks_of([], 60.0).members
    (0,)
    """
    meshes = (x.device_mesh for x in tensors if isinstance(x, DTensor))
    mesh = max(meshes, key=lambda mesh: mesh.size(), default=None)
    if not dist.is_initialized():
        if mesh is not None:
            circle_of(mesh)  # of several ranks it is refused: their process group is gone
        return Ranks((0,), 0, None, timeout)
    if mesh is None or mesh.size() == dist.get_world_size():
        ranks, group = tuple(range(dist.get_world_size())), dist.group.WORLD
    else:
        ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
        # `_flatten` is private; the public way, a group made here, would be a collective of all.
        whole_mesh = mesh if mesh.ndim == 1 else mesh._flatten()
        group = group_along(whole_mesh, 0)
    index = ranks.index(dist.get_rank())
    if len(ranks) == 1:
        return Ranks(ranks, index, None, timeout)
    whole = mesh is None or mesh.size() == dist.get_world_size()
    assert isinstance(group, ProcessGroup)  # this rank is in it
    circle = circle_for(ranks, [group]) if whole or mesh is None else circle_of(mesh)
    return Ranks(ranks, index, group, timeout, circle, by_default=mesh is None)


def on_every_rank(
    ranks: Ranks, what: str, act: Callable[[], Any], failing: tuple[str, str]
) -> list[Any]:
    """What `act` returns on every rank, as JSON keeps it; if it fails on one, an error on all.

    Args:
        ranks: the ranks; all must call it.
        what: what is exchanged, as the message names it.
        act: what each rank does. OSError and CheckpointError count as failures of its own; anything
            else is a bug and goes through.
        failing: what a failure means, and what to do next.

    Raises:
        CheckpointError: on every rank, with each rank's failure.
    """
    cause: Exception | None = None
    outcome: dict[str, Any] = {}
    try:
        outcome["is"] = act()
    except (OSError, CheckpointError) as error:
        cause = error
        outcome["failed"] = str(error)
        outcome["told"] = isinstance(error, CheckpointError)  # with what to do next
    by_rank = ranks.gather(what, outcome)
    failed = {r: t["failed"] for r, t in zip(ranks.members, by_rank, strict=True) if "failed" in t}
    if not failed:
        return [outcome["is"] for outcome in by_rank]
    # All that failed say the same: a list by rank would only repeat it.
    if isinstance(cause, CheckpointError) and len(set(failed.values())) == 1:
        raise cause
    listing = "; ".join(f"rank {rank}: {text.rstrip('.')}" for rank, text in failed.items())
    told = all(outcome.get("told", True) for outcome in by_rank)
    rest = "" if told else f" {failing[1]}"
    raise CheckpointError(f"{failing[0]}. {listing}.{rest}") from cause


def _digest(items: Mapping[str, str]) -> str:
    return hashlib.blake2b(json.dumps(dict(items)).encode(), digest_size=16).hexdigest()
