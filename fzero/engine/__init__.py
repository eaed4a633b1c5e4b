"""The eager adapter: `fzero.Engine`."""

from fzero.engine.engine import Engine

__all__ = ["Engine"]
