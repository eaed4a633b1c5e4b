"""Checkpoints: written whole or not at all, read into any world size, and never unpickled.

fzero.checkpoint.save("runs/a", params, opt_state, keep=3)
params, opt_state = fzero.checkpoint.load("runs/a", params, opt_state)
"""

from fzero.checkpoint.background import wait
from fzero.checkpoint.client import client_state
from fzero.checkpoint.foreign.deepspeed import deepspeed_param_groups, import_deepspeed_universal
from fzero.checkpoint.foreign.safetensors import export_safetensors
from fzero.checkpoint.format.folders import latest
from fzero.checkpoint.format.reader import Reader
from fzero.checkpoint.load import load
from fzero.checkpoint.partial import LoadReport, PartialLoad, load_partial
from fzero.checkpoint.resume import StopOnSignal, sample_order
from fzero.checkpoint.save import save

__all__ = [
    "LoadReport",
    "PartialLoad",
    "Reader",
    "StopOnSignal",
    "client_state",
    "deepspeed_param_groups",
    "export_safetensors",
    "import_deepspeed_universal",
    "latest",
    "load",
    "load_partial",
    "sample_order",
    "save",
    "wait",
]
