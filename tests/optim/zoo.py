"""Every optimizer and composition that the laws are tested over, and trees to test them on."""

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

from fzero import optim, tree

SCHEDULE = optim.warmup_cosine(0.05, warmup_steps=2, total_steps=6, start=0.01)


def no_vectors(values: Any) -> Any:
    """The usual mask for weight decay."""
    return tree.map(lambda leaf: leaf.dim() > 1, values)


# Elementwise: what an element becomes depends on no other element.
ELEMENTWISE: dict[str, Callable[[], optim.Optimizer]] = {
    "sgd": lambda: optim.sgd(0.1),
    "sgd decay": lambda: optim.sgd(0.1, weight_decay=0.1),
    "sgd momentum": lambda: optim.sgd(0.1, momentum=0.9, weight_decay=0.1),
    "sgd nesterov": lambda: optim.sgd(0.1, momentum=0.9, nesterov=True),
    "sgd dampening": lambda: optim.sgd(0.1, momentum=0.9, dampening=0.3),
    "sgd schedule": lambda: optim.sgd(SCHEDULE, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda: optim.adam(0.1),
    "adam schedule": lambda: optim.adam(SCHEDULE, b1=0.8, b2=0.95, eps=1e-6),
    "adamw": lambda: optim.adamw(0.1, weight_decay=0.1),
    "adamw schedule": lambda: optim.adamw(SCHEDULE, weight_decay=0.1),
    "adam as it is": lambda: optim.chain(
        optim.scale_by_adam(bias_correction=False), optim.scale(-0.1)
    ),
    "adam l2": lambda: optim.adam(0.1, weight_decay=0.1),
    "amsgrad": lambda: optim.adamw(0.1, b2=0.5, weight_decay=0.1, amsgrad=True),
    "ema": lambda: optim.chain(optim.ema(0.8), optim.scale(-0.1)),
    "injected": lambda: optim.inject_hyperparams(optim.lion)(lr=SCHEDULE, weight_decay=0.1),
    "injected momentum": lambda: optim.inject_hyperparams(optim.sgd, momentum=True)(
        lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "injected mean": lambda: optim.inject_hyperparams(optim.lion, momentum=True)(lr=SCHEDULE),
    "multi": lambda: optim.multi_transform(
        {"yes": optim.lion(0.1), "no": optim.sgd(0.1)},
        lambda values: tree.map(lambda leaf: "yes" if leaf.dim() > 1 else "no", values),
    ),
    "lion": lambda: optim.lion(0.1),
    "lion schedule": lambda: optim.lion(SCHEDULE, b1=0.95, b2=0.98, weight_decay=0.1),
    "composed adamw": lambda: optim.chain(
        optim.scale_by_adam(),
        optim.masked(optim.add_decayed_weights(0.1), no_vectors),
        optim.scale_by_learning_rate(SCHEDULE),
    ),
    "composed lion": lambda: optim.chain(optim.scale_by_lion(), optim.scale(-0.1)),
    "momentum, then adam": lambda: optim.chain(
        optim.identity(), optim.trace(0.5), optim.trace(0.9, nesterov=True), optim.adam(0.1)
    ),
    "masked": lambda: optim.chain(optim.scale(-0.1), optim.masked(optim.lion(0.1), no_vectors)),
}
CLIPPED: dict[str, Callable[[], optim.Optimizer]] = {
    "clip": lambda: optim.clip_by_global_norm(0.5),
    "clip, then adamw": lambda: optim.chain(
        optim.clip_by_global_norm(0.5), optim.adamw(0.1, weight_decay=0.1)
    ),
    "clip the matrices": lambda: optim.chain(
        optim.masked(optim.clip_by_global_norm(0.5), no_vectors), optim.sgd(SCHEDULE, momentum=0.9)
    ),
}
OPTIMIZERS = ELEMENTWISE | CLIPPED
# torch's fused CPU kernels round the last elements of a leaf, those that do not fill a vector,
# otherwise than the ones before: up to a unit in the last place depends on where a leaf is cut.
FUSED = {n for n in OPTIMIZERS if ("adam" in n and n != "composed adamw") or n == "amsgrad"}


def random_tree(shapes: list[tuple[int, ...]], seed: int, *dtypes: torch.dtype) -> Any:
    """A tree with nested containers, frozen leaves, and these shapes, dtypes in turn."""
    generator = torch.Generator().manual_seed(seed)
    leaves = [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtypes[i % len(dtypes)])
        for i, shape in enumerate(shapes)
    ]
    return {"layers": [{"w": leaf, "frozen": None} for leaf in leaves[1:]], "a.first": leaves[0]}


def gradients(params: Any, seed: int) -> Any:
    """Gradients for a tree, random by place and seed."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return tree.map(
        lambda p: torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype), params
    )


def clone(values: Any) -> Any:
    return tree.map(lambda leaf: leaf.clone(), values)


def plus(params: Any, updates: Any) -> Any:
    return tree.map(lambda p, u: p + u, params, updates)


def same(left: Any, right: Any) -> bool:
    """Bitwise equal, dtypes, shapes and structures too."""
    (a, spec_a), (b, spec_b) = tree.flatten(left), tree.flatten(right)
    return spec_a == spec_b and all(
        x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True)
    )


def assert_close(left: Any, right: Any, **tolerance: float) -> None:
    (a, spec_a), (b, spec_b) = tree.flatten(left), tree.flatten(right)
    assert spec_a == spec_b
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, **tolerance)


SHAPES = st.lists(
    st.sampled_from([(), (1,), (7,), (0, 3), (3, 5), (16, 17), (2, 3, 4)]), min_size=1, max_size=5
)
SEEDS = st.integers(0, 2**16)
