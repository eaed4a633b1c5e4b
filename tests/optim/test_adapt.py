"""Optimizers from elsewhere: TorchOpt's, and anything with init and update."""

from typing import Any, NamedTuple

import pytest
import torch
import torchopt
from torch.fx.experimental.proxy_tensor import make_fx

from fzero import Config, optim, tree
from fzero.errors import ConfigError
from tests.optim.zoo import assert_close, clone, gradients, plus, random_tree, same

TORCHOPT = {
    "sgd": (lambda: torchopt.sgd(0.1, momentum=0.9), lambda: optim.sgd(0.1, momentum=0.9)),
    "adam": (lambda: torchopt.adam(0.1), lambda: optim.adam(0.1)),
    "adamw": (
        lambda: torchopt.adamw(0.1, weight_decay=0.1),
        lambda: optim.adamw(0.1, weight_decay=0.1),
    ),
    "chain": (
        lambda: torchopt.chain(torchopt.clip.clip_grad_norm(0.5), torchopt.sgd(0.1)),
        lambda: optim.chain(optim.clip_by_global_norm(0.5), optim.sgd(0.1)),
    ),
}


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", TORCHOPT)
def test_torchopts_optimizers_are_taken_as_they_are(name, in_place):
    theirs, ours = (make() for make in TORCHOPT[name])
    adapted = optim.as_optimizer(theirs)
    assert adapted.foreign
    assert not ours.foreign
    params = random_tree([(3, 5), (), (7,)], 0, torch.float64)
    others = clone(params)
    state, other_state = adapted.init(params), ours.init(others)
    for step in range(5):
        grads = gradients(params, step)
        before = clone((grads, state, params))
        updates, new_state = adapted.update(grads, state, params)
        assert same((grads, state, params), before)
        if in_place:
            after = adapted.apply_(grads, state, params)
            pairs = zip(tree.leaves(after), tree.leaves(state), strict=True)
            assert all(new is old for new, old in pairs)
            assert same((state, params), (new_state, plus(before[2], updates)))
        else:
            state, params = new_state, plus(params, updates)
        other_state = ours.apply_(grads, other_state, others)
    # TorchOpt takes 1 - b2**step in float32.
    assert_close(params, others, rtol=1e-4, atol=1e-4)


def test_torchopts_optimizers_can_be_staged_out():
    opt = optim.as_optimizer(torchopt.adam(0.1))
    params = random_tree([(3, 5), (7,)], 0, torch.float32)
    leaves, spec = tree.flatten((gradients(params, 0), opt.init(params), params))

    def apply_(*flat):
        grads, state, params = tree.unflatten(spec, flat)
        return tree.leaves((params, opt.apply_(grads, state, params)))

    program = make_fx(apply_, tracing_mode="fake")(*clone(leaves))
    assert same(program(*clone(leaves)), apply_(*clone(leaves)))


def test_a_composition_with_a_foreign_part_is_foreign():
    assert optim.chain(optim.scale(2.0), torchopt.sgd(0.1)).foreign
    assert optim.masked(torchopt.sgd(0.1), True).foreign
    assert not optim.chain(optim.scale(2.0), optim.masked(optim.sgd(0.1), True)).foreign


def _by_keyword(grads, state, *, params=None):
    return params, state


def _by_position(grads, state, weights, /):
    return weights, state


def _rest(*arguments):
    return arguments[2], arguments[1]


def _options(grads, state, **options):
    assert list(options) == ["params"]
    return options["params"], state


def _in_place_by_default(grads, state, params=None, inplace=True):
    assert not inplace
    return params, state


def _with_norm(grads, state, params, global_norm):
    return global_norm(params), state


@pytest.mark.parametrize(
    "update", [_by_keyword, _by_position, _rest, _options, _in_place_by_default, _with_norm]
)
def test_the_signature_decides_how_update_is_called(update):
    class Foreign(NamedTuple):
        init: object
        update: object

    opt = optim.as_optimizer(Foreign(lambda params: (), update))
    params = torch.tensor(7.0)
    assert opt.update(None, (), params, global_norm=lambda tree: tree)[0] == 7


def test_without_a_place_for_params_none_are_passed():
    opt = optim.as_optimizer(
        optim.Optimizer(lambda params: (), lambda grads, state: (grads, state))
    )
    assert opt.update(3, (), 4) == (3, ())
    assert not opt.foreign


class Averaging:
    """Keeps the params before the last step and their average: fields that alias its inputs."""

    def init(self, params):
        return {"average": params, "last": params, "steps": 0}

    def update(self, grads, state, params):
        average = tree.map(lambda a, p: 0.5 * a + 0.5 * p, state["average"], params)
        new = {"average": average, "last": params, "steps": state["steps"] + 1}
        return tree.map(lambda g: -0.1 * g, grads), new


def test_states_that_share_tensors_with_params_survive_a_step_in_place():
    opt = optim.as_optimizer(Averaging())
    params = [torch.ones(2), torch.ones(3)]
    pure, state_ = clone(params), opt.init(params)
    state = clone_numbers_too(opt.init(pure))
    for step in range(3):
        grads = gradients(params, step)
        updates, state = opt.update(grads, state, pure)
        pure = plus(pure, updates)
        state_ = opt.apply_(grads, state_, params)
    assert state_["steps"] == 3
    assert same(params, pure)
    assert same((state_["average"], state_["last"]), (state["average"], state["last"]))


def clone_numbers_too(state):
    return tree.map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, state)


class Swapping:
    def init(self, params):
        return [torch.zeros(1), torch.ones(1)]

    def update(self, grads, state, params):
        return grads, state[::-1]


def test_states_that_change_places_are_written_as_if_at_once():
    opt = optim.as_optimizer(Swapping())
    params = torch.zeros(1)
    assert same(opt.apply_(params, opt.init(params), params), [torch.ones(1), torch.zeros(1)])


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ((torch.ones(2), torch.ones(1)), r"structure of its state, from \[''\] to"),
        (torch.ones(3), r"state from torch.float32 \(2,\) to torch.float32 \(3,\)"),
        (torch.ones(2).double(), r"state from torch.float32 \(2,\) to torch.float64 \(2,\)"),
    ],
)
def test_a_state_that_changes_its_shape_is_named(new, message):
    opt = optim.Optimizer(lambda params: torch.ones(2), lambda grads, state, params: (grads, new))
    opt = optim.as_optimizer(opt)
    params = torch.ones(2)
    with pytest.raises(ConfigError, match=message):
        opt.apply_(torch.ones(2), opt.init(params), params)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (object(), "lacks init and update"),
        (Config(), r"opt is Config\(.*A Config goes by its name, cfg="),
        ([optim.sgd(0.1), optim.sgd(0.2)], r"\[Optimizer\(...\), .*\], a list,.*chain\(\*tr"),
        (optim.adamw, r"Call it first: adamw\(...\)"),
        (Swapping, r"Call it first: Swapping\(...\)"),
        (torch.optim.SGD([torch.ones(1)]), r"Pass fzero.optim.sgd\(...\)"),
        (torch.optim.AdamW, r"torch.optim.AdamW, .*Pass fzero.optim.adamw\(...\)"),
        (NamedTuple("Half", [("init", object)])(lambda params: ()), "lacks update"),
    ],
    ids=["object", "config", "several", "factory", "class", "torch", "torch class", "half"],
)
def test_what_is_no_optimizer_is_told_what_is_missing(wrong, message):
    with pytest.raises(ConfigError, match=message):
        optim.as_optimizer(wrong)
    with pytest.raises(ConfigError, match=message):
        optim.chain(wrong)


class _Optax(NamedTuple):
    init: Any
    update: Any


_Optax.__module__ = "optax._src.base"


def test_one_of_optax_that_wants_arrays_of_jax_is_told_in_our_words():
    def refusing(*_: object) -> None:
        raise TypeError("Cannot interpret 'torch.float32' as a data type\nand more")

    params = {"w": torch.ones(2)}
    said = r"optax, which computes on arrays of JAX.*\(Cannot interpret 'torch.float32'.* type\)"
    with pytest.raises(ConfigError, match=said):
        optim.as_optimizer(_Optax(refusing, refusing)).init(params)
    updating = optim.as_optimizer(_Optax(lambda params: (), refusing))
    with pytest.raises(ConfigError, match=r"take fzero.optim.adamw"):
        updating.update(params, updating.init(params), params)
    # some of its functions ask for no more than operators
    plain = optim.as_optimizer(
        _Optax(
            lambda params: (),
            lambda grads, state, params=None: (tree.map(lambda g: -0.1 * g, grads), state),
        )
    )
    updates, _ = plain.update(params, plain.init(params), params)
    assert torch.equal(updates["w"], torch.full((2,), -0.1))
