"""fzero: sharded training as pure functions.

step_fn = fzero.make_train_step(model_fn, opt, fzero.Config(stage=3))
params, opt_state = step_fn.init(params)
params, opt_state = step_fn(params, opt_state, batch)
"""

from fzero import checkpoint, optim, passes
from fzero.config import Config
from fzero.eager.stage import stage
from fzero.engine import Engine
from fzero.errors import (
    BackwardError,
    CheckpointError,
    ConfigError,
    FzeroError,
    RankMismatchError,
    ShardError,
    TraceError,
)
from fzero.functional.functionalize import functionalize
from fzero.functional.opaque import opaque
from fzero.functional.remat import checkpoint_name, remat, save_only
from fzero.numerics.loss_scale import LossScale
from fzero.numerics.precision import Precision
from fzero.program import Hardware, Program
from fzero.simulation import Report, simulate
from fzero.state.opt_state import OptState
from fzero.state.sharding import shard, unshard
from fzero.step.train_step import TrainStep, make_train_step
from fzero.transforms.derivatives import grad, hvp, jvp, sharded, value_and_grad, vjp
from fzero.transforms.function import jit
from fzero.transforms.trees import (
    apply_updates,
    tree_map,
    tree_norm,
    tree_random_like,
    tree_vdot,
)

__all__ = [
    "BackwardError",
    "CheckpointError",
    "Config",
    "ConfigError",
    "Engine",
    "FzeroError",
    "Hardware",
    "LossScale",
    "OptState",
    "Precision",
    "Program",
    "RankMismatchError",
    "Report",
    "ShardError",
    "TraceError",
    "TrainStep",
    "apply_updates",
    "checkpoint",
    "checkpoint_name",
    "functionalize",
    "grad",
    "hvp",
    "jit",
    "jvp",
    "make_train_step",
    "opaque",
    "optim",
    "passes",
    "remat",
    "save_only",
    "shard",
    "sharded",
    "simulate",
    "stage",
    "tree_map",
    "tree_norm",
    "tree_random_like",
    "tree_vdot",
    "unshard",
    "value_and_grad",
    "vjp",
]
__version__ = "0.1.0"
