"""Programs: functions of a training step staged out into graphs that can be read and scheduled."""

from fzero.program.hardware import Hardware
from fzero.program.listing import Collective
from fzero.program.program import Program

__all__ = ["Collective", "Hardware", "Program"]
