"""`python -m fzero.simulate`: what a training step would cost on machines that aren't there.

`fzero.simulate` is a function, and importing this module puts the module in its place: so the
module can be called, and is that function by another name.
"""

import sys
from types import ModuleType
from typing import Any

from fzero.simulation.cli import main
from fzero.simulation.simulation import simulate

__all__ = ["main", "simulate"]


class _Callable(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return simulate(*args, **kwargs)


if __name__ == "__main__":
    sys.exit(main())

sys.modules[__name__].__class__ = _Callable
