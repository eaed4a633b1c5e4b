"""Whether ranks update by the same numbers: those of the state that are no leaf's.

Which step it is (`opt_state.step`, the counts of schedules and of bias corrections), a rate in the
state (`engine.lr`, a scheduler, `hyperparams["lr"].fill_(x)`) and a loss scale of the caller's own
must be the same on all ranks: each updates its own rows with what it has. So each update sums a
digest of them, and its square, with the loss and the norm. By the inequality of Cauchy and Schwarz
both sums are what a rank makes of its own digest on all ranks at once, or on none.

Where there are numbers that a program writes, an update waits for these sums before it writes
anything, and refuses. Counts differ where a program is wrong once, and not from step to step: for
them no update waits, and it is told after it.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from fzero.distributed.agree import agree
from fzero.distributed.mesh import Mesh
from fzero.errors import RankMismatchError
from fzero.operators import define
from fzero.optim.inject import injected
from fzero.state.plan import Plan
from fzero.tree import PyTree

NUMBERS = "the numbers that an update goes by"
HINT = (
    "Give every rank the state of the same step: after a call that raised on one of them, all go "
    "on from the same state or checkpoint. "
    "A rate that is set by hand or by a scheduler, a momentum and a loss scale of your own must be "
    "the same on every rank. A scheduler that reads a loss must read the mean over ranks, "
    'metrics["loss"], not this rank\'s. engine.zero_grad() is for every rank to call, or none.'
)


class NotAlike(Exception):
    """Ranks have other numbers; no rank has updated anything."""


def numbers_of(
    plan: Plan, inner: PyTree, scale: Tensor | None, step: Tensor, sums: Tensor | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The numbers that every rank must have, with what messages call them.

    Args:
        plan: of the step.
        inner: the optimizer's state.
        scale: 0-d, the loss scale, if the caller's own.
        step: 0-d, `opt_state.step`.
        sums: 0-d, of an Engine: which of its reductions are in the gradients.
    """
    yield "opt_state.step", step
    if sums is not None:
        yield "backwards since engine.zero_grad() or p.grad = None", sums
    # a hyperparameter may have the name of a parameter
    found = {**dict(plan.numbers(inner)), **dict(injected(inner))}
    yield from ((f"opt_state.inner{name}", x) for name, x in found.items())
    if scale is not None:
        yield "opt_state.loss_scale.scale", scale


def digest(numbers: Sequence[Tensor], device: torch.device) -> Tensor:
    """A whole number below 2**18 of their bits, 0-d float64: sums of its square are exact, of up
    to 2**17 ranks.

    Args:
        numbers: 0-d, of any dtype and device.
        device: of the result.

    Examples:
        >>> one, other = torch.tensor(0.1), torch.tensor(0.1).nextafter(torch.tensor(1.0))
        >>> digest([one], one.device) == digest([other], one.device)
        tensor(False)
    """
    bits = torch.stack([x.double().to(device) for x in numbers]).view(torch.int64)
    # whole numbers differ in high bits alone, and of an even number of these nothing may be left
    bits = bits ^ bits.bitwise_right_shift(32)
    odd = torch.arange(1, 2 * len(numbers), 2, device=device)
    # that first: compilers multiply known numbers without wrapping around, and refuse the product
    return ((bits * _GOLDEN * odd).sum().bitwise_right_shift(46) & (2**18 - 1)).double()


# 2**64 over the golden ratio, as int64 has it: its multiples are spread over the high bits
_GOLDEN = -7046029254386353131


def with_square(own: Tensor) -> Tensor:
    """What ranks sum of their digests: float64 [2]."""
    return torch.stack([own, own * own])


def differ(sums: Tensor, own: Tensor, ranks: int, *, refuse: bool) -> Tensor:
    """Whether not all ranks have the same digest; on every rank alike.

    Args:
        sums: float64 [2], of all ranks' digests and of their squares.
        own: this rank's.
        ranks: how many.
        refuse: whether nothing may be written then.

    Returns:
        0-d bool; on a CPU it is false if it would refuse.

    Raises:
        NotAlike: on a CPU, where the host can tell without waiting: they differ, and it refuses.
    """
    found = (sums != own * ranks).any()
    if refuse:
        torch.ops.fzero.refuse(found)
    return found


def tell(
    numbers: Iterable[tuple[str, Tensor]], mesh: Mesh, timeout: float | None, *, updated: bool
) -> NoReturn:
    """Raise on every rank, with the number that differs; all ranks must call it.

    Args:
        numbers: from `numbers_of`.
        mesh: the ranks.
        timeout: seconds to wait for them.
        updated: whether that was found after an update.

    Raises:
        RankMismatchError: always.
    """
    rows = [(name, _shown(x)) for name, x in numbers]
    done = "Nothing was updated; the gradients of this step are dropped."
    if updated:
        done = "Each rank has updated its part with its own: go on from a checkpoint."
    hint = f"{HINT} {done}"
    agree(NUMBERS, rows, mesh, timeout, hint=hint)
    raise RankMismatchError(f"Ranks differed in {NUMBERS}, and do no more. {hint}")


def _shown(x: Tensor) -> str:
    value = x.item()
    if value == value:
        return repr(value)
    # of these there are many, which differ in bits
    return f"nan ({x.double().view(torch.int64).item():#x})"


def late(when: str) -> RankMismatchError:
    """What is said where only a flag is known."""
    return RankMismatchError(
        f"{when}ranks differed in {NUMBERS}, and each updated its part with its own: go on from a "
        f"checkpoint. {HINT}"
    )


def _refuse(found: Tensor) -> None:
    if found.device.type == "cpu" and found:
        raise NotAlike


def _fake(found: Tensor) -> None:
    pass


# it returns nothing, so passes keep it where it is: before anything is updated
define("refuse(Tensor found) -> ()", _refuse, _fake)
