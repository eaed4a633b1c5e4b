"""What CUDA's caching allocator reserves for a step: its rules, on a Program's lifetimes.

[Note: reserved] A device runs out of what the allocator has asked the driver for, and not of what
tensors take. It asks for segments, cuts blocks out of them, and keeps them: a block goes to the
smallest gap that is large enough, what is left of a gap becomes one of its own, and neighbours that
are free join. So large values that come late find gaps with small ones in between, and take new
segments. Which, follows from the order of sizes alone, so a Program's lifetimes say it. cuBLAS's
workspaces, and what the driver and the communication library take, come on top.

References: c10/cuda/CUDACachingAllocator.cpp of PyTorch, and "Memory management" in its notes on
CUDA; expandable segments: `PYTORCH_ALLOC_CONF=expandable_segments:True` there.
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fzero.program.categories import GRADIENTS
from fzero.program.graph import Part, placeholders
from fzero.program.memory import lifetimes, storages

_ROUND = 512  # every block
_SMALL = 2**20  # up to here blocks come from segments of their own
_SMALL_SEGMENT = 2 * 2**20
_LARGE_SEGMENT = 20 * 2**20
_LARGE = 10 * 2**20  # from here on a block has its own segment
_LARGE_ROUND = 2 * 2**20
_APART = 2**60  # addresses of large segments begin here


@dataclass(eq=False, slots=True)
class _Block:
    """A part of a segment; its neighbours are those of the same segment."""

    start: int
    size: int
    small: bool
    before: "_Block | None" = None
    after: "_Block | None" = None
    free: bool = False


class CachingAllocator:
    """Segments and blocks without memory.

    Args:
        expandable: whether segments grow instead of being one of many.

    Attributes:
        reserved: bytes of all segments.
        allocated: bytes of blocks in use.
        most: the most that was allocated at once.
        gaps: of small blocks' segments (True) and large ones': size, start and block, sorted.

    Examples:
        >>> allocator = CachingAllocator()
        >>> first, second = allocator.take(30 * 2**20), allocator.take(12 * 2**20)
        >>> allocator.give(first)
        >>> _ = allocator.take(16 * 2**20), allocator.take(16 * 2**20)  # 14 MiB of the gap are left
        >>> allocator.reserved // 2**20, allocator.most // 2**20
        (58, 44)
    """

    def __init__(self, *, expandable: bool = False) -> None:
        self.expandable = expandable
        self.reserved = self.allocated = self.most = 0
        self.gaps: dict[bool, list[tuple[int, int, _Block]]] = {True: [], False: []}
        self._ends: dict[bool, _Block | None] = {True: None, False: None}
        self._next = {True: 0, False: _APART}

    def take(self, nbytes: int) -> _Block:
        """A block of `nbytes` or some more."""
        size = max(-(-nbytes // _ROUND) * _ROUND, _ROUND)
        small = size <= _SMALL
        gaps = self.gaps[small]
        place = bisect_left(gaps, (size, -1))
        block = gaps.pop(place)[2] if place < len(gaps) else self._grown(size, small)
        block.free = False
        rest = block.size - size
        if rest >= _ROUND if small else rest > _SMALL:
            self._split(block, size)
        self.allocated += block.size
        self.most = max(self.most, self.allocated)
        return block

    def give(self, block: _Block) -> None:
        """Free a block; free neighbours join it."""
        self.allocated -= block.size
        for neighbour in (block.after, block.before):
            if neighbour is not None and neighbour.free:
                self._take_gap(neighbour)
                left, right = sorted((block, neighbour), key=lambda x: x.start)
                self._join(left, right)
                block = left
        self._gap(block)

    def _grown(self, size: int, small: bool) -> _Block:
        """A gap that has room, of memory that was not reserved before."""
        end = self._ends[small] if self.expandable else None
        if end is not None and end.free:
            self._take_gap(end)
            missing = size - end.size
        else:
            missing = size
        unit = _SMALL_SEGMENT if small else _LARGE_SEGMENT
        if self.expandable:
            more = -(-missing // unit) * unit
        elif small or size < _LARGE:
            more = unit
        else:
            more = -(-size // _LARGE_ROUND) * _LARGE_ROUND
        self.reserved += more
        if end is not None and end.free:
            end.size += more
            self._next[small] += more
            return end
        block = _Block(self._next[small], more, small, before=end)
        if end is not None:
            end.after = block
        self._next[small] += more
        self._ends[small] = block
        return block

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.start + size, block.size - size, block.small, block, block.after)
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        if self._ends[block.small] is block:
            self._ends[block.small] = rest
        self._gap(rest)

    def _join(self, left: _Block, right: _Block) -> None:
        left.size += right.size
        left.after = right.after
        if right.after is not None:
            right.after.before = left
        if self._ends[left.small] is right:
            self._ends[left.small] = left

    def _gap(self, block: _Block) -> None:
        block.free = True
        insort(self.gaps[block.small], (block.size, block.start, block))

    def _take_gap(self, block: _Block) -> None:
        gaps = self.gaps[block.small]
        del gaps[bisect_left(gaps, (block.size, block.start))]


def reserved_bytes(
    parts: Sequence[Part], *, expandable: bool = False, away: Collection[str] = ()
) -> int:
    """Bytes of all segments after two steps. See [Note: reserved].

    Args:
        parts: of a step.
        expandable: see `CachingAllocator`.
        away: categories of the state that are in host memory.
    """
    allocator = CachingAllocator(expandable=expandable)
    replay(allocator, parts, away)
    return allocator.reserved


def replay(
    allocator: CachingAllocator, parts: Sequence[Part], away: Collection[str] = (), steps: int = 2
) -> None:
    """Take and give what steps do; the second finds what the first has left."""
    for nbytes in _state(parts[0], away):
        allocator.take(nbytes)
    events = [_events(part) for part in parts]
    for _ in range(steps):
        left: list[_Block] = []  # what parts return stays until the step is over
        for part, moves in zip(parts, events, strict=True):
            for turn in range(part.times):
                returned = _run(allocator, moves)
                if turn:  # added to the first micro-batch's, and gone
                    for block in returned:
                        allocator.give(block)
                else:
                    left += returned
        for block in left:
            allocator.give(block)


def _state(first: Part, away: Collection[str]) -> list[int]:
    """Bytes of each tensor that is there before a step."""
    nodes = placeholders(first.graph)
    kinds = dict(zip(nodes, first.input_categories, strict=False))
    inputs = storages(node for node in nodes if kinds.get(node) not in away)
    # of accumulated gradients there are those that micro-batches return
    rest = [row.bytes for row in first.resident if row.category not in (GRADIENTS, *away)]
    return [nbytes for nbytes in (*inputs.values(), *rest) if nbytes]


def _events(part: Part) -> list[tuple[int, int]]:
    """(storage, bytes) where one is made; (storage, 0) where it is freed."""
    born, dies = lifetimes(part.graph)
    found: list[tuple[int, int]] = []
    for node in part.graph.nodes:
        found += [(key, nbytes) for key, nbytes in born.get(node, {}).items() if nbytes]
        found += [(key, 0) for key, nbytes in dies.get(node, {}).items() if nbytes]
    return found


def _run(allocator: CachingAllocator, events: Sequence[tuple[int, int]]) -> list[_Block]:
    """Run a part once; the blocks of what it returns."""
    held: dict[int, _Block] = {}
    for key, nbytes in events:
        if nbytes:
            held[key] = allocator.take(nbytes)
        else:
            allocator.give(held.pop(key))
    return list(held.values())
