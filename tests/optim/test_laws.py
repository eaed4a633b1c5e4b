"""What is true of every optimizer: pure, in place the same, shard by shard the same, staged out."""

from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from fzero import optim, tree
from tests.optim.zoo import (
    ELEMENTWISE,
    FUSED,
    OPTIMIZERS,
    SEEDS,
    SHAPES,
    assert_close,
    clone,
    gradients,
    plus,
    random_tree,
    same,
)

every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)
few = settings(max_examples=15)


@every_optimizer
@given(shapes=SHAPES, seed=SEEDS)
@few
def test_apply_in_place_equals_params_plus_updates(name, shapes, seed):
    opt = OPTIMIZERS[name]()
    params = random_tree(shapes, seed, torch.float64)
    state = opt.init(params)
    params_, state_ = clone(params), clone(state)
    for step in range(4):
        grads = gradients(params, seed + step)
        updates, state = opt.update(grads, state, params)
        params = plus(params, updates)
        state_ = opt.apply_(grads, state_, params_)
        assert_close((params_, state_), (params, state), rtol=1e-12, atol=1e-12)


@every_optimizer
@given(shapes=SHAPES, seed=SEEDS)
@few
def test_update_is_pure_and_keeps_structures_and_dtypes(name, shapes, seed):
    opt = OPTIMIZERS[name]()
    params = random_tree(shapes, seed, torch.float32, torch.bfloat16, torch.float64)
    grads, state = gradients(params, seed), opt.init(params)
    _, state = opt.update(grads, state, params)
    inputs = (grads, state, params)
    before = clone(inputs)
    first = opt.update(grads, state, params)
    assert same(inputs, before)
    assert same(opt.update(grads, state, params), first)
    updates, new_state = first
    for values, like in ((updates, grads), (new_state, state)):
        kinds = tree.map(lambda leaf: (leaf.dtype, leaf.shape), (values, like))
        assert kinds[0] == kinds[1]


@every_optimizer
def test_apply_overwrites_params_and_state_and_nothing_else(name):
    opt = OPTIMIZERS[name]()
    params = random_tree([(3, 5), (), (7,), (0, 3)], 0, torch.float32, torch.bfloat16)
    grads, state = gradients(params, 0), opt.init(params)
    before = clone(grads), clone(params)
    state_after = opt.apply_(grads, state, params)
    assert same(grads, before[0])
    assert not same(params, before[1])
    assert tree.flatten(state_after)[1] == tree.flatten(state)[1]
    pairs = zip(tree.leaves(state_after), tree.leaves(state), strict=True)
    assert all(after is old for after, old in pairs)


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("in_place", [False, True])
@given(shapes=SHAPES, seed=SEEDS)
@few
def test_elementwise_optimizers_commute_with_sharding(name, in_place, shapes, seed):
    opt = ELEMENTWISE[name]()
    params = random_tree(shapes, seed, torch.float32, torch.float64)

    def run(part):
        own, state = part(params), opt.init(part(params))
        for step in range(3):
            grads = part(gradients(params, seed + step))
            if in_place:
                state = opt.apply_(grads, state, own)
            else:
                updates, state = opt.update(grads, state, own)
                own = plus(own, updates)
        return own

    whole, first, last = run(clone), run(_halves(0)), run(_halves(1))
    glued = tree.map(lambda a, b: torch.cat([a, b]) if a.dim() else a, first, last)
    if in_place and name in FUSED:
        assert_close(glued, whole, rtol=1e-6, atol=1e-7)
    else:
        assert same(glued, whole)


@given(shapes=SHAPES, seed=SEEDS)
@few
def test_clipping_shards_by_the_norm_of_the_whole_tree(shapes, seed):
    opt = optim.clip_by_global_norm(0.5)
    params = random_tree(shapes, seed, torch.float64)
    grads = gradients(params, seed)
    norm = optim.tree_global_norm(grads)
    whole, _ = opt.update(grads, opt.init(params))
    parts = [
        opt.update(half(grads), opt.init(half(params)), global_norm=lambda _: norm)[0]
        for half in (_halves(0), _halves(1))
    ]
    glued = tree.map(lambda a, b: torch.cat([a, b]) if a.dim() else a, *parts)
    assert same(glued, whole)


@every_optimizer
def test_update_and_apply_can_be_staged_out(name):
    opt = OPTIMIZERS[name]()
    params = random_tree([(3, 5), (), (7,), (0, 3)], 0, torch.float32, torch.float64)
    state = opt.init(params)
    leaves, spec = tree.flatten((gradients(params, 0), state, params))

    def update(*flat):
        grads, state, params = tree.unflatten(spec, flat)
        return tree.leaves(opt.update(grads, state, params))

    def apply_(*flat):
        grads, state, params = tree.unflatten(spec, flat)
        return tree.leaves((params, opt.apply_(grads, state, params)))

    for fn in (update, apply_):
        program = make_fx(fn, tracing_mode="fake")(*clone(leaves))
        other = tree.leaves((gradients(params, 1), opt.update(*_unflat(spec, leaves))[1], params))
        for values in (leaves, other):  # at another step, too: nothing of the first is baked in
            assert same(program(*clone(values)), fn(*clone(values)))


@every_optimizer
@pytest.mark.parametrize("method", ["update", "apply_"])
def test_the_number_of_kernels_does_not_grow_with_the_number_of_leaves(name, method):
    def kernels(leaves: int) -> int:
        opt = OPTIMIZERS[name]()
        params = {str(i): torch.ones(2, 2) for i in range(leaves)}
        grads, state = gradients(params, 0), opt.init(params)
        with _Counter() as counter:
            getattr(opt, method)(grads, state, params)
        return counter.calls

    assert kernels(40) == kernels(2)


class _Counter(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def _halves(which: int):
    """Rank `which` of two: rows are split, 0-d leaves are on both."""

    def part(values):
        return tree.map(
            lambda x: torch.tensor_split(x, 2)[which].clone() if x.dim() else x.clone(), values
        )

    return part


def _unflat(spec, leaves):
    return tree.unflatten(spec, clone(leaves))


REORDERED = OPTIMIZERS | {
    "adafactor": lambda: optim.adafactor(0.1),
    "lamb": lambda: optim.lamb(0.1),
    "muon": lambda: optim.muon(0.1),
    "masked": lambda: optim.masked(optim.adamw(0.1), {"a": True, "b": False, "c": True}),
    "multi_transform": lambda: optim.multi_transform(
        {"x": optim.adamw(0.1), "y": optim.sgd(0.1, momentum=0.9)}, {"a": "x", "b": "y", "c": "x"}
    ),
}


@pytest.mark.parametrize("method", ["update", "apply_"])
@pytest.mark.parametrize("name", REORDERED)
def test_a_leaf_has_its_own_gradient_and_state_in_whichever_order_dicts_have_them(name, method):
    """Leaves of an `OrderedDict` come as its keys stand, those of a dict sorted."""
    shapes = {"c": (4, 4), "a": (4, 4), "b": (4,)} if name == "adafactor" else dict.fromkeys("cab")
    torch.manual_seed(0)
    values, *rows = (
        {key: torch.randn(shape or (4, 4)) for key, shape in shapes.items()} for _ in range(4)
    )

    def trained(*kinds):
        opt, params = REORDERED[name](), OrderedDict((k, values[k].clone()) for k in "cab")
        state = opt.init(params)
        for (kind, keys), row in zip(kinds, rows, strict=True):
            grads = kind((key, row[key].clone()) for key in keys)
            if method == "update":
                updates, state = opt.update(grads, state, params)
                params = OrderedDict((key, params[key] + updates[key]) for key in "cab")
            else:
                state = opt.apply_(grads, state, params)
        return [params[key] for key in "abc"]

    wanted = trained(*[(OrderedDict, "cab")] * 3)
    found = trained((OrderedDict, "abc"), (dict, "bca"), (OrderedDict, "bac"))
    assert all(map(torch.equal, found, wanted))


def test_a_dict_of_labels_means_the_leaves_of_an_ordered_dict_by_their_keys():
    params = OrderedDict((key, torch.ones(2)) for key in "cab")
    flags = {"a": True, "b": False, "c": False}
    opt = optim.masked(optim.sgd(0.5), flags)
    (updates, _), labels = opt.update(params, opt.init(params), params), {}
    assert {key: float(x[0]) for key, x in updates.items()} == {"a": -0.5, "b": 1.0, "c": 1.0}
    labels = {key: "slow" if flag else "fast" for key, flag in flags.items()}
    opt = optim.multi_transform({"slow": optim.sgd(0.5), "fast": optim.sgd(2.0)}, labels)
    opt.apply_(clone(params), opt.init(params), params)
    assert {key: float(x[0]) for key, x in params.items()} == {"a": 0.5, "b": -1.0, "c": -1.0}


@every_optimizer
@pytest.mark.parametrize("how", ["torch.func.grad", "backward"])
def test_update_can_be_differentiated(name, how):
    opt = OPTIMIZERS[name]()
    params = random_tree([(3, 5), (7,)], 0, torch.float64)
    leaves, spec = tree.flatten(params)
    weights = gradients(params, 9)

    def loss(*leaves):
        params = tree.unflatten(spec, leaves)
        state = opt.init(tree.map(torch.Tensor.detach, params))
        for _ in range(3):
            # a gradient that depends on the parameters, and so on the updates before
            grads = tree.map(lambda x, w: x * x * w + x, params, weights)
            updates, state = opt.update(grads, state, params)
            params = plus(params, updates)
        return sum(leaf.square().sum() for leaf in tree.leaves(params))

    if how == "backward":
        own = [leaf.clone().requires_grad_() for leaf in leaves]
        loss(*own).backward()
        found = [leaf.grad for leaf in own]
    else:
        found = torch.func.grad(loss, argnums=tuple(range(len(leaves))))(*leaves)
    step = 1e-6
    for i, leaf in enumerate(leaves):
        along = torch.randn(leaf.shape, dtype=leaf.dtype)

        def at(distance, i=i, leaf=leaf, along=along):
            return loss(*leaves[:i], leaf + distance * along, *leaves[i + 1 :])

        difference = (at(step) - at(-step)) / (2 * step)
        assert_close((found[i] * along).sum(), difference, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("make", [optim.sgd, optim.adam, optim.adamw, optim.lion, optim.lamb])
def test_so_can_a_learning_rate(make):
    params = random_tree([(3, 5), (7,)], 0, torch.float64)
    grads = gradients(params, 1)

    def loss(lr):
        opt = make(lr)
        updates, _ = opt.update(grads, opt.init(params), params)
        return sum(leaf.square().sum() for leaf in tree.leaves(plus(params, updates)))

    lr = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    loss(lr).backward()
    difference = (loss(lr.detach() + 1e-6) - loss(lr.detach() - 1e-6)) / 2e-6
    assert_close(lr.grad, difference, rtol=1e-5, atol=1e-7)
    assert_close(torch.func.grad(loss)(lr.detach()), difference, rtol=1e-5, atol=1e-7)
