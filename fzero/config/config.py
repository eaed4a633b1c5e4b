"""The one place where a step is configured.

Every field is checked when the `Config` is made, so that what runs later can rely on it.
"""

import dataclasses
import functools
import inspect
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from os import PathLike
from typing import Any, Literal, NoReturn

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fzero.config import deepspeed
from fzero.config.names import name_of
from fzero.errors import ConfigError, fields_by_name, refuse_unknown, shown, users_line
from fzero.functional.remat import Policy, SaveOnly, saves_of
from fzero.numerics import loss_scale as loss_scales
from fzero.numerics import precision as precisions
from fzero.numerics.loss_scale import LossScale
from fzero.numerics.precision import Precision

Selection = str | Sequence[str] | Callable[[str], bool]

# Names that say an axis splits something else than the data, so that a mesh which has one was
# passed whole by mistake.
_FOREIGN_AXES = (
    "tp",
    "pp",
    "cp",
    "sp",
    "ep",
    "etp",
    "tensor",
    "pipeline",
    "pipe",
    "model",
    "expert",
)


@fields_by_name
@dataclass(frozen=True)
class Config:
    """How a step is sharded, accumulated, kept finite and run.

    Args:
        stage: ZeRO stage: 0 shards nothing, 1 the optimizer state, 2 also gradients, 3 also
            parameters.
        mesh: the ranks. None: all of them on one axis; a 2-axis mesh is `(replicate, shard)`.
        accum_steps: micro-batches per step, whose gradients are averaged.
        clip_norm: bound on the global gradient norm; None does not clip.
        precision: None, "bf16", "fp16", or a `Precision`.
        loss_scale: None, "dynamic", a number (static), or a `LossScale`. With float16 gradients
            None means "dynamic".
        has_aux: the model function returns `(loss, aux)`.
        on_nonfinite: what a step does whose gradients are not finite: "report" it in the metrics,
            "skip" the update, or "raise". With a loss scale it always skips.
        frozen: leaves that get no gradient and no optimizer state: globs over leaf names
            (`*` crosses dots), or a predicate.
        reshard_after_forward: free gathered parameters after forward and gather them again.
        bucket_mb: MiB of gathered bytes that share one collective.
        layout: "rows" gives each rank rows of every leaf, as `Shard(dim)` does. "flat" lays small
            leaves end to end and cuts them there, so that what is gathered needs no copy: see
            docs/design.md. Results are the same. Its DTensors have placements of their own, and
            torch 2.13 is wanted. "auto" is "flat" at stages 1 and 2, where parameters are whole and
            nothing but the optimizer's state is in such DTensors, and at stage 3 in an Engine of
            many small parameters (2**20 elements or more, at most 2**13 each in the mean). It is
            "rows" elsewhere, for optimizers that are not of `fzero.optim`, and with an older torch.
        prefetch: how many buckets ahead gathers are launched. None: 1 in the Engine and on devices;
            in a Program over gloo up to 4, but for those around the end of forward, where early
            buffers would raise the peak.
            `fzero.passes.overlap` goes by estimated times and a cap in bytes instead.
        gather_together: globs over module names, each gathered as one (for modules that only some
            ranks run). A Program gathers alike on all ranks in any case; the eager executor can't
            do this at stage 3.
        opaque: globs over names of modules that run as plain PyTorch inside of the Program, one
            node each (see `fzero.opaque`); or "auto": the smallest that can't be recorded.
        executor: "traced" runs the Program as generated code; "inductor" compiles the operators
            between its collectives when it first runs, and runs what can't be compiled generated:
            see docs/staging.md; "eager" stages nothing out.
        donate: reuse the memory of the inputs; False leaves them untouched.
        offload: "cpu" keeps masters and optimizer state in host memory, pinned where there is a
            GPU, and updates them there; parameters stay on the device in the compute dtype.
            "activations" lets a plan for `memory_limit` keep values of forward in host memory until
            backward reads them, where the copies cost less than computing them again; "all" does
            both. See docs/fit.md.
        seed: of all randomness in the step.
        norm_type: p of the norm that `clip_norm` bounds and `metrics["grad_norm"]` tells;
            `math.inf` for the largest magnitude.
        memory_limit: what a step may hold on a rank: bytes, or a text such as "12GiB" (KiB, MiB,
            GiB, TiB; KB, MB, GB, TB are powers of 1000). Backward then computes values again, and
            leaves are gathered again or kept, as that takes with the least work; results are the
            same bit for bit. None: no limit.
        remat: which modules backward computes again: globs over names of submodules (`*` crosses
            dots), each with a policy of `fzero.remat`, such as `{"blocks.*.attn": "everything",
            "blocks.*": "nothing"}`. A module has the first whose glob matches it or one around it;
            the outermost that has one is computed again as a whole, but for what the policies of
            modules in it keep.
        passes: functions from a Program to a Program, in the order in which they run on every
            Program that is staged out; see `fzero.passes`.
        dynamic: record so that batches of other sizes need no recording of their own, as far as
            what the function does with sizes allows: see docs/staging.md.
        cuda_graph: run each Program as a CUDA graph from its second run on, which takes the time
            that the host needs to launch kernels out of a step. What can't be captured runs as it
            is, and the Program's log says why: see docs/staging.md.
        timeout: seconds that a rank may come later than others to what they do together. None: what
            `init_process_group` was told, over gloo also for the groups of a mesh. A rank that is
            late is waited for; one that went another way, or is gone, is told at once.

    Raises:
        ConfigError: a value that its field does not take; the message names field, value, rule.

    Examples:
        >>> cfg = Config(stage=2, accum_steps=4, precision="bf16", frozen="embed.*")
        >>> cfg.frozen, cfg.is_frozen("embed.weight"), cfg.is_frozen("head.weight")
        (('embed.*',), True, False)
        >>> cfg
        Config(stage=2, accum_steps=4, precision='bf16', frozen=('embed.*',))
        >>> Config(executor="trace")
        Traceback (most recent call last):
        ...
        fzero.errors.ConfigError: Config.executor='trace': must be ... Did you mean 'traced'?
    """

    stage: int = 3
    mesh: DeviceMesh | None = None
    accum_steps: int = 1
    clip_norm: float | None = None
    precision: Literal["bf16", "fp16"] | Precision | None = None
    loss_scale: Literal["dynamic"] | float | LossScale | None = None
    has_aux: bool = False
    on_nonfinite: Literal["report", "skip", "raise"] = "report"
    frozen: Selection = ()
    reshard_after_forward: bool = True
    bucket_mb: float = 25
    layout: Literal["auto", "rows", "flat"] = "auto"
    prefetch: int | None = None
    gather_together: str | Sequence[str] = ()
    opaque: str | Sequence[str] = ()
    executor: Literal["traced", "eager", "inductor"] = "traced"
    donate: bool = True
    offload: Literal["cpu", "activations", "all"] | None = None
    seed: int = 0
    norm_type: float = 2.0
    timeout: float | None = None
    memory_limit: int | str | None = None
    remat: Mapping[str, Policy] | Sequence[tuple[str, Policy]] = ()
    passes: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] = ()
    dynamic: bool = False
    cuda_graph: bool = False

    def __post_init__(self) -> None:
        self._check_int("stage", 0, 3, "0 (nothing sharded) to 3 (parameters sharded)")
        self._check_int("accum_steps", 1, None, ">= 1 (micro-batches per step)")
        if self.prefetch is not None:
            self._check_int("prefetch", 0, None, "None or >= 0 (buckets ahead; 0: when needed)")
        self._check_int("seed", 0, 2**63 - 1, ">= 0 and below 2**63")
        if self.clip_norm is not None:
            self._check_number("clip_norm", "None or a finite number > 0 (a global norm)")
        if self.norm_type != math.inf:
            self._check_number("norm_type", "a number > 0 (p of a p-norm), or math.inf")
        if self.timeout is not None:
            self._check_number("timeout", "None or a finite number > 0 (seconds)")
        self._check_memory_limit()
        self._check_number("bucket_mb", "a finite number > 0 (MiB)")
        for field in ("has_aux", "reshard_after_forward", "donate", "dynamic", "cuda_graph"):
            if not isinstance(getattr(self, field), bool):
                self._refuse(field, "True or False")
        self._check_choice("on_nonfinite", ("report", "skip", "raise"))
        self._check_choice("layout", ("auto", "rows", "flat"))
        self._check_choice("executor", ("traced", "eager", "inductor"))
        self._check_choice("offload", (None, "cpu", "activations", "all"))
        if self.offloads_activations and self.memory_limit is None:
            self._refuse(
                "offload",
                "None or 'cpu' without a memory_limit: which activations go to the host is planned "
                "for a limit. Pass memory_limit='40GiB', say",
            )
        if self.dynamic and (self.executor != "traced" or self.memory_limit or self.opaque):
            self._refuse(
                "dynamic",
                "False with a memory_limit, opaque parts or executor='inductor', which are for the "
                "sizes of one batch, and with executor='eager', which records nothing",
            )
        self._check_cuda_graph()
        if isinstance(self.frozen, nn.Module):  # which can be called, and is no predicate
            self._refuse("frozen", _OF_NAMES)
        if not callable(self.frozen):
            self._set_globs("frozen", _OF_NAMES)
        elif not _takes_one(self.frozen):
            self._refuse("frozen", _OF_NAMES)
        self._set_globs("gather_together", "globs over module names")
        self._set_globs("opaque", '"auto", or globs over module names')
        self._set_remat()
        self._set_passes()
        try:
            precisions.resolve(self.precision)
            loss_scales.resolve(self.loss_scale)
        except ConfigError as error:
            raise ConfigError(f"Config.{error}") from None
        self._check_mesh()

    @functools.cached_property
    def dtypes(self) -> Precision:
        """`precision` with its preset filled in."""
        return precisions.resolve(self.precision)

    @functools.cached_property
    def scaling(self) -> LossScale | None:
        """`loss_scale` as a `LossScale`: dynamic where float16 needs one and none was given.

        Examples:
            >>> Config(precision="fp16").scaling == LossScale(), Config(precision="bf16").scaling
            (True, None)
        """
        given = loss_scales.resolve(self.loss_scale)
        return LossScale() if given is None and self.dtypes.needs_loss_scale else given

    @property
    def limit(self) -> int | None:
        """`memory_limit` in bytes.

        Examples:
            >>> Config(memory_limit="1.5GiB").limit, Config(memory_limit=10**9).limit
            (1610612736, 1000000000)
        """
        return None if self.memory_limit is None else _bytes_of(self.memory_limit)

    @property
    def offloads_state(self) -> bool:
        """Whether masters and optimizer state are in host memory."""
        return self.offload in ("cpu", "all")

    @property
    def offloads_activations(self) -> bool:
        """Whether values of forward may wait for backward in host memory.

        Examples:
            >>> cfg = Config(offload="activations", memory_limit="12GiB")
            >>> cfg.offloads_activations, cfg.offloads_state
            (True, False)
        """
        return self.offload in ("activations", "all")

    @property
    def remat_rules(self) -> tuple[tuple[str, Policy], ...]:
        """`remat` as pairs, as which it is kept."""
        rules: Any = self.remat
        return rules

    @property
    def named_passes(self) -> tuple[tuple[str, Callable[[Any], Any]], ...]:
        """`passes`, each with the name by which ranks, errors and logs know it."""
        passes: Any = self.passes
        return tuple((name_of(fn), fn) for fn in passes)

    @functools.cached_property
    def nonfinite_policy(self) -> Literal["report", "skip", "raise"]:
        """`on_nonfinite`, or "skip" where a loss scale makes overflows part of the plan."""
        return self.on_nonfinite if self.scaling is None else "skip"

    def __repr__(self) -> str:
        fields = [(f, getattr(self, f.name)) for f in dataclasses.fields(self)]
        # the stage in any case: it is what a reader asks first
        said = [f"{f.name}={v!r}" for f, v in fields if v != f.default or f.name == "stage"]
        if self.passes:
            names = ", ".join(name for name, _ in self.named_passes)
            said = [text for text in said if not text.startswith("passes=")] + [f"passes=({names})"]
        return f"Config({', '.join(said)})"

    def is_frozen(self, name: str) -> bool:
        """Whether the leaf of this dotted name is frozen."""
        if callable(self.frozen):
            return bool(self.frozen(name))
        return any(fnmatchcase(name, glob) for glob in self.frozen)

    def check_frozen(self, names: Sequence[str]) -> None:
        """See that every glob of `frozen` matches a leaf: one that does not would train all.

        Where all are frozen it warns.

        Args:
            names: dotted names of all leaves.

        Raises:
            ConfigError: a glob matches none of them.

        Examples:
            >>> Config(frozen=["encoder.*"]).check_frozen(["encode.weight", "head.weight"])
            Traceback (most recent call last):
            ...
            fzero.errors.ConfigError: Config.frozen: 'encoder.*' matches no leaf; ...
        """
        for glob in () if callable(self.frozen) else self.frozen:
            if names and not any(fnmatchcase(name, glob) for name in names):
                near = get_close_matches(glob, names, n=3) or names[:3]
                raise ConfigError(
                    f"Config.frozen: {glob!r} matches no leaf; there are "
                    f"{', '.join(map(repr, near))}, {len(names)} in all. Globs are over the dotted "
                    "names of leaves, whole ones: 'encoder.*'. Nothing would be frozen by it; "
                    "where that is right, pass a predicate: frozen=lambda name: ..."
                )
        if names and self.frozen != () and all(map(self.is_frozen, names)):
            warnings.warn(
                f"Config.frozen freezes every leaf, {len(names)} in all, so nothing is trained. "
                "Leave out of it what is to be.",
                stacklevel=users_line(),
            )

    def replace(self, **changes: Any) -> "Config":
        """A copy with some fields changed, checked like a new one.

        Examples:
            >>> Config(stage=3).replace(stage=1).stage
            1
        """
        refuse_unknown("Config", changes, [f.name for f in dataclasses.fields(Config)])
        return dataclasses.replace(self, **changes)

    def describe(self) -> dict[str, str]:
        """Every field as text that two ranks can compare.

        Examples:
            >>> Config(stage=2).describe()["stage"]
            '2'
        """
        text = {f.name: repr(getattr(self, f.name)) for f in dataclasses.fields(self)}
        if callable(self.frozen):
            # A repr holds an address, which differs between ranks.
            text["frozen"] = str(
                getattr(self.frozen, "__qualname__", type(self.frozen).__qualname__)
            )
        text["remat"] = str([(glob, _policy_text(policy)) for glob, policy in self.remat_rules])
        text["passes"] = str([name for name, _ in self.named_passes])
        if self.mesh is not None:
            names = self.mesh.mesh_dim_names
            text["mesh"] = f"{tuple(self.mesh.shape)} {names or ''}".strip()
        return text

    @classmethod
    def from_deepspeed(
        cls, source: dict[str, Any] | str | PathLike[str], *, world_size: int | None = None
    ) -> "Config":
        """The `Config` that a DeepSpeed configuration asks for, or a list of what it can't have.

        A value "auto" means this library's default. Keys that cannot change results (logging,
        profiling, scheduling of communication) are ignored, and named to the logger
        `fzero.config.deepspeed` at level INFO; every other key that is not translated is refused,
        all of them in one message. `optimizer` and `scheduler` are among those: take them out
        first, they become the `opt` of a step function or an Engine.

        Args:
            source: the configuration as a dict, or the path of its JSON file.
            world_size: ranks, to relate `train_batch_size` and
                `train_micro_batch_size_per_gpu` (default: the process group's, else 1).

        Returns:
            The `Config`; `mesh` stays None.

        Raises:
            ConfigError: keys that are unknown, contradict each other, or cannot be honoured.

        Examples:
            >>> Config.from_deepspeed({
            ...     "gradient_accumulation_steps": 4,
            ...     "bf16": {"enabled": True},
            ...     "zero_optimization": {"stage": 2},
            ... }) == Config(stage=2, accum_steps=4, precision="bf16")
            True
        """
        return cls(**deepspeed.read(source, world_size=world_size))

    # --- checks ---

    def _check_int(self, field: str, low: int, high: int | None, rule: str) -> None:
        value = getattr(self, field)
        ok = isinstance(value, int) and not isinstance(value, bool) and value >= low
        if not ok or (high is not None and value > high):
            self._refuse(field, f"an int {rule}")

    def _check_number(self, field: str, rule: str) -> None:
        value = getattr(self, field)
        ok = isinstance(value, int | float) and not isinstance(value, bool)
        if not ok or not math.isfinite(value) or value <= 0:
            self._refuse(field, rule)

    def _check_cuda_graph(self) -> None:
        if not self.cuda_graph:
            return
        for field, value, why in (
            ("executor", "eager", "executor='eager', which has no Program"),
            ("dynamic", True, "dynamic=True: a graph is for the sizes that it was captured with"),
            ("donate", False, "donate=False: a graph works on parameters where they are"),
        ):
            if getattr(self, field) == value:
                self._refuse("cuda_graph", f"False with {why}")
        if self.offload is not None or self.opaque:
            self._refuse(
                "cuda_graph",
                "False with offload or opaque parts, where the host takes part in each step",
            )
        if self.memory_limit is not None:
            self._refuse(
                "cuda_graph",
                "False with a memory_limit: a graph keeps the memory that it was captured with, "
                "and copies what comes and goes, which no plan has counted",
            )

    def _check_memory_limit(self) -> None:
        if self.memory_limit is None:
            return
        if not _bytes_of(self.memory_limit):
            self._refuse(
                "memory_limit", 'None, bytes as an int > 0, or a text with its unit such as "12GiB"'
            )
        if self.executor == "eager":
            self._refuse(
                "memory_limit",
                "None with executor='eager', which stages nothing out: there is no Program to "
                "plan. Use executor='traced', or fzero.remat",
            )

    def _set_remat(self) -> None:
        given: Any = self.remat
        rules = tuple(given.items()) if isinstance(given, Mapping) else given
        pairs = isinstance(rules, list | tuple) and all(
            isinstance(rule, tuple) and len(rule) == 2 and isinstance(rule[0], str) and rule[0]
            for rule in rules
        )
        if not pairs:
            self._refuse("remat", "a dict from globs over module names to policies of fzero.remat")
        if rules and self.executor == "eager":
            self._refuse(
                "remat",
                "empty with executor='eager', which stages nothing out. Use executor='traced', or "
                "fzero.remat in the model",
            )
        for glob, policy in rules:
            try:
                saves_of(policy)
            except ConfigError as error:
                raise ConfigError(f"Config.remat={given!r}: {glob!r}: {error}") from None
        # as pairs, whose order counts: a config is a value, and a dict is none
        kept = [
            (glob, tuple(policy) if isinstance(policy, list | set | frozenset) else policy)
            for glob, policy in rules
        ]
        object.__setattr__(self, "remat", tuple(kept))

    def _set_passes(self) -> None:
        given: Any = (self.passes,) if callable(self.passes) else self.passes
        if not isinstance(given, list | tuple) or not all(map(callable, given)):
            self._refuse("passes", "functions from a Program to a Program")
        if given and self.executor == "eager":
            self._refuse(
                "passes",
                "empty with executor='eager', which stages nothing out: there is no Program that a "
                "pass could change. Use executor='traced'",
            )
        object.__setattr__(self, "passes", tuple(given))

    def _check_choice(self, field: str, allowed: tuple[str | None, ...]) -> None:
        value = getattr(self, field)
        if not isinstance(value, str | None) or value not in allowed:
            words = [word for word in allowed if word is not None]
            near = get_close_matches(value.lower(), words, n=1) if isinstance(value, str) else []
            hint = f" Did you mean {near[0]!r}?" if near else ""
            self._refuse(field, f"one of {', '.join(map(repr, allowed))}.{hint}")

    def _set_globs(self, field: str, rule: str) -> None:
        value = getattr(self, field)
        globs = (value,) if isinstance(value, str) else value
        ok = isinstance(globs, list | tuple | set | frozenset)
        if not ok or not all(isinstance(glob, str) and glob for glob in globs):
            self._refuse(field, f"{rule} (non-empty strings)")
        if isinstance(globs, set | frozenset):
            # a set of strings has another order in each process, and ranks compare their configs
            globs = sorted(globs)
        object.__setattr__(self, field, tuple(globs))

    def _check_mesh(self) -> None:
        if self.mesh is None:
            return
        if not isinstance(self.mesh, DeviceMesh):
            self._refuse("mesh", "None or a torch.distributed DeviceMesh (init_device_mesh)")
        names = self.mesh.mesh_dim_names or ()
        foreign = [name for name in names if name.lower() in _FOREIGN_AXES]
        if self.mesh.ndim not in (1, 2) or (self.mesh.ndim == 2 and foreign):
            found = f"{self.mesh.ndim} axes of sizes {tuple(self.mesh.shape)}"
            if names:
                found += f" named {names}"
            raise ConfigError(
                f"Config.mesh is an undivided mesh ({found}): it must have one axis, or the two "
                "axes (replicate, shard). Slice out the data-parallel part, mesh['dp'], or "
                "flatten several axes into one, mesh['dp', 'cp']._flatten('data')."
            )
        # axes count by their place: names that say the opposite are a mistake
        if len(names) == 2 and (_shards(names[0]) or _replicates(names[1])):
            raise ConfigError(
                f"Config.mesh has the axes {names} of sizes {tuple(self.mesh.shape)}: two axes "
                "are (replicate, shard), in this order, and these names say otherwise. Make it "
                "with init_device_mesh(device, (replicas, shards), mesh_dim_names=('replicate', "
                "'shard')); if both axes shard, flatten them into one, mesh._flatten('shard')."
            )

    def _refuse(self, field: str, rule: str) -> NoReturn:
        end = "" if rule.endswith(("?", ".")) else "."
        raise ConfigError(f"Config.{field}={shown(getattr(self, field))}: must be {rule}{end}")


_OF_NAMES = "globs over leaf names, such as 'encoder.*' or '*.bias', or a predicate over names"


def _takes_one(fn: Callable[..., Any]) -> bool:
    """Whether a function can be called with one argument, as far as it says what it takes."""
    try:
        inspect.signature(fn).bind("name")
    except ValueError:  # one of C that does not say
        return True
    except TypeError:
        return False
    return True


def _shards(axis: str) -> bool:
    return "shard" in axis.lower() or axis.lower() == "fsdp"


def _replicates(axis: str) -> bool:
    return "replic" in axis.lower() or axis.lower() == "ddp"


def _policy_text(policy: Any) -> str:
    """A policy of `fzero.remat` as text that is the same in every process."""
    if isinstance(policy, SaveOnly):
        return f"save_only{tuple(sorted(policy.names))}"
    if isinstance(policy, str):
        return policy
    if isinstance(policy, tuple):  # operators, of a set as well
        return str(sorted(map(str, policy)))
    return str(getattr(policy, "__qualname__", policy))


_UNITS = {"B": 1} | {
    f"{letter}{end}": base**power
    for power, letter in enumerate("KMGT", 1)
    for end, base in (("iB", 1024), ("B", 1000))
}


def as_config(what: str, cfg: Any) -> Config:
    """What a user passed as `cfg`; None is the default one.

    Args:
        what: was given it, as messages call it.
        cfg: the user's.

    Raises:
        ConfigError: it is something else.

    >>> as_config("Engine", None) == Config()
    True
    """
    if cfg is None:
        return Config()
    if isinstance(cfg, Config):
        return cfg
    advice = "pass fzero.Config(...) or None"
    if isinstance(cfg, Mapping):
        advice = "pass fzero.Config(**fields), or fzero.Config.from_deepspeed(...) of DeepSpeed's"
    raise ConfigError(f"{what}: cfg is a {type(cfg).__name__}; {advice}.")


def _bytes_of(value: object) -> int:
    """Bytes of a limit; 0 if it is none."""
    if isinstance(value, int) and not isinstance(value, bool):
        return max(value, 0)
    found = (
        re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([A-Za-z]*)\s*", value)
        if isinstance(value, str)
        else None
    )
    if found is None or found[2] not in _UNITS:
        return 0
    return int(float(found[1]) * _UNITS[found[2]])
