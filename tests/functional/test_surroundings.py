"""A whole step says where it can't be called, and what it makes is part of nobody's graph."""

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fzero
from tests.ranks import run_ranks

X = torch.linspace(-1, 1, 6).reshape(2, 3)


def model_fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.tanh(x @ params["w"]).square().mean()


def weights() -> dict[str, Tensor]:
    return {"w": torch.linspace(-1, 2, 12).reshape(3, 4)}


def make(stage: int = 3, executor: str = "traced", **more: bool) -> fzero.TrainStep:
    cfg = fzero.Config(stage, executor=executor, **more)  # pyright: ignore[reportArgumentType]
    return fzero.make_train_step(model_fn, fzero.optim.sgd(0.1, momentum=0.9), cfg)


each = pytest.mark.parametrize(("stage", "executor"), [(0, "traced"), (0, "eager"), (3, "traced")])


@each
@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp"])
def test_a_step_inside_of_a_transform_is_refused(stage, executor, transform) -> None:
    step_fn = make(stage, executor)
    params, opt_state = step_fn.init(weights())

    def loss(x: Tensor) -> Tensor:
        return step_fn(params, opt_state, x)[1].metrics["loss"]

    run = {
        "grad": lambda: torch.func.grad(loss)(X),
        "vmap": lambda: torch.func.vmap(loss)(X[None]),
        "jvp": lambda: torch.func.jvp(loss, (X,), (X,)),
    }[transform]
    with pytest.raises(fzero.TraceError, match=r"step_fn was called inside of a transform"):
        run()
    with pytest.raises(fzero.TraceError, match=r"step_fn.init was called inside of a transform"):
        torch.func.vmap(lambda x: step_fn.init({"w": x}) and x)(X)
    # and nothing of it is left
    other = make(stage, executor)
    again = other(*other.init(weights()), X)
    torch.testing.assert_close(step_fn(params, opt_state, X)[1].metrics, again[1].metrics)


def test_fake_tensors_are_refused_with_a_way_to_shapes() -> None:
    step_fn = make()
    with FakeTensorMode():
        state = step_fn.init(weights())
        with pytest.raises(fzero.TraceError, match=r"torch.device\('meta'\)"):
            step_fn(*state, X)
    with FakeTensorMode(), pytest.raises(fzero.TraceError, match="Engine was called under Fake"):
        fzero.Engine(torch.nn.Linear(2, 2))
    with torch.device("meta"):  # the way that it names
        step_fn = make()
        program = step_fn.lower(*step_fn.init({"w": torch.empty(3, 4)}), torch.empty(2, 3))
    assert program.peak_bytes() > 0


@each
@pytest.mark.parametrize("donate", [False, True])
def test_what_a_step_makes_has_no_graph(stage, executor, donate) -> None:
    step_fn = make(stage, executor, donate=donate)
    params, opt_state = step_fn.init(weights())
    x = X.clone().requires_grad_()
    if stage == 0 and not donate:  # as a program that differentiates an inner loop would have it
        params["w"].requires_grad_()
    new = step_fn(params, opt_state, x)
    leaves = [leaf for leaf in fzero.tree.leaves(new) if isinstance(leaf, Tensor)]
    assert [leaf.grad_fn for leaf in leaves] == [None] * len(leaves)


def _compiled(stage: int) -> None:
    torch._dynamo.reset()
    plain, step_fn = make(stage), make(stage)

    @torch.compile(backend="eager")
    def train(params, opt_state, x):
        return step_fn(params, opt_state, 2 * x)

    rank = dist.get_rank() if dist.is_initialized() else 0
    state, other, third = plain.init(weights()), step_fn.init(weights()), step_fn.init(weights())
    for i in range(3):
        x = X * (1 + rank + i)
        state, other = plain(*state, 2 * x), train(*other, x)
        third = torch.compile(step_fn, backend="eager")(*third, 2 * x)
    expected = fzero.unshard(state[0])["w"]
    for params, _ in (other, third):
        assert torch.equal(fzero.unshard(params)["w"], expected)


@pytest.mark.parametrize("stage", [0, 3])
def test_torch_compile_around_a_step_leaves_it_as_it_is(stage) -> None:
    _compiled(stage)
    run_ranks(2, _compiled, stage, timeout=200)


def test_so_it_does_around_functions_of_shards() -> None:
    torch._dynamo.reset()
    params = fzero.shard(weights())
    for fn in (
        fzero.value_and_grad(model_fn),
        fzero.jit(lambda p, x: model_fn({"w": p["w"].full_tensor()}, x)),
        lambda p, x: x @ fzero.unshard(p)["w"],
        lambda p, x: x.sum() * fzero.tree_norm(p),
    ):
        pair = torch.compile(fn, backend="eager")(params, X), fn(params, X)
        pairs = zip(*map(fzero.tree.leaves, map(fzero.unshard, pair)), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def test_full_tensors_are_there_in_jit() -> None:
    params = fzero.shard(weights())
    found = fzero.jit(lambda p: fzero.unshard(p)["w"] * 2)(params)
    assert torch.equal(found, weights()["w"] * 2)
