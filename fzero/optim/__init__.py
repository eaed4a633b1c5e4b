"""Optimizers as pairs of pure functions, on optax's protocol.

`opt.init(params) -> state`, `opt.update(grads, state, params) -> (updates, state)`, and
`opt.apply_(grads, state, params) -> state` for the same step in place, through torch's foreach
and fused kernels. What is elementwise needs to see no more than shards. `clip_by_global_norm` asks
for the norm of the whole tree; `lamb` and `adafactor` sum norms and means of whole leaves over
ranks; `muon` has each matrix on one rank.
"""

from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from fzero.optim.adafactor import FactoredState, adafactor
from fzero.optim.adam import AdamState, adam, adamw, scale_by_adam
from fzero.optim.adapt import as_optimizer
from fzero.optim.averages import EmaState, ema
from fzero.optim.base import Optimizer
from fzero.optim.clip import clip_by_global_norm, tree_global_norm, tree_norm
from fzero.optim.compose import MaskedState, MultiState, chain, masked, multi_transform
from fzero.optim.counts import common_count, own_counts
from fzero.optim.deepspeed_schedules import (
    one_cycle,
    warmup_cosine_lr,
    warmup_decay_lr,
    warmup_lr,
)
from fzero.optim.inject import InjectState, inject_hyperparams
from fzero.optim.inplace import EmptyState
from fzero.optim.lamb import lamb, scale_by_trust_ratio
from fzero.optim.lion import LionState, lion, scale_by_lion
from fzero.optim.muon import MuonState, muon, muon_labels, newton_schulz, scale_by_muon
from fzero.optim.schedules import (
    constant,
    cosine,
    exponential,
    join,
    linear,
    warmup_cosine,
    warmup_linear,
)
from fzero.optim.sgd import TraceState, sgd, trace
from fzero.optim.transforms import (
    ScheduleState,
    add_decayed_weights,
    identity,
    scale,
    scale_by_learning_rate,
)

__all__ = [
    "AdamState",
    "EmaState",
    "EmptyState",
    "FactoredState",
    "InjectState",
    "LionState",
    "MaskedState",
    "MultiState",
    "MuonState",
    "Optimizer",
    "ScheduleState",
    "TraceState",
    "adafactor",
    "adam",
    "adamw",
    "add_decayed_weights",
    "as_optimizer",
    "chain",
    "clip_by_global_norm",
    "common_count",
    "constant",
    "cosine",
    "ema",
    "exponential",
    "identity",
    "inject_hyperparams",
    "join",
    "lamb",
    "linear",
    "lion",
    "masked",
    "multi_transform",
    "muon",
    "muon_labels",
    "newton_schulz",
    "one_cycle",
    "own_counts",
    "scale",
    "scale_by_adam",
    "scale_by_learning_rate",
    "scale_by_lion",
    "scale_by_muon",
    "scale_by_trust_ratio",
    "sgd",
    "trace",
    "tree_global_norm",
    "tree_norm",
    "warmup_cosine",
    "warmup_cosine_lr",
    "warmup_decay_lr",
    "warmup_linear",
    "warmup_lr",
]

# as optax calls them
_ELSEWHERE = {
    "cosine_decay_schedule": "cosine",
    "linear_schedule": "linear",
    "constant_schedule": "constant",
    "exponential_decay": "exponential",
    "join_schedules": "join",
    "warmup_cosine_decay_schedule": "warmup_cosine",
    "global_norm": "tree_global_norm",
}


if not TYPE_CHECKING:  # which knows by itself what is there

    def __getattr__(name: str) -> Any:
        lower = name.lower()
        near = [_ELSEWHERE[lower]] if lower in _ELSEWHERE else get_close_matches(lower, __all__, 1)
        hint = f" Did you mean fzero.optim.{near[0]}?" if near and not name.startswith("_") else ""
        raise AttributeError(f"module 'fzero.optim' has no attribute {name!r}.{hint}")
