"""Checkpoints: written whole or not at all, read into any world size, and never unpickled.

fzero.checkpoint.save("runs/a", params, opt_state, keep=3)
params, opt_state = fzero.checkpoint.load("runs/a", params, opt_state)
"""

from fzero.checkpoint.background import wait
from fzero.checkpoint.deepspeed import deepspeed_param_groups, import_deepspeed_universal
from fzero.checkpoint.folders import latest
from fzero.checkpoint.load import load
from fzero.checkpoint.order import sample_order
from fzero.checkpoint.safetensors import export_safetensors
from fzero.checkpoint.save import save
from fzero.checkpoint.stopping import StopOnSignal
from fzero.checkpoint.storage import Reader

__all__ = [
    "Reader",
    "StopOnSignal",
    "deepspeed_param_groups",
    "export_safetensors",
    "import_deepspeed_universal",
    "latest",
    "load",
    "sample_order",
    "save",
    "wait",
]
