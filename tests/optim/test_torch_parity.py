"""The numbers of torch.optim over 20 steps, and those of the composed forms."""

import math

import pytest
import torch

from fzero import optim
from tests.optim.zoo import assert_close, gradients, plus, same

SHAPES = [(7, 15), (16, 17), (33,), (1,), ()]
SGD = [
    {},
    {"weight_decay": 0.1},
    {"momentum": 0.9},
    {"momentum": 0.9, "weight_decay": 0.1},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    {"momentum": 0.9, "dampening": 0.4},
]
ADAM = [{}, {"b1": 0.8, "b2": 0.95, "eps": 1e-6}]
PEAK, WARMUP, TOTAL = 0.05, 3, 15
RATES = {
    "constant": (0.05, None),
    "cosine": (
        optim.warmup_cosine(PEAK, WARMUP, TOTAL, end=0.005),
        lambda step: (
            step / WARMUP
            if step < WARMUP
            else 0.1
            + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1, (step - WARMUP) / (TOTAL - WARMUP))))
        ),
    ),
    "exponential": (optim.exponential(PEAK, 0.9), lambda step: 0.9**step),
}
TOLERANCE = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 1e-5, "atol": 2e-6},
}


def make_params(dtype):
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES
    ]


def run_torch(make, factor, dtype, steps=20):
    params = [torch.nn.Parameter(p) for p in make_params(dtype)]
    reference = make(params)
    schedule = factor and torch.optim.lr_scheduler.LambdaLR(reference, factor)
    for step in range(steps):
        for param, grad in zip(params, gradients(make_params(dtype), step), strict=True):
            param.grad = grad
        reference.step()
        if schedule:
            schedule.step()
    return [p.detach() for p in params]


def run_ours(opt, dtype, in_place, steps=20):
    params = make_params(dtype)
    state = opt.init(params)
    for step in range(steps):
        grads = gradients(params, step)
        if in_place:
            state = opt.apply_(grads, state, params)
        else:
            updates, state = opt.update(grads, state, params)
            params = plus(params, updates)
    return params


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("options", SGD, ids=str)
def test_sgd_has_torchs_numbers(options, rate, dtype, in_place):
    lr, factor = RATES[rate]
    ours = run_ours(optim.sgd(lr, **options), dtype, in_place)
    theirs = run_torch(lambda p: torch.optim.SGD(p, lr=PEAK, **options), factor, dtype)
    assert_close(ours, theirs, **TOLERANCE[dtype])


@pytest.mark.parametrize("implementation", ["foreach", "single"])
@pytest.mark.parametrize("options", SGD[:-1], ids=str)
def test_sgd_in_place_is_bitwise_torchs(options, implementation):
    foreach = implementation == "foreach"
    ours = run_ours(optim.sgd(0.05, **options), torch.float32, in_place=True)
    theirs = run_torch(
        lambda p: torch.optim.SGD(p, lr=0.05, foreach=foreach, **options), None, torch.float32
    )
    assert same(ours, theirs)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("implementation", ["foreach", "fused"])
@pytest.mark.parametrize("options", ADAM, ids=str)
@pytest.mark.parametrize("decay", [None, 0.01, 0.3])
def test_adam_and_adamw_have_torchs_numbers(decay, options, implementation, rate, dtype, in_place):
    lr, factor = RATES[rate]
    theirs_too = {
        "betas": (options.get("b1", 0.9), options.get("b2", 0.999)),
        "eps": options.get("eps", 1e-8),
        implementation: True,
    }
    if decay is None:
        opt = optim.adam(lr, **options)
        make = lambda p: torch.optim.Adam(p, lr=PEAK, **theirs_too)  # noqa: E731
    else:
        opt = optim.adamw(lr, weight_decay=decay, **options)
        make = lambda p: torch.optim.AdamW(p, lr=PEAK, weight_decay=decay, **theirs_too)  # noqa: E731
    ours = run_ours(opt, dtype, in_place)
    assert_close(ours, run_torch(make, factor, dtype), **TOLERANCE[dtype])


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("name", ["sgd", "adamw", "lion"])
def test_the_composed_form_has_the_numbers_of_the_fused_one(name, rate, in_place):
    lr, _ = RATES[rate]
    decay, downhill = optim.add_decayed_weights(0.1), optim.scale_by_learning_rate(lr)
    one, parts = {
        "sgd": (
            optim.sgd(lr, momentum=0.9, nesterov=True, weight_decay=0.1),
            (decay, optim.trace(0.9, nesterov=True), downhill),
        ),
        "adamw": (optim.adamw(lr, weight_decay=0.1), (optim.scale_by_adam(), decay, downhill)),
        "lion": (optim.lion(lr, weight_decay=0.1), (optim.scale_by_lion(), decay, downhill)),
    }[name]
    composed = run_ours(optim.chain(*parts), torch.float64, in_place)
    fused = run_ours(one, torch.float64, in_place=True)
    assert_close(composed, fused, rtol=1e-12, atol=1e-12)


def test_lion_follows_its_paper():
    params, b1, b2, lr, decay = make_params(torch.float64), 0.9, 0.99, 0.01, 0.1
    means = [torch.zeros_like(p) for p in params]
    for step in range(20):
        for i, grad in enumerate(gradients(params, step)):
            mix = b1 * means[i] + (1 - b1) * grad
            params[i] = params[i] - lr * (mix.sign() + decay * params[i])
            means[i] = b2 * means[i] + (1 - b2) * grad
    ours = run_ours(optim.lion(lr, b1, b2, decay), torch.float64, in_place=True)
    assert_close(ours, params, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("make", [optim.adam, optim.adamw])
@pytest.mark.parametrize("transposed", ["params", "grads", "moments"])
def test_fused_kernels_get_what_they_can_read_from_any_strides(make, transposed):
    def turned(x, what):
        return x.t().contiguous().t() if what == transposed else x

    expected, state = [torch.randn(4, 6)], None
    grads = [torch.randn(4, 6)]
    params = [turned(expected[0].clone(), "params")]
    opt = make(0.1)
    state = opt.init(expected)
    mine = state._replace(mu=[turned(state.mu[0].clone(), "moments")])._replace(
        step=state.step.clone(), nu=[state.nu[0].clone()]
    )
    for _ in range(2):
        opt.apply_(grads, state, expected)
        opt.apply_([turned(grads[0], "grads")], mine, params)
    assert_close(params, expected, rtol=1e-6, atol=1e-7)
    assert_close(mine, state, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("make", [optim.sgd, optim.adamw, optim.lion])
def test_gradients_of_another_precision_are_taken_in_the_params_own(make):
    opt = make(0.1)
    grads = [torch.randn(5).bfloat16()]
    params, expected = [torch.ones(5)], [torch.ones(5)]
    state = opt.apply_(grads, opt.init(params), params)
    expected_state = opt.apply_([grads[0].float()], opt.init(expected), expected)
    assert same((params, state), (expected, expected_state))
    assert same(
        opt.update(grads, state, params)[1], opt.update([grads[0].float()], state, params)[1]
    )
