"""Whether a recording still says what its function would do: [Note: stale].

While a function is recorded, what it reads from outside is noted (see `functional.outside`). Before
its Program runs again the notes are compared with what is there now, by identity first
(`transforms.ledger`). What differs is looked at by value, and where it really is another, the
function is recorded anew.

What a function *writes* outside while it is recorded happens once, and not when the Program runs.
If it also reads that, the Program may depend on it; a second recording tells.
"""

import contextlib
import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from fzero import tree
from fzero.errors import TraceError, users_line
from fzero.functional.carried import Doubt
from fzero.functional.draws import Source, Watch, global_sources, source, without_draws
from fzero.functional.leftovers import Leftover, depends_on_inputs, leftovers, stand_in
from fzero.functional.outside import (
    Fact,
    Place,
    Walk,
    attributes_of,
    bytes_of,
    is_hooks,
    labelled,
    put,
    put_bytes,
)
from fzero.functional.reads import MISSING, Reads
from fzero.functional.transforms import is_recorded, levels_of
from fzero.functional.turns import Turn, turns_among
from fzero.numerics.host import strided_parts
from fzero.program import Program
from fzero.program.graph import is_wanted, memory_of
from fzero.transforms.ambient import Ambient
from fzero.transforms.ledger import Ledger, contents, form_of, keys_of, unchanged

# Recording patches classes and modules of the process, and runs the user's modules with other
# tensors in their slots; torch's tracers are the process's as well. A second thread waits. It is
# one of the turns that [Note: turns] looks at: who records takes those of modules, and a module
# that is called may record.
ONE_AT_A_TIME = Turn("a recording", limited=False)


class Seen(NamedTuple):
    """What a recording did beside reading facts.

    Args:
        written: places that it writes to.
        values: tensors whose values Python read.
    """

    written: frozenset[str]
    values: list[Tensor]


class Notes:
    """What a recording read from outside.

    Args:
        roots: the functions that are recorded, by what messages call them.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self.roots = dict(roots)
        self._reads: Reads | None = None
        self._written: frozenset[str] = frozenset()
        self._values: list[tuple[Tensor, Tensor]] = []
        self._ambient = Ambient.of_now()

    @classmethod
    def resumed(cls, roots: Mapping[str, Any], walk: Walk, reads: Reads, seen: "Seen") -> "Notes":
        """Those of another process, taken up by a walk that has found all as they say."""
        notes = cls(roots)
        notes._reads, notes._written = reads, seen.written
        notes._take(walk)
        reads.keep(walk.seen)
        notes._values = [(x, x.detach().clone()) for x in seen.values]
        return notes

    def seen(self) -> "Seen":
        """What was read beside the facts."""
        return Seen(self._written, [x for x, _ in self._values])

    @property
    def reads(self) -> Reads:
        """Which attributes were read."""
        assert self._reads is not None
        return self._reads

    def record(self, run: Callable[[], Program]) -> Program:
        """Run a recording, and note what it reads from outside.

        Returns:
            What `run` returns.

        Raises:
            TraceError: it draws from a host generator, or reads what it writes.
        """
        # what it finds in modules, and may put back, is theirs and not another thread's
        with ONE_AT_A_TIME, turns_among(fact.holder for fact in Walk(self.roots).facts):
            return self._record(run)

    def _record(self, run: Callable[[], Program]) -> Program:
        self._ambient = Ambient.of_now()
        sources: list[Source] = global_sources()
        host: list[Any] = []
        numbers: list[Any] = []

        first: Walk | None = None
        before: _Snapshot | None = None

        def met(value: Any) -> None:
            if first is None:  # what the walk itself reads
                return
            known = len(first.generators)
            first.visit(value, Place(None, type(value).__name__))
            if before is not None:  # as it is before its reader may write to it
                before.more()
            sources.extend(source(g, f"a generator ({p})") for g, p in first.generators[known:])

        with Reads(met) as reads:
            first = Walk(self.roots, watch=reads.watch)
            sources += [source(g, f"the generator `{p}`") for g, p in first.generators]
            before = _Snapshot(first)

            def watched() -> Program:
                with Watch(host, numbers):
                    return run()

            with leftovers() as left:
                program = without_draws(watched, sources)
        self._reads = reads
        if carried := [x for x in left.values() if _read_before(x, reads)]:
            _refuse_carried(carried, list(left.values()), program, watched)
        last = Walk(self.roots, reads)
        if kept := _kept_of_inputs(last, reads, program):
            _refuse_kept(kept, program, watched)
        written = before.changed(last, reads)
        if written:
            after = _Snapshot(last)
            again = watched()
            # what is written the first time alone (a default that is put in) is noted as it is now
            every_time = set(after.changed(Walk(self.roots, reads)))
            # the second recording was a test only: what it wrote is taken back
            after.put_back()
            if not _same_program(program, again):
                raise _reads_its_writes(written)
            written = [place for place in written if place in every_time]
        self._written = frozenset(written)
        self._take(last)
        reads.keep(last.seen)
        if host or numbers:
            constants = program.constants.values() if host else ()
            found = [x for x in (*host, *numbers, *constants) if isinstance(x, Tensor)]
            mine = {id(x): x for x in found if not is_recorded(x)}
            self._values = [(x, x.detach().clone()) for x in mine.values()]
        return program

    def hold(self) -> bool:
        """Whether all is as noted. What was replaced by its equal counts as such, and is noted."""
        with self._turns:  # while another thread calls a module it is not as it is
            try:
                return self._hold() or not self.differences()
            except ValueError:  # a cell that is empty now
                return False

    def _hold(self) -> bool:
        return (
            self._ledger.holds()
            and Ambient.of_now() == self._ambient
            and all(_equal_arrays(live, noted) for live, noted in self._arrays)
            and all(_equal_tensors(live, noted) for live, noted in self._values)
        )

    def differences(self) -> list[str]:
        """Which place is no longer as noted, and from what to what it has changed."""
        for fact in self._facts:
            now = _look(fact)
            both = now is not fact.value and _plain(now) and _plain(fact.value)
            if both and not _equal(now, fact.value):
                return [f"{fact.place} from {_shown(fact.value)} to {_shown(now)}"]
        if changed := self._ambient.changes(Ambient.of_now()):
            return changed
        for live, noted in self._values:
            if not _equal_tensors(live, noted):
                return ["the values of a tensor that Python read"]
        for live, noted in self._arrays:
            if not _equal_arrays(live, noted):
                return ["the values of an array"]
        for x, noted, place in self._forms:
            if (now := form_of(x)) != noted:
                return [f"{place} from a tensor of {_said(noted)} to one of {_said(now)}"]
        walk = Walk(self.roots, self._reads)
        old, new = self._tokens, tokens_of(walk, self._written)
        rows = [(p, old.get(p, MISSING), new.get(p, MISSING)) for p in dict.fromkeys((*old, *new))]
        rows = [(p[0], a, b) for p, a, b in rows if not _equal(a, b)]
        if not rows:
            self._take(walk)
        return [f"{place} from {_shown(a)} to {_shown(b)}" for place, a, b in rows]

    def _take(self, walk: Walk) -> None:
        """Note what `walk` found, in the forms that are compared fastest."""
        self._facts: list[Fact] = [f for f in walk.facts if not _under(f.place, self._written)]
        self._turns = turns_among(f.holder for f in self._facts)
        containers = [c for c, p in walk.containers if not _under(p, self._written)]
        self._arrays = [(a, copy.copy(a)) for a, _ in walk.arrays]
        # a tensor of a recording has a form that is nobody's
        tensors = [(x, p) for x, p in walk.tensors if not is_recorded(x) and not x.is_nested]
        tensors = [(x, p) for x, p in tensors if not _under(p, self._written)]
        self._forms = [(x, form_of(x), p) for x, p in tensors]
        self._ledger = Ledger(self._facts, containers, [x for x, _ in tensors])
        self._tokens = tokens_of(walk, self._written)


_IN_THE_BATCH = (
    "What changes at every step belongs in the batch (or, for a learning rate, in a schedule of "
    "the step)."
)


def warn_of_recordings(
    what: str, count: int, changed: Sequence[str], advice: str = _IN_THE_BATCH
) -> None:
    """Say that recordings come too often, and why."""
    warnings.warn(
        f"{what} is recorded for the {count}th time; since the last one changed "
        f"{', '.join(changed[:3]) or 'nothing'}. Each costs time and memory. {advice}",
        stacklevel=users_line(),
    )


class _Snapshot:
    """The values of facts and the contents of containers at one moment."""

    def __init__(self, walk: Walk) -> None:
        self.walk = walk
        self.facts: dict[tuple[int, Any], Fact] = {}
        self.containers: dict[int, tuple[Any, Any, Place]] = {}
        self.arrays: dict[int, tuple[Any, Any, Place]] = {}
        self._taken = (0, 0, 0)
        self._late: set[int] = set()
        self.more()

    def more(self) -> None:
        """Take what the walk has found since."""
        walk, (facts, containers, arrays) = self.walk, self._taken
        if containers:
            self._late |= {id(c) for c, _ in walk.containers[containers:]}
        self.facts |= {(id(f.holder), f.key): f for f in walk.facts[facts:]}
        self.containers |= {id(c): (c, contents(c), p) for c, p in walk.containers[containers:]}
        self.arrays |= {id(a): (a, copy.copy(a), p) for a, p in walk.arrays[arrays:]}
        self._taken = (len(walk.facts), len(walk.containers), len(walk.arrays))

    def changed(self, later: Walk, reads: Reads | None = None) -> list[str]:
        """The places that have another value than here, or than when `reads` first saw it."""
        found: dict[str, None] = {}
        for fact in later.facts:
            old = self.facts.get((id(fact.holder), fact.key))
            value = fact.value if old is None else old.value
            if old is not None and value is not fact.value and not _equal(value, fact.value):
                found[str(fact.place)] = None
        seen = {} if reads is None else reads.names
        # by what holds them: an object's dict; itself, of slots
        names = dict(seen)
        names |= {id(attributes_of(reads.objects[i])): seen[i] for i in seen} if reads else {}
        for fact in later.facts:
            value = names.get(id(fact.holder), {}).get(fact.key, MISSING)
            if value is MISSING or fact.value is MISSING:  # the class has it
                continue
            both = _plain(value) and _plain(fact.value)
            if both and not _equal(value, fact.value):
                found[str(fact.place)] = None
        for container, place in later.containers:
            live, noted, _ = self.containers.get(id(container), (container, None, place))
            if noted is None or unchanged(live, noted):
                continue
            # a cache of masks, say, that a module has filled: the recording has made them for
            # itself, and another one that finds them is refused (`program.trace`)
            if id(container) not in self._late or not any(map(is_recorded, _items(live))):
                found[str(place)] = None
        for array, place in later.arrays:
            live, noted, _ = self.arrays.get(id(array), (array, None, place))
            if noted is not None and not _equal_arrays(live, noted):
                found[str(place)] = None
        return list(found)

    def put_back(self) -> None:
        """Write the values of that moment back."""
        for fact in self.facts.values():
            if _look(fact) is not fact.value:
                put(fact, fact.value)
        for live, noted, _ in self.containers.values():
            if not unchanged(live, noted):
                # in place: others hold the same container
                live.clear()
                if isinstance(live, dict):
                    live.update(zip(*noted, strict=True))
                elif isinstance(live, set):
                    live.update(noted)
                else:
                    live.extend(noted)
        for live, noted, _ in self.arrays.values():
            put_bytes(live, noted)


def _look(fact: Fact) -> Any:
    try:
        return fact.get(fact.key, MISSING)
    except ValueError:  # a cell that is empty now
        return MISSING


def _items(container: Any) -> Any:
    return list(dict.values(container)) if isinstance(container, dict) else list(container)


def tokens_of(walk: Walk, written: frozenset[str]) -> dict[tuple[str, int], Any]:
    """By place, what must stay as it is. A number tells places of the same name apart."""
    # of attributes that came all at once each counts that is read
    rows = [(f.place, f.value) for f in walk.facts if f.key != "__dict__"]
    for container, place in walk.containers:
        rows.append((place, container))
        rows += [(Place(place, label), item) for label, item in labelled(container, place)]
        if isinstance(container, dict) and not is_hooks(place.label):
            order = tuple(map(repr, keys_of(container)))
            rows.append((Place(place, ", the order of its keys"), order))
    found: dict[tuple[str, int], Any] = {}
    count: dict[str, int] = {}
    for place, value in rows:
        if not _under(place, written):
            name = str(place)
            found[name, count.setdefault(name, 0)] = value
            count[name] += 1
    return found


def _under(place: Place, written: frozenset[str]) -> bool:
    if not written:
        return False
    found: Place | None = place
    while found is not None:
        if str(found) in written:
            return True
        found = found.parent
    return False


def _plain(value: Any) -> bool:
    return value is MISSING or isinstance(value, (int, float, complex, str, bytes, type(None)))


def _equal(a: Any, b: Any) -> bool:
    """Whether one stands for the other: the same object, or plain data of the same value."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (float, complex, set, frozenset)):
        return tree.exact(a) == tree.exact(b)
    if isinstance(a, (int, str, bytes, torch.Size, torch.dtype, torch.device, range, slice)):
        return a == b
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, dict):
        keys = tree.exact([*a]) == tree.exact([*b])
        return keys and all(map(_equal, a.values(), b.values()))
    return False


def _equal_arrays(live: Any, noted: Any) -> bool:
    return bytes_of(live) == bytes_of(noted)


def _said(form: tuple[Any, ...]) -> str:
    shape, dtype, device, grad = form
    return f"{tuple(shape)} {dtype} on {device}{', with requires_grad' if grad else ''}"


def _equal_tensors(live: Tensor, noted: Tensor) -> bool:
    """Whether both have the same values, whatever their layout; nan is nan here."""
    mine, its = strided_parts(live), strided_parts(noted)
    # rows of a nested one have shapes, it has none
    fits = live.is_nested or live.shape == noted.shape
    return fits and len(mine) == len(its) and all(map(_alike, mine, its))


def _alike(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def _same_program(a: Program, b: Program) -> bool:
    """Whether two Programs compute the same, whatever their nodes are called."""
    rows = [_rows(program) for program in (a, b)]
    if rows[0] != rows[1] or a.constants.keys() != b.constants.keys():
        return False
    pairs = ((a.constants[name], b.constants[name]) for name in a.constants)
    return all(x is y or _same_constant(x, y) for x, y in pairs)


def _rows(program: Program) -> list[tuple[Any, ...]]:
    """What has an effect in a Program; nodes by their numbers."""
    needed: set[fx.Node] = set()
    for node in reversed(program.graph.nodes):
        if node in needed or is_wanted(node):
            needed.update((node, *node.all_input_nodes))
    number: dict[fx.Node, str] = {}
    rows: list[tuple[Any, ...]] = []
    for node in program.graph.nodes:
        if node in needed:
            rows.append((node.op, node.target, repr(map_arg((node.args, node.kwargs), number.get))))
            number[node] = f"%{len(number)}"
    return rows


def _same_constant(x: Any, y: Any) -> bool:
    if not isinstance(x, Tensor) or not isinstance(y, Tensor) or x.shape != y.shape:
        return False
    return x.dtype == y.dtype and torch.equal(x, y)


def _read_before(left: Leftover, reads: Reads) -> bool:
    """Whether the call has read what it found in an attribute."""
    names = reads.names.get(id(left.module), {})
    return left.name in names and names[left.name] is left.before


def _refuse_carried(
    carried: Sequence[Leftover],
    left: Sequence[Leftover],
    program: Program,
    record: Callable[[], Program],
) -> None:
    """Raise if a call that finds what the last one left records something else.

    See [Note: leftovers] in `fzero.functional.leftovers`.
    """

    def same(doubt: Doubt) -> bool:
        undo = [one.put(doubt) for one in left]
        try:
            return _same_program(program, record())
        finally:
            for put_back in reversed(undo):
                put_back()

    doubt, cause = Doubt(), None
    try:
        counts = not same(doubt)
    except Exception as error:  # of a tensor of the recording before, say
        counts, cause = True, error
    if not counts and doubt.compared:  # a warm-up of a thousand calls looks the same at the second
        with contextlib.suppress(Exception):  # of what logs at each thousandth, say
            counts = not same(Doubt(flips=True))
    if not counts:
        return
    raise TraceError(
        f"forward leaves {', '.join(x.place for x in carried[:3])} for its next call, which "
        "computes with that in plain PyTorch. A call through `apply` is a function of its "
        "arguments: it puts the attribute back, and each would begin anew. Make it a buffer "
        "(register_buffer, functionalize(module, buffers=True)), or an argument and a result of "
        "forward; a number may be changed between calls (the step is then recorded anew). Or use "
        "fzero.Engine, where a module keeps what it writes."
    ) from cause


def _kept_of_inputs(walk: Walk, reads: Reads, program: Program) -> list[tuple[Fact, Any]]:
    """What was read, and holds a tensor now that the recording has made of its inputs; with what
    was read."""
    names = {id(attributes_of(reads.objects[i])): seen for i, seen in reads.names.items()}
    nodes: dict[int, list[fx.Node]] = {}
    found = []
    for fact in walk.facts:
        value = names.get(id(fact.holder), {}).get(fact.key, MISSING)
        if value is fact.value or value is MISSING or not is_recorded(fact.value):
            continue
        if not nodes:
            for node in program.graph.nodes:
                for key in memory_of(node):
                    nodes.setdefault(key, []).append(node)
        made = nodes.get(_storage_of(fact.value))
        # what the graph has not was of no use to it, this time
        if made is None or depends_on_inputs(made):
            found.append((fact, value))
    return found


def _storage_of(x: Tensor) -> int:
    """The storage of a tensor of a recording; 0: it has none that can be told."""
    *_, inner = levels_of(x)  # what a transform has wrapped
    return inner.untyped_storage()._cdata if inner.layout is torch.strided else 0


def _refuse_kept(
    kept: Sequence[tuple[Fact, Any]], program: Program, record: Callable[[], Program]
) -> None:
    """Raise if a call that finds what the last one kept records something else."""
    for fact, _ in kept:
        put(fact, stand_in(fact.value))
    cause = None
    try:
        same = _same_program(program, record())
    except Exception as error:  # of a tensor without values
        same, cause = False, error
    for fact, before in kept:
        put(fact, fact.value if same else before)  # who catches the error finds no such tensor
    if not same:
        raise _reads_its_writes([str(fact.place) for fact, _ in kept]) from cause


def _reads_its_writes(places: Sequence[str]) -> TraceError:
    return TraceError(
        f"the function changes {', '.join(places[:3])} while it is staged out, and what it "
        "computes depends on that. The Program would compute with one value for ever, as Python "
        "does not run when it does. Keep such a value outside and change it between calls (the "
        "step is then recorded anew), pass it in the batch, or keep it as model state; or use "
        "Config(executor='eager')."
    )


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, float) and math.isnan(value):
        return "nan"
    text = repr(value) if _plain(value) else f"another {type(value).__name__}"
    return text if len(text) < 60 else text[:57] + "..."
