"""A step's Programs in files, and whether they hold in this process: [Note: saved steps].

[Note: saved steps] A folder has one file for each rank. It says what everything in it rests on, by
name (*grounds*: versions, mesh, config, layouts), and has an *entry* for each kind of batch: the
Programs of gradients and update, and the notes of what their functions read. An entry is used if
the grounds are the same, the key is, and both notes hold. Ranks need no word about it: Programs
are functions of what they rest on, and whether ranks have the same collectives is compared as ever.
"""

import dataclasses
import hashlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fzero.distributed.mesh import Mesh, backend_of
from fzero.errors import FzeroError, users_line
from fzero.program import Program
from fzero.program.choice import Choice
from fzero.program.file import read, write
from fzero.state.plan import Plan
from fzero.step.gradients import Signature
from fzero.step.traced import GradientHalf, Traced
from fzero.step.update_program import UpdateProgram
from fzero.transforms.frames import Frame, take_apart
from fzero.transforms.recorded import Recorded
from fzero.transforms.saved_notes import Gone, Resumed, Saved, source_of
from fzero.transforms.staging import TracedFunction

Json = Any


def save_programs(path: Path, plan: Plan, every: Sequence[tuple[Any, Traced]]) -> None:
    """Write this rank's file.

    Args:
        path: of the folder.
        plan: that they were made for.
        every: what is staged out, by its kind of batch.

    Raises:
        FzeroError: something has no form as data.
    """
    tensors: dict[str, Tensor] = {}
    entries = []
    for key, traced in every:
        update, aux = traced.updating, traced.signature.aux_out
        entries.append(
            {
                "key": repr(key),
                "gradients": _half(traced.gradient_fn, tensors),
                "update": None if update is None else _update(update, tensors),
                "aux": None if aux is None else _aux_as_data(aux),
                "choice": traced.choice.encoded(),
            }
        )
    data = {"format": _FORMAT, "grounds": grounds(plan), "entries": entries}
    write(path / _file_of(plan.mesh), data, tensors)


class SavedPrograms:
    """What another process saved.

    Args:
        path: of the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read: tuple[Plan, list[Json], dict[str, Tensor]] | None = None

    def find(
        self,
        key: Any,
        make: Callable[..., Traced],
        model_fn: Any,
        update: UpdateProgram,
        signature: Signature,
        settled: Choice | None,
    ) -> Traced | None:
        """The step of a kind of batch; None, with a warning that says why, if none holds.

        Args:
            key: the kind of batch.
            make: `(like, saved)` -> a step, of what holds; the rest of it is recorded.
            model_fn, update: that it is of.
            signature: of its gradients, as far as it is known without recording it.
            settled: buckets that ranks have settled, if they have, and the plan for a limit.
        """
        plan = update.plan
        if self._read is None or self._read[0] is not plan:
            self._read = (plan, *self._open(plan))
        _, entries, tensors = self._read
        same = [entry for entry in entries if entry["key"] == repr(key)]
        if entries and not same:
            self._warn("there is none for this kind of batch")
        reasons: list[str] = []
        for entry in same:
            if settled is not None and Choice.decoded(entry["choice"]) != settled:
                continue  # the ranks have others: not a change that anybody made
            try:
                traced, changed = _resumed(entry, tensors, make, model_fn, update, signature)
            except Gone as gone:
                reasons += gone.differences
            except _DAMAGE as error:
                reasons.append(f"the file can't be read ({type(error).__name__}: {error})")
            else:
                if changed:
                    self._warn(f"changed is {'; '.join(changed)}", "the update")
                return traced
        if reasons:
            self._warn(f"changed is {'; '.join(dict.fromkeys(reasons))}")
        return None

    def _open(self, plan: Plan) -> tuple[list[Json], dict[str, Tensor]]:
        name = _file_of(plan.mesh)
        if not (self.path / name).exists():
            there = sorted(x.name for x in self.path.glob("rank-*.programs"))
            if there:  # otherwise this is the first start
                self._warn(f"there is no {name} (the first of {len(there)} is {there[0]})")
            return [], {}
        try:
            data, tensors = read(self.path / name)
            if data["format"] != _FORMAT:
                raise ValueError(f"format {data['format']}, and this is {_FORMAT}")
            old, new = data["grounds"], grounds(plan)
            entries = data["entries"]
        except (OSError, *_DAMAGE) as error:
            self._warn(f"{name} can't be read ({type(error).__name__}: {error})")
            return [], {}
        rows = [(k, old.get(k, "nothing"), new.get(k, "nothing")) for k in {**old, **new}]
        if changed := [f"{k} from {a} to {b}" for k, a, b in rows if a != b]:
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            self._warn(f"changed is {'; '.join(changed[:3])}{more}")
            return [], {}
        return entries, tensors

    def _warn(self, why: str, what: str = "the step") -> None:
        warnings.warn(
            f"the Programs saved in {self.path} are not used, and {what} is recorded: {why}. "
            "step_fn.save_programs(path) after a step saves what holds now.",
            stacklevel=users_line(),
        )


# -------------------------------------------------------------------------- what all rests on
def grounds(plan: Plan) -> dict[str, str]:
    """What the Programs of a plan rest on beside what functions read, by name."""
    mesh, cfg = plan.mesh, plan.cfg
    groups = (mesh.shard_group, mesh.replicate_group)
    found = {
        "torch": torch.__version__,
        "Python": ".".join(map(str, sys.version_info[:3])),
        "fzero": f"{sys.modules['fzero'].__version__}, sources {_sources()}",
        "the processor": _processor(mesh.device_type),
        "the mesh": f"{mesh.device_type}, ranks {list(mesh.ranks)}, {mesh.replicate_size} x "
        f"{mesh.shard_size}, groups {groups} on {[backend_of(x) for x in groups if x]}",
        "this rank": str(mesh.rank),
        "the structure of params": str(plan.sharding.spec),
        "the structure of the optimizer's state": str(plan.inner_spec),
    }
    for field in dataclasses.fields(cfg):
        value = getattr(cfg, field.name)
        if field.name not in _SEEN_IN_LAYOUT:
            found[f"Config.{field.name}"] = _shown(field.name, value)
    passes: Any = cfg.passes
    for i, rule in enumerate(passes):
        found[f"the code of pass {i}"] = source_of(type(rule).__module__)
    for leaf, dtensor in zip(plan.sharding.layout, plan.sharding.dtensors, strict=True):
        found[f"leaf {leaf.name}"] = f"{leaf}{' as a DTensor' if dtensor is not None else ''}"
    return found


_SEEN_IN_LAYOUT = ("mesh", "frozen")


def _shown(name: str, value: Any) -> str:
    text = repr(value)
    if " at 0x" in text:
        raise FzeroError(
            f"the Programs can't be saved: Config.{name}={value!r} is a function, which another "
            "process can't compare with its own."
        )
    return text


def _sources() -> str:
    """A digest of the package: passes may change where its version does not."""
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(Path(str(sys.modules["fzero"].__file__)).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _processor(device_type: str) -> str:
    cpu = torch.backends.cpu.get_cpu_capability()
    if device_type != "cuda":
        return cpu
    return f"{cpu}, {torch.cuda.get_device_name()} {torch.cuda.get_device_capability()}"


# ------------------------------------------------------------------------------------- entries
def _half(recorded: Recorded, tensors: dict[str, Tensor]) -> Json:
    """A Program and its notes."""
    program, saved = recorded.program, Saved(recorded.notes)
    literals = {id(x) for x in program.literals}

    def constant(name: str, x: Tensor) -> Json:
        if id(x) in literals:
            key = f"{len(tensors)}.{name}"
            tensors[key] = x
            return {"tensor": key}
        return {"at": at_of(f"a tensor of shape {tuple(x.shape)} from outside", x)}

    def at_of(what: str, x: Tensor) -> Json:
        at = saved.at(x)
        if at is None:
            raise FzeroError(
                f"the Program {program.name!r} can't be saved: it reads {what}, and nothing that "
                "the function names leads to it, so another process could not find its own. Hold "
                "it in a closure, an attribute of the module or a buffer, or pass it in the batch."
            )
        return at

    # what nothing reads no walk comes to, and no hook of it would run
    there = [(name, saved.at(x)) for name, x in recorded.module_params]
    params = [[name, at] for name, at in there if at is not None]
    return {"program": program.encoded(constant), "notes": saved.data, "params": params}


def _update(traced: TracedFunction, tensors: dict[str, Tensor]) -> Json:
    """The update, and the form of what it returns."""
    assert traced.result is not None
    return {**_half(traced.recorded, tensors), "result": _aux_as_data(traced.result)}


def _resumed(
    entry: Json,
    tensors: Mapping[str, Tensor],
    make: Callable[..., Traced],
    model_fn: Any,
    update: UpdateProgram,
    signature: Signature,
) -> tuple[Traced, list[str]]:
    """The step, and what has changed of its update alone, which is recorded then."""
    plan = update.plan
    gradient_fn = _recorded(entry["gradients"], {"model_fn": model_fn}, tensors, plan)
    signature.state_out = signature.state
    signature.aux_out = None if entry["aux"] is None else _aux_of_data(entry["aux"])
    saved, changed = None, []
    if entry["update"] is not None:
        try:
            recorded = _recorded(entry["update"], update.fn.reads, tensors, plan)
            saved = (recorded, _aux_of_data(entry["update"]["result"]))
        except Gone as gone:
            changed = gone.differences
    half = GradientHalf(signature, gradient_fn)
    return make(like=half, update=update, saved=saved), changed


def _recorded(
    half: Json, roots: Mapping[str, Any], tensors: Mapping[str, Tensor], plan: Plan
) -> Recorded:
    resumed = Resumed(roots, half["notes"])
    literals: list[Tensor] = []

    def constant(data: Json) -> Tensor:
        if "at" in data:
            return resumed.tensor(data["at"])
        literals.append(tensors[data["tensor"]])
        return literals[-1]

    program = Program.decoded(half["program"], constant)
    program = dataclasses.replace(program, literals=tuple(literals))
    params = [(name, resumed.tensor(at)) for name, at in half["params"]]
    cfg = plan.cfg
    return Recorded.resumed(program, resumed.notes, params, cfg.executor, cuda_graph=cfg.cuda_graph)


# ------------------------------------------------------------------------------------ aux
def _aux_as_data(frame: Frame) -> Json:
    """The containers of aux; the inverse of `_aux_of_data`.

    Raises:
        FzeroError: they are others than dicts, lists and tuples.
    """
    data = _as_data(frame.unflatten([_PLACE] * frame.num_leaves))
    if _aux_of_data(data) != frame:
        raise _refused("objects of other classes")
    return data


def _aux_of_data(data: Json) -> Frame:
    return take_apart(_of_data(data), "aux", numbers=True)[1]


def _as_data(x: Any) -> Json:
    if x is _PLACE:
        return {"tensor": None}
    if x is None or type(x) in (bool, int, float, str):
        return {"plain": x}
    if type(x) in (list, tuple):
        return {type(x).__name__: [_as_data(y) for y in x]}
    if type(x) is dict and all(type(k) in (str, int) for k in x):
        return {"dict": [[k, _as_data(v)] for k, v in x.items()]}
    raise _refused(f"a {type(x).__name__}")


def _of_data(data: Json) -> Any:
    ((kind, inner),) = data.items()
    if kind == "tensor":
        return torch.empty(0, device="cpu")
    if kind == "plain":
        return inner
    if kind == "dict":
        return {k: _of_data(v) for k, v in inner}
    return {"list": list, "tuple": tuple}[kind](map(_of_data, inner))


def _refused(what: str) -> FzeroError:
    return FzeroError(
        f"the Programs can't be saved: aux holds {what}, and a file knows dicts, lists, tuples, "
        "numbers and strings. Return aux in those."
    )


def _file_of(mesh: Mesh) -> str:
    return f"rank-{mesh.rank:05}-of-{mesh.world_size:05}.programs"


_PLACE: Any = object()
_FORMAT = 5
_DAMAGE = (KeyError, ValueError, TypeError, AttributeError, IndexError, RuntimeError)
