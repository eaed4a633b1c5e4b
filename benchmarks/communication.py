"""Bytes on the wire: what the Program lists, what a step launches, and the closed form.

    python -m benchmarks.communication                       # gpt2 at worlds 2 and 8
    python -m benchmarks.communication --models gpt27 --worlds 8 --accum 4

One process plays one rank (a fake process group). Columns: collectives of a step as
`program.collectives()` lists them and as they were counted while the step ran; bytes that a rank
sends in one step, in units of the parameters' bytes P, padding apart, and what the closed form of
the stage says, with W ranks and k micro-batches:

    stage 0, 1   2 P (W-1)/W
    stage 2      (k + 1) P (W-1)/W
    stage 3      k (2 P + R) (W-1)/W    R: bytes of the leaves that backward reads

The one all-reduce of 32 bytes, of loss, gradient norm, and whether ranks are at the same step, is
left out.
"""

import argparse
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fzero
from benchmarks.memory import one_rank_of
from benchmarks.models import GPT, SIZES, batch_of, fzero_step
from fzero.program.listing import Collective

STATISTICS = {"loss", "grad_norm"}


class Launched(NamedTuple):
    """One collective as it ran: its kind, and the bytes of its full side, padding included."""

    kind: str
    bytes: int


class Collectives(TorchDispatchMode):
    """Records the collectives that are launched inside."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[Launched] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        kind = _KINDS.get(func._schema.name)
        if kind:
            leaves = tree_leaves((args, out))
            size = max(x.nbytes for x in leaves if isinstance(x, Tensor))
            # of two ranks that swap parts, each keeps its own: half of the full side travels
            swapped = kind == "all_to_all" and any(isinstance(x, int) and x == 0 for x in leaves)
            self.launched.append(Launched(kind, 2 * size if swapped else size))
        return out


_KINDS = {
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::all_gather_into_tensor_out": "all_gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional::all_reduce": "all_reduce",
    # what carries gathers and reduce-scatters over gloo
    "_c10d_functional::all_to_all_single": "all_to_all",
    # the same where a process waits with open eyes (fzero/distributed/works.py)
    "c10d::_allgather_base_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::allreduce_": "all_reduce",
    "c10d::alltoall_base_": "all_to_all",
}


def launched_by(step: Callable[[], object]) -> list[Launched]:
    """The collectives of one call."""
    with Collectives() as mode:
        step()
    return mode.launched


def is_statistics(row: Collective) -> bool:
    """Whether it carries no leaf."""
    return {*", ".join(row.leaves).split(", ")} <= STATISTICS


def sent_bytes(program: fzero.Program) -> int:
    """Bytes that a rank sends in one step for parameters and gradients."""
    rows = program.collectives()
    return sum(row.wire_bytes * row.times for row in rows if not is_statistics(row))


def closed_form(stage: int, params: int, read: int, world: int, micro: int) -> float:
    """The same from the stage alone.

    Args:
        params: bytes of the parameters.
        read: bytes of those that backward reads.
        world: ranks.
        micro: micro-batches.
    """
    volume = {0: 2 * params, 1: 2 * params, 2: (micro + 1) * params}.get(stage)
    if volume is None:
        volume = micro * (2 * params + read)
    return volume * (world - 1) / world


def read_in_backward(names_and_sizes: Sequence[tuple[str, int]]) -> int:
    """Bytes of a GPT's leaves whose values its backward takes.

    The gradients of `x @ w + b` are made from `w`, not from `b`; those of a lookup from the tokens
    alone. LayerNorm's backward takes its bias along, for its shape.
    """
    lookups, norms = ("tok.", "pos."), ("ln.", "ln1.", "ln2.")
    return sum(
        nbytes
        for name, nbytes in names_and_sizes
        if (name.endswith(".weight") and not name.startswith(lookups))
        or name.removesuffix("bias").endswith(norms)
    )


def main() -> None:
    """Print one row per case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["gpt2"], choices=SIZES)
    parser.add_argument("--worlds", nargs="+", type=int, default=[2, 8])
    parser.add_argument("--stages", nargs="+", type=int, default=[0, 1, 2, 3])
    parser.add_argument("--accum", nargs="+", type=int, default=[1, 4])
    args = parser.parse_args()
    print(
        "| model | world | stage | micro-batches | listed | launched | sent / P | closed form / P |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, world, stage, micro in itertools.product(
        args.models, args.worlds, args.stages, args.accum
    ):
        size = SIZES[name]
        with torch.device("meta"):
            leaves = [(n, p.nbytes) for n, p in GPT(size).named_parameters()]
        total = sum(nbytes for _, nbytes in leaves)
        with one_rank_of(world):
            batch = batch_of(size, max(size.rows // world, 1) * micro)
            opt = fzero.optim.adamw(1e-3, weight_decay=0.01)
            step = fzero_step(size, batch, opt, fzero.Config(stage=stage, accum_steps=micro))
            step()  # staged out
            program, launched = step.lower(), launched_by(step)
        expected = closed_form(stage, total, read_in_backward(leaves), world, micro)
        listed = Counter[str]()
        for row in program.collectives():
            listed[row.kind] += row.times
        cells = [
            name,
            str(world),
            str(stage),
            str(micro),
            _counts(listed),
            _counts(Counter(one.kind for one in launched)),
            f"{sent_bytes(program) / total:.4f}",
            f"{expected / total:.4f}",
        ]
        print("| " + " | ".join(cells) + " |", flush=True)


def _counts(kinds: Counter[str]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))


if __name__ == "__main__":
    main()
