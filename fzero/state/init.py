"""The first state of a step: what ranks must agree on, shards, masters, optimizer state."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from fzero import tree
from fzero.config import Config
from fzero.distributed.agree import agree
from fzero.distributed.dtensor import local_tensor
from fzero.distributed.mesh import Mesh, resolve_mesh
from fzero.errors import ConfigError, ShardError, users_line
from fzero.functional.memory import overlapping, why_unwritable
from fzero.functional.owners import is_untrained, keeps_dtype, noted_like, owners_of
from fzero.inference import makes_normal
from fzero.layout.end_to_end import lay
from fzero.layout.modules import check_together
from fzero.numerics import loss_scale
from fzero.numerics.casts import widened
from fzero.numerics.rng import generator_of, mix, preserved
from fzero.numerics.thread_generator import check_draws, drawing_from
from fzero.optim.base import Optimizer
from fzero.optim.whole import whole_leaves
from fzero.state.agreement import agree_on_optimizer, agree_on_start
from fzero.state.builder import Recording, record
from fzero.state.masters import Residence, copied, plan_leaf_dtypes, plan_residence
from fzero.state.opt_state import OptState
from fzero.state.plan import Plan
from fzero.state.sharding import check_tensors, plan_sharding, refuse_shards
from fzero.tree import PyTree


@makes_normal
def start(
    cfg: Config,
    opt: Optimizer,
    params: PyTree | Callable[[], PyTree] | Recording,
    model_state: PyTree = None,
    *,
    inside: bool = False,
) -> tuple[Plan, PyTree, OptState]:
    """The plan of a step, sharded parameters, and the state before the first call.

    Args:
        cfg, opt: the step's.
        params: full, the same on every rank, and copied; or a function that builds them, or what
            was recorded of it.
        model_state: what the model carries from call to call, or None; copied.
        inside: as `plan_sharding` takes it.

    Raises:
        ConfigError: the config can't be honoured for parameters of these dtypes, or on this device.
        ShardError: a leaf is not a tensor, or there is none.
        RankMismatchError: ranks differ in config, structure, shapes, dtypes or values.
        TraceError: the function that builds the parameters can't be recorded.
    """
    # a module can be called, and builds no parameters by that
    if callable(params) and not isinstance(params, nn.Module):
        params = record(params)
    recording = params if isinstance(params, Recording) else None
    shapes = recording.tree() if recording else params
    leaves = tree.leaves(shapes)
    check_tensors("params", leaves, tree.paths(shapes))
    if not leaves:
        raise ShardError(
            "params has no tensors, so there is nothing to train. Pass the pytree of the model's "
            "parameters (of a module: apply, params = fzero.functionalize(module)), or a function "
            "that returns it."
        )
    refuse_shards("params", leaves, tree.paths(shapes), "init")
    check_tensors("model_state", tree.leaves(model_state), tree.paths(model_state))
    cfg.check_frozen(tree.names(shapes))
    check_together(cfg.gather_together, tree.names(shapes))
    if not inside and cfg.gather_together and cfg.executor == "eager" and cfg.stage == 3:
        raise ConfigError(
            f"Config.gather_together={cfg.gather_together!r} with executor='eager' at stage 3: "
            "such a step gathers each leaf where the model function reads it, and all ranks must "
            "read the same. For modules that only some ranks run use stage 2, or the traced "
            "executor with Config(opaque=...) or fzero.opaque around them, or an Engine."
        )
    if not inside and cfg.frozen == ():
        _warn_of_untrained(leaves, tree.names(shapes))
    device = leaves[0].device if leaves else torch.device("cpu")
    device = recording.device if recording else device
    mesh = resolve_mesh(cfg.mesh, device.type)
    agree_on_start(cfg, shapes, model_state, mesh, built=recording is None)
    residence = plan_residence(cfg, device)
    _check_offload(cfg.offload, residence, opt)
    dtypes = plan_leaf_dtypes(
        leaves,
        tree.paths(shapes),
        cfg.dtypes,
        trained=[not cfg.is_frozen(name) for name in tree.names(shapes)],
        sharded=cfg.stage == 3,
        apart=cfg.offloads_state,
        kept=[keeps_dtype(owners_of(x)) for x in leaves],
    )
    pairs = zip(leaves, dtypes.params, strict=True)
    # On the meta device: plans need no values, and casts of all leaves at once would cost memory.
    low = [noted_like(x.detach().to("meta", dtype), x) for x, dtype in pairs]
    low = tree.unflatten(tree.flatten(shapes)[1], low)
    sharding = plan_sharding(low, cfg, mesh, sharded=cfg.stage == 3, opt=opt, inside=inside)
    plan = Plan(cfg, opt, mesh, sharding)
    shards: list[Any] = [None] * len(leaves)
    masters_of: list[Any] = [None] * len(leaves)

    def take(i: int, full: Tensor) -> None:
        shards[i] = sharding.split_one(i, full.to(dtypes.params[i]))
        leaf = sharding.layout.leaves[i]
        if dtypes.masters is not None and leaf.trainable:
            masters_of[i] = residence.master(plan.part(full, leaf), dtypes.masters[i])

    if recording is None:
        for i, leaf in enumerate(tree.leaves(params)):
            take(i, leaf)
    else:
        _agree_on_randomness(recording, mesh, cfg.timeout)
        recording.replay(take)
    if plan.homes is not None:
        trained, frozen = sharding.layout.divide(shards)
        shards = list(sharding.layout.merge(plan.homes.settled(trained), frozen))
    # an Engine's gradients come from autograd, each in memory of its own
    lies = plan.axes.world == 1 and cfg.offload is None and not inside and not opt.foreign
    if lies:
        trained, frozen = map(list, sharding.layout.divide(shards))
        shards = []  # nobody else is to hold what is copied
        lay(trained, plan.names[0])
        shards = list(sharding.layout.merge(trained, frozen))
    targets = plan.targets(sharding.layout.divide(shards)[0])
    if dtypes.masters is not None:
        targets = list(sharding.layout.divide(masters_of)[0])
    wide = targets
    if cfg.dtypes.state == torch.float32:  # the state is made in the dtype of what it is made for
        wide = [widened(x) for x in targets]

    def draw(number: int) -> contextlib.AbstractContextManager[None]:
        return _drawing(mix(cfg.seed, number, _START), wide)

    noise = draw(0) if opt.foreign else plan.noise(wide, around=draw)
    with whole_leaves(plan.whole), noise:
        inner = opt.init((plan.foreign_tree if opt.foreign else plan.trained_tree)(wide))
    inner = _apart(tree.map(residence.state, inner), [*shards, *targets])
    if lies:
        state, spec = tree.flatten(inner)
        names, inner = tree.names(inner), None
        lay(state, names)
        inner = tree.unflatten(spec, state)
    agree_on_optimizer(opt, inner, mesh, cfg.timeout)
    opt_state = OptState(
        step=torch.zeros((), dtype=torch.int64, device="cpu"),
        inner=plan.wrap_inner(inner),
        master=None if dtypes.masters is None else plan.trained_tree(plan.wrap(targets)),
        loss_scale=loss_scale.init(cfg.scaling, device=device) if cfg.scaling else None,
        model_state=tree.map(lambda x: x.detach().clone(), model_state),
        metrics={},
    )
    return plan, tree.unflatten(sharding.spec, sharding.wrap(shards)), opt_state


@contextlib.contextmanager
def _drawing(seed: int, leaves: Sequence[Tensor]) -> Iterator[None]:
    """Random numbers inside are a function of the seed; the generators stay as they are.

    The host's is this thread's own, as in a step: [Note: own draws].
    """
    held = [x for x in leaves if not isinstance(x, FakeTensor) and x.device.type != "meta"]
    devices = {x.device for x in held} | {torch.device("cpu")}
    own = drawing_from(torch.Generator("cpu")) if check_draws() else contextlib.nullcontext()
    with own:
        generators = [generator_of(device) for device in sorted(devices, key=str)]
        with preserved(generators):
            for generator in generators:
                generator.manual_seed(seed)
            yield


_START = 0x517  # tells the first state's numbers from those of updates


def _apart(inner: PyTree, held: Sequence[Tensor]) -> PyTree:
    """The optimizer's state, each leaf in memory of its own.

    An optimizer may start two slots, or a slot and the parameters, with one tensor: its functions
    are pure. An update writes over each leaf for itself.

    Args:
        held: the parameters, and what else an update writes over.
    """
    leaves, spec = tree.flatten(inner)
    every = [
        local_tensor(x) if isinstance(x, Tensor) else torch.empty(0, device="cpu")
        for x in (*held, *leaves)
    ]
    twice = {j - len(held) for _, j in overlapping(every, [True] * len(every))}
    twice |= {i for i, x in enumerate(every[len(held) :]) if why_unwritable(x)}
    return tree.unflatten(spec, [copied(x) if i in twice else x for i, x in enumerate(leaves)])


def _warn_of_untrained(leaves: Sequence[Tensor], names: Sequence[str]) -> None:
    untrained = [name for x, name in zip(leaves, names, strict=True) if is_untrained(x)]
    if 0 < len(untrained) < len(leaves):
        more = f" and {len(untrained) - 2} more" if len(untrained) > 2 else ""
        warnings.warn(
            f"{len(untrained)} of {len(leaves)} parameters have requires_grad=False in their "
            f"module, {', '.join(untrained[:2])}{more}, and will be trained: a tree of tensors is "
            "trained but for Config(frozen=...). Say frozen=[n for n, p in "
            "module.named_parameters() if not p.requires_grad]; or frozen=lambda name: False, to "
            "train them all.",
            stacklevel=users_line(),
        )


def _check_offload(offload: str | None, residence: Residence, opt: Optimizer) -> None:
    if opt.foreign and residence.masters != residence.params:
        raise ConfigError(
            f"Config.offload={offload!r} keeps the optimizer's state in host memory while "
            f"collectives run on {residence.params.type}, and an optimizer that knows nothing of "
            "shards needs collectives for its state. Use one of fzero.optim, or leave the state "
            "where it is: offload=None, or 'activations'."
        )


def _agree_on_randomness(recording: Recording, mesh: Mesh, timeout: float | None) -> None:
    """See that all ranks will draw, and so build, the same numbers."""
    agree(
        "what the parameters are built from",
        recording.fingerprint(),
        mesh,
        timeout,
        hint="Seed all ranks alike before step_fn.init, or in the function that builds the "
        "parameters: torch.manual_seed(0).",
    )
