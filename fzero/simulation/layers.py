"""Many equal layers from few: a report on eighty, from recordings of two, three and four.

What a step of equal layers costs grows by the same with each: FLOPs, bytes sent, seconds, and the
bytes that are alive at a moment which is as far from the start of a phase, or from its end. Between
start and end they change by the same from layer to layer, so the most is at one of them. Three
recordings say whether it is so: their second differences must vanish. If not, deeper ones are made
of a model of many layers, and in the end all are recorded.

A peak is the largest of many moments' bytes, each of which grows in its own way. So moments are
carried on, and not peaks: what is largest at four layers need not be at eighty.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import fx

from fzero.config import Config
from fzero.distributed.buckets import PACKS, UNPACKS
from fzero.optim import as_optimizer
from fzero.program import Program
from fzero.program.categories import summed
from fzero.program.graph import tensors_of
from fzero.program.hardware import Hardware
from fzero.program.held import memory
from fzero.program.memory import is_wait
from fzero.program.passes.rewrite import is_cheap
from fzero.simulation.report import Report, Traffic, away, report_on, tokens_in
from fzero.simulation.simulation import check_world, lowered
from fzero.state.sharding import lies_flat
from fzero.step.gradients import ModelFn
from fzero.tree import PyTree

Made = tuple[ModelFn, PyTree, PyTree]
FIRST, LAST = 2, 6  # depths that are tried before all layers are recorded
_WORTH = 15  # deeper ones than the first three, where they cost so little of recording all
_EVEN = 1e-3  # share of a step's time by which its growth may differ


def simulate_layers(
    make: Callable[[int], Made],
    layers: int,
    opt: Any,
    cfg: Config,
    world_size: int | tuple[int, int],
    hardware: Hardware,
) -> Report:
    """`simulate` for a model of equal layers, in the time that a few take.

    Args:
        make: from a number of layers to (model function, parameters, batch).
        layers: that the model has.
        opt, cfg, world_size, hardware: as `simulate` takes them.

    Returns:
        A report whose `program` is of the deepest recording.
    """
    shape = check_world(cfg, world_size)

    def sample(depth: int, like: Program | None = None) -> _Sample:
        model_fn, params, batch = make(depth)
        program, mesh = lowered(model_fn, opt, cfg, params, batch, shape, hardware, like=like)
        report = report_on(program, cfg, mesh, hardware, tokens_in(batch))
        return _Sample(depth, report, _sections(program, cfg))

    # how large flats are depends on how many layers follow
    if layers <= FIRST + 2 or lies_flat(cfg, as_optimizer(opt)):
        return sample(layers).report
    third = sample(FIRST + 2)
    # the deepest of the first three says how large buckets are, and the others need not look
    like = third.report.program
    few = [sample(FIRST, like), sample(FIRST + 1, like), third]
    while (found := _grown(few[-3:], layers)) is None:
        depth = few[-1].depth + 1
        if depth > min(LAST, layers // _WORTH):
            return sample(layers).report
        few.append(sample(depth, like))
    return found


class _At(NamedTuple):
    """A moment: what is computed, and the device's bytes by category."""

    what: str
    categories: Mapping[str, int]


@dataclass(frozen=True)
class _Sample:
    depth: int
    report: Report
    sections: Mapping[tuple[str, str], list[_At]]  # by part and phase


def _sections(program: Program, cfg: Config) -> dict[tuple[str, str], list[_At]]:
    parts = list(program.parts())
    nodes = [n for part in parts for n in part.graph.nodes if n.op == "call_function"]
    found: dict[tuple[str, str], list[_At]] = {}
    for node, moment in zip(nodes, memory(parts), strict=True):
        without = away(cfg, first=moment.program == parts[0].name)
        categories = {name: n for name, n in moment.categories.items() if name not in without}
        at = _At(_what(node), categories)
        moments = found.setdefault((moment.program, moment.phase), [])
        if moments and moments[-1].what == at.what and _is_of_leaves(node):
            moments[-1] = max(moments[-1], at, key=_total)
        else:
            moments.append(at)
    # an update works through groups of leaves, not through layers: its largest moment stands for it
    for (part, phase), moments in found.items():
        if part != parts[0].name:
            most = max(moments, key=_total)
            found[part, phase] = [_At("most", most.categories)]
    return found


def _what(node: fx.Node) -> str:
    """What a node does, in words that are the same at every depth."""
    # a bucket of small leaves has more of them in a deeper model
    shapes = [] if _is_of_leaves(node) else [tuple(x.shape) for x in tensors_of(node)]
    return f"{node.target} {shapes}"


def _is_of_leaves(node: fx.Node) -> bool:
    """Whether a node carries leaves, of which there may be more in a deeper model."""
    target = node.target
    if target is operator.getitem or "bucket" in node.meta or is_wait(node):
        return True
    sources = node.all_input_nodes
    return target in PACKS | UNPACKS or (is_cheap(node) and sources[0].op == "placeholder")


def _total(at: _At) -> int:
    return sum(at.categories.values())


# ------------------------------------------------------------------------------ what is grown
def _grown(few: Sequence[_Sample], layers: int) -> Report | None:
    """The report on `layers` layers; None if these samples do not grow evenly."""
    a, b, c = (one.report for one in few)
    steps = layers - few[-1].depth
    most = _most(few, steps)
    if most is None or [x[:2] for x in a.traffic] != [x[:2] for x in c.traffic]:
        return None
    try:
        whole = {
            name: _on([getattr(x, name) for x in (a, b, c)], steps)
            for name in ("flops", "recomputed", "host_bytes")
        }
        traffic = tuple(
            Traffic(*row[0][:2], *(_on(list(n), steps) for n in zip(*(x[2:] for x in row))))  # noqa: B905
            for row in zip(a.traffic, b.traffic, c.traffic, strict=True)
        )
        times = {
            name: _on([getattr(x, name) for x in (a, b, c)], steps, _EVEN * c.seconds)
            for name in ("seconds", "exposed")
        }
    except _UnevenError:
        return None
    depths = ", ".join(str(one.depth) for one in few)
    line = f"{layers} equal layers cost as the recordings of {depths} layers say, which grow evenly"
    return replace(
        c,
        **whole,
        **times,
        traffic=traffic,
        peak_bytes=sum(most.values()),
        reserved_bytes=None,  # gaps do not grow evenly
        categories=most,
        assumptions=(*c.assumptions, line),
    )


class _UnevenError(Exception):
    pass


def _on(values: Sequence[Any], steps: int, slack: float = 0) -> Any:
    """The value `steps` after the last of three that grow by the same."""
    first, second, third = values
    if abs((third - second) - (second - first)) > slack:
        raise _UnevenError
    return third + (third - second) * steps


def _most(few: Sequence[_Sample], steps: int) -> Mapping[str, int] | None:
    """The largest of all moments, carried on."""
    best: Mapping[str, int] = {}
    a, b, c = (one.sections for one in few)
    if not a.keys() == b.keys() == c.keys():
        return None
    for key, moments in a.items():
        half = (len(moments) + 1) // 2
        for index in (*range(half), *range(half - len(moments), 0)):
            try:  # the same distance from the start, or from the end
                same = (moments[index], b[key][index], c[key][index])
            except IndexError:
                return None
            if len({at.what for at in same}) > 1:
                return None
            names = {name for at in same for name in at.categories}
            try:
                grown = {
                    name: _on([at.categories.get(name, 0) for at in same], steps) for name in names
                }
            except _UnevenError:
                return None
            if sum(grown.values()) > sum(best.values()):
                best = grown
    return summed((n, name) for name, n in best.items() if n)
