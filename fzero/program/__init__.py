"""Programs: functions of a training step staged out into graphs that can be read and scheduled."""

from fzero.program.ir import Program
from fzero.program.listing import Collective

__all__ = ["Collective", "Program"]
