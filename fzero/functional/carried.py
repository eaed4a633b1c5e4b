"""Numbers that tell whether somebody has compared them.

[Note: carried numbers] A counter that a module carries from call to call may matter at its third
call, or its thousandth: `if self.calls > 1000`. A recording with the counter one further on says
nothing of that, so the number that stands for it there notes comparisons, and can be made to answer
all of them the other way round.
"""

from collections.abc import Callable
from typing import Any


class Doubt:
    """What is shared by the numbers of one recording.

    Args:
        flips: whether comparisons have the other answer than is true.

    Attributes:
        compared: how often one of them was compared.
    """

    # a loop that waits for a number must end
    MOST = 64

    def __init__(self, *, flips: bool = False) -> None:
        self.flips, self.compared = flips, 0

    def answer(self, true: Any) -> Any:
        """What a comparison is answered with."""
        self.compared += 1
        return not true if self.flips and self.compared <= self.MOST else true

    def number(self, value: float) -> Any:
        """An int or float that computes as `value` does, and its results, too.

        >>> doubt = Doubt()
        >>> calls = doubt.number(3) + 1
        >>> calls, calls % 3, doubt.compared, calls > 3, doubt.compared
        (4, 1, 0, True, 1)
        >>> Doubt(flips=True).number(3) > 2
        False
        """
        made = (_Int if isinstance(value, int) else _Float)(value)
        made.doubt = self
        return made


def _kind(number: Any) -> Any:
    return int if isinstance(number, int) else float


def _computed(name: str) -> Callable[..., Any]:
    def run(self: Any, *others: Any) -> Any:
        result = getattr(_kind(self), name)(self, *others)
        return self.doubt.number(result) if type(result) in (int, float) else result

    return run


def _compared(name: str) -> Callable[..., Any]:
    def run(self: Any, other: Any) -> Any:
        result = getattr(_kind(self), name)(self, other)
        return result if result is NotImplemented else self.doubt.answer(result)

    return run


_ARITHMETIC = ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow")
_METHODS: dict[str, Any] = {
    **{f"__{r}{name}__": _computed(f"__{r}{name}__") for r in ("", "r") for name in _ARITHMETIC},
    **{f"__{name}__": _computed(f"__{name}__") for name in ("neg", "abs")},
    **{f"__{name}__": _compared(f"__{name}__") for name in ("lt", "le", "gt", "ge", "eq", "ne")},
    "__bool__": lambda self: self.doubt.answer(self.real != 0),
}
_Int: Any = type("Int", (int,), _METHODS | {"__hash__": int.__hash__})
_Float: Any = type("Float", (float,), _METHODS | {"__hash__": float.__hash__})
