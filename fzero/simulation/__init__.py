"""Simulation: what a step would cost on machines that aren't there."""

from fzero.program.machines import HARDWARE
from fzero.simulation.report import Report, Traffic
from fzero.simulation.simulation import simulate

__all__ = ["HARDWARE", "Report", "Traffic", "simulate"]
