"""What can be loaded, whoever wrote it, as one value: a reader and its leaves."""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, Metadata, StorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.futures import Future

from fzero.checkpoint.flatten import Scalar
from fzero.checkpoint.format.pieces import pieces
from fzero.errors import CheckpointError

Region = tuple[slice, ...]

# From a name in a checkpoint to a name of ours; None where it stays what it would be.
Rename = Callable[[str], str | None]

BUFFERS = "opt_state.model_state."

# Fields of the states of fzero.optim, and what torch.optim calls the same thing.
TORCH_NAMES = {"mu": "exp_avg", "nu": "exp_avg_sq", "trace": "momentum_buffer"}


@dataclass(frozen=True)
class Source:
    """Something that can be loaded.

    Args:
        where: it is, for messages.
        reader: reads it.
        metadata: what it holds, under the keys of a checkpoint of fzero.
        scalars: plain values by key.
        values: small tensors that are known already, by key; in the metadata too.
        identity: the same on all ranks if they see the same checkpoint.
        renamed: of keys whose name was changed, by choice, what it was.
        names: of parameters and buffers, as they are in the checkpoint.
    """

    where: str
    reader: StorageReader
    metadata: Metadata
    scalars: Mapping[str, Scalar] = field(default_factory=dict)
    values: Mapping[str, Tensor] = field(default_factory=dict)
    identity: str = ""
    renamed: Mapping[str, str] = field(default_factory=dict)
    names: Sequence[str] = ()


class Lazy(NamedTuple):
    """A tensor in somebody else's file.

    Args:
        dtype: of it.
        shape: of it.
        read: a region of it, in new memory or mapped from the file.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[Region], Tensor]

    def metadata(self) -> TensorStorageMetadata:
        """As `torch.distributed.checkpoint` knows it."""
        size = torch.Size(self.shape)
        whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
        chunks = [whole] if size.numel() else []
        return TensorStorageMetadata(TensorProperties(dtype=self.dtype), size, chunks)


class LazyReader(StorageReader):
    """Reads regions of tensors in other formats, a few MiB at a time.

    Args:
        leaves: by key.
        on_bytes: called with the bytes of each piece.
    """

    def __init__(self, leaves: Mapping[str, Lazy], on_bytes: Callable[[int], None]) -> None:
        self.leaves, self.on_bytes = leaves, on_bytes

    def reset(self, checkpoint_id: Any = None) -> None:
        """The leaves stay the ones that it was made for."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What there is."""
        return Metadata({key: leaf.metadata() for key, leaf in self.leaves.items()})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """All is known."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what the plan names into the planner's tensors."""
        for item in plan.items:
            leaf = self.leaves[item.storage_index.fqn]
            target = planner.resolve_tensor(item).detach()
            # piece by piece: another dtype or device needs a copy, which stays small so
            for piece in pieces(tuple(target.shape), leaf.dtype.itemsize):
                starts, sizes = list(item.storage_offsets), list(target.shape)
                for dim, start, length in piece.cuts:
                    starts[dim], sizes[dim] = starts[dim] + start, length
                region = tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))
                piece.of(target).copy_(leaf.read(region))
                self.on_bytes(piece.nbytes)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """The leaves say all there is to say."""
        return checkpoint_id is None


def names_of(keys: Iterable[str]) -> list[str]:
    """The names of the parameters among the keys.

    >>> names_of(["params.a.w", "opt_state.step"])
    ['a.w']
    """
    return [key.removeprefix("params.") for key in keys if key.startswith("params.")]


def ends_of(key: str) -> Iterator[tuple[str, str]]:
    """A key, cut in two before each of its parts: the longest end first.

    >>> list(ends_of("a.b.w"))
    [('', 'a.b.w'), ('a.', 'b.w'), ('a.b.', 'w')]
    """
    at = 0
    while at >= 0:
        yield key[:at], key[at:]
        at = key.find(".", at) + 1 or -1


def shared_prefix(names: Iterable[str], foreign: Iterable[str], where: str) -> str:
    """What the others put before our names: the prefix under which most of them are found.

    Of several it is the one that all of them begin with: none, if the names themselves are there.

    Args:
        names: of our parameters.
        foreign: theirs.
        where: they are, for the message.

    Raises:
        CheckpointError: as many are found under two that are beside each other.

    >>> shared_prefix(["a.w", "b.w"], ["model.a.w", "model.b.w", "ema.a.w"], "file")
    'model.'
    >>> shared_prefix(["w"], ["ema.w", "w"], "file"), shared_prefix(["w"], ["m.a.w", "m.w"], "file")
    ('', 'm.')
    """
    known = {*names}
    heads = (head for key in {*foreign} for head, end in ends_of(key) if end in known)
    counts = Counter(heads)
    most = max(counts.values(), default=0)
    # in this order what all begin with comes first
    best = sorted(head for head, count in counts.items() if count == most)
    apart = [head for head in best if not head.startswith(best[0])]
    if apart:
        one, other = best[0], apart[0]
        raise CheckpointError(
            f"{where} has {most} of the {len(known)} names that are asked for under {one!r} and as "
            f"many under {other!r}, and nothing tells which are meant. Choose: fzero.checkpoint."
            f"load_partial(..., rename={{'{one}*': '*'}}) takes the first, {{'{other}*': '*'}} the "
            "second."
        )
    return best[0] if best else ""


def our_names(
    names: Sequence[str], foreign: Sequence[str], rename: Rename | None, where: str
) -> dict[str, str]:
    """Foreign names of parameters, and what they are here.

    Args:
        names: of our parameters.
        foreign: theirs.
        rename: the user's choice, which is final; what it doesn't choose loses the prefix that most
            of our other names have there. None: what is not below that prefix is left out, too.
        where: they are, for messages.

    Raises:
        CheckpointError: two of theirs would be one of ours, or two prefixes fit as well.

    >>> our_names(["a.w", "b.w"], ["m.a.w", "m.c.w", "x"], {"m.c.w": "b.w"}.get, "file")
    {'m.a.w': 'a.w', 'm.c.w': 'b.w', 'x': 'x'}
    """
    chosen = {} if rename is None else {k: to for k in foreign if (to := rename(k)) is not None}
    rest = [k for k in foreign if k not in chosen]
    prefix = shared_prefix({*names} - {*chosen.values()}, rest, where)
    found = {k: k.removeprefix(prefix) for k in rest if rename or k.startswith(prefix)}
    ours = {k: (chosen | found)[k] for k in foreign if k in chosen or k in found}
    one_each(ours)
    return ours


def one_each(ours: Mapping[str, str]) -> None:
    """Return if no two leaves of a checkpoint are to be one of ours.

    Raises:
        CheckpointError: names the two.
    """
    taken: dict[str, str] = {}
    for theirs, to in ours.items():
        if taken.setdefault(to, theirs) != theirs:
            raise CheckpointError(
                f"{taken[to]} and {theirs} of the checkpoint would both be {to!r}. A leaf is "
                "filled by one: rename one of them to something else."
            )


def renamed_params(ours: Mapping[str, str], rename: Rename | None) -> dict[str, str]:
    """Keys of ours that `rename` chose, and the names that they had.

    >>> renamed_params({"m.a": "a", "m.b": "c"}, {"m.b": "c"}.get)
    {'params.c': 'm.b'}
    """
    chosen = {} if rename is None else {to: k for k, to in ours.items() if rename(k) is not None}
    return {f"params.{to}": name for to, name in chosen.items() if to != name}


def split_key(key: str, names: Container[str]) -> tuple[str, str | None]:
    """A key of ours as what stands before a name, and the name: of a parameter or a buffer.

    Args:
        key: of a checkpoint.
        names: of the parameters, which an optimizer's keys end in.

    >>> split_key("opt_state.inner.mu.a.w", ["w", "a.w"]), split_key("opt_state.step", ["w"])
    (('opt_state.inner.mu.', 'a.w'), ('opt_state.step', None))
    """
    for head in ("params.", BUFFERS):
        if key.startswith(head):
            return head, key.removeprefix(head)
    # the longest name first, and never the key as a whole
    for head, name in ends_of(key):
        if head and name in names:
            return head, name
    return key, None


def moment_of(key: str, names: Container[str]) -> tuple[str, str] | None:
    """Whose state a key of ours is, and what torch.optim calls it: `("a.w", "exp_avg")`.

    >>> moment_of("opt_state.inner.0.mu.a.w", ["a.w", "w"])
    ('a.w', 'exp_avg')
    """
    if not key.startswith("opt_state."):
        return None
    # the longest name first: a parameter may itself be called as a field is
    for head, name in ends_of(key):
        kind = TORCH_NAMES.get(head.removesuffix(".").rpartition(".")[2])
        # an optimizer's field may have any name; only a parameter's behind it makes it a moment
        if kind is not None and name in names:
            return name, kind
    return None


def is_step(key: str) -> bool:
    """Whether a key of ours counts updates.

    >>> is_step("opt_state.inner.0.step"), is_step("params.step")
    (True, False)
    """
    return key.startswith("opt_state.") and key.endswith(".step")
