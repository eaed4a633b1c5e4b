"""What is true of every optimizer: pure, in place the same, shard by shard the same, staged out."""

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
