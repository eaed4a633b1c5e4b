"""The values that a model reads from outside, and what it makes of each.

`use(x, value)` tells apart values that are equal but not the same: `1`, `1.0` and `True`, `0.0` and
`-0.0`, two orders of one dict.
"""

import enum
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class Color(enum.Enum):
    """Two choices."""

    RED = 1
    BLUE = 2


class Half(float):
    """A float that is another type."""


def soft(x: Tensor) -> Tensor:
    """A function of the user's."""
    return x.tanh() * 0.8


def hard(x: Tensor) -> Tensor:
    """Another one."""
    return x.clamp(-0.5, 0.5)


def scaled(x: Tensor, by: float = 1.0) -> Tensor:
    """For partials."""
    return x * by


class Caller:
    """An object that is called."""

    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.by


VALUES: dict[str, Callable[[], Any]] = {
    "1": lambda: 1,
    "1.0": lambda: 1.0,
    "True": lambda: True,
    "False": lambda: False,
    "0": lambda: 0,
    "0.0": lambda: 0.0,
    "-0.0": lambda: -0.0,
    "2": lambda: 2,
    "-1.5": lambda: -1.5,
    "Half(1.0)": lambda: Half(1.0),
    "np 1.0": lambda: np.float64(1.0),
    "np 3": lambda: np.int64(3),
    "1+2j": lambda: 1 + 2j,
    "None": lambda: None,
    "tanh": lambda: "tanh",
    "sin": lambda: "sin",
    "RED": lambda: Color.RED,
    "BLUE": lambda: Color.BLUE,
    "soft": lambda: soft,
    "hard": lambda: hard,
    "partial": lambda: functools.partial(scaled, by=0.5),
    "partial2": lambda: functools.partial(scaled, by=-0.5),
    "lambda": lambda: lambda x: x * 0.25,
    "caller": lambda: Caller(0.5),
    "caller2": lambda: Caller(-0.5),
    "tensor": lambda: torch.tensor(0.5, dtype=torch.float64),
    "tensor2": lambda: torch.tensor(-0.5, dtype=torch.float64),
    "tanh module": lambda: nn.Tanh(),
    "elu 0.5": lambda: nn.ELU(0.5),
    "elu 2": lambda: nn.ELU(2.0),
    "list": lambda: ["sin", 2],
    "list2": lambda: [2, "sin"],
    "tuple": lambda: ("sin", 2),
    "nested": lambda: {"a": [1, {"b": (0.5, "tanh")}]},
    "nested2": lambda: {"a": [1, {"b": (0.5, "sin")}]},
    "dict": lambda: {"a": "sin", "b": 2.0},
    "dict2": lambda: {"b": 2.0, "a": "sin"},
    "slice": lambda: slice(0, 2),
    "slice2": lambda: slice(1, 3),
    "range": lambda: range(2),
    "range2": lambda: range(3),
    "dtype": lambda: torch.float32,
    "dtype2": lambda: torch.float64,
    "bytes": lambda: b"ab",
    "bytes2": lambda: b"abc",
    "array": lambda: np.array([0.5, 2.0]),
    "array2": lambda: np.array([2.0, 0.5]),
    "type": lambda: nn.Tanh,
    "type2": lambda: nn.Sigmoid,
}


def use(x: Tensor, value: Any) -> Tensor:
    """`x`, changed by a value; nearly every pair of values changes it in two ways."""
    if value is None:
        return x
    if isinstance(value, bool):
        return x + 0.3 if value else x - 0.3
    if isinstance(value, Half):
        return x * 0.7
    if isinstance(value, np.generic):
        return x * (0.6 + 0.1 * float(value))
    if isinstance(value, int):
        return x * (0.9 + 0.1 * value)
    if isinstance(value, float):
        return x * (1 + 0.1 * value) + 0.1 * math.copysign(1.0, value)
    if isinstance(value, complex):
        return x * value.real + value.imag
    if isinstance(value, str):
        return getattr(torch, value)(x)
    if isinstance(value, bytes):
        return x + len(value)
    if isinstance(value, enum.Enum):
        return x + 0.4 if value is Color.RED else x - 0.4
    if isinstance(value, slice):
        return torch.cat([x[:, value] * 0.5, x], 1)[:, : x.shape[1]]
    if isinstance(value, range):
        for _ in value:
            x = x.sin()
        return x
    if isinstance(value, torch.dtype):
        return x * (0.5 if value == torch.float32 else 1.5)
    if isinstance(value, np.ndarray):
        return use(x, float(value[0]))
    if isinstance(value, Tensor):
        return x * value.to(x.dtype)
    if isinstance(value, type):
        layer: Any = value()
        return layer(x)
    if callable(value):
        made: Any = value(x)
        return made
    if isinstance(value, dict):
        for key, item in value.items():
            x = use(x, item) + 0.01 * len(key)
        return x
    for item in value:
        x = use(x, item)
    return x


def number(value: Any) -> float:
    """A rate between 0.02 and 0.2 for any value, without tensors but for a value that is one."""
    return 0.02 + 0.18 / (1 + math.exp(-_score(value)))


def _score(value: Any) -> float:
    if value is None:
        return -2.0
    if isinstance(value, bool):
        return 0.7 if value else -0.7
    if isinstance(value, Half):
        return 1.3
    if isinstance(value, np.generic):
        return 0.2 * float(value) + 0.05
    if isinstance(value, float):
        return math.copysign(0.3, value) + 0.4 * value
    if isinstance(value, int):
        return 0.25 * value
    if isinstance(value, complex):
        return value.real - value.imag
    if isinstance(value, (str, bytes)):
        return 0.1 * sum(value if isinstance(value, bytes) else value.encode()) % 1.0
    if isinstance(value, enum.Enum):
        return 0.9 if value is Color.RED else -0.9
    if isinstance(value, slice):
        return 0.3 * value.start
    if isinstance(value, Tensor):
        return float(value)
    if isinstance(value, np.ndarray):
        return float(value[0])
    if isinstance(value, functools.partial):
        return value.keywords["by"]
    if isinstance(value, Caller):
        return 2 * value.by
    if isinstance(value, nn.ELU):
        return value.alpha
    if callable(value):
        return 0.01 * len(getattr(value, "__name__", type(value).__name__))
    if isinstance(value, torch.dtype):
        return 0.1 if value == torch.float32 else 0.6
    items = value.items() if isinstance(value, dict) else value
    total = 0.0
    for item in items:  # the order counts
        total = 0.5 * total + _score(item)
    return total
