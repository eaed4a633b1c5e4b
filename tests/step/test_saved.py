"""Saved Programs: a restart stages nothing, computes the same, and never runs what is stale."""

import array
import contextlib
import contextvars
import copy
import dataclasses
import functools
import importlib
import itertools
import json
import math
import operator
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import fzero
from fzero import Program, passes
from fzero.errors import FzeroError
from fzero.program.file import read, write
from fzero.step import saved
from fzero.step.train_step import TrainStep
from fzero.transforms import recorded
from tests.ranks import run_ranks

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: fzero.optim.adamw(fzero.optim.warmup_cosine(0.1, 2, 9), weight_decay=0.1),
    "sgd": lambda: fzero.optim.sgd(0.1, momentum=0.9),
    "muon": lambda: fzero.optim.muon(0.1),
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 3)
        self.drop = nn.Dropout(0.3)
        self.mask: Tensor
        self.register_buffer("mask", torch.arange(8.0))
        self.scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        h = h * self.mask.to(h.dtype) * torch.tensor([1.0, 2.0] * 4, dtype=h.dtype)
        return self.last(self.drop(h)) * self.scale


class Fresh:
    """What a process makes of its own: the same again at each start."""

    def __init__(self, opt: str = "adamw", lr: float | None = None, **cfg: Any) -> None:
        torch.manual_seed(3)
        self.module = Model()
        apply, params = fzero.functionalize(self.module)
        self.outside, self.factor = torch.full((3,), 0.5), 1.0
        block = fzero.remat(apply)

        def model_fn(params: Any, batch: Any) -> Any:
            out = block(params, batch["x"]) + self.outside
            loss = (out * self.factor - batch["y"]).square().mean()
            return (loss, {"out": out.sum(), "n": [1, out.mean()]}) if cfg.get("has_aux") else loss

        made = OPTIMIZERS[opt]() if lr is None else fzero.optim.adamw(lr)
        self.step_fn: TrainStep = fzero.make_train_step(model_fn, made, fzero.Config(**cfg))
        self.state = self.step_fn.init(params)

    def steps(self, count: int = 3) -> list[Any]:
        """The losses and, at the end, all leaves."""
        found: list[Any] = []
        for i in range(count):
            generator = torch.Generator().manual_seed(10 * i)
            batch = {
                "x": torch.randn(4, 5, generator=generator),
                "y": torch.randn(4, 3, generator=generator),
            }
            self.state = self.step_fn(*self.state, batch)
            found.append(self.state[1].metrics["loss"].clone())
        return [*found, *fzero.unshard(self.state[0]).values()]


def equal(a: list[Any], b: list[Any]) -> bool:
    return all(map(torch.equal, a, b)) and len(a) == len(b)


@pytest.fixture
def nothing_is_staged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is recorded, of which there should be nothing."""
    found: list[str] = []
    init = recorded.Recorded.__init__

    def noted(self: Any, *args: Any, **more: Any) -> None:
        init(self, *args, **more)
        found.append(self.program.name)

    monkeypatch.setattr(recorded.Recorded, "__init__", noted)
    return found


# ------------------------------------------------------------------------------- the same again
@pytest.mark.parametrize(
    ("stage", "opt"),
    [(0, "adamw"), (1, "sgd"), (2, "muon"), (3, "adamw"), (3, "muon")],
)
def test_what_is_loaded_computes_what_was_recorded(
    stage: int, opt: str, tmp_path: Path, nothing_is_staged: list[str]
) -> None:
    cfg: dict[str, Any] = {"stage": stage, "accum_steps": 2, "clip_norm": 1.0, "has_aux": True}
    if opt == "sgd":
        cfg |= {"precision": "fp16", "donate": False}
    first = Fresh(opt, **cfg)
    wanted = first.steps()
    first.step_fn.save_programs(tmp_path)
    program = first.step_fn.lower(*first.state, batch())
    nothing_is_staged.clear()
    again = Fresh(opt, **cfg)
    again.step_fn.load_programs(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert equal(again.steps(), wanted)
    assert not nothing_is_staged
    loaded = again.step_fn.lower(*again.state, batch())
    assert loaded.listing(verbose=True) == program.listing(verbose=True)
    assert loaded.peak() == program.peak()
    loaded.verify()
    again.step_fn.save_programs(tmp_path / "again")
    (file,) = tmp_path.glob("*.programs")
    assert read(tmp_path / "again" / file.name)[0] == read(file)[0]


def batch(rows: int = 4) -> dict[str, Tensor]:
    return {"x": torch.zeros(rows, 5), "y": torch.zeros(rows, 3)}


def on_two_ranks(folder: str) -> list[tuple[bool, int]]:
    """For each stage: whether all is equal with every file, then without one of them."""
    found = []
    for stage in range(4):
        path = Path(folder) / str(stage)
        first = Fresh(stage=stage, accum_steps=2)
        wanted = first.steps()
        first.step_fn.save_programs(path)
        torch.distributed.barrier()
        for gone in (False, True):
            if gone and torch.distributed.get_rank() == 1:
                (path / "rank-00001-of-00002.programs").unlink()
            again = Fresh(stage=stage, accum_steps=2)
            again.step_fn.load_programs(path)
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                same = equal(again.steps(), wanted)
            said = [w for w in warned if "are not used" in str(w.message)]
            found.append((same, len(said)))
    return found


def test_ranks_go_on_with_and_without_their_files(tmp_path: Path) -> None:
    one, two = run_ranks(2, on_two_ranks, str(tmp_path))
    assert one == [(True, 0), (True, 0)] * 4
    assert two == [(True, 0), (True, 1)] * 4


# ----------------------------------------------------------------------------- what has changed
def _change_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved, "_sources", lambda: "others")


GROUNDS: dict[str, tuple[dict[str, Any], Callable[[pytest.MonkeyPatch], None] | None]] = {
    "torch from": ({}, lambda m: m.setattr(torch, "__version__", "3.0")),
    "fzero from": ({}, _change_source),
    "Config.clip_norm from None to 2.0": ({"clip_norm": 2.0}, None),
    "Config.seed from 0 to 1": ({"seed": 1}, None),
    "the processor from": ({}, lambda m: m.setattr(saved, "_processor", lambda kind: "abacus")),
    "this rank from 0 to 1": ({}, None),
    "the mesh from": ({}, None),
    "leaf first.weight from": ({"frozen": ["first.weight"]}, None),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("programs")
    first = Fresh()
    first.steps(1)
    first.step_fn.save_programs(path)
    return path


def file_in(folder: Path) -> Path:
    return folder / "rank-00000-of-00001.programs"


@pytest.mark.parametrize("said", GROUNDS)
def test_a_change_of_what_all_rests_on_is_named(
    said: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg, change = GROUNDS[said]
    data, tensors = read(file_in(folder))
    name = said.partition(" from")[0]
    if name in ("this rank", "the mesh"):
        data["grounds"][name] = "1" if name == "the mesh" else "0"
        said = f"{name} from "
        data["grounds"][name] += " once"
    write(file_in(tmp_path), data, tensors)
    if change is not None:
        change(monkeypatch)
    again = Fresh(**cfg)
    again.step_fn.load_programs(tmp_path)
    with pytest.warns(UserWarning, match="are not used, and the step is recorded") as warned:
        again.steps(1)
    assert said in str(warned[0].message)


def scaled(fresh: Fresh) -> None:
    fresh.module.scale = 3.0


def factored(fresh: Fresh) -> None:
    fresh.factor = 2.0


def evaluated(fresh: Fresh) -> None:
    fresh.module.eval()


def reshaped(fresh: Fresh) -> None:
    fresh.outside = torch.zeros(1)


def hooked(fresh: Fresh) -> None:
    def doubled(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return out * 2

    fresh.module.first.register_forward_hook(doubled)


def recoded(fresh: Fresh) -> None:
    first: Any = fresh.module.first
    first.forward = lambda x: nn.functional.linear(x, first.weight)


def dropping_more(fresh: Fresh) -> None:
    fresh.module.drop.p = 0.5


def defaults(fresh: Fresh) -> None:
    torch.use_deterministic_algorithms(True)


CHANGES: dict[Any, str] = {
    scaled: "scale from float 2.0 to float 3.0",
    factored: "factor from float 1.0 to float 2.0",
    evaluated: "training from bool True to bool False",
    reshaped: "outside from Tensor float32 (3,)",
    hooked: "_forward_hooks",
    recoded: "forward from",
    dropping_more: "drop",
    defaults: "torch's deterministic_algorithms from False to True",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_the_model_function_reads_is_compared(
    change: Callable[[Fresh], None], folder: Path
) -> None:
    try:
        recording, loading = Fresh(), Fresh()
        change(recording)
        change(loading)
        loading.step_fn.load_programs(folder)
        with pytest.warns(UserWarning, match="are not used, and the step is recorded") as warned:
            found = loading.steps()
        assert CHANGES[change] in str(warned[0].message)
        assert equal(found, recording.steps())  # and not what was saved
    finally:
        torch.use_deterministic_algorithms(False)


def test_another_learning_rate_records_the_update_alone(
    tmp_path: Path, nothing_is_staged: list[str]
) -> None:
    first = Fresh(lr=0.1)
    first.steps(1)
    first.step_fn.save_programs(tmp_path)
    nothing_is_staged.clear()
    again = Fresh(lr=0.2)
    again.step_fn.load_programs(tmp_path)
    with pytest.warns(UserWarning, match="the update is recorded: .*lr from float 0.1 to"):
        found = again.steps()
    assert nothing_is_staged == ["update"]
    assert equal(found, Fresh(lr=0.2).steps())


def test_a_value_that_was_read_is_compared(tmp_path: Path) -> None:
    def step_for(value: float) -> tuple[TrainStep, list[Any]]:
        outside = torch.tensor(value)

        def model_fn(params: Any, batch: Tensor) -> Tensor:
            return (params["w"] * batch).sum() * float(outside)

        step_fn = fzero.make_train_step(model_fn, fzero.optim.sgd(0.1))
        return step_fn, list(step_fn.init({"w": torch.ones(3)}))

    step_fn, state = step_for(2.0)
    step_fn(state[0], state[1], torch.ones(3))
    step_fn.save_programs(tmp_path)
    for value in (2.0, 3.0):
        step_fn, state = step_for(value)
        step_fn.load_programs(tmp_path)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            assert step_fn(state[0], state[1], torch.ones(3))[1].metrics["loss"].item() == 3 * value
        assert [*map(str, (w.message for w in warned))] == [] or (
            value == 3.0 and "values" in str(warned[0].message)
        )


def test_values_from_outside_are_those_of_this_process(folder: Path) -> None:
    again = Fresh()
    again.outside.fill_(9.0)
    again.module.mask.fill_(1.0)
    again.step_fn.load_programs(folder)
    plain = Fresh()
    plain.outside.fill_(9.0)
    plain.module.mask.fill_(1.0)
    assert equal(again.steps(), plain.steps())


def test_a_parameter_with_a_hook_is_refused_as_ever(folder: Path) -> None:
    again = Fresh()
    again.step_fn.load_programs(folder)
    again.steps(1)
    again.module.first.weight.register_hook(lambda grad: grad)
    with pytest.raises(FzeroError, match="hook"):
        again.steps(1)


def test_another_kind_of_batch_is_recorded(folder: Path) -> None:
    again = Fresh()
    again.step_fn.load_programs(folder)
    with pytest.warns(UserWarning, match="none for this kind of batch"):
        again.step_fn.lower(*again.state, batch(6))


def test_a_step_that_follows_sizes_is_saved_for_the_recorded_ones(
    tmp_path: Path, nothing_is_staged: list[str]
) -> None:
    def rows(*sizes: int) -> Iterator[dict[str, Tensor]]:
        for size in sizes:
            generator = torch.Generator().manual_seed(size)
            yield {k: torch.randn(size, n, generator=generator) for k, n in (("x", 5), ("y", 3))}

    def trained(made: Fresh, *sizes: int) -> list[Tensor]:
        for one in rows(*sizes):
            made.state = made.step_fn(*made.state, one)
        return [*fzero.unshard(made.state[0]).values()]

    first = Fresh("sgd", dynamic=True)
    trained(first, 4, 6, 9)
    assert nothing_is_staged.count("gradients") == 2  # the third follows the second
    first.step_fn.save_programs(tmp_path)
    nothing_is_staged.clear()
    again = Fresh("sgd", dynamic=True)
    again.step_fn.load_programs(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = trained(again, 4, 6)
    assert not nothing_is_staged
    assert equal(found, trained(Fresh("sgd"), 4, 6))
    (one,) = rows(6)
    log = again.step_fn.lower(*again.state, one).log
    assert log[-1] == "dynamic: no more: a file serves the recorded sizes"
    nothing_is_staged.clear()
    with pytest.warns(UserWarning, match="there is none for this kind of batch"):
        found = trained(again, 9, 7)
    assert nothing_is_staged == ["gradients"]  # which follows sizes again
    assert equal(found, trained(Fresh("sgd"), 4, 6, 9, 7))


@dataclasses.dataclass(frozen=True)
class Clamps:
    """A pass: relu as a clamp."""

    def __call__(self, program: Program) -> Program:
        graph = passes.copy_graph(program.graph)
        found = passes.calls(graph, "aten::relu")
        for node in found:
            with graph.inserting_before(node):
                made = passes.inline(graph, lambda x: x.clamp_min(0), node.args[0])
            passes.replace_value(node, made)
        return program.logged(graph, f"{len(found)} relus are clamps")


def test_what_a_pass_put_in_a_values_place_stands_for_it_after_a_load(tmp_path: Path) -> None:
    first = Fresh("sgd", passes=(Clamps(),))
    wanted = first.steps()
    program = first.step_fn.lower(*first.state, batch())
    assert "2 relus are clamps" in program.log
    program.save(tmp_path / "one")
    fzero.Program.load(tmp_path / "one").verify()
    first.step_fn.save_programs(tmp_path)
    again = Fresh("sgd", passes=(Clamps(),))
    again.step_fn.load_programs(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert equal(again.steps(), wanted)
    again.step_fn.lower(*again.state, batch()).verify()


def test_another_step_made_of_one_looks_where_that_does(tmp_path: Path) -> None:
    first = Fresh("sgd")
    wanted = first.steps()
    first.step_fn.save_programs(tmp_path)
    again = Fresh("sgd")
    again.step_fn.load_programs(tmp_path)
    clamped, again.step_fn = again.step_fn.with_pass(Clamps()), copy.copy(again.step_fn)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a recording would say why
        assert equal(again.steps(), wanted)
    with pytest.warns(UserWarning, match="are not used, and the step is recorded"):
        clamped.lower(*again.state, batch())


# ------------------------------------------------------------------------------ files that fail
@pytest.mark.parametrize("folder", ["", "none"])
def test_a_first_start_has_no_files(folder: str, tmp_path: Path) -> None:
    again = Fresh()
    again.step_fn.load_programs(tmp_path / folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again.steps(1)


def test_a_relative_folder_is_that_of_the_call(
    nothing_is_staged: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = Fresh("sgd")
    first.steps(1)
    first.step_fn.save_programs("programs")
    nothing_is_staged.clear()
    again = Fresh("sgd")
    again.step_fn.load_programs("programs")
    monkeypatch.chdir("/")
    again.steps(1)
    assert nothing_is_staged == []


def test_a_folder_that_is_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    first = Fresh("sgd")
    first.steps(1)
    with pytest.raises(FzeroError, match=r"can't be written.*can be a folder"):
        first.step_fn.save_programs(tmp_path / "x")
    with pytest.raises(FzeroError, match=r"x is a file.*pass the folder"):
        first.step_fn.load_programs(tmp_path / "x")


def test_a_file_for_other_ranks_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "rank-00000-of-00008.programs").write_bytes(file_in(folder).read_bytes())
    again = Fresh()
    again.step_fn.load_programs(tmp_path)
    with pytest.warns(UserWarning, match="rank-00000-of-00001.*rank-00000-of-00008"):
        again.steps(1)


@pytest.mark.parametrize("keep", [5, 0.999])
def test_a_damaged_file_is_recorded_over(keep: float, folder: Path, tmp_path: Path) -> None:
    content = file_in(folder).read_bytes()
    file_in(tmp_path).write_bytes(content[: math.ceil(keep * len(content)) if keep < 1 else 5])
    again = Fresh()
    again.step_fn.load_programs(tmp_path)
    with pytest.warns(UserWarning, match="can't be read"):
        again.steps(1)


def test_a_file_calls_nothing_but_operators(folder: Path, tmp_path: Path) -> None:
    data, tensors = read(file_in(folder))
    text = json.dumps(data)
    for name in ("system", "aten::no_such_operator"):
        changed = json.loads(text)
        rows = changed["entries"][0]["gradients"]["program"]["nodes"]
        row = next(row for row in rows if isinstance(row[2], dict) and "op" in row[2])
        row[2] = {"fn": name} if name == "system" else {"op": [name, "default"]}
        write(file_in(tmp_path), changed, tensors)
        again = Fresh()
        again.step_fn.load_programs(tmp_path)
        with pytest.warns(UserWarning, match="can't be read"):
            again.steps(1)


def test_what_has_no_form_as_data_is_refused(tmp_path: Path) -> None:
    def island(params: Any, batch: Tensor) -> Tensor:
        return fzero.opaque(torch.sin)(params["w"] * batch).sum()

    hidden = itertools.repeat(torch.ones(3))  # no walk looks into an iterator

    def blind(params: Any, batch: Tensor) -> Tensor:
        return (params["w"] * batch * next(hidden)).sum()

    for model_fn, said in ((island, "can't be saved: it calls"), (blind, "from outside")):
        step_fn = fzero.make_train_step(model_fn, fzero.optim.sgd(0.1))
        state = step_fn.init({"w": torch.ones(3)})
        with pytest.raises(FzeroError, match="nothing is staged out yet"):
            step_fn.save_programs(tmp_path)
        step_fn(state[0], state[1], torch.ones(3))
        with pytest.raises(FzeroError, match=said):
            step_fn.save_programs(tmp_path)
    assert not list(tmp_path.iterdir())


UNSEEN = '''"""A module of the user's; {comment}."""
import torch

class Made:
    def scaled(self, x):
        return x * {factor}  # of an object that is made inside: no walk comes to it

KINDS = {{"made": Made}}

def model_fn(params, x):
    return KINDS["made"]().scaled((params["w"] * x).sum())
'''


@pytest.mark.parametrize(
    ("edited", "loss"),
    [({"comment": "with another comment"}, 6.0), ({"factor": "3.0"}, 9.0)],
    ids=["comment", "code"],
)
def test_code_that_no_walk_comes_to_counts_by_its_module(
    edited: dict[str, str], loss: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    first = {"comment": "as it was", "factor": "2.0"}
    for number, words in enumerate([first, {**first, **edited}]):
        (tmp_path / "unseen_by_walks.py").write_text(UNSEEN.format(**words))
        importlib.invalidate_caches()
        sys.modules.pop("unseen_by_walks", None)
        user: Any = importlib.import_module("unseen_by_walks")
        step_fn = fzero.make_train_step(user.model_fn, fzero.optim.sgd(0.0))
        state = step_fn.init({"w": torch.ones(3)})
        warned = pytest.warns(UserWarning, match="the code of the module 'unseen_by_walks'")
        with warned if number and "factor" in edited else contextlib.nullcontext():
            step_fn.load_programs(tmp_path / "programs")
            state = step_fn(*state, torch.ones(3))
        step_fn.save_programs(tmp_path / "programs")
    sys.modules.pop("unseen_by_walks", None)
    assert float(state[1].metrics["loss"]) == loss


# --------------------------------------------------------- what is not of the function's own doing
_NOBODY: Any = object()
_SCALE: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=2.0)


def spare_buffer() -> nn.Module:
    module: Any = nn.Sequential(nn.Linear(5, 3))
    module.register_buffer("spare", torch.ones(2))
    return module


def statistics_at_rest() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)).eval()  # counts batches, unread


def lstm() -> nn.Module:
    return Reading(nn.LSTM(5, 3), lambda module, x: module(x)[0])


def hook_of_torchs() -> nn.Module:
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(5, 3))).eval()


def sentinel() -> nn.Module:
    def read(module: nn.Module, x: Tensor, scale: Any = _NOBODY) -> Tensor:
        return module(x) if scale is _NOBODY else module(x) * scale

    return Reading(nn.Linear(5, 3), read)


def context_variable() -> nn.Module:
    return Reading(nn.Linear(5, 3), lambda module, x: module(x) * _SCALE.get())


class Reading(nn.Module):
    """Calls `read(inner, x)`."""

    def __init__(self, inner: nn.Module, read: Callable[..., Tensor]) -> None:
        super().__init__()
        self.inner, self.read = inner, read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.inner, x)


def one_step(
    module: nn.Module, load: Path | None = None, save: Path | None = None
) -> tuple[Tensor, list[str]]:
    """The loss, and what was said of Programs that are not used."""
    apply, params = fzero.functionalize(module)
    step_fn = fzero.make_train_step(
        lambda params, x: apply(params, x).square().mean(), fzero.optim.sgd(0.1)
    )
    state = step_fn.init(params)
    if load is not None:
        step_fn.load_programs(load)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        state = step_fn(*state, torch.arange(20.0).view(4, 5))
    if save is not None:
        step_fn.save_programs(save)
    said = [str(w.message) for w in warned if "are not used" in str(w.message)]
    return state[1].metrics["loss"], said


INCIDENTAL = [
    spare_buffer,
    statistics_at_rest,
    lstm,
    hook_of_torchs,
    sentinel,
    context_variable,
]


@pytest.mark.parametrize("make", INCIDENTAL, ids=lambda make: make.__name__)
def test_only_what_the_function_reads_counts(
    make: Callable[[], nn.Module], tmp_path: Path, nothing_is_staged: list[str]
) -> None:
    torch.manual_seed(0)
    wanted, _ = one_step(make(), save=tmp_path)
    nothing_is_staged.clear()
    nn.Linear(1, 1).register_forward_hook(print)  # in another process the numbers of hooks differ
    torch.manual_seed(0)
    found, said = one_step(make(), load=tmp_path)
    assert torch.equal(found, wanted)
    assert (nothing_is_staged, said) == ([], [])


def test_hooks_are_compared_by_what_they_do_and_in_their_order(tmp_path: Path) -> None:
    def halve(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return out / 2

    def shift(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return out + 1

    def with_hooks(*hooks: Any, kwargs: tuple[bool, ...] = (False, False)) -> nn.Module:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(5, 3))
        for hook, with_kwargs in zip(hooks, kwargs, strict=True):
            module.register_forward_hook(hook, with_kwargs=with_kwargs)
        return module

    one_step(with_hooks(halve, shift), save=tmp_path)
    wanted, _ = one_step(with_hooks(shift, halve))
    found, said = one_step(with_hooks(shift, halve), load=tmp_path)
    assert torch.equal(found, wanted)
    assert len(said) == 1
    assert "_forward_hooks" in said[0]

    def either(module: nn.Module, args: Any, *rest: Any) -> Tensor:
        return rest[-1] * len(rest)

    folder = tmp_path / "either"
    one_step(with_hooks(either, either, kwargs=(False, True)), save=folder)
    _, said = one_step(with_hooks(either, either, kwargs=(True, False)), load=folder)
    assert len(said) == 1
    assert "_forward_hooks_with_kwargs" in said[0]
    _, said = one_step(with_hooks(either, either, kwargs=(False, True)), load=folder)
    assert not said


class Number(float):
    """A float of a class of one's own."""


class Numbers:
    def scale(self, by: float) -> float:
        return by

    twice = functools.partialmethod(scale, 2.0)
    thrice = functools.partialmethod(scale, 3.0)


WITH_VALUES: dict[str, tuple[Any, Any, Callable[[Any], float]]] = {
    "attrgetter": (operator.attrgetter("real"), operator.attrgetter("imag"), lambda f: f(2 + 3j)),
    "itemgetter": (operator.itemgetter(0), operator.itemgetter(1), lambda f: f([2.0, 3.0])),
    "a float's class": (Number(2.0), Number(3.0), lambda x: x),
    "pattern": (re.compile("a"), re.compile("b"), lambda p: 2.0 if p.match("a") else 3.0),
    "array": (array.array("d", [2.0]), array.array("d", [3.0]), lambda a: a[0]),
    "path": (Path("a"), Path("abc"), lambda p: float(len(str(p)))),
    "partialmethod": (
        Numbers.__dict__["twice"],
        Numbers.__dict__["thrice"],
        lambda m: m.__get__(Numbers(), Numbers)(),
    ),
}


@pytest.mark.parametrize("kind", WITH_VALUES)
def test_what_an_object_of_the_library_holds_is_compared(kind: str, tmp_path: Path) -> None:
    first, second, read = WITH_VALUES[kind]

    def made(held: Any) -> nn.Module:
        torch.manual_seed(0)
        return Reading(nn.Linear(5, 3), lambda module, x: module(x) * read(held))

    one_step(made(first), save=tmp_path)
    assert not one_step(made(first), load=tmp_path)[1]
    wanted, _ = one_step(made(second))
    found, said = one_step(made(second), load=tmp_path)
    assert torch.equal(found, wanted)
    assert len(said) == 1


class Marker:
    """What is told from another one by `is` alone."""


@pytest.mark.parametrize("kind", [object, Marker])
def test_one_sentinel_is_not_taken_for_another(kind: type, tmp_path: Path) -> None:
    def made(same: bool) -> nn.Module:
        torch.manual_seed(0)
        first, second = kind(), kind()
        given = first if same else second

        def read(module: nn.Module, x: Tensor) -> Tensor:
            return module(x) * (2 if given is first else 3)

        return Reading(nn.Linear(5, 3), read)

    one_step(made(True), save=tmp_path)
    wanted, _ = one_step(made(False))
    found, said = one_step(made(False), load=tmp_path)
    assert torch.equal(found, wanted)
    assert len(said) == 1
    assert not one_step(made(True), load=tmp_path)[1]


def test_a_context_variable_that_says_otherwise_is_noticed(tmp_path: Path) -> None:
    one_step(context_variable(), save=tmp_path)
    token = _SCALE.set(3.0)
    try:
        _, said = one_step(context_variable(), load=tmp_path)
    finally:
        _SCALE.reset(token)
    assert len(said) == 1
    assert "from float 2.0 to float 3.0" in said[0]


def test_what_keeps_programs_from_being_saved_is_named(tmp_path: Path) -> None:
    fresh = Fresh()
    with sdpa_kernel(SDPBackend.MATH):
        fresh.steps(1)
    with pytest.raises(FzeroError, match=r"no longer holds.*flash_attention from False to True"):
        fresh.step_fn.save_programs(tmp_path)
