"""`python -m fzero.simulate`: what a training step would cost on machines that aren't there.

Whoever imports this module gets the function `fzero.simulate`, which it has its name from.
"""

import sys
from typing import Any

from fzero.simulation.cli import main
from fzero.simulation.simulation import simulate

if __name__ == "__main__":
    sys.exit(main())

# the import would otherwise put a module where `fzero.simulate` is a function
modules: dict[str, Any] = sys.modules
modules[__name__] = simulate
