"""This rank's part of an optimizer's state, as `engine.optimizer.state_dict()` gives it.

[Note: places] Who saves by a `state_dict` has a file for each rank, or one rank's for all. So each
tensor comes with its place: the shape of the whole, how it is split, and which rank's part it is.
What is loaded must have the places that there are here; if one rank's has not, no rank loads.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from fzero import tree
from fzero.distributed.agree import agree, smallest
from fzero.distributed.dtensor import from_local_like, local_tensor
from fzero.distributed.mesh import is_simulated
from fzero.engine.driver import Driver
from fzero.errors import CheckpointError
from fzero.optim.counts import common_count, own_counts
from fzero.state.opt_state import OptState


def part_of(state: OptState) -> dict[str, Any]:
    """Copies of this rank's tensors by path, the step and loss scale among them, and their places.

    Parameters, masters and buffers are not in it: they are `Engine.state_dict`'s.

    Examples:
        >>> import fzero, torch
        >>> engine = fzero.Engine(torch.nn.Linear(3, 1), fzero.optim.sgd(0.1, momentum=0.9))
        >>> part_of(engine.state[1])["places"]["['inner'].trace['weight']"]
        '(1, 3), (Shard(dim=0),), part 0 of 1'
    """
    leaves = _leaves(_kept(state))
    return {
        "state": {path: _copy(x) for path, x in leaves.items()},
        "places": {path: _place(x) for path, x in leaves.items()},
    }


def with_part(state: OptState, given: Mapping[str, Any]) -> OptState:
    """The state with the values of what `part_of` gave.

    Raises:
        CheckpointError: they have other paths or places; it names the first.
    """
    parts, places = given.get("state", {}), given.get("places", {})
    # either may have counts of leaves, whose other states are alike: see [Note: counts of leaves]
    inner = state.inner
    alike = [state._replace(inner=x) for x in (inner, own_counts(inner), common_count(inner))]
    same = [_kept(x) for x in alike if _leaves(_kept(x)).keys() == parts.keys()]
    kept = same[0] if same else _kept(state)
    mine = _leaves(kept)
    here = {path: (_place(x), _shape(x)) for path, x in mine.items()}
    there = {path: (places.get(path, "without a place"), _shape(x)) for path, x in parts.items()}
    wrong = [x for x in here.keys() | there.keys() if here.get(x) != there.get(x)]
    if wrong:
        first = min(wrong)
        found, own = (x.get(first, ("missing",))[0] for x in (there, here))
        raise CheckpointError(
            f"optimizer.load_state_dict: {first} is {found} in what is loaded, and {own} here."
        )
    new = [
        from_local_like(parts[path].to(local_tensor(x).device), x)
        if isinstance(x, Tensor)
        else parts[path]
        for path, x in mine.items()
    ]
    return state._replace(**tree.unflatten(tree.flatten(kept)[1], new))


def agree_on(driver: Driver, new: OptState | CheckpointError, instead: str) -> OptState:
    """What all ranks go on from, each with its own part of it.

    Args:
        driver: of the engine.
        new: from `with_part`.
        instead: what to do where it does not fit.

    Raises:
        CheckpointError: some rank's part doesn't fit, on every rank.
        RankMismatchError: the parts are of different steps.
    """
    mesh, limit = driver.stepper.plan.mesh, driver.cfg.timeout
    fits, alone = isinstance(new, OptState), is_simulated(mesh)
    if not alone:
        driver.journal.enter("load_state_dict")
        (fits,) = smallest("an optimizer's state", [int(fits)], mesh, limit)
    if not fits or not isinstance(new, OptState):
        said = "optimizer.load_state_dict: what another rank loads does not fit there."
        raise CheckpointError(
            f"{said if isinstance(new, OptState) else new} Nothing was loaded. It takes what "
            "state_dict() gave on this rank, of the same model, optimizer, stage and world. "
            f"{instead}"
        )
    if not alone:
        agree("optimizer.load_state_dict", [("step", str(int(new.step)))], mesh, limit, instead)
    return new


def _kept(state: OptState) -> dict[str, Any]:
    return {"inner": state.inner, "loss_scale": state.loss_scale, "step": state.step}


def _leaves(kept: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(tree.paths(kept), tree.leaves(kept), strict=True))


def _copy(x: Any) -> Any:
    # an optimizer from elsewhere may keep numbers
    return local_tensor(x).detach().clone() if isinstance(x, Tensor) else x


def _place(x: Any) -> str:
    if not isinstance(x, DTensor):
        return f"{tuple(x.shape)}, whole" if isinstance(x, Tensor) else "a number"
    coordinate, mesh = x.device_mesh.get_coordinate(), x.device_mesh
    assert coordinate is not None  # this rank's own
    return f"{tuple(x.shape)}, {x.placements}, part {coordinate[-1]} of {mesh.size(mesh.ndim - 1)}"


def _shape(x: Any) -> Any:
    return tuple(local_tensor(x).shape) if isinstance(x, Tensor) else ()
