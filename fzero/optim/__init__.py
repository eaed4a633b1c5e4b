"""Optimizers as pairs of pure functions, on optax's protocol.

`opt.init(params) -> state`, `opt.update(grads, state, params) -> (updates, state)`, and
`opt.apply_(grads, state, params) -> state` for the same step in place, through torch's foreach
and fused kernels. Everything here is elementwise, so shards are all it needs to see, but for
`clip_by_global_norm`, which asks for the norm of the whole tree.
"""

from fzero.optim.adam import AdamState, adam, adamw, scale_by_adam
from fzero.optim.adapt import as_optimizer
from fzero.optim.base import Optimizer
from fzero.optim.clip import clip_by_global_norm, tree_global_norm, tree_norm
from fzero.optim.compose import MaskedState, chain, masked
from fzero.optim.inplace import EmptyState
from fzero.optim.lion import LionState, lion, scale_by_lion
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
    "EmptyState",
    "LionState",
    "MaskedState",
    "Optimizer",
    "ScheduleState",
    "TraceState",
    "adam",
    "adamw",
    "add_decayed_weights",
    "as_optimizer",
    "chain",
    "clip_by_global_norm",
    "constant",
    "cosine",
    "exponential",
    "identity",
    "join",
    "linear",
    "lion",
    "masked",
    "scale",
    "scale_by_adam",
    "scale_by_learning_rate",
    "scale_by_lion",
    "sgd",
    "trace",
    "tree_global_norm",
    "tree_norm",
    "warmup_cosine",
    "warmup_linear",
]
