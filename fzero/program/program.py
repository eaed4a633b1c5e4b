"""A Program: one staged-out function as a graph, with what is known about it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from torch import Tensor, fx

from fzero.errors import ConfigError, FzeroError, shown
from fzero.program.caching import reserved_bytes
from fzero.program.codec import Constants, decoded, encoded
from fzero.program.cost import Cost, cost
from fzero.program.diff import Diff, diff
from fzero.program.dynamic import Dynamic
from fzero.program.file import read, write
from fzero.program.frontier import Frontier, frontier
from fzero.program.graph import Held
from fzero.program.hardware import CPU, Hardware
from fzero.program.held import Memory, Peak, memory, peak
from fzero.program.listing import Collective, collectives, listing
from fzero.program.machines import resolve_hardware
from fzero.program.memory import host_bytes, peak_bytes
from fzero.program.perfetto import save_trace
from fzero.program.plot import plot
from fzero.program.verify import verify


class Others(Protocol):
    """What a Program asks for others of the same function: a `fzero.program.fitting.Fitting`."""

    def frontier(self, points: int) -> "Sequence[Program]":
        """Programs that do more and hold less."""
        ...


@dataclass(frozen=True)
class Program:
    """One staged-out function: an FX graph of aten operators and collectives. A value: passes make
    new Programs.

    Args:
        name: of the part of the step that it is ("gradients", "update").
        graph: a placeholder per input, in order; one output node with a flat tuple. Every node that
            holds tensors has a fake copy of them in `meta["val"]`.
        inputs: a name for each placeholder.
        outputs: a name for each output; of a gradient, its leaf's.
        constants: tensors that the traced function closed over, by `get_attr` target.
        log: one line per front end and pass: what it did.
        times: how often a step runs it (micro-batches).
        resident: what a step's state has that lives beside this graph and isn't among its inputs.
        bucket_bytes: most bytes of full leaves that share a collective; 0 if there are none.
        growth: how much larger buckets may be, as `passes.groups` has it.
        early: how many buckets early gathers are launched, as `passes.schedule` has it.
        thrift: of a plan for a memory limit, what decides which collectives run, as
            `fzero.program.fitting` has it; empty: there is no limit.
        next: what the step runs after it.
        input_categories: what each of the first inputs is: see `fzero.program.categories`.
        output_categories: the same of outputs.
        reduced_over: the process groups over which each gradient must be summed here, exactly once.
        fitting: makes the same function's Programs that hold less.
        literals: those of the constants that the function made while it was recorded.
        dynamic: how it follows the sizes of dims of its inputs, if it does.
    """

    name: str
    graph: fx.Graph
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    log: tuple[str, ...] = ()
    times: int = 1
    resident: tuple[Held, ...] = ()
    bucket_bytes: int = 0
    growth: tuple[int, ...] = ()
    early: tuple[int, ...] = ()
    thrift: tuple[Any, ...] = ()
    next: "Program | None" = None
    input_categories: tuple[str, ...] = ()
    output_categories: tuple[str, ...] = ()
    reduced_over: tuple[str, ...] = ()
    fitting: Others | None = field(default=None, repr=False, compare=False)
    literals: tuple[Any, ...] = field(default=(), repr=False, compare=False)
    dynamic: Dynamic | None = field(default=None, repr=False, compare=False)

    def parts(self) -> Iterator["Program"]:
        """This Program and those that follow it in the step."""
        part: Program | None = self
        while part is not None:
            yield part
            part = part.next

    def then(self, following: "Program") -> "Program":
        """The Program that goes on with `following`."""
        return replace(self, next=following)

    def logged(self, graph: fx.Graph, line: str) -> "Program":
        """The same Program with another graph and one more line in its log."""
        return replace(self, graph=graph, log=(*self.log, line))

    def collectives(self) -> list[Collective]:
        """Rows of (kind, leaves, bytes, phase): see `fzero.program.listing.Collective`."""
        return collectives(self.parts())

    def peak_bytes(self) -> int:
        """Most bytes of tensors alive at once on this rank, inputs included."""
        return max(peak_bytes(part) for part in self.parts())

    def reserved_bytes(self, *, expandable: bool = False) -> int:
        """Bytes that CUDA's caching allocator holds after two steps, gaps between tensors included:
        what the device must have, beside the driver. See [Note: reserved].

        Args:
            expandable: with `PYTORCH_ALLOC_CONF=expandable_segments:True`.

        Examples:
            >>> import torch, fzero
            >>> step_fn = fzero.make_train_step(lambda p, x: (p["w"] * x).sum(), fzero.optim.sgd(1))
            >>> state = step_fn.init({"w": torch.ones(2**20)})
            >>> program = step_fn.lower(*state, torch.ones(2**20))
            >>> program.peak_bytes() // 2**20, program.reserved_bytes() // 2**20
            (12, 22)
        """
        return reserved_bytes(list(self.parts()), expandable=expandable)

    def host_bytes(self) -> int:
        """Most bytes of host memory that values of forward take at once on their way to backward:
        see `Config.offload`. They are not among `peak_bytes()`, but where the device is the CPU.
        """
        return max(host_bytes(part) for part in self.parts())

    def peak(self) -> Peak:
        """What is alive at the moment when most is: rows of (bytes, category, name, module, where),
        the largest first. They add up to `peak_bytes()`.

        Examples:
            >>> import torch, fzero
            >>> def model_fn(params, x):
            ...     return torch.tanh(x @ params["w"]).square().mean()
            >>> step_fn = fzero.make_train_step(model_fn, fzero.optim.adam(0.1))
            >>> state = step_fn.init({"w": torch.ones(64, 4)})
            >>> program = step_fn.lower(*state, torch.ones(8, 64))
            >>> peak = program.peak()
            >>> sum(row.bytes for row in peak) == peak.bytes == program.peak_bytes()
            True
            >>> nbytes, category, name, module, where = peak[0]
            >>> nbytes, category, name
            (2048, 'batch', 'batch')
            >>> peak.by_category()["optimizer"]
            2052
        """
        return peak(self.parts())

    def memory(self) -> Memory:
        """The bytes alive at each node of the step, by category: see `fzero.program.held.Moment`.

        A Program that runs once per micro-batch is shown once.
        """
        return memory(self.parts())

    def cost(self, hardware: Hardware | str = CPU) -> Cost:
        """FLOPs, bytes moved and bytes sent of a whole step on this rank, by module, and an
        estimate of the time they take.

        Args:
            hardware: what it would run on, as a `fzero.program.hardware.Hardware`, or a name that
                `fzero.simulate` takes: "h100".

        Raises:
            ConfigError: there is no hardware of that name.

        Examples:
            >>> import torch, fzero
            >>> step_fn = fzero.make_train_step(lambda p, x: (p["w"] * x).sum(), fzero.optim.sgd(1))
            >>> program = step_fn.lower(*step_fn.init({"w": torch.ones(2)}), torch.ones(2))
            >>> program.cost("h100").seconds < program.cost("cpu").seconds < 1e-3
            True
        """
        return cost(self.parts(), resolve_hardware(hardware))

    def frontier(self, points: int = 12, hardware: Hardware | str = CPU) -> Frontier:
        """What the step would hold and recompute under memory limits, from none to the least that
        can be reached. `.plot(path)` draws it; see `fzero.program.frontier`.

        Args:
            points: how many limits, evenly spread.
            hardware: that times are estimated for, or its name.

        Raises:
            ConfigError: `points` is no number of 1 or more, or no hardware has that name.
            FzeroError: the Program is one that nothing can be planned for.
        """
        if not isinstance(points, int) or isinstance(points, bool) or points < 1:
            raise ConfigError(
                f"program.frontier: points={shown(points)}, but it must be a whole number >= 1."
            )
        hardware = resolve_hardware(hardware)
        if self.fitting is None:
            raise FzeroError(
                f"the Program {self.name!r} has no other plans: a step's, or a function's of "
                "shards, as step_fn.lower(...) gives it, has."
            )
        others = [replace(part, next=self.next) for part in self.fitting.frontier(points)]
        return frontier([tuple(other.parts()) for other in others], hardware)

    def plot(self, path: str | Path, hardware: Hardware | str = CPU) -> None:
        """Draw memory by category over the estimated time of a step, and under it what computes and
        what communicates then.

        Args:
            path: ends with what it is to be: ".png", ".svg", ".pdf".
            hardware: what it would run on, or its name.

        Raises:
            ConfigError: there is no hardware of that name, or no picture of that ending.
            FzeroError: matplotlib is not installed, or the picture can't be written.
        """
        plot(self.parts(), path, resolve_hardware(hardware))

    def save_trace(self, path: str | Path, hardware: Hardware | str = CPU) -> None:
        """Write the estimated time line as JSON for ui.perfetto.dev or chrome://tracing.

        Args:
            path: of the file to write.
            hardware: what it would run on, or its name.

        Raises:
            ConfigError: there is no hardware of that name.
            FzeroError: it can't be written; what was there is as it was.
        """
        save_trace(self.parts(), path, resolve_hardware(hardware))

    def diff(self, other: "Program") -> Diff:
        """What `other`'s step does differently; printed it is a table.

        Raises:
            ConfigError: `other` is no Program.
        """
        _check_program("diff", other)
        return diff(self.parts(), other.parts())

    def verify(self, others: Iterable["Program"] = ()) -> None:
        """Check that the Program does what was recorded; see `fzero.program.verify`.

        Args:
            others: the same step's Programs of other ranks: they must launch the same collectives
                in the same order.

        Raises:
            ConfigError: one of `others` is no Program.
            TraceError: with the node, what was recorded, and what is there.
        """
        others = [others] if isinstance(others, Program) else list(others)
        for other in others:
            _check_program("verify", other)
        verify(self.parts(), [tuple(other.parts()) for other in others])

    def listing(self, *, verbose: bool = False) -> str:
        """The Program as text, in sections by module, with bytes made and bytes alive.

        Args:
            verbose: show every node; otherwise layers that are alike are shown once, and views
                stand inside the operators that read them.
        """
        return listing(self.parts(), verbose=verbose)

    def save(self, path: str | Path) -> None:
        """Write it to a file, with those that follow it; see [Note: saved Programs].

        A step function's Programs, with what says whether they still hold, are saved by
        `TrainStep.save_programs`.

        Args:
            path: of one file, in the format of safetensors. Tensors that the function closed over
                are in it as they are now.

        Raises:
            FzeroError: it holds an opaque part, whose Python can't be written as data; or the file
                can't be written (a full disk, a folder or a device of that name).

        Examples:
            >>> import tempfile, torch, fzero
            >>> step_fn = fzero.make_train_step(lambda p, x: (p["w"] * x).sum(), fzero.optim.sgd(1))
            >>> state = step_fn.init({"w": torch.ones(2)})
            >>> program = step_fn.lower(*state, torch.ones(2))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     program.save(f"{folder}/step.program")
            ...     again = fzero.Program.load(f"{folder}/step.program")
            >>> str(again) == str(program), again.peak_bytes() == program.peak_bytes()
            (True, True)
        """
        tensors: dict[str, Tensor] = {}

        def kept(name: str, x: Tensor) -> str:
            tensors[f"{len(tensors)}.{name}"] = x
            return f"{len(tensors) - 1}.{name}"

        write(Path(path), {"programs": [part.encoded(kept) for part in self.parts()]}, tensors)

    @classmethod
    def load(cls, path: str | Path) -> "Program":
        """Read what `save` wrote: a Program to look at, to compare and to check.

        Nothing in the file is run or unpickled: operators are looked up by their names. What it
        computes is up to who wrote it, as with any program: run those of people whom you trust.

        Raises:
            FzeroError: it is no such file, or names operators that are not there.
        """
        try:
            data, tensors = read(Path(path))
            if "entries" in data:
                raise ValueError("step_fn.save_programs wrote it: step_fn.load_programs(folder)")
            parts = [cls.decoded(one, tensors.__getitem__) for one in data["programs"]]
        except (KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
            raise FzeroError(
                f"{path} holds no Program that this process can read ({type(error).__name__}: "
                f"{error}). Save it again with program.save(path), under this torch and fzero."
            ) from error
        done = parts.pop()
        while parts:
            done = parts.pop().then(done)
        return done

    def encoded(self, constants: Constants) -> Any:
        """It, without what follows it, as plain data; see `fzero.program.codec`."""
        fields = {name: getattr(self, name) for name in _PLAIN}
        if self.dynamic is not None:  # the numbers that follow sizes are expressions of torch's
            fields["log"] = (*self.log, "dynamic: no more: a file serves the recorded sizes")
        return encoded(self, fields, constants)

    @classmethod
    def decoded(cls, data: Any, constant: Callable[[Any], Tensor]) -> "Program":
        """The inverse of `encoded`."""
        fields = decoded(data, constant)
        return cls(**fields)

    def __str__(self) -> str:
        return self.listing()


def _check_program(method: str, other: object) -> None:
    if not isinstance(other, Program):
        raise ConfigError(
            f"program.{method}: {shown(other)} is no Program. Pass what step_fn.lower(...) returns."
        )


_PLAIN = (
    *("name", "inputs", "outputs", "log", "times", "resident", "bucket_bytes", "growth"),
    *("early", "thrift"),
    *("input_categories", "output_categories", "reduced_over"),
)

Pass = Callable[[Program], Program]
