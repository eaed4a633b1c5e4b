"""Running a Program as a CUDA graph: all its kernels are captured once, and started by one call.

[Note: addresses] A graph's kernels read and write where they did when it was captured. What lives
on from step to step, parameters and the optimizer's state, is written in place and stays where it
is: the graph works on it. What is new at each call, such as the batch, is copied to a place of the
graph's own first. Which is which nobody has to say: an input that lies elsewhere than at the call
before comes and goes. The graph holds what it works on, so an address means the same memory as
long as it lives. Where an input moves later on (parameters from a checkpoint), the graph is
captured again, and that input is copied from then on. Results are copied out: the next call writes
over them. And kernels are those that torch's settings chose: with others it is captured again, too.

A graph ends before the process groups whose collectives it holds: see `fzero.distributed.teardown`.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fzero.distributed import works
from fzero.distributed.mesh import is_gloo
from fzero.distributed.teardown import before_teardown, is_told
from fzero.errors import ConfigError, first_line
from fzero.program.codegen import Executable
from fzero.program.graph import inputs_written_in_place, is_op, placeholders, tensors_of
from fzero.program.program import Program
from fzero.program.sites import SITE


class Captured(Protocol):
    """What a device has captured.

    Attributes:
        results: of the function, where each run leaves them.
    """

    results: list[Any]

    def begin(self) -> None:
        """Have the caller's stream wait until the results of the run before have been read."""
        ...

    def run(self) -> None:
        """Run it, in the caller's stream."""
        ...

    def end(self) -> None:
        """The results have been read, as far as the caller's stream comes."""
        ...


class Device(Protocol):
    """What can capture.

    Attributes:
        type: of its tensors' devices.
    """

    type: str

    def capture(self, run: Callable[[], list[Any]], device: torch.device) -> Captured:
        """Record what a function starts on a device, without running it.

        Raises:
            RuntimeError: it does what can't be captured.
        """
        ...


def replayed(
    program: Program, run: Executable, tell: Callable[[str], None], on: Device | None = None
) -> Executable:
    """`run`, as a graph from its second call on; a Program that can't be captured runs as it is.

    Args:
        program: what `run` runs.
        run: from `compile_program`, say.
        tell: is given a line for the log, when it is known.
        on: what captures; None: `Cuda`.

    Raises:
        ConfigError: at the first run: no input is on such a device.
    """
    return _Replayed(program, run, tell, on or Cuda())


def why_not(program: Program, device: torch.device) -> str:
    """Why a Program can't be captured on a device; "" if it can."""
    for node in program.graph.nodes:
        target = node.target
        if SITE in node.meta:
            return f"{node.name} draws random numbers, from a generator that the host sets"
        if hasattr(target, "runs"):
            return f"{node.name} is an opaque part, which runs Python"
        for x in tensors_of(node):
            if x.device != device:
                return f"{node.name} is on {x.device}, beside {device}"
        tags = getattr(target, "tags", ())
        if torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags:
            return f"{node.name} ({target}) lets the host read a value"
        if not is_op(node, *works.LAUNCHES):
            continue
        if is_gloo(_group(node.args)):
            return f"{node.name} travels by gloo, which the host drives"
        if not is_told():
            return (
                f"torch {torch.__version__} would wait for a graph with {node.name} for ever in "
                "destroy_process_group(), and does not say when it begins"
            )
    return ""


def _group(args: Sequence[Any]) -> str:
    """The name of the process group: the last text among a collective's arguments."""
    return [x for x in args if isinstance(x, str)][-1]


class _Input(NamedTuple):
    """All that kernels know of an input besides its values."""

    address: int
    strides: tuple[int, ...]
    is_conj: bool
    is_neg: bool

    @classmethod
    def of(cls, x: Tensor) -> "_Input":
        return cls(x.data_ptr(), x.stride(), x.is_conj(), x.is_neg())


class _Graph:
    """One capture.

    Args:
        captured: by the device.
        inputs: what it works on: of those that come and go buffers of its own.
        copied: their numbers.
        kept: the numbers of the other tensors.
    """

    def __init__(
        self, captured: Captured, inputs: Sequence[Any], copied: Sequence[int], kept: Sequence[int]
    ) -> None:
        self.captured, self.inputs, self.copied, self.kept = captured, inputs, copied, kept
        self.where, self.settings = self.places(inputs), _settings()
        given = {id(x): i for i, x in enumerate(inputs) if isinstance(x, Tensor)}
        # a result that is an input stays that input; the others are copied out, each once
        self.passed = {i: given[id(x)] for i, x in enumerate(captured.results) if id(x) in given}
        made = {
            id(x): x
            for i, x in enumerate(captured.results)
            if isinstance(x, Tensor) and i not in self.passed
        }
        self.made = list(made.values())
        self.number = {key: n for n, key in enumerate(made)}

    def places(self, inputs: Sequence[Any]) -> list[_Input]:
        """Where the inputs are that it works on."""
        return [_Input.of(inputs[i]) for i in self.kept]

    def fits(self, inputs: Sequence[Any]) -> bool:
        """Whether its kernels are those that would run now, where inputs are now."""
        return self.places(inputs) == self.where and _settings() == self.settings

    def __call__(self, inputs: Sequence[Any], written: Sequence[int]) -> list[Any]:
        """Run it on these inputs, of which it writes some."""
        self.captured.begin()
        _copy([self.inputs[i] for i in self.copied], [inputs[i] for i in self.copied])
        self.captured.run()
        back = [i for i in self.copied if i in written]
        _copy([inputs[i] for i in back], [self.inputs[i] for i in back])
        copies = [torch.empty_like(x) for x in self.made]
        _copy(copies, self.made)
        self.captured.end()
        return [
            inputs[self.passed[i]]
            if i in self.passed
            else copies[self.number[id(x)]]
            if isinstance(x, Tensor)
            else x
            for i, x in enumerate(self.captured.results)
        ]


class _Replayed:
    """See `replayed`."""

    def __init__(
        self, program: Program, run: Executable, tell: Callable[[str], None], on: Device
    ) -> None:
        self.program, self.run, self.tell, self.on = program, run, tell, on
        given = placeholders(program.graph)
        values = [tensors_of(node) for node in given]
        written = inputs_written_in_place(program.graph)
        self.tensors = [i for i, value in enumerate(values) if value]
        self.written = [i for i, node in enumerate(given) if node in written]
        self.copied: set[int] = set()
        self.before: Sequence[Any] | None = None  # held: or others could lie where these did
        self.graph: _Graph | None = None
        self.generated = False
        self._turn = threading.RLock()  # a graph has one set of buffers and results

    def __call__(self, *inputs: Any) -> list[Any]:
        if self.generated:
            return self.run(*inputs)
        with self._turn, torch.no_grad():
            if self.before is None and self.graph is None:
                # kernels and communicators make themselves ready, which can't be captured
                return self._first(inputs)
            graph = self.graph
            if graph is None or not graph.fits(inputs):
                graph = self._captured(inputs)
            if graph is not None:
                return graph(inputs, self.written)
        return self.run(*inputs)

    def _first(self, inputs: Sequence[Any]) -> list[Any]:
        devices = sorted({inputs[i].device for i in self.tensors}, key=str)
        if all(device.type != self.on.type for device in devices):
            found = ", ".join(map(str, devices)) or "no device"
            raise ConfigError(
                f"Config.cuda_graph=True: the tensors are on {found}, and CUDA graphs are captured "
                "on CUDA devices alone. Move the parameters there before init (module.cuda()), or "
                "leave cuda_graph=False."
            )
        found = [x for x in devices if x.type == self.on.type]
        if why := why_not(self.program, found[0]):
            self._give_up(why)
        else:
            self.before = inputs
        return self.run(*inputs)

    def _captured(self, inputs: Sequence[Any]) -> _Graph | None:
        """A graph for inputs that lie as these do; None if there can be none."""
        last = self.before if self.graph is None else self.graph.inputs
        assert last is not None
        kept = [i for i in self.tensors if i not in self.copied]
        self.copied |= {i for i in kept if _Input.of(inputs[i]) != _Input.of(last[i])}
        self.graph = self.before = last = None  # its memory goes before the next one's is asked for
        copied = sorted(self.copied)
        given = list(inputs)
        for i in copied:
            given[i] = inputs[i].clone()
        device = next(inputs[i].device for i in self.tensors)
        try:
            captured = self.on.capture(lambda: self.run(*given), device)
        except RuntimeError as error:  # what an operator does that can't be captured
            self._give_up(first_line(error))
            return None
        kept = [i for i in self.tensors if i not in self.copied]
        self.tell(
            f"CUDA graph: works on {len(kept)} inputs where they are, and copies {len(copied)}"
        )
        self.graph = _Graph(captured, given, copied, kept)
        before_teardown(self)
        return self.graph

    def release(self) -> None:
        """Let the graph go; a call after that begins anew."""
        with self._turn:
            self.graph = self.before = None

    def _give_up(self, why: str) -> None:
        self.generated = True
        self.tell(f"CUDA graph: none, runs as it is: {why}")


def _copy(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Write values over targets of their dtypes, in as few kernels as torch has."""
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, value in zip(targets, values, strict=True):
        pair = by_dtype.setdefault(target.dtype, ([], []))
        pair[0].append(target)
        pair[1].append(value)
    for pair in by_dtype.values():
        torch._foreach_copy_(*pair)


def _settings() -> tuple[Any, ...]:
    """What kernels are chosen by when they are started, and so by a graph only when it is made."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return (
        matmul.fp32_precision,
        cudnn.conv.fp32_precision,
        cudnn.rnn.fp32_precision,
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_fp16_reduced_precision_reduction_split_k,
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction_split_k,
        matmul.allow_fp16_accumulation,
        cudnn.enabled,
        cudnn.benchmark,
        cudnn.benchmark_limit,
        cudnn.deterministic,
        torch.backends.cuda.preferred_blas_library(),
        torch.backends.cuda.preferred_linalg_library(),
        torch.utils.deterministic.fill_uninitialized_memory,  # pyright: ignore
        torch.are_deterministic_algorithms_enabled(),
    )


# --------------------------------------------------------------------------------------- CUDA
class Cuda:
    """CUDA devices."""

    type = "cuda"

    def capture(self, run: Callable[[], list[Any]], device: torch.device) -> Captured:
        """See `Device`."""
        graph = torch.cuda.CUDAGraph()
        # other threads, such as NCCL's that looks after its works, may go on asking the device
        with torch.cuda.device(device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            results = run()
        return _OnCuda(graph, results, device)


class _OnCuda:
    """A graph of torch's. Threads have streams of their own, and it has one set of results."""

    def __init__(
        self, graph: torch.cuda.CUDAGraph, results: list[Any], device: torch.device
    ) -> None:
        self.graph, self.results, self.device = graph, results, device
        self.read = torch.cuda.Event()

    def begin(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.read)

    def run(self) -> None:
        with torch.cuda.device(self.device):
            self.graph.replay()

    def end(self) -> None:
        self.read.record(torch.cuda.current_stream(self.device))
