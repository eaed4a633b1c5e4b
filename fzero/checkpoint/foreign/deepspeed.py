"""DeepSpeed's universal checkpoints: what `ds_to_universal.py` makes, read into any sharding.

    zero/optimizer_state.pt              hyperparameters of each group, and counters: under ZeRO-3
                                         in optimizer_state_dict["state"][i]["step"] alone
    zero/<parameter>/fp32.pt             {"param": tensor, "vocab_tensor": True, ...}
    zero/<parameter>/exp_avg.pt          the same for the moments: exp_avg_sq.pt, momentum_buffer.pt
    zero/<parameter>/step.pt             a number; not under ZeRO-3

References: `deepspeed/checkpoint/ds_to_universal.py` and `universal_checkpoint.py` of DeepSpeed
0.14 to 0.19 (https://github.com/deepspeedai/DeepSpeed). Lian et al., Universal Checkpointing,
arXiv:2406.18820.
"""

import math
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import TensorStorageMetadata
from torch.distributed.checkpoint.metadata import TensorProperties

from fzero.checkpoint.fill import fill
from fzero.checkpoint.flatten import Flat
from fzero.checkpoint.foreign.dcp import one_step
from fzero.checkpoint.format.disk import as_path
from fzero.checkpoint.sources import Lazy, LazyReader, Region, Source, moment_of, names_of
from fzero.errors import CheckpointError, arguments_by_name
from fzero.tree import PyTree

STATE = "optimizer_state.pt"


@arguments_by_name
def import_deepspeed_universal(
    path: str | os.PathLike[str],
    params_like: PyTree,
    opt_state_like: PyTree = None,
    *,
    strict: bool = True,
    timeout: float | None = None,
) -> tuple[PyTree, PyTree]:
    """Fill trees from a DeepSpeed universal checkpoint; every rank must call it.

    Parameters (masters, where there are any) take `fp32.pt`; the moments of Adam take `exp_avg.pt`
    and `exp_avg_sq.pt`, momentum takes `momentum_buffer.pt`, and every counter of updates the one
    step that all parameters agree on. Vocabularies that were padded for another world are cut or
    filled up with zeros along dim 0. The loss scale starts anew. Hyperparameters belong to the
    optimizer that you make: `deepspeed_param_groups` tells what they were, group by group.

    Args:
        path: the universal folder: the one that holds `zero/`, or `zero/` itself.
        params_like, opt_state_like, strict, timeout: as for `load`.

    Returns:
        `(params, opt_state)`, in the memory of the trees that were passed.

    Raises:
        CheckpointError: a file asks for code, parameters were updated different numbers of times,
            nothing counts the updates of the moments, or something does not fit; every leaf that
            differs is named.

    Examples:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp(), "zero", "w")
        >>> folder.mkdir(parents=True)
        >>> torch.save({"param": torch.ones(2)}, folder / "fp32.pt")
        >>> import_deepspeed_universal(folder.parent.parent, {"w": torch.zeros(2)})
        ({'w': tensor([1., 1.])}, None)
    """

    where = as_path(path)
    # cast: float32 is what DeepSpeed keeps, whatever precision the job had
    return fill(
        where,
        lambda: str(_zero(where)),
        _open,
        params_like,
        opt_state_like,
        strict=strict,
        cast=True,
        timeout=timeout,
    )


def deepspeed_param_groups(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The hyperparameters of a DeepSpeed universal checkpoint, one dict for each group.

    Args:
        path: as for `import_deepspeed_universal`.

    Returns:
        What torch.optim keeps in `param_groups`, without the parameters: `lr`, `betas`,
        `weight_decay` and so on. Groups are kept apart: give each its own optimizer, with `masked`.

    Raises:
        CheckpointError: there is no `optimizer_state.pt`, or it asks for code.
    """
    groups = _state(_zero(as_path(path))).get("param_groups", [])
    return [{k: v for k, v in group.items() if k != "params"} for group in groups]


def _zero(path: Path) -> Path:
    for folder in (path / "zero", path):
        if folder.is_dir() and (folder.name == "zero" or (folder / STATE).exists()):
            return folder
    raise CheckpointError(
        f"{path} has no folder zero/; a universal checkpoint of DeepSpeed has one. Convert the "
        "checkpoint with DeepSpeed's ds_to_universal.py first, and pass its output folder."
    )


def _open(where: str, flat: Flat, on_bytes: Callable[[int], None]) -> Source:
    zero = Path(where)
    names = dict.fromkeys(names_of(flat.tensors))
    folders = {e.name: e for e in sorted(zero.iterdir()) if (e / "fp32.pt").exists()}
    leaves = {f"params.{n}": _lazy(f / "fp32.pt", flat, f"params.{n}") for n, f in folders.items()}
    for key in flat.tensors:
        moment = moment_of(key, names)
        if moment and moment[0] in folders:
            file = folders[moment[0]] / f"{moment[1]}.pt"
            if file.exists():
                leaves[key] = _lazy(file, flat, key)
    moments = any(key.startswith("opt_state.") for key in leaves)
    steps = _steps(zero, [folders[name] for name in names if name in folders], moments=moments)
    own = {name: steps[name] for name in names if name in steps}
    values = one_step(steps, own, str(zero), flat) if steps else {}
    reader = LazyReader(leaves, on_bytes)
    metadata = reader.read_metadata()
    stored = metadata.state_dict_metadata
    for key, x in flat.tensors.items():
        if key.startswith("opt_state.loss_scale"):
            values[key] = x.clone()  # starts anew
    for key, value in values.items():
        stored[key] = TensorStorageMetadata(TensorProperties(dtype=value.dtype), value.shape, [])
    return Source(str(zero), reader, metadata, values=values, identity=repr(sorted(leaves)))


def _steps(zero: Path, folders: Sequence[Path], *, moments: bool) -> dict[str, float]:
    """Every count of updates that the checkpoint has, by where it is.

    A group's 0 is no count: under ZeRO-3 that is what it stays, while the parameters' own state has
    the count (seen with DeepSpeed 0.19.8, FusedAdam and its Adam for the CPU).

    Args:
        zero: the folder.
        folders: those of our parameters.
        moments: whether the optimizer's moments are there, which belong to a count.

    Raises:
        CheckpointError: there are moments, and nothing counts their updates.
    """
    files = [folder / "step.pt" for folder in folders]
    steps = {f.parent.name: _number(read_safely(f), f) for f in files if f.exists()}
    top = _state(zero) if (zero / STATE).exists() else {}
    inner = _records(top, "optimizer_state_dict", zero)
    records = {"": top, "optimizer_state_dict.": inner}
    found = {
        f"{prefix}{key}[{i!r}]": _number(one["step"], zero / STATE)
        for prefix, record in records.items()
        for key in ("state", "param_groups")
        for i, one in _records(record, key, zero).items()
        if isinstance(one, Mapping) and "step" in one
    }
    steps |= {where: n for where, n in found.items() if n or ".state[" in f".{where}"}
    if not steps and not moments:
        steps = found
    if moments and not steps:
        raise CheckpointError(
            f"{zero} has the moments of an optimizer, and no count of its updates: there is none "
            "in step.pt beside a parameter, in optimizer_state_dict['state'][i]['step'] of "
            f"{STATE}, or (above 0) in its param_groups. Moments without their count would be "
            "corrected as if they were new. Convert the checkpoint again with DeepSpeed's "
            "ds_to_universal.py, or pass None as opt_state_like to load the parameters alone."
        )
    return steps


def _records(record: Mapping[Any, Any], key: str, zero: Path) -> Mapping[Any, Any]:
    """What is under a key as a mapping, a list's items by their number; {} if there is nothing."""
    found = record.get(key) or {}
    if isinstance(found, list):
        found = dict(enumerate(found))
    if not isinstance(found, Mapping):
        raise CheckpointError(
            f"{zero / STATE} holds a {type(found).__name__} as {key!r}; expected a dict or a list."
        )
    return found


def _lazy(file: Path, flat: Flat, key: str) -> Lazy:
    found = _param(file)
    tensor = found["param"]
    shape, dtype = tuple(tensor.shape), tensor.dtype
    wanted = tuple(flat.tensors[key].shape) if key in flat.tensors else shape
    fits = len(shape) == len(wanted) and shape[1:] == wanted[1:]
    # Mapped, so that only what is copied is ever read.
    if bool(found.get("vocab_tensor", False)) and fits and shape[:1] != wanted[:1]:
        return Lazy(dtype, wanted, lambda region: _padded(tensor, region))
    if shape != wanted and shape == (math.prod(wanted),):  # not given its shape back when merged
        return Lazy(dtype, wanted, lambda region: tensor.view(wanted)[region])
    return Lazy(dtype, shape, lambda region: tensor[region])


def _padded(tensor: Tensor, region: Region) -> Tensor:
    """Rows beyond the last one are zeros, as padding is."""
    rows = region[0]
    part = tensor[region]
    missing = (rows.stop - rows.start) - part.shape[0]
    return torch.cat([part, part.new_zeros(missing, *part.shape[1:])]) if missing else part


def _param(file: Path) -> Mapping[str, Any]:
    found = read_safely(file)
    found = found if isinstance(found, dict) else {"param": found}
    if not isinstance(found.get("param"), Tensor):
        raise CheckpointError(f"{file} holds no tensor under 'param'; it is no universal file.")
    return found


def _state(zero: Path) -> Mapping[str, Any]:
    found = read_safely(zero / STATE)
    if not isinstance(found, dict):
        raise CheckpointError(f"{zero / STATE} holds a {type(found).__name__}; expected a dict.")
    return found


def read_safely(file: Path) -> Any:
    """What `torch.load` makes of a file without running any code in it, mapped from the disk.

    Objects of DeepSpeed's own classes, such as its loss scaler, become empty records: DeepSpeed
    isn't imported.

    Raises:
        CheckpointError: the file asks for anything else, is damaged or isn't there.
    """
    try:
        asked = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        foreign = [name for name in asked if not name.startswith("deepspeed.")]
        if foreign:
            raise CheckpointError(
                f"{file} asks for {', '.join(foreign)}, which a checkpoint has no use for: loading "
                "it could run code. Don't trust this file."
            )
        stand_ins: list[Any] = [
            (type(name.rpartition(".")[2], (_StandIn,), {}), name) for name in asked
        ]
        with torch.serialization.safe_globals(stand_ins):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except CheckpointError:
        raise
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"{file} cannot be read: {error}. It is damaged, missing, or asks for more than "
            "tensors and plain values."
        ) from error


class _StandIn:
    """In place of an object of DeepSpeed's: takes whatever comes, and does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def _number(value: Any, file: Path) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{file} holds {value!r:.60} as a step; expected a number."
        ) from error
