"""Values and derivatives of sharded parameters equal those of plain PyTorch on full tensors."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import fzero
from fzero import optim, tree
from fzero.errors import ShardError
from tests.ranks import run_ranks

F64 = torch.float64
SHAPES = {"bias": (16,), "gain": (), "up": (7, 15), "wide": (15, 3), "out": (16, 17)}
Params = dict[str, Tensor]


def _tree(seed: int) -> Params:
    generator = torch.Generator().manual_seed(seed)
    return {k: torch.randn(s, generator=generator, dtype=F64) / 2 for k, s in SHAPES.items()}


def _predict(p: Params, x: Tensor) -> Tensor:
    h = torch.tanh(x @ p["up"]) * p["gain"]
    return torch.nn.functional.pad(h, (0, 2)) @ p["out"].t() + p["bias"]


def _loss(p: Params, x: Tensor) -> Tensor:
    return (_predict(p, x).sin() ** 2).mean() + (x @ p["up"] @ p["wide"]).square().mean()


def _full(values: Any) -> Any:
    return tree.map(lambda x: x.full_tensor() if isinstance(x, DTensor) else x, values)


def _dot(a: Params, b: Params) -> Tensor:
    return torch.stack([(a[k] * b[k]).sum() for k in a]).sum()


def _cases(
    cfg: fzero.Config, put: Callable[[Params], Params], data: Tensor, rank: int
) -> dict[str, tuple[Any, Any]]:
    """By name: what the library gives on this rank, and what plain torch gives for all ranks."""
    params, along, other = _tree(1), _tree(2), _tree(4)
    p, t, u, x = put(params), put(along), put(other), data[rank]
    func = torch.func

    def mean(q: Params) -> Tensor:
        return torch.stack([_loss(q, one) for one in data]).mean()

    def grads(q: Params) -> Params:
        return func.grad(mean)(q)

    def hess(q: Params, v: Params) -> Params:
        return func.jvp(grads, (q,), (v,))[1]

    found: dict[str, tuple[Any, Any]] = {}
    found["sharded"] = fzero.sharded(_predict, cfg)(p, x), _predict(params, x)
    every = fzero.sharded(_loss, cfg, reduce="mean")(p, x)
    found["sharded mean"] = every, mean(params)
    with_aux = fzero.value_and_grad(lambda q, x: (_loss(q, x), {"x": x.sum()}), cfg, has_aux=True)
    (value, aux), g = with_aux(p, x)
    found["value"], found["aux"], found["grad"] = (
        (value, mean(params)),
        (aux["x"], x.sum()),
        (
            g,
            grads(params),
        ),
    )
    found["jvp"] = fzero.jvp(_loss, cfg)(p, t, x), func.jvp(mean, (params,), (along,))
    rows = fzero.jvp(_predict, cfg)(p, t, x)
    found["jvp of rows"] = rows, func.jvp(lambda q: _predict(q, x), (params,), (along,))
    value, pull = fzero.vjp(_loss, cfg)(p, x)
    doubled = {k: 2 * v for k, v in grads(params).items()}
    found["vjp"] = (value, pull(torch.tensor(2.0))), (mean(params), doubled)
    value, pull = fzero.vjp(_predict, cfg)(p, x)
    together, pull_all = func.vjp(lambda q: torch.stack([_predict(q, x) for x in data]), params)
    cotangents = torch.randn(together.shape, generator=torch.Generator().manual_seed(9), dtype=F64)
    found["vjp of rows"] = pull(cotangents[rank]), pull_all(cotangents)[0]
    found["hvp"] = fzero.hvp(_loss, cfg)(p, t, x), (grads(params), hess(params, along))

    # a gradient inside: plain torch's, of full leaves
    def penalty(q: Params, x: Tensor) -> Tensor:
        inner = func.grad(_loss)(q, x)
        return _loss(q, x) + 0.3 * _dot(inner, inner)

    def penalised(q: Params) -> Tensor:
        return torch.stack([penalty(q, one) for one in data]).mean()

    found["penalty"] = fzero.grad(penalty, cfg)(p, x), func.grad(penalised)(params)

    # and the library's: of the mean over ranks
    def nested(q: Params, x: Tensor) -> Tensor:
        inner = fzero.grad(_loss, cfg)(q, x)
        stepped = fzero.apply_updates(q, {k: -0.1 * v for k, v in inner.items()})
        return _loss(stepped, x)

    def maml(q: Params) -> Tensor:
        inner = grads(q)
        return mean({k: v - 0.1 * inner[k] for k, v in q.items()})

    meta = func.grad(maml)(params)
    found["maml"] = fzero.value_and_grad(nested, cfg)(p, x), (maml(params), meta)
    curved = func.jvp(func.grad(maml), (params,), (along,))[1]
    found["hvp of maml"] = fzero.hvp(nested, cfg)(p, t, x), (meta, curved)
    # reverse over reverse: what was computed alike on every rank is differentiated twice
    _, pull = fzero.vjp(fzero.grad(nested, cfg), cfg)(p, x)
    found["vjp of maml's gradient"] = pull(t), curved

    # what is differentiated outside is beside the inner parameters, or reaches a second network
    def ridge(q: Params, scale: Params, x: Tensor) -> Tensor:
        return _loss(q, x) + scale["gain"] * q["up"].square().sum()

    def tuned(scale: Params, q: Params, x: Tensor) -> Tensor:
        inner = fzero.grad(ridge, cfg)(q, scale, x)
        return _loss({k: v - 0.1 * inner[k] for k, v in q.items()}, x) + scale["gain"]

    def tuned_by_all(scale: Params) -> Tensor:
        ridges = func.grad(lambda q: torch.stack([ridge(q, scale, one) for one in data]).mean())
        inner = ridges(params)
        return mean({k: v - 0.1 * inner[k] for k, v in params.items()}) + scale["gain"]

    hyper = tuned_by_all(along), func.grad(tuned_by_all)(along)
    found["hypergradient"] = fzero.value_and_grad(tuned, cfg)(t, p, x), hyper

    def taught(q: Params, x: Tensor) -> Tensor:
        return fzero.sharded(_predict, cfg)(u, x * q["gain"]).square().mean()

    def taught_by_all(q: Params) -> Tensor:
        return torch.stack([_predict(other, x * q["gain"]).square().mean() for x in data]).mean()

    found["through a teacher"] = fzero.grad(taught, cfg)(p, x), func.grad(taught_by_all)(params)

    # transforms of transforms, on shards
    third = fzero.jvp(fzero.hvp(_loss, cfg), cfg)(p, u, t, x)
    plain = func.jvp(lambda q: (grads(q), hess(q, along)), (params,), (other,))
    found["jvp of hvp"] = third, plain
    _, pull = fzero.vjp(fzero.grad(_loss, cfg), cfg)(p, x)
    found["vjp of grad"] = pull(t), hess(params, along)

    def pulled(q: Params, v: Params, x: Tensor) -> Params:
        return fzero.vjp(_loss, cfg)(q, x)[1](torch.tensor(1.0, dtype=F64))

    _, pull = fzero.vjp(pulled, cfg)(p, t, x)
    # of full leaves: each rank has a whole gradient, and its own cotangent for it; but what is 0-d
    # counts as a mean, with one cotangent
    share = {k: v / (len(data) if v.dim() else 1) for k, v in along.items()}
    found["vjp of vjp"] = pull(share), hess(params, along)

    def sam(q: Params, x: Tensor) -> tuple[Params, Params]:
        first = fzero.grad(_loss, cfg)(q, x)
        scale = 0.05 / fzero.tree_norm(first)
        up = fzero.tree_map(lambda a, b: a + b * scale, q, first)
        return first, fzero.grad(_loss, cfg)(up, x)

    first = grads(params)
    scale = 0.05 / _dot(first, first).sqrt()
    second = grads({k: v + first[k] * scale for k, v in params.items()})
    found["sam"] = fzero.jit(sam, cfg)(p, x), (first, second)

    def per_sample(q: Params, x: Tensor) -> Tensor:
        each = func.vmap(func.grad(lambda q, row: _loss(q, row[None])), in_dims=(None, 0))(q, x)
        return torch.stack([v.reshape(len(x), -1).square().sum(1) for v in each.values()]).sum(0)

    found["per sample"] = fzero.sharded(per_sample, cfg)(p, x), per_sample(params, x)
    found["vdot"] = fzero.tree_vdot(p, t), _dot(params, along)
    found["random"] = fzero.tree_random_like(p, 5), fzero.tree_random_like(params, 5)
    teacher = fzero.sharded(lambda q, other, x: _predict(q, x) - _predict(other, x), cfg)
    found["two trees"] = teacher(p, t, x), _predict(params, x) - _predict(along, x)
    return found


def _errors(hybrid: bool, stage: int, executor: Any) -> dict[str, float]:
    mesh = init_device_mesh("cpu", (2, 2)) if hybrid else None
    cfg = fzero.Config(mesh=mesh, stage=stage, executor=executor, bucket_mb=0.0005)
    world = dist.get_world_size()
    data = torch.randn(world, 4, 7, generator=torch.Generator().manual_seed(3), dtype=F64)

    def put(values: Params) -> Params:
        return fzero.shard(values, cfg) if stage == 3 else {k: v.clone() for k, v in values.items()}

    errors = {}
    for name, (ours, plain) in _cases(cfg, put, data, dist.get_rank()).items():
        ours, (expected, spec) = _full(ours), tree.flatten(plain)
        assert tree.flatten(ours)[1] == spec, name
        gaps = [(a - b).abs().max() for a, b in zip(tree.leaves(ours), expected, strict=True)]
        errors[name] = torch.stack(gaps).max().item()
    return errors


@pytest.mark.parametrize(
    ("world", "hybrid", "stage"),
    [
        (2, False, 3),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in [
                *[(1, False, 0), (1, False, 3), (2, False, 0)],
                *[(4, True, 0), (4, True, 3)],
            ]
        ),
    ],
)
def test_every_transform_equals_plain_torch(world: int, hybrid: bool, stage: int) -> None:
    for errors in run_ranks(world, _errors, hybrid, stage, "traced", timeout=240):
        assert errors == pytest.approx(dict.fromkeys(errors, 0.0), abs=1e-10)


def test_the_eager_executor_has_the_same_numbers() -> None:
    for errors in run_ranks(2, _errors, False, 3, "eager", timeout=240):
        assert errors == pytest.approx(dict.fromkeys(errors, 0.0), abs=1e-10)


def _two(x: Tensor) -> Tensor:
    return torch.stack([_loss(_tree(1), part) for part in x.chunk(2)]).mean()


def test_micro_batches_are_averaged_and_frozen_leaves_have_no_gradient() -> None:
    cfg = fzero.Config(accum_steps=2, frozen=["wide", "gain"])
    params, x = fzero.shard(_tree(1), cfg), torch.randn(4, 7, dtype=F64)
    (value, aux), grads = fzero.value_and_grad(
        lambda p, x: (_loss(p, x), {"rows": len(x), "x": x.sum()}), cfg, has_aux=True
    )(params, x)
    assert (grads["wide"], grads["gain"]) == (None, None)
    assert aux["x"].shape == (2,)
    expected = torch.func.grad(lambda p: _loss(p, x))(_tree(1))
    assert (value - _two(x)).abs() < 1e-12
    assert (_full(grads)["up"] - expected["up"]).abs().max() < 1e-12


@pytest.mark.parametrize("executor", ["traced", "eager"])
def test_gradients_are_a_direction_although_frozen_leaves_have_none(executor: Any) -> None:
    cfg = fzero.Config(frozen=["wide", "gain"], executor=executor)
    full, x = _tree(1), torch.randn(4, 7, dtype=F64)
    params = fzero.shard(full, cfg)
    _, grads = fzero.value_and_grad(_loss, cfg)(params, x)
    still = tree.either(_full(grads), tree.map(torch.zeros_like, full))
    _, slope = fzero.jvp(_loss, cfg)(params, grads, x)
    torch.testing.assert_close(slope, _dot(still, still), rtol=1e-12, atol=0)
    _, products = fzero.hvp(_loss, cfg)(params, grads, x)
    _, expected = torch.func.jvp(torch.func.grad(lambda p: _loss(p, x)), (full,), (still,))
    for name, found in _full(products).items():
        if found is None:
            assert name in ("wide", "gain")
        else:
            torch.testing.assert_close(found, expected[name], rtol=1e-10, atol=1e-12)
    # inside of another derivative
    nested = fzero.jvp(lambda p, t, x: fzero.tree_vdot(fzero.hvp(_loss, cfg)(p, t, x)[1], t), cfg)
    value, _ = nested(params, grads, grads, x)
    torch.testing.assert_close(value, _dot(expected, still), rtol=1e-10, atol=1e-12)
    with pytest.raises(ShardError, match="must have their structure"):
        fzero.hvp(_loss, cfg)(params, grads | {"up": None}, x)
    with pytest.raises(ShardError, match="must have their structure"):
        fzero.jvp(_loss, cfg)(params, list(grads.values()), x)


def test_two_arguments_are_differentiated_together() -> None:
    both = fzero.grad(lambda p, q, x: (p["w"] * q["w"] * x).sum(), argnums=(1, 0))
    of_q, of_p = both(fzero.shard({"w": torch.ones(2)}), {"w": torch.full((2,), 3.0)}, 2.0)
    assert torch.equal(of_q["w"], torch.full((2,), 2.0))
    assert torch.equal(of_p["w"].full_tensor(), torch.full((2,), 6.0))


def test_attention_has_second_derivatives() -> None:
    def loss(p: Params, x: Tensor) -> Tensor:
        q = x @ p["w"]
        return torch.nn.functional.scaled_dot_product_attention(q, q, x).square().mean()

    params, x = {"w": torch.eye(4, dtype=F64)}, torch.randn(2, 3, 4, dtype=F64)
    along = {"w": torch.randn(4, 4, dtype=F64)}
    _, products = fzero.hvp(loss)(params, along, x)
    with sdpa_kernel(SDPBackend.MATH):
        expected = torch.func.jvp(lambda p: torch.func.grad(loss)(p, x), (params,), (along,))[1]
    assert (products["w"] - expected["w"]).abs().max() < 1e-12


def test_a_checkpoint_has_second_derivatives() -> None:
    def loss(p: Params, x: Tensor) -> Tensor:
        return checkpoint(lambda x: _predict(p, x), x, use_reentrant=False).square().mean()

    params, along, x = _tree(1), _tree(2), torch.randn(3, 7, dtype=F64)
    _, products = fzero.hvp(loss)(fzero.shard(params), fzero.shard(along), x)
    plain = torch.func.grad(lambda p: _predict(p, x).square().mean())
    expected = torch.func.jvp(plain, (params,), (along,))[1]
    assert (_full(products)["up"] - expected["up"]).abs().max() < 1e-12
    assert (_full(products)["bias"] - expected["bias"]).abs().max() < 1e-12


@pytest.mark.parametrize("executor", ["traced", "eager"])
@pytest.mark.parametrize("how", ["views", "same storage"])
def test_parameters_that_lie_in_one_memory_have_all_derivatives(how: str, executor: Any) -> None:
    """As the flats of stages 1 and 2 do, or an optimizer's flat buffer."""

    def loss(p: Params, x: Tensor) -> Tensor:
        h = torch.tanh(torch.nn.functional.linear(x, p["up"], p["bias"]))
        return torch.nn.functional.linear(h, p["out"]).square().mean()

    shapes = {"up": (5, 4), "bias": (5,), "out": (3, 5)}

    def drawn(*, together: bool) -> Params:
        memory, end, found = torch.randn(40, dtype=F64), 0, {}
        for name, shape in shapes.items():
            size = torch.Size(shape).numel()
            part = memory[end : end + size].view(shape)
            if how == "same storage":
                part = torch.empty(0, dtype=F64).set_(
                    memory.untyped_storage(), end, shape, part.stride()
                )
            found[name] = part if together else part.clone()
            end += size
        return found

    x = torch.randn(6, 4, dtype=F64)
    params, along, apart = (drawn(together=x) for x in (True, False, False))
    for p in (params, apart):
        plain = {k: v.clone() for k, v in p.items()}
        directions = ({k: v.clone() for k, v in along.items()},)
        fn = fzero.hvp(loss, fzero.Config(executor=executor))
        _, products = fn(p, along, x)
        if executor == "traced":
            assert "refused" not in str(fn.lower(p, along, x))
        wanted = torch.func.jvp(lambda q: torch.func.grad(loss)(q, x), (plain,), directions)[1]
        torch.testing.assert_close(products, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("executor", ["traced", "eager"])
def test_micro_batches_count_for_all_derivatives_of_a_loss(executor: Any) -> None:
    def loss(p: Params, x: Tensor) -> Tensor:
        return _loss(p, x) ** 2  # no mean over rows: that of halves is another

    def mean(p: Params) -> Tensor:
        return torch.stack([loss(p, half) for half in x.chunk(2)]).mean()

    cfg = fzero.Config(accum_steps=2, executor=executor)
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(3), dtype=F64)
    full, along = _tree(1), _tree(2)
    params, vectors = fzero.shard(full), fzero.shard(along)
    grads, products = torch.func.jvp(torch.func.grad(mean), (full,), (along,))
    ours = _full(fzero.hvp(loss, cfg)(params, vectors, x))
    value, first = _full(fzero.value_and_grad(loss, cfg)(params, x))

    torch.testing.assert_close(value, mean(full), rtol=0, atol=1e-12)
    for found, expected in [(first, grads), (ours[0], grads), (ours[1], products)]:
        for k, v in expected.items():
            torch.testing.assert_close(found[k], v, rtol=0, atol=1e-10)


@pytest.mark.parametrize("make", [lambda: optim.adamw(0.1), lambda: optim.sgd(0.1)])
@pytest.mark.parametrize("executor", ["traced", "eager"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_pullback_is_of_the_arguments_as_they_were(stage: int, executor: Any, make: Any) -> None:
    cfg = fzero.Config(stage=stage, executor=executor)
    step_fn = fzero.make_train_step(_loss, make(), cfg)
    params, state = step_fn.init(_tree(0))
    x = torch.randn(4, 7, dtype=F64)
    _, pull = fzero.vjp(_loss, cfg)(params, x)
    expected = _full(pull(1.0))
    step_fn(params, state, x)
    x.zero_()
    torch.testing.assert_close(_full(pull(1.0)), expected)


@pytest.mark.parametrize("transform", [fzero.grad, fzero.vjp, fzero.jvp, fzero.hvp])
def test_complex_numbers_are_refused_by_name(transform: Any) -> None:
    tangents = ({"c": torch.ones(4)},) if transform in (fzero.jvp, fzero.hvp) else ()
    leaf = {"c": torch.ones(4, dtype=torch.complex64)}
    with pytest.raises(ShardError, match=r"argument 0\['c'\] is torch.complex64"):
        transform(lambda p: p["c"].abs().sum())(leaf, *tangents)
    if transform in (fzero.jvp, fzero.vjp):  # the others want a loss
        with pytest.raises(ShardError, match=r"returned torch\.complex64"):
            transform(lambda p: p["c"] * 1j)({"c": torch.ones(4)}, *tangents)
    assert torch.equal(fzero.sharded(lambda p: p["c"].abs())(fzero.shard(leaf)), torch.ones(4))


@pytest.mark.parametrize("executor", ["traced", "eager"])
def test_what_asks_for_a_gradient_gives_results_without_a_graph(executor: Any) -> None:
    params = {"w": torch.ones(3, requires_grad=True)}
    both = fzero.value_and_grad(lambda p: p["w"].square().sum(), fzero.Config(executor=executor))
    value, grads = both(params)
    assert not value.requires_grad
    assert not grads["w"].requires_grad
    assert torch.equal(grads["w"], torch.full((3,), 2.0))


@pytest.mark.parametrize("executor", ["traced", "eager"])
def test_leaves_without_elements_and_a_call_after_an_exception(executor: Any) -> None:
    params = fzero.shard({"w": torch.ones(3, 2), "none": torch.zeros(0, 4)})
    cfg = fzero.Config(executor=executor)
    both = fzero.value_and_grad(lambda p, x: (x @ p["w"]).sum() + p["none"].sum(), cfg)
    with pytest.raises((RuntimeError, fzero.TraceError), match="dtype"):
        both(params, torch.ones(1, 3, dtype=F64))
    value, grads = both(params, torch.ones(1, 3))
    assert (value.item(), grads["none"].shape) == (6.0, (0, 4))


@pytest.mark.parametrize("executor", ["traced", "eager"])
def test_a_parameter_that_is_read_past_the_params_is_refused(executor: Any) -> None:
    module, x = torch.nn.Linear(3, 2), torch.ones(4, 3)
    apply, params = fzero.functionalize(module)
    cfg = fzero.Config(executor=executor)

    def loss_fn(params: Params, x: Tensor) -> Tensor:
        return apply(params, x).square().mean() + module.weight.square().sum()

    for call in (
        lambda: fzero.value_and_grad(loss_fn, cfg)(params, x),
        lambda: fzero.hvp(loss_fn, cfg)(params, params, x),
        lambda: fzero.jvp(loss_fn, cfg)(params, params, x),
        lambda: fzero.vjp(loss_fn, cfg)(params, x)[1](torch.ones(())),
    ):
        with pytest.raises(fzero.TraceError, match="own parameter 'weight' beside apply"):
            call()
    value = fzero.sharded(loss_fn, cfg)(params, x)  # no derivative: a constant is right
    torch.testing.assert_close(value, loss_fn(params, x).detach())


@pytest.mark.parametrize("make", [fzero.sharded, fzero.grad, fzero.hvp, fzero.jvp, fzero.vjp])
def test_a_callers_inference_mode_does_not_reach_what_is_recorded(make: Any) -> None:
    params = {"w": torch.tensor([0.5, -1.0, 2.0])}

    def numbers(inside: bool) -> Any:
        p, x = fzero.shard(params), torch.arange(3.0)
        with torch.inference_mode(inside):
            fn = make(lambda p, x: (p["w"] * x).sin().sum())
            if make in (fzero.jvp, fzero.hvp):
                return fn(p, p, x)
            found = fn(p, x)
            return found[1](torch.ones(())) if make is fzero.vjp else found

    for one, other in zip(*map(tree.leaves, map(_full, map(numbers, (True, False)))), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("world", [1, 2])
def test_counts_are_summed_as_torch_sums_them(world: int) -> None:
    for wrong in run_ranks(world, _wrong_sums, timeout=240):
        assert not wrong


def _wrong_sums() -> list[str]:
    """The dtypes, executors and stages whose sum over the ranks is not torch.sum's."""
    rank, world, wrong = dist.get_rank(), dist.get_world_size(), list[str]()
    dtypes = (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float32)
    for executor, stage, dtype in itertools.product(("traced", "eager"), (0, 3), dtypes):
        cfg = fzero.Config(stage=stage, executor=executor)  # pyright: ignore[reportArgumentType]
        data = [torch.tensor([100, i], dtype=torch.int32).to(dtype) for i in range(world)]
        total = fzero.sharded(lambda params, x: x + 0, cfg, reduce="sum")
        if dtype is torch.bool:
            total = fzero.sharded(lambda params, x: x & True, cfg, reduce="sum")
        found = total(fzero.shard({"w": torch.ones(2)}, cfg), data[rank])
        want = torch.stack(data).sum(0)
        if found.dtype != want.dtype or not torch.equal(found, want):
            wrong.append(f"{dtype}, {executor}, stage {stage}: {found}")
    return wrong
