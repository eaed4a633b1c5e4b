"""Every mistake is told before anything hangs or changes, and the same step function goes on."""

import ast
import random
import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fzero
from fzero import CheckpointError, Config, ConfigError, FzeroError, ShardError, TraceError, tree
from fzero.errors import arguments_by_name, first_line
from fzero.step.train_step import TrainStep
from tests.ranks import run_ranks

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def _params() -> dict[str, Tensor]:
    return {"b": torch.zeros(3), "w": torch.arange(12.0).reshape(4, 3) / 10}


def _loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return (x @ params["w"] + params["b"]).square().mean()


def _make(model_fn: Callable[..., Any] = _loss, **config: Any) -> TrainStep:
    return fzero.make_train_step(model_fn, fzero.optim.sgd(0.1, momentum=0.9), Config(**config))


X = torch.ones(8, 4)


def _state(step_fn: TrainStep) -> tuple[Any, Any]:
    return step_fn.init(_params())


# ---- the batch
def test_a_batch_that_accumulation_does_not_divide_is_named() -> None:
    step_fn = _make(accum_steps=3)
    state = _state(step_fn)
    with pytest.raises(ShardError, match=r"batch has 8 rows.*accum_steps=3"):
        step_fn(*state, X)
    nested = _make(lambda p, b: _loss(p, b["x"][0]), accum_steps=3)
    with pytest.raises(ShardError, match=r"batch\['x'\]\[0\] has 8 rows"):
        nested(*_state(nested), {"x": [X]})


@pytest.mark.parametrize("accum", [1, 4])
@pytest.mark.parametrize("bad", [np.ones(2), object(), {1}], ids=lambda x: type(x).__name__)
def test_a_leaf_of_the_batch_that_is_no_tensor_is_named(bad: Any, accum: int) -> None:
    step_fn = _make(lambda p, b: _loss(p, b["x"]), accum_steps=accum)
    state = _state(step_fn)
    kind = type(bad).__name__
    with pytest.raises(ShardError, match=rf"batch\['n'\] is a {kind}.*must be a torch.Tensor"):
        step_fn(*state, {"x": X, "n": bad})


# ---- parameters and state
def test_parameters_that_are_shards_are_sent_through_unshard() -> None:
    step_fn = fzero.make_train_step(lambda p, x: p["w"].sum() * x, fzero.optim.sgd(0.1))
    sharded = fzero.shard({"w": torch.ones(4)})
    with pytest.raises(ShardError, match=r"\['w'\] is a DTensor, sharded .* fzero\.unshard\("):
        step_fn.init(sharded)
    assert step_fn.init(fzero.unshard(sharded))[0]["w"].shape == (4,)


def test_a_parameter_that_is_no_tensor_is_named() -> None:
    with pytest.raises(ShardError, match=r"params\['lr'\] is a float"):
        _make().init({**_params(), "lr": 0.1})
    with pytest.raises(ShardError, match=r"model_state\['n'\] is a int"):
        _make().init(_params(), {"n": 1})
    with pytest.raises(ShardError, match=r"full\[1\] is a str"):
        fzero.shard([torch.ones(1), "x"])


@STAGES
def test_parameters_of_another_structure_are_named(stage: int) -> None:
    step_fn = _make(stage=stage)
    params, opt_state = _state(step_fn)
    with pytest.raises(ShardError, match=r"lacks params\['b'\]"):
        step_fn({"w": params["w"]}, opt_state, X)
    with pytest.raises(ShardError, match=r"has params\['extra'\] besides"):
        step_fn({**params, "extra": params["b"]}, opt_state, X)
    with pytest.raises(ShardError, match="another structure"):
        step_fn(tuple(params.values()), opt_state, X)


def test_full_parameters_at_stage_3_are_sent_through_init() -> None:
    step_fn = _make(stage=3)
    _, opt_state = _state(step_fn)
    with pytest.raises(
        ShardError, match=r"params\['b'\] is a Tensor.*must be a DTensor.*init.*fzero.shard"
    ):
        step_fn(_params(), opt_state, X)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_shards_at_a_lower_stage_are_refused(stage: int) -> None:
    step_fn = _make(stage=stage)
    _, opt_state = _state(step_fn)
    with pytest.raises(
        ShardError, match=r"params\['b'\] is a DTensor.*must be a plain tensor.*fzero.unshard"
    ):
        step_fn(fzero.shard(_params()), opt_state, X)


@STAGES
def test_parameters_of_another_shape_or_dtype_are_named(stage: int) -> None:
    step_fn = _make(stage=stage)
    _, opt_state = _state(step_fn)
    wide = {"b": torch.zeros(4), "w": torch.zeros(4, 4)}
    double = tree.map(torch.Tensor.double, _params())
    for other, found in ((wide, r"\(4,\)"), (double, "float64")):
        params = fzero.shard(other) if stage == 3 else other
        with pytest.raises(ShardError, match=rf"params\['b'\] is .*{found}"):
            step_fn(params, opt_state, X)


@STAGES
def test_an_optimizer_state_of_another_kind_is_refused(stage: int) -> None:
    step_fn = _make(stage=stage)
    params, opt_state = _state(step_fn)
    for wrong in ({}, None, opt_state.inner, tuple(opt_state)):
        with pytest.raises(ShardError, match="opt_state is a"):
            step_fn(params, wrong, X)
        with pytest.raises(ShardError, match="opt_state is a"):  # with no plan to compare with
            _make(stage=stage)(params, wrong, X)
    adam = fzero.make_train_step(_loss, fzero.optim.adam(1e-3), Config(stage=stage))
    with pytest.raises(ShardError, match=r"opt_state\.inner"):
        step_fn(params, adam.init(_params())[1], X)
    with pytest.raises(ShardError, match=r"opt_state\.inner"):
        step_fn(params, opt_state._replace(inner=()), X)


def test_a_state_of_other_frozen_leaves_names_the_first_of_them() -> None:
    full = {f"blocks.{i:02}": torch.ones(3) for i in range(50)}

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.stack([(p * x).square().mean() for p in params.values()]).mean()

    frozen, free = _make(loss, frozen=["blocks.0*"]), _make(loss)
    params, opt_state = frozen.init(full)
    free.init(full)
    with pytest.raises(ShardError) as error:
        free(params, opt_state, torch.ones(3))
    assert "lacks opt_state.inner.trace['blocks.00'], " in str(error.value)
    assert "(and 7 more)" in str(error.value)
    assert "load_partial" in str(error.value)
    assert len(str(error.value)) < 600  # not the whole tree, twice


# ---- what is donated
def _stateless(**config: Any) -> TrainStep:
    return fzero.make_train_step(_loss, fzero.optim.sgd(0.1), Config(**config))


@STAGES
@pytest.mark.parametrize("make", [_make, _stateless])
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_state_that_a_step_has_written_over_is_not_taken_again(
    stage: int, make: Callable[..., TrainStep], precision: str | None, tmp_path: Path
) -> None:
    x = X if precision is None else X.bfloat16()
    step_fn = make(stage=stage, precision=precision)
    params, old = _state(step_fn)
    copy = tree.map(torch.clone, old)
    params, opt_state = step_fn(params, old, x)
    takers: list[Callable[[], Any]] = [
        lambda: step_fn(params, old, x),
        lambda: make(stage=stage, precision=precision)(params, old, x),
        lambda: fzero.checkpoint.save(tmp_path, params, old),
    ]
    for take in takers:
        with pytest.raises(ShardError, match=r"opt_state is that of an earlier step, 0, .*donate"):
            take()
    assert not list(tmp_path.iterdir())
    # what is not written over is taken: a copy, the new one, what is read into the old one
    fzero.checkpoint.save(tmp_path, params, copy)
    read = fzero.checkpoint.load(tmp_path, params, old)
    assert int(step_fn(params, copy, x)[1].step) == 1
    assert int(step_fn(*read, x)[1].step) == 1
    assert int(step_fn(params, opt_state, x)[1].step) == 2


def test_an_engine_refuses_a_state_that_a_step_has_written_over() -> None:
    engine = fzero.Engine(nn.Linear(4, 1), fzero.optim.sgd(0.1))
    apply, _ = fzero.functionalize(nn.Linear(4, 1))
    step_fn = fzero.make_train_step(
        lambda p, x: apply(p, x).square().mean(), fzero.optim.sgd(0.1), engine.cfg
    )
    params, old = engine.state
    for expected in (1, 2):
        params, new = step_fn(params, old, X)
        with pytest.raises(ShardError, match="earlier step"):
            engine.state = params, old
        engine.state = params, new
        params, old = engine.state  # the engine's own can be lent again
        assert int(old.step) == expected


def test_a_state_that_was_not_donated_is_taken_again() -> None:
    step_fn = _make(donate=False)
    state = _state(step_fn)
    step_fn(*state, X)
    assert int(step_fn(*state, X)[1].step) == 1


# ---- names of arguments
def _step_fn() -> fzero.TrainStep:
    return fzero.make_train_step(lambda params, x: x.mean(), fzero.optim.sgd(0.1))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: fzero.Engine(nn.Linear(4, 1), stage=2),  # pyright: ignore[reportCallIssue]
            r"Engine has no argument 'stage'. It is a field of cfg=fzero.Config\(...\). "
            r"Call it as Engine\(model, opt=None, cfg=None, \*,",
        ),
        (
            lambda: fzero.make_train_step(_loss, fzero.optim.sgd(0.1), clip_norm=1.0),  # pyright: ignore
            r"make_train_step has no argument 'clip_norm'. It is a field of cfg=fzero.Config",
        ),
        (
            lambda: fzero.Engine(nn.Linear(4, 1), optimizer=fzero.optim.sgd(0.1)),  # pyright: ignore
            r"Engine has no argument 'optimizer'. Did you mean 'opt'\?",
        ),
        (
            lambda: fzero.optim.adamw(1e-3, betas=(0.9, 0.95)),  # pyright: ignore
            r"adamw has no argument 'betas'. Did you mean 'b1' and 'b2'\? Call it as adamw\(lr, b1",
        ),
        (
            lambda: fzero.optim.adamw(nn.Linear(1, 1).parameters(), lr=1e-3),  # pyright: ignore
            r"adamw\(\) got multiple values for argument 'lr'. Parameters and groups are not "
            r"passed here, as torch.optim has them: adamw\(3e-4\).* Call it as adamw\(lr, ",
        ),
        (
            lambda: fzero.optim.cosine(init_value=1e-3, decay_steps=9),  # pyright: ignore
            r"cosine has no argument 'init_value'. Did you mean 'peak'\?",
        ),
        (
            lambda: fzero.optim.warmup_cosine(init_value=0.0),  # pyright: ignore
            r"warmup_cosine has no argument 'init_value'. Did you mean 'start'\?",
        ),
        (
            lambda: Config(gradient_accumulation_steps=2),  # pyright: ignore
            r"Config has no field 'gradient_accumulation_steps'. Did you mean 'accum_steps'\?",
        ),
        (
            lambda: Config(max_grad_norm=1.0),  # pyright: ignore
            r"Config has no field 'max_grad_norm'. Did you mean 'clip_norm'\?",
        ),
        (
            lambda: fzero.optim.sgd(),  # pyright: ignore
            r"sgd\(\) missing 1 required positional argument: 'lr'. Call it as sgd\(lr, mom",
        ),
        (
            lambda: fzero.optim.warmup_cosine(1e-3, warmup=10, total_steps=20),  # pyright: ignore
            r"no argument 'warmup'. Did you mean 'warmup_steps'\?",
        ),
        (
            lambda: fzero.checkpoint.load("run"),  # pyright: ignore
            r"missing 1 required positional argument: 'params_like'. Call it as load\(path, para",
        ),
        (
            lambda: _step_fn().lower(*_step_fn().init({"w": torch.ones(2)})),  # pyright: ignore
            r"missing 1 required positional argument: 'batch'. Call it as step_fn.lower\(para",
        ),
        (
            lambda: _step_fn().init(param={}),  # pyright: ignore
            r"step_fn.init has no argument 'param'. Did you mean 'params'\?",
        ),
    ],
)
def test_an_argument_that_does_not_fit_is_told_with_those_that_do(
    call: Callable[[], Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        call()


@pytest.mark.parametrize(
    "name", ["sgd", "adam", "adamw", "lion", "lamb", "adafactor", "muon", "injected"]
)
def test_every_optimizer_that_is_called_as_torchs_says_where_parameters_go(name: str) -> None:
    optim = fzero.optim
    make = optim.inject_hyperparams(optim.adamw) if name == "injected" else getattr(optim, name)
    for given in (nn.Linear(1, 1).parameters(), [{"params": [torch.ones(1)]}]):
        calls = [((given,), {"lr": 1e-3}), ((given,), {}), ((), {"params": given, "lr": 1e-3})]
        for args, named in calls:
            with pytest.raises(ConfigError, match="Parameters and groups are not passed here"):
                make(*args, **named)
    if name != "injected":
        with pytest.raises(ConfigError, match=r"no argument 'learning_rate'. Did you mean 'lr'\?"):
            make(learning_rate=1e-3)


@pytest.mark.parametrize(
    ("name", "said"), [("AdamW", "adamw"), ("SGD", "sgd"), ("cosine_decay_schedule", "cosine")]
)
def test_optimizers_go_by_the_names_of_others_to_a_hint(name: str, said: str) -> None:
    with pytest.raises(AttributeError, match=rf"Did you mean fzero\.optim\.{said}\?"):
        getattr(fzero.optim, name)
    assert not hasattr(fzero.optim, "nothing_like_it")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: fzero.unshard({}, rank0_only=0), "unshard: rank0_only=0, but .*bool"),
        (lambda: fzero.unshard({}, copy=None), "unshard: copy=None, but copy must be True or F"),
        (lambda: fzero.functionalize(nn.Linear(1, 1), buffers="all"), "buffers='all'"),
        (lambda: fzero.grad(_loss, has_aux=_loss), "grad: has_aux=<function"),
        (lambda: fzero.value_and_grad(_loss, has_aux=np.bool_(True)), "has_aux=.*bool"),
        (lambda: fzero.optim.adamw(0.1, amsgrad="no"), "adamw: amsgrad='no'"),
        (lambda: fzero.optim.sgd(0.1, 0.9, 0.1), "sgd: nesterov=0.1"),
        (lambda: fzero.optim.ema(0.5, 0.5), "ema: debias=0.5"),
        (lambda: fzero.optim.inject_hyperparams(fzero.optim.sgd, momentum=0.9), "momentum=0.9"),
        (lambda: fzero.checkpoint.save("run", {}, asynchronous="yes"), "save: asynchronous='yes'"),
        (lambda: fzero.checkpoint.load("run", {}, strict=0), "load: strict=0"),
        (lambda: fzero.checkpoint.load_partial("run", {}, state={}), r"load_partial: state=\{\}"),
        (lambda: fzero.checkpoint.export_safetensors("o", {}, overwrite=1), "overwrite=1"),
    ],
)
def test_a_flag_is_true_or_false(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        call()


def test_a_type_error_from_inside_is_left_alone() -> None:
    @arguments_by_name
    def outer(x: int) -> None:
        _params(x)  # pyright: ignore[reportCallIssue]

    with pytest.raises(TypeError, match="_params") as error:
        outer(1)
    assert not isinstance(error.value, FzeroError)


@pytest.mark.parametrize(
    "call",
    [
        lambda: fzero.checkpoint.save(_params(), None),  # pyright: ignore
        lambda: fzero.checkpoint.load(_params(), None),  # pyright: ignore
        lambda: fzero.checkpoint.latest(None),  # pyright: ignore
        lambda: fzero.checkpoint.client_state(3),  # pyright: ignore
        lambda: fzero.checkpoint.load_partial(_params(), None),  # pyright: ignore
        lambda: fzero.checkpoint.export_safetensors(_params(), "out"),  # pyright: ignore
    ],
)
def test_what_is_no_path_is_refused(call: Callable[[], Any]) -> None:
    with pytest.raises(CheckpointError, match=r"path is a .*must be a str or a pathlib.Path"):
        call()


def _with_a_collective(name: str) -> list[str]:
    def model_fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
        other = x.clone()
        if name == "all_reduce":
            dist.all_reduce(other)
        elif name == "all_gather":
            dist.all_gather([torch.zeros_like(x) for _ in range(dist.get_world_size())], other)
        else:
            dist.barrier()
        return _loss(params, x * other)

    step_fn = _make(model_fn)
    with pytest.raises(TraceError) as error:
        step_fn(*_state(step_fn), X)
    eager = _make(model_fn, executor="eager")
    eager(*_state(eager), X)  # where it runs as it is
    return [str(error.value)]


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "barrier"])
def test_a_collective_of_torch_distributed_is_named_with_its_line(name: str) -> None:
    for (said,) in run_ranks(2, _with_a_collective, name):
        assert re.search(
            r"a collective of torch.distributed, c10d\.\w+\.default at .*\.py:\d+", said
        )
        assert "_functional_collectives" in said


def test_an_undivided_mesh_is_refused() -> None:
    mesh = DeviceMesh("cpu", [[[0]]], _init_backend=False, _rank=0)
    with pytest.raises(ConfigError, match="undivided mesh"):
        Config(mesh=mesh)


def test_what_is_no_function_or_no_optimizer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model_fn is a Linear|model_fn is a str"):
        fzero.make_train_step("loss", fzero.optim.sgd(0.1))  # pyright: ignore
    with pytest.raises(ConfigError):
        fzero.make_train_step(_loss, torch.optim.SGD([torch.ones(1)], 0.1))


# ---- the loss
@pytest.mark.parametrize(
    ("model_fn", "said"),
    [
        (lambda p, x: (x @ p["w"]).mean(0), r"shape \(3,\)"),
        (lambda p, x: (x @ p["w"]).sum().long(), "int64"),
        (lambda p, x: 3.0, "a float as its loss"),
        (lambda p, x: None, "a NoneType as its loss"),
        (lambda p, x: (_loss(p, x), x), r"a tuple of 2.*has_aux=True"),
        (lambda p, x: {"loss": _loss(p, x)}, "a dict as its loss"),
    ],
)
def test_a_result_that_is_no_loss_is_described(model_fn: Callable[..., Any], said: str) -> None:
    step_fn = _make(model_fn)
    state = _state(step_fn)
    with pytest.raises(FzeroError, match=said):
        step_fn(*state, X)


@pytest.mark.parametrize("given", ["none", "left out", "left out, loss alone", "taken by mistake"])
def test_whoever_loses_buffers_is_told_how_a_step_keeps_them(given: str) -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    apply, params = fzero.functionalize(module)
    with_state, _, buffers = fzero.functionalize(module, buffers=True)
    model_fn = {
        "none": lambda p, x: apply(p, x).mean(),
        "left out": lambda p, x: with_state(p, buffers, x),
        "left out, loss alone": lambda p, x: with_state(p, buffers, x)[0].mean(),
        "taken by mistake": lambda p, s, x: with_state(p, s, x),
    }[given]
    step_fn = _make(model_fn)
    state = step_fn.init(params, *[buffers] * given.startswith("left out"))
    said = r"model_fn\(params, state, batch\) -> \(loss, new_state\), after step_fn.init\(params, "
    with pytest.raises(FzeroError, match=said):
        step_fn(*state, X)


def test_has_aux_without_aux_is_described() -> None:
    step_fn = _make(has_aux=True)
    state = _state(step_fn)
    with pytest.raises(FzeroError, match=r"must return \(loss, aux\)"):
        step_fn(*state, X)
    step_fn = _make(lambda p, s, x: _loss(p, x))
    state = step_fn.init(_params(), {"n": torch.zeros(())})
    with pytest.raises(FzeroError, match=r"must return \(loss, new_model_state\)"):
        step_fn(*state, X)


@pytest.mark.parametrize(
    ("new", "said"),
    [
        ({"m": torch.zeros(2)}, "structure"),
        ({"n": torch.zeros(2)}, r"\(2,\)"),
        ({"n": torch.zeros((), dtype=torch.int64)}, "int64"),
    ],
)
def test_a_model_state_that_changes_its_form_is_refused(new: Any, said: str) -> None:
    step_fn = _make(lambda p, s, x: (_loss(p, x), new))
    state = step_fn.init(_params(), {"n": torch.zeros(())})
    with pytest.raises(ShardError, match=said):
        step_fn(*state, X)


# ---- what can't be staged out
def test_what_torch_compile_has_made_is_named() -> None:
    net = torch.compile(nn.Linear(4, 3), backend="eager")

    def model_fn(params: Any, x: Tensor) -> Tensor:
        return net(x).sum() + _loss(params, x)

    step_fn = _make(model_fn)
    with pytest.raises(TraceError, match=r"torch\.compile has made at .*_orig_mod.*inductor"):
        step_fn(*_state(step_fn), X)


def _reads_a_value(params: Any, x: Tensor) -> Tensor:
    loss = _loss(params, x)
    return loss * loss.item()  # mark: item


def _branches(params: Any, x: Tensor) -> Tensor:
    loss = _loss(params, x)
    if loss > 1:  # mark: branch
        loss = loss * 2
    return loss


def _masks(params: Any, x: Tensor) -> Tensor:
    y = x @ params["w"]
    return y[y > 0].mean()  # mark: mask


def _leaves_torch(params: Any, x: Tensor) -> Tensor:
    scale = np.abs(params["w"].detach().numpy()).max()  # mark: numpy
    return _loss(params, x) * float(scale)


class SkipBatch(Exception):
    """Of the user's, who catches it around the step."""


def test_an_exception_of_the_users_own_comes_as_itself() -> None:
    seen = []

    def model_fn(params: Any, x: Tensor) -> Tensor:
        seen.append(None)
        if x.shape[0] == 5:
            raise SkipBatch("too long")
        return _loss(params, x)

    step_fn = _make(model_fn)
    state = _state(step_fn)
    state = step_fn(*state, torch.ones(4, 4))
    with pytest.raises(SkipBatch, match="too long"):
        step_fn(*state, torch.ones(5, 4))
    calls = len(seen)
    step_fn(*state, torch.ones(4, 4))
    assert len(seen) == calls  # the recording of before still holds


def test_one_that_tells_of_torchs_refusal_is_a_refusal() -> None:
    def model_fn(params: Any, x: Tensor) -> Tensor:
        try:
            return _reads_a_value(params, x)
        except RuntimeError as error:
            raise SkipBatch("in the loss") from error

    step_fn = _make(model_fn)
    with pytest.raises(fzero.TraceError, match=r"SkipBatch: in the loss"):
        step_fn(*_state(step_fn), torch.ones(4, 4))


class _Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y * int(y.sum().item())  # mark: module


def _line(mark: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if line.endswith(f"# mark: {mark}"))


@STAGES
@pytest.mark.parametrize(
    ("model_fn", "mark", "operation"),
    [
        (_reads_a_value, "item", r"\.item\(\)"),
        (_branches, "branch", "an `if` on it"),
        (_masks, "mask", "boolean index"),
        (_leaves_torch, "numpy", "numpy"),
    ],
)
def test_what_cannot_be_staged_out_is_shown_with_its_line(
    stage: int, model_fn: Callable[..., Any], mark: str, operation: str
) -> None:
    step_fn = _make(model_fn, stage=stage)
    state = _state(step_fn)
    with pytest.raises(TraceError, match=operation) as caught:
        step_fn(*state, X)
    message = str(caught.value)
    assert f"{__file__}:{_line(mark)}, in {model_fn.__name__}" in message
    assert "torch.where" in message
    assert "executor='eager'" in message
    assert message.count(first_line(caught.value.__cause__ or caught.value)) == 1


def test_another_cause_of_another_front_end_is_told_once() -> None:
    causes = iter([KeyError("a"), KeyError("b"), KeyError("b")])

    def model_fn(params: Any, x: Tensor) -> Tensor:
        raise next(causes)

    step_fn = _make(model_fn)
    with pytest.raises(TraceError) as caught:
        step_fn(*_state(step_fn), X)
    message = str(caught.value)
    assert message.count("through") == 1
    assert "KeyError: 'b'" in message
    assert ": 'a'\n" in message


def test_the_line_is_shown_inside_a_module_too() -> None:
    apply, params = fzero.functionalize(_Reader())
    step_fn = _make(lambda p, x: apply(p, x).mean())
    state = step_fn.init(params)
    with pytest.raises(TraceError, match=re.escape(f"{__file__}:{_line('module')}, in forward")):
        step_fn(*state, X)


def _draws_from_random(params: Any, x: Tensor) -> Tensor:
    return _loss(params, x) * random.random()


def _draws_from_numpy(params: Any, x: Tensor) -> Tensor:
    return _loss(params, x) * float(np.random.rand())


@pytest.mark.parametrize(
    ("model_fn", "library"), [(_draws_from_random, "random"), (_draws_from_numpy, "numpy.random")]
)
def test_host_randomness_is_refused_and_its_state_put_back(
    model_fn: Callable[..., Any], library: str
) -> None:
    step_fn = _make(model_fn)
    state = _state(step_fn)
    before = random.getstate(), np.random.get_state()[1].tolist()  # pyright: ignore
    with pytest.raises(TraceError, match=rf"`{library}`.*torch.rand"):
        step_fn(*state, X)
    assert before == (random.getstate(), np.random.get_state()[1].tolist())  # pyright: ignore


def _has_a_bug(params: Any, x: Tensor) -> Tensor:
    return (x @ params["w"].t()).mean()  # mark: bug


def _lacks_a_key(params: Any, x: Tensor) -> Tensor:
    return (x @ params["weight"]).mean()  # mark: key


@pytest.mark.parametrize(
    ("model_fn", "mark", "said"),
    [(_has_a_bug, "bug", "RuntimeError.*dim"), (_lacks_a_key, "key", "KeyError.*'weight'")],
)
def test_a_bug_of_the_model_function_is_shown_with_its_line(
    model_fn: Callable[..., Any], mark: str, said: str
) -> None:
    step_fn = _make(model_fn)
    state = _state(step_fn)
    with pytest.raises(FzeroError, match=said) as caught:
        step_fn(*state, X)
    assert f"{__file__}:{_line(mark)}, in {model_fn.__name__}" in str(caught.value)
    assert caught.value.__cause__ is not None


# ---- and then?
def _fails_on_odd_batches(params: Any, x: Tensor) -> Tensor:
    loss = _loss(params, x)
    if x.shape[0] % 2:
        raise ValueError("odd")
    return loss


@pytest.mark.parametrize("donate", [True, False])
@STAGES
def test_after_an_error_the_same_call_gives_the_same_result(stage: int, donate: bool) -> None:
    step_fn = _make(_fails_on_odd_batches, stage=stage, donate=donate, accum_steps=2)
    plain = _make(_loss, stage=stage, donate=donate, accum_steps=2)
    state, expected = _state(step_fn), _state(plain)
    for wrong in (X[:6], X[:5], [X], {"x": 1}, X.long(), X[:, :3]):
        with pytest.raises(FzeroError):
            step_fn(*state, wrong)
        state, expected = step_fn(*state, X), plain(*expected, X)
        for a, b in zip(tree.leaves(state), tree.leaves(expected), strict=True):
            assert torch.equal(_local(a), _local(b))


def _local(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, torch.distributed.tensor.DTensor) else x


# ---- gradients that are not finite
def _touchy(params: Any, x: Tensor) -> Tensor:
    return _loss(params, x).sqrt() * x.amax().log()  # NaN where x is negative


@STAGES
@pytest.mark.parametrize("accum", [1, 2])
def test_nonfinite_gradients_are_reported(stage: int, accum: int) -> None:
    step_fn = _make(_touchy, stage=stage, accum_steps=accum)
    state = _state(step_fn)
    state = step_fn(*state, X)
    assert not state[1].metrics["nonfinite"]
    state = step_fn(*state, -X)
    assert state[1].metrics["nonfinite"]
    assert not state[1].metrics["skipped"]
    assert torch.isnan(_local(state[0]["w"])).all()


@STAGES
@pytest.mark.parametrize("donate", [True, False])
def test_a_step_that_is_not_finite_is_skipped(stage: int, donate: bool) -> None:
    step_fn = _make(_touchy, stage=stage, on_nonfinite="skip", donate=donate, clip_norm=1.0)
    params, opt_state = step_fn(*_state(step_fn), X)
    before = [_local(x).clone() for x in tree.leaves((params, opt_state.inner))]
    params, opt_state = step_fn(params, opt_state, -X)
    after = [_local(x) for x in tree.leaves((params, opt_state.inner))]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert opt_state.metrics["skipped"]
    assert opt_state.metrics["nonfinite"]
    assert opt_state.step == 2  # calls, so that the next masks are new
    params, opt_state = step_fn(params, opt_state, X)
    assert not opt_state.metrics["skipped"]
    assert not torch.equal(_local(params["w"]), before[-1])


@STAGES
@pytest.mark.parametrize("accum", [1, 2])
def test_a_step_that_is_not_finite_is_raised_and_changes_nothing(stage: int, accum: int) -> None:
    step_fn = _make(_touchy, stage=stage, on_nonfinite="raise", accum_steps=accum)
    state = step_fn(*_state(step_fn), X)
    before = [_local(x).clone() for x in tree.leaves(state)]
    with pytest.raises(FzeroError, match=r"step 1: NaN or infinity in w|step 1: NaN .* in b"):
        step_fn(*state, -X)
    assert all(torch.equal(a, _local(b)) for a, b in zip(before, tree.leaves(state), strict=True))
    state = step_fn(*state, X)
    assert state[1].step == 2


def test_a_state_of_an_earlier_tree_does_not_stay() -> None:
    """The same step function, initialised again for other parameters."""
    step_fn = _make()
    step_fn(*_state(step_fn), X)
    state = step_fn.init({"w": torch.ones(4, 5), "b": torch.zeros(5)})
    state = step_fn(*state, X)
    assert state[0]["w"].shape == (4, 5)
    state = step_fn(*_state(step_fn), X)
    expected = _make()
    again = expected(*_state(expected), X)
    assert torch.equal(_local(state[0]["w"]), _local(again[0]["w"]))


def test_a_project_may_be_called_after_ours(tmp_path: Path) -> None:
    folder = tmp_path / "fzero" / "torch"
    folder.mkdir(parents=True)
    file = folder / "train.py"
    file.write_text("def model_fn(params, x):\n    return params['w'].sum() * x.sum().item()\n")
    scope: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), scope)
    step_fn = _make(scope["model_fn"])
    with pytest.raises(TraceError, match=re.escape(f"{file}:2, in model_fn")):
        step_fn(*_state(step_fn), X)


def test_complex_leaves_are_trained_as_pairs_of_real_numbers() -> None:
    leaf = torch.ones(3, dtype=torch.complex64)

    def model_fn(params: dict[str, torch.Tensor], batch: torch.Tensor) -> torch.Tensor:
        return (params["w"] * batch).abs().square().mean()

    step_fn = fzero.make_train_step(model_fn, fzero.optim.sgd(0.1))
    with pytest.raises(ShardError, match=r"params\['w'\] is torch.complex64.*view_as_real"):
        step_fn.init({"w": leaf})


@pytest.mark.parametrize("executor", ["traced", "eager"])
def test_a_step_under_the_caller_s_autocast_is_refused(executor: Any) -> None:
    cfg = Config(executor=executor)
    step_fn = fzero.make_train_step(
        lambda params, batch: params["w"].sum(), fzero.optim.sgd(0.1), cfg
    )
    state = step_fn.init({"w": torch.ones(2)})
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ConfigError, match=r"torch\.autocast.*Precision\(autocast=torch\.bfloat16\)"),
    ):
        step_fn(*state, X)
    assert step_fn(*state, X)[1].step == 1


@dataclass
class _Net:
    w: Tensor
    b: Tensor | None = None


@pytest.mark.parametrize(
    ("params", "instead"),
    [
        (nn.Linear(3, 2), "fzero.functionalize"),
        (nn.Linear(3, 2).parameters(), "named_parameters"),
        (_Net(torch.ones(3)), "register_node"),
        ({"net": [_Net(torch.ones(3))]}, "register_node"),
    ],
    ids=["module", "iterator", "dataclass", "dataclass inside"],
)
def test_what_is_no_tree_of_tensors_says_how_it_becomes_one(params: Any, instead: str) -> None:
    with pytest.raises(ShardError, match=rf"params.* is a .*{instead}"):
        _make().init(params)


def test_a_registered_dataclass_is_a_tree() -> None:
    @dataclass
    class Net:
        w: Tensor
        b: Tensor | None

    optree.dataclasses.register_node(Net, namespace="")
    step_fn = fzero.make_train_step(lambda p, x: (x @ p.w).square().mean(), fzero.optim.adam(0.1))
    params, opt_state = step_fn.init(Net(torch.ones(4), None))
    params, _ = step_fn(params, opt_state, X)
    assert isinstance(params, Net)
    assert params.b is None
    assert tree.labels(params) == ["w"]


def test_a_module_where_a_function_belongs_is_refused() -> None:
    module: Any = nn.Linear(3, 2)
    sgd = fzero.optim.sgd(0.1)
    for what, call in (
        ("make_train_step", lambda: fzero.make_train_step(module, sgd)),
        ("value_and_grad", lambda: fzero.value_and_grad(module)),
        ("sharded", lambda: fzero.sharded(module)),
        ("jit", lambda: fzero.jit(module)),
        ("simulate", lambda: fzero.simulate(module, sgd, Config(), _params(), X, 2)),
    ):
        with pytest.raises(
            ConfigError, match=rf"{what} was given a Linear, a module.*functionalize"
        ):
            call()


def test_a_dict_where_a_config_belongs_is_refused_by_shard() -> None:
    given: Any = {"stage": 3}
    with pytest.raises(ConfigError, match=r"shard: cfg is a dict; pass fzero.Config"):
        fzero.shard(_params(), given)


def test_a_function_of_whole_leaves_inside_jit_is_told_how_it_is_called() -> None:
    params = fzero.shard(_params(), Config())
    with pytest.raises(TraceError, match=r"read as if it were whole.*fzero.sharded\(fn, cfg\)"):
        fzero.jit(_loss)(params, X)
    assert fzero.jit(lambda params, x: fzero.sharded(_loss)(params, x))(params, X).ndim == 0


@pytest.mark.parametrize("executor", ["traced", "eager"])
@pytest.mark.parametrize(
    ("model_fn", "stateful"),
    [
        (lambda params, state, batch: (params["w"].sum(), state), False),
        (lambda params: params["w"].sum(), False),
        (lambda params, batch, *, key: params["w"].sum(), False),
        (lambda params, state, batch, key: (params["w"].sum(), state), True),
    ],
    ids=["no state", "one", "keyword", "four"],
)
def test_a_model_function_with_other_arguments_is_told_which_it_gets(
    model_fn: Callable[..., Any], stateful: bool, executor: Any
) -> None:
    step_fn = _make(model_fn, executor=executor)
    params, opt_state = step_fn.init(_params(), {"mean": torch.zeros(1)} if stateful else None)
    with pytest.raises(FzeroError, match=r"the model function .* can't be called with \(params, "):
        step_fn(params, opt_state, X)


@pytest.mark.parametrize("glob", ["encoder.*", "W", "w.*"])
def test_a_glob_that_freezes_nothing_is_refused(glob: str) -> None:
    with pytest.raises(ConfigError, match=r"Config.frozen: .* matches no leaf; there are .*'w'"):
        _make(frozen=["b", glob]).init(_params())
    with pytest.raises(ConfigError, match=r"Config.frozen: .* matches no leaf; there are "):
        fzero.Engine(nn.Linear(3, 2), None, Config(frozen=["bias", glob]))


def test_an_empty_batch_is_named() -> None:
    step_fn = _make(lambda params, x: nn.functional.mse_loss(x @ params["w"], x[:, :3]))
    with pytest.raises(TraceError, match=r"batch.* has shape \(0, 4\).*Pass over such a batch"):
        step_fn(*step_fn.init(_params()), torch.ones(0, 4))


@pytest.mark.parametrize("frozen", [["*"], lambda name: True])
def test_what_freezes_everything_is_warned_of(frozen: Any) -> None:
    with pytest.warns(UserWarning, match=r"freezes every leaf, 2 in all") as seen:
        _make(frozen=frozen).init(_params())
    assert seen[0].filename == __file__
    with pytest.warns(UserWarning, match=r"freezes every leaf, 2 in all"):
        fzero.Engine(nn.Linear(3, 2), None, Config(frozen=frozen))


@pytest.mark.parametrize("executor", ["traced", "eager"])
def test_an_ordered_dict_of_parameters_in_another_order_is_refused(executor: Any) -> None:
    """The state of `b` would be that of `c`: its leaves come in the order that it had."""
    step_fn = fzero.make_train_step(
        lambda p, x: sum((w * x).sum() for w in p.values()),
        fzero.optim.sgd(0.1, momentum=0.9),
        fzero.Config(executor=executor),
    )
    params, opt_state = step_fn.init(OrderedDict((k, torch.ones(2)) for k in "acb"))
    params, opt_state = step_fn(params, opt_state, torch.ones(2))
    turned = OrderedDict((k, params[k]) for k in "abc")
    with pytest.raises(ShardError, match=r"params\['b'\] where params\['c'\] was .*OrderedDict"):
        step_fn(turned, opt_state, torch.ones(2))
    step_fn(OrderedDict((k, params[k]) for k in "acb"), opt_state, torch.ones(2))


def test_trees_whose_leaves_are_in_their_order_are_told_that_containers_differ() -> None:
    step_fn = _make()
    params, opt_state = step_fn.init({"b": torch.zeros(3), "w": torch.zeros(4, 3)})
    with pytest.raises(ShardError, match="nests the same leaves in other containers"):
        step_fn(OrderedDict(sorted(params.items())), opt_state, X)


def test_masters_in_another_order_than_their_parameters_are_refused() -> None:
    """They were followed as what a user had written into the parameters, and lost their digits."""
    step_fn = fzero.make_train_step(
        lambda p, x: sum((w * x).sum() for w in p.values()),
        fzero.optim.sgd(0.1),
        fzero.Config(stage=0, precision="bf16"),
    )
    given = OrderedDict((k, torch.ones(2) * n) for n, k in enumerate("cab", 1))
    params, opt_state = step_fn.init(given)
    turned = OrderedDict((k, opt_state.master[k]) for k in "abc")
    batch = torch.ones(2, dtype=torch.bfloat16)
    with pytest.raises(ShardError, match=r"opt_state.master\['a'\] where opt_state.master\['c'\]"):
        step_fn(params, opt_state._replace(master=turned), batch)
    step_fn(params, opt_state, batch)


def _warnings() -> list[tuple[str, str]]:
    """Every call of `warnings.warn` in the package, and the stack level that it passes."""
    found: list[tuple[str, str]] = []
    for file in sorted(Path(fzero.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn":
                levels = [ast.unparse(x.value) for x in node.keywords if x.arg == "stacklevel"]
                found.append((file.name, "".join(levels)))
    return found


def test_every_warning_names_the_users_line() -> None:
    found = _warnings()
    assert len(found) > 20
    # its caller is transformers' Trainer, whose line says nothing
    others = [name for name, level in found if level != "users_line()"]
    assert others == ["transformers.py"]


def test_what_a_load_lets_pass_is_told_with_the_users_line(tmp_path: Path) -> None:
    state = _make().init(_params())
    fzero.checkpoint.save(tmp_path, *state, step=1)
    like = _make().init({**_params(), "c": torch.zeros(3)})
    with pytest.warns(UserWarning, match="does not fit in all") as told:
        fzero.checkpoint.load(tmp_path, *like, strict=False)
    assert {x.filename for x in told} == {__file__}
