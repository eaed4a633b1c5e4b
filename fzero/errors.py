"""Every error that fzero raises on purpose.

A message says what was found, where (leaf path, rank, field), the rule, and what to do next.
"""

import sys


class FzeroError(Exception):
    """Base of all errors of this library."""


class ConfigError(FzeroError, ValueError):
    """A `Config` field, or a combination of fields, that is not allowed."""


class ShardError(FzeroError):
    """A tree or tensor that does not fit its layout or mesh."""


class TraceError(FzeroError):
    """A model function that cannot be staged out into a Program."""


class TransformOverError(TraceError):
    """What a transform of `torch.func` gave to a call is read after the transform is over."""


class RankMismatchError(FzeroError):
    """Ranks disagree on something that must be the same everywhere."""


class BackwardError(FzeroError):
    """A backward call or a step of the eager adapter that is out of order."""


class CheckpointError(FzeroError):
    """A checkpoint that cannot be written, read or trusted."""


def users_line() -> int:
    """The `stacklevel` with which a warning names the line that called into this package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == "fzero":
        frame, level = frame.f_back, level + 1
    return level
