"""`jit`: a function of trees of shards, staged out once for each signature of its arguments."""

import contextlib
import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from fzero import tree
from fzero.config import Config, as_config
from fzero.distributed.collectives import told_to
from fzero.distributed.dtensor import local_tensor
from fzero.distributed.journal import FUNCTION, Journal
from fzero.distributed.mesh import Mesh
from fzero.errors import ConfigError, ShardError, TraceError
from fzero.functional.differentiate import is_differentiated
from fzero.functional.functionalize import calls_noted
from fzero.functional.held import held_over
from fzero.functional.memory import storage_of
from fzero.functional.uncompiled import never_compiled
from fzero.inference import outside_inference, with_versions
from fzero.numerics.casts import refuse_outer_autocast
from fzero.numerics.rng import mix
from fzero.program import Program
from fzero.program.choice import Choice
from fzero.program.strides import layout_of
from fzero.transforms.agreement import Agreement, Mine
from fzero.transforms.frames import AS_TENSORS, Frame, first_places, take_apart, values_apart
from fzero.transforms.micro import refuse_sparse, tell_of_graph
from fzero.transforms.notes import warn_of_recordings
from fzero.transforms.parts import has_parts, mesh_of
from fzero.transforms.randomness import seeded
from fzero.transforms.recorded import MAX_RECORDINGS, Recorded, Recordings
from fzero.transforms.staging import TracedFunction, as_result, changed_in_place, detached
from fzero.transforms.trees import ReadWhole
from fzero.transforms.whole import WholeLeaves
from fzero.tree import PyTree


class Function:
    """A function of sharded parameters; see `jit`, `sharded`, `value_and_grad` and the others.

    Called, it is staged out for the structure, shapes and dtypes of its arguments, and its Program
    is run: the same arguments give the same results, bit for bit. Called inside of another one
    while that is staged out, it becomes a part of the other's Program.

    Args:
        name: of the user's function, for listings and messages.
        body: `(*args, **kwargs) -> tree` on trees of DTensors and plain tensors.
        fn: the user's function in it.
        cfg: see `Config`.
        donate_argnums: arguments whose memory may be reused.
        takes_parts: whether `body` can be differentiated on shards.
        second: name of the argument that `body` has after the first one of `fn`.
    """

    def __init__(
        self,
        name: str,
        body: Callable[..., PyTree],
        fn: Callable[..., Any],
        cfg: Config,
        *,
        donate_argnums: Sequence[int] = (),
        takes_parts: bool = True,
        second: str | None = None,
    ) -> None:
        functools.update_wrapper(self, fn, updated=())
        self.name, self.body, self.cfg = name, body, cfg
        self.reads = {name: fn}  # by what messages call it
        self.donate_argnums, self.takes_parts = tuple(donate_argnums), takes_parts
        self._arguments = _arguments(fn, second)
        self.__wrapped__ = fn
        self._recordings: Recordings[TracedFunction] = Recordings()
        self._agreement = Agreement(f"function {name}", cfg.timeout)
        self._journals: dict[Mesh, Journal] = {}  # of the eager executor
        self._count = 0

    @never_compiled
    def __call__(self, *args: Any, rng: int = 0, **kwargs: Any) -> PyTree:
        """Run it.

        Args:
            args, kwargs: trees of DTensors (shards) and plain tensors (this rank's own). Numbers
                and strings among the leaves are static: it is staged out anew for other ones.
            rng: which random numbers are drawn: they are a function of `cfg.seed`, `rng`, rank and
                operator. Pass the number of the step for another dropout mask in each.

        Raises:
            ShardError: a leaf can't be an argument, or lives on another mesh.
            TraceError: the function can't be staged out.
            FzeroError: it changes an argument in place.
            RankMismatchError: ranks would run different collectives, or a rank is gone.
            ConfigError: a rank can't stay under `cfg.memory_limit`; on all ranks.
        """
        if is_inside(args, kwargs):
            return self.body(*args, **kwargs)
        refuse_outer_autocast()
        _check_rng(self.name, rng)
        leaves, key = _key(args, kwargs)
        if any(x.grad_fn is not None for x in leaves):
            self._tell_of_graphs(args, kwargs)
        mesh = mesh_of(leaves, self.cfg)
        agreement = self._agreement
        if self.cfg.executor == "eager":
            agreement.calls += 1
            before, donated = _versions(leaves), self._donated(args, len(leaves))
            # as of a Program: whoever differentiates this takes a transform of it, and containers
            # are the function's own
            own = _rebuilt(key, [_without_graph(x) for x in leaves])
            if mesh not in self._journals:
                self._journals[mesh] = Journal(mesh, FUNCTION, active=True, limit=self.cfg.timeout)
            journal = self._journals[mesh]
            journal.begin(self.name)
            with (
                agreement.running(mesh),
                told_to(journal.hear),
                seeded(mix(self.cfg.seed, rng, 0, mesh.rank), leaves),
                _running(),
                outside_inference(),
                torch.enable_grad(),  # as while it is recorded
                calls_noted() if agreement.calls == 1 else contextlib.nullcontext(),
            ):
                result = tree.map(_as_result, self.body(*own[0], **own[1]))
            journal.leave(f"result of {self.name}")
            rows = zip(before, _versions(leaves), donated, strict=True)
            for i, (old, new, given) in enumerate(rows):
                if old != new and not given:
                    frame = take_apart((args, kwargs), "arguments")[1]
                    label = _named(frame, self._arguments).names[i]
                    raise changed_in_place(self.name, label, written=True)
            kept = [x for x, given in zip(leaves, donated, strict=True) if not given]
            return _apart_from(kept, result)
        known = self._recordings
        mine = Mine(
            lambda: self._find(args, kwargs, key, mesh, exact=False),
            lambda: (one for _, one in known),
            known.forget,
            known.clear,
        )
        traced = agreement.together(mine, mesh)
        flat = [local_tensor(x) for x in leaves]
        with agreement.running(mesh):
            traced.check_donated(flat)
            flat = [detached(x) for x in flat]
            return traced(flat, lambda: mix(self.cfg.seed, rng, 0, mesh.rank))

    def lower(self, *args: Any, rng: int = 0, **kwargs: Any) -> Program:
        """The Program for these arguments, without running it; asks no other rank.

        Raises:
            TraceError: the function can't be staged out, or isn't: `Config(executor="eager")`.
        """
        if self.cfg.executor == "eager":
            raise no_program()
        leaves, key = _key(args, kwargs)
        return self._find(args, kwargs, key, mesh_of(leaves, self.cfg)).program

    def staged(
        self,
        *args: Any,
        choice: Choice | None,
        saved: tuple[Recorded, Frame] | None = None,
        **more: Any,
    ) -> TracedFunction:
        """What a call with such arguments would run, ahead of it: for who calls with the same kinds
        of arguments each time, on ranks that have agreed by themselves.

        It takes flat lists of local tensors, and asks nothing; a call asks the kind of each leaf.

        Args:
            args: as for a call; fake tensors will do.
            choice: of buckets, settled by all ranks; None: the best up to `cfg.bucket_mb`.
            saved: what another process has recorded, if its notes hold.
            more: `budget`, `slack`, `at_home` and `known` of `TracedFunction`.

        Raises:
            TraceError: the function can't be staged out.
            Gone: what was saved was recorded for others.
        """
        leaves, (static, *rows) = _key(args, {})
        mesh, found = mesh_of(leaves, self.cfg), None
        if choice is not None and saved is None:
            found = self._recordings.find(key := ((static, choice), *rows))
            if found is None:
                self._warn_of_many(key)
        if found is None:
            found = self._record(args, {}, mesh, choice=choice, saved=saved, **more)
            self._recordings.add(((static, Choice(found.choice.gradients)), *rows), found)
        return found

    def _find(
        self, args: Any, kwargs: Any, key: Any, mesh: Mesh, *, exact: bool = True
    ) -> TracedFunction:
        found = self._recordings.find(key, exact=exact)
        if found is None:
            self._warn_of_many(key)
            dynamic, choice = self._recordings.dynamic(key, self.cfg), self._agreement.choice
            found = self._record(args, kwargs, mesh, choice=choice, dynamic=dynamic)
            self._recordings.add(key, found, dynamic)
        return found

    def _warn_of_many(self, key: Any) -> None:
        self._count += 1
        if self._count > MAX_RECORDINGS:
            known = self._recordings.of(key)
            if known:
                warn_of_recordings(self.name, self._count, known[0].notes.differences())
                return
            last = next((_static(kind) for kind, _ in reversed([*self._recordings])), None)
            now = _static(key)
            if isinstance(last, Frame) and isinstance(now, Frame):
                values = values_apart(last, now)
                if values:
                    changed = [f"{self._called(path)} from {a} to {b}" for path, a, b in values]
                    warn_of_recordings(self.name, self._count, changed, AS_TENSORS)
                    return
            warn_of_recordings(self.name, self._count, ["the shapes of its arguments"])

    def _called(self, path: str) -> str:
        """A path in `(args, kwargs)` by the argument's name."""
        found = re.match(r"\[([01])\]\[(?:(\d+)|'(\w+)')\](.*)", path)
        if found is None:
            return path
        _, number, keyword, rest = found.groups()
        names = self._arguments
        if keyword is None:
            keyword = names[int(number)] if int(number) < len(names) else f"arg{number}"
        return f"{keyword}{rest}"

    def _tell_of_graphs(self, args: Any, kwargs: Any) -> None:
        leaves, frame = take_apart((args, kwargs), "arguments")
        for x, name in zip(leaves, _named(frame, self._arguments).names, strict=True):
            tell_of_graph(x, f"the argument {name} of {self.name}")

    def _record(self, args: Any, kwargs: Any, mesh: Mesh, **more: Any) -> TracedFunction:
        leaves, frame = take_apart((args, kwargs), "arguments")
        frame = _named(frame, self._arguments)
        for x, name in zip(leaves, frame.names, strict=True):
            refuse_sparse(x, f"the argument {name} of {self.name}")
        return TracedFunction(
            self.name,
            self.body,
            self.reads,
            self.cfg,
            leaves,
            frame.of_inputs(leaves),
            self._donated(args, len(leaves)),
            mesh,
            **more,
        )

    def _donated(self, args: Sequence[Any], count: int) -> list[bool]:
        """One flag per tensor among the arguments."""
        if self.donate_argnums and max(self.donate_argnums) >= len(args):
            raise ShardError(
                f"{self.name}: donate_argnums={self.donate_argnums}, and it was called with "
                f"{len(args)} positional arguments. Pass what is donated by position."
            )
        flags: list[bool] = []
        for i, arg in enumerate(args):
            flags += [i in self.donate_argnums] * len(take_apart(arg, "arguments")[0])
        return flags + [False] * (count - len(flags))


def jit(
    fn: Callable[..., Any], cfg: Config | None = None, *, donate_argnums: Sequence[int] = ()
) -> Function:
    """A whole function of the user's as one Program.

    Inside, trees of shards are trees of `DTensor`s: arithmetic is that of the whole leaves, and the
    transforms of this library, `fzero.optim` updates and `tree_*` take them. All becomes one graph,
    under one set of passes: gathers at first use, buckets, memory reused.

    Args:
        fn: a pure function of trees of tensors.
        cfg: see `Config`.
        donate_argnums: arguments whose memory the results may take; do not read them again. A
            function that takes no derivative and gathers nothing may write into them itself, as an
            optimizer's `apply_` does.

    Returns:
        A function of the same arguments; `.lower(...)` gives its Program.

    Raises:
        ConfigError: `fn` can't be called, or `donate_argnums` are no positions. At a call:
        ShardError: a donated argument is not there, can't be written over (it was made under
            `torch.inference_mode()`, or by `expand`), or shares its memory with another.

    Examples:
        >>> import fzero, torch
        >>> def step(params, batch):
        ...     loss, grads = fzero.value_and_grad(loss_fn)(params, batch)
        ...     return fzero.apply_updates(params, {"w": -0.1 * grads["w"]}), loss
        >>> def loss_fn(params, batch):
        ...     return (params["w"] * batch).sum()
        >>> fzero.jit(step)({"w": torch.ones(2)}, torch.ones(2))
        ({'w': tensor([0.9000, 0.9000])}, tensor(2.))
    """
    name = check_callable("jit", fn)
    cfg = as_config("jit", cfg)
    numbers = positions("jit", "donate_argnums", donate_argnums)

    def body(*args: Any, **kwargs: Any) -> Any:
        reads = ReadWhole() if _EAGERLY.get() else contextlib.nullcontext()
        with held_over(), reads, WholeLeaves():
            return fn(*args, **kwargs)

    return Function(name, body, fn, cfg, donate_argnums=numbers, takes_parts=False)


def positions(what: str, field: str, given: Any) -> tuple[int, ...]:
    """Positions of arguments, from one or several.

    Raises:
        ConfigError: they are no positions, or one is named twice.
    """
    numbers = (given,) if isinstance(given, int) else tuple(given)
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in numbers):
        raise ConfigError(f"{what}: {field}={given!r}; positions of arguments, from 0 on.")
    if len(set(numbers)) < len(numbers):
        raise ConfigError(f"{what}: {field}={given!r} names an argument twice.")
    return numbers


def refuse_module(what: str, fn: Any) -> None:
    """See that a user's function is no module, which has parameters of its own.

    Raises:
        ConfigError: it is one.
    """
    if isinstance(fn, nn.Module):
        raise ConfigError(
            f"{what} was given a {type(fn).__name__}, a module; it must be a function of "
            "parameters, as fn(params, batch). Make one: apply, params = "
            "fzero.functionalize(module), and lambda params, batch: loss(apply(params, batch)); or "
            "use fzero.Engine(module, opt, cfg), which takes the module as it is."
        )


def check_callable(what: str, fn: Any) -> str:
    """The name of a user's function.

    Raises:
        ConfigError: it can't be called, is a module, or has an argument that the library takes for
            itself.
    """
    refuse_module(what, fn)
    if not callable(fn):
        raise ConfigError(
            f"{what} was given a {type(fn).__name__}; it must be a function of trees of tensors."
        )
    try:
        taken = "rng" in inspect.signature(fn).parameters and not isinstance(fn, Function)
    except (TypeError, ValueError):
        taken = False
    if taken:
        raise ConfigError(
            f"{what}: the function has an argument `rng`, a keyword that every function of sharded "
            "parameters takes (which random numbers it draws). Give it another name."
        )
    return getattr(fn, "__name__", type(fn).__name__)


def no_program() -> TraceError:
    """Why a function of the eager executor has no Program."""
    return TraceError(
        "Config(executor='eager') stages nothing out, so there is no Program to lower to. Use "
        "Config(executor='traced') for a listing, or measure a step with torch.profiler."
    )


def is_inside(args: Any, kwargs: Any) -> bool:
    """Whether an outer function is being staged out or differentiated, or runs eagerly."""
    recorded = is_differentiated() or get_proxy_mode() is not None
    return recorded or _EAGERLY.get() or has_parts((args, kwargs))


# Of the eager executor: there autograd differentiates, and leaves no mark that a transform would.
_EAGERLY: ContextVar[bool] = ContextVar("fzero_eagerly", default=False)


@contextlib.contextmanager
def _running() -> Iterator[None]:
    """What is called inside is a part of the function that runs."""
    token = _EAGERLY.set(True)
    try:
        yield
    finally:
        _EAGERLY.reset(token)


def _versions(leaves: Sequence[Tensor]) -> list[int]:
    """How often each was written; tensors of inference mode don't count that."""
    # what is written through a DTensor counts for that, and what is written past it for the shard
    pairs = [{id(part): part for part in (x, local_tensor(x))}.values() for x in leaves]
    return [sum(0 if x.is_inference() else x._version for x in pair) for pair in pairs]


def _as_result(x: Any) -> Any:
    return as_result(x) if isinstance(x, Tensor) else x


def _apart_from(leaves: Sequence[Tensor], result: PyTree) -> PyTree:
    """The result in memory of its own, as a Program's is: what one writes there stays there."""
    held = {storage_of(local_tensor(x)) for x in leaves} - {None}

    def apart(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if storage_of(local_tensor(x)) in held:
            x = x.clone()
        held.add(storage_of(local_tensor(x)))
        return x

    return tree.map(apart, result)


def _key(args: Any, kwargs: Any) -> tuple[list[Tensor], Any]:
    """The tensors of a call, and what it is staged out for."""
    leaves, spec = tree.flatten((args, kwargs))
    if not all(isinstance(x, Tensor) for x in leaves):
        leaves, spec = take_apart((args, kwargs), "arguments")
    lazy = tuple(i for i, x in enumerate(leaves) if x.is_conj() or x.is_neg())
    static = spec, first_places(leaves), tree.orders((args, kwargs)), lazy
    return leaves, (static, *map(_kind, leaves))


def _rebuilt(key: Any, leaves: Sequence[Tensor]) -> Any:
    """The arguments of a call with this key, in containers of their own."""
    form = _static(key)
    return form.unflatten(leaves) if isinstance(form, Frame) else tree.unflatten(form, leaves)


def _static(kind: Any) -> Any:
    """The structure of what a call is staged out for; a frame, where not all leaves are tensors."""
    while isinstance(kind, tuple):
        kind = kind[0]
    return kind


def _without_graph(x: Any) -> Any:
    if isinstance(x, Tensor) and x.is_inference():
        return with_versions(x)
    return x.detach() if isinstance(x, Tensor) and x.requires_grad else x


def _kind(x: Tensor) -> Any:
    if isinstance(x, DTensor):
        local = x._local_tensor
        return (x._spec, local.shape, layout_of(local), local.dtype, local.device)
    return (x.shape, layout_of(x), x.dtype, x.device)


def _arguments(fn: Callable[..., Any], second: str | None) -> list[str]:
    """The names of a function's arguments that can be passed by position."""
    try:
        given = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return []
    names = [p.name for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return names if second is None else [*names[:1], second, *names[1:]]


def _named(frame: Frame, names: Sequence[str]) -> Frame:
    """The frame with the arguments' names in place of their numbers."""

    def named(label: str) -> str:
        group, _, rest = label.partition(".")
        number, _, rest = rest.partition(".")
        if group == "1":  # a keyword
            return f"{number}.{rest}".rstrip(".")
        first = names[int(number)] if int(number) < len(names) else f"arg{number}"
        return f"{first}.{rest}".rstrip(".")

    return dataclasses.replace(frame, names=tuple(map(named, frame.names)))


def _check_rng(name: str, rng: Any) -> None:
    if not isinstance(rng, int) or isinstance(rng, bool) or not 0 <= rng < math.inf:
        raise ConfigError(
            f"{name}: rng={rng!r}; it must be an int from 0 on, such as the number of the step."
        )
