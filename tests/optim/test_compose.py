"""chain, masked, clip_by_global_norm and the norm of a tree."""

import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from fzero import optim, tree
from fzero.errors import ConfigError, ShardError
from fzero.optim.foreach import by_group
from tests.optim.zoo import SEEDS, SHAPES, assert_close, clone, gradients, plus, random_tree


@given(shapes=SHAPES, seed=SEEDS)
@settings(max_examples=30)
def test_global_norm_is_the_norm_of_the_concatenation(shapes, seed):
    values = random_tree(shapes, seed, torch.float32, torch.bfloat16, torch.float64)
    together = torch.cat([leaf.double().flatten() for leaf in tree.leaves(values)])
    norm = optim.tree_global_norm(values)
    torch.testing.assert_close(norm.double(), together.norm(), rtol=1e-6, atol=0)
    has_double = any(leaf.dtype == torch.float64 for leaf in tree.leaves(values))
    assert norm.dtype == (torch.float64 if has_double else torch.float32)


def test_global_norm_of_half_precision_is_summed_in_float32():
    values = [torch.full((4096,), 1.0, dtype=torch.bfloat16), torch.ones(1, dtype=torch.bfloat16)]
    assert optim.tree_global_norm(values).item() == pytest.approx(4097**0.5, rel=1e-6)
    assert optim.tree_global_norm({"frozen": None}).item() == 0


@given(shapes=SHAPES, seed=SEEDS)
@settings(max_examples=30)
def test_clipping_has_torchs_numbers(shapes, seed):
    grads = gradients(random_tree(shapes, seed, torch.float64), seed)
    for max_norm in (0.5, 1e6):
        params = [torch.nn.Parameter(leaf) for leaf in tree.leaves(clone(grads))]
        for param, grad in zip(params, tree.leaves(clone(grads)), strict=True):
            param.grad = grad
        torch.nn.utils.clip_grad_norm_(params, max_norm)
        clip = optim.clip_by_global_norm(max_norm)
        clipped, _ = clip.update(grads, clip.init(grads))
        expected = [param.grad for param in params]
        assert_close(tree.leaves(clipped), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", ["update", "apply_"])
def test_every_part_of_a_composition_gets_the_callers_norm(method):
    seen = []

    def norm(values):
        seen.append(tree.paths(values))
        return torch.tensor(10.0)

    clip = optim.clip_by_global_norm(1.0)
    opt = optim.chain(
        optim.chain(clip, optim.sgd(0.1)), optim.masked(clip, {"a": 1 > 0, "b": 1 < 0})
    )
    params = {"a": torch.ones(2), "b": torch.ones(2)}
    getattr(opt, method)(clone(params), opt.init(params), params, global_norm=norm)
    assert seen == [["['a']", "['b']"], ["['a']"]]


def test_opposite_masks_train_two_groups_differently():
    params = {"w": torch.ones(3, 2), "b": torch.ones(2), "frozen": None}
    matrices = {"w": True, "b": False, "frozen": None}
    vectors = {"w": False, "b": True, "frozen": True}
    opt = optim.chain(
        optim.masked(optim.adamw(0.1), matrices), optim.masked(optim.sgd(0.3), vectors)
    )
    grads, state = gradients(params, 0), opt.init(params)
    assert [tuple(leaf.shape) for leaf in tree.leaves(state[0].inner.mu)] == [(3, 2)]
    expected = []
    for own, name in ((optim.sgd(0.3), "b"), (optim.adamw(0.1), "w")):
        part, part_grads = {name: params[name]}, {name: grads[name]}
        updates, _ = own.update(part_grads, own.init(part), part)
        expected.append(part[name] + updates[name])
    assert_close(
        tree.leaves(plus(params, opt.update(grads, state, params)[0])), expected, rtol=0, atol=1e-7
    )
    opt.apply_(grads, state, params)
    assert_close(tree.leaves(params), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "mask", [{"blocks": True, "head": False}, lambda _: {"blocks": True, "head": False}]
)
def test_a_mask_may_be_a_prefix_or_a_function(mask):
    values = {"blocks": [torch.ones(1), torch.ones(2)], "head": torch.ones(3)}
    opt = optim.masked(optim.scale(2.0), mask)
    updates, _ = opt.update(values, opt.init(values))
    assert [leaf[0].item() for leaf in tree.leaves(updates)] == [2, 2, 1]


@pytest.mark.parametrize(
    ("mask", "message"),
    [({"v": True}, r"\['v'\].*\['w'\].*prefix"), ({"w": 1}, r"mask\['w'\]=1.*bools")],
)
def test_a_mask_that_does_not_fit_is_named(mask, message):
    opt = optim.masked(optim.scale(2.0), mask)
    with pytest.raises(ConfigError, match=message):
        opt.init({"w": torch.ones(1)})


def test_trees_that_differ_are_named():
    opt = optim.adamw(0.1)
    params = {"w": torch.ones(1), "b": torch.ones(1)}
    with pytest.raises(ShardError, match=r"gradient at \['v'\] has no partner in the optimizer's"):
        opt.update({**params, "v": torch.ones(1)}, opt.init(params), params)
    with pytest.raises(ShardError, match=r"params\['b'\] has no gradient"):
        opt.apply_({"w": torch.ones(1)}, opt.init(params), params)


@pytest.mark.parametrize("name", ["sgd", "adamw", "lion"])
def test_decay_without_params_is_refused(name):
    opt = getattr(optim, name)(0.1, weight_decay=0.5)
    grads = [torch.ones(1)]
    with pytest.raises(ConfigError, match=f"{name}: weight_decay=0.5 needs the params"):
        opt.update(grads, opt.init(grads))


def test_an_empty_tree_is_a_step_too():
    for opt in (optim.sgd(0.1, momentum=0.9), optim.adamw(0.1), optim.chain(optim.lion(0.1))):
        state = opt.init({"frozen": None})
        updates, state = opt.update({"frozen": None}, state, {"frozen": None})
        assert updates == {"frozen": None}
        assert opt.apply_({"frozen": None}, state, {"frozen": None}) is not None


@pytest.mark.parametrize("max_bytes", [None, 0, 60, 100, 10**9])
@given(shapes=SHAPES, seed=SEEDS)
@settings(max_examples=20)
def test_groups_hold_every_leaf_once_and_no_more_bytes_than_asked(max_bytes, shapes, seed):
    leaves = tree.leaves(random_tree(shapes, seed, torch.float32, torch.float64))

    def kernel(group, places):
        assert len({leaf.dtype for leaf in group}) == 1
        if max_bytes is not None:
            assert len(group) == 1 or sum(leaf.nbytes for leaf in group) <= max_bytes
        return group, places

    limit = None if max_bytes is None else lambda device: max_bytes
    places = [torch.tensor(i) for i in range(len(leaves))]
    out, same_places = by_group(kernel, leaves, places, outputs=2, max_bytes=limit)
    assert all(a is b for a, b in zip(out, leaves, strict=True))
    assert same_places == places


def test_in_place_temporaries_are_bounded(monkeypatch):
    module = sys.modules[optim.LionState.__module__]
    monkeypatch.setattr(module, "temporary_bytes", lambda device: 100)
    opt = optim.lion(0.1, weight_decay=0.1)
    params = random_tree([(3, 5), (4,), (5,), (), (16, 17), (0, 3)], 0, torch.float64)
    grads, state = gradients(params, 0), opt.init(params)
    updates, _ = opt.update(grads, state, params)
    expected = plus(params, updates)
    opt.apply_(grads, state, params)
    assert_close(params, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("value", [1e38, 1e-30])
def test_the_2_norm_of_float32_neither_overflows_nor_vanishes(value):
    values = [torch.full((2,), value), torch.full((2,), value)]
    assert optim.tree_norm(values, 2).item() == pytest.approx(2 * value, rel=1e-6)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
@pytest.mark.parametrize("in_place", [False, True])
def test_complex_leaves_have_torchs_numbers(name, in_place):
    generator = torch.Generator().manual_seed(1)

    def draw():
        return torch.randn(3, 2, generator=generator, dtype=torch.complex128)

    params = {"w": draw()}
    plain = torch.nn.Parameter(params["w"].clone())
    theirs, ours = getattr(torch.optim, name)([plain], 1e-2), getattr(optim, name.lower())(1e-2)
    state = ours.init(params)
    for _ in range(4):
        grads = {"w": draw()}
        plain.grad = grads["w"].clone()
        theirs.step()
        if in_place:
            state = ours.apply_(grads, state, params)
        else:
            updates, state = ours.update(grads, state, params)
            params = plus(params, updates)
    torch.testing.assert_close(params["w"], plain.detach(), rtol=1e-12, atol=1e-12)


def test_transforms_are_by_label() -> None:
    with pytest.raises(ConfigError, match=r"transforms is a list, and must be a dict, .*'decay': "):
        optim.multi_transform([optim.sgd(0.1)], {"w": "a"})  # pyright: ignore


def test_labels_are_texts() -> None:
    labels: Any = {True: optim.sgd(0.1)}
    with pytest.raises(ConfigError, match="the label True is a bool"):
        optim.multi_transform(labels, lambda params: True)
