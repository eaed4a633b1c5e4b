"""`jit`: a user's own step as one Program, pure, in memory that it was given."""

import collections
import dataclasses
import itertools
import threading
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import fzero
from fzero import optim, tree
from fzero.errors import ConfigError, FzeroError, ShardError, TraceError
from fzero.program.choice import Choice
from fzero.state.sharding import locals_of
from tests.ranks import fake_ranks, run_fresh, run_ranks

F64 = torch.float64
Params = dict[str, Tensor]


def _params() -> Params:
    generator = torch.Generator().manual_seed(1)
    shapes = {"w": (7, 15), "v": (15, 5), "b": (5,), "s": ()}
    return {k: torch.randn(s, generator=generator, dtype=F64) / 3 for k, s in shapes.items()}


def _loss(p: Params, x: Tensor) -> Tensor:
    return ((torch.tanh(x @ p["w"]) @ p["v"] + p["b"]).square().mean() * p["s"].exp()).sin()


def _full(values: Any) -> Any:
    return tree.map(lambda x: x.full_tensor() if isinstance(x, DTensor) else x, values)


def _trained(stage: int, donate: bool) -> dict[str, float]:
    cfg = fzero.Config(stage=stage, bucket_mb=0.0002)
    opt = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2, weight_decay=0.1))

    def step(params: Params, state: Any, ema: Params, x: Tensor) -> Any:
        loss, grads = fzero.value_and_grad(_loss, cfg)(params, x)
        updates, state = opt.update(grads, state, params)
        params = fzero.apply_updates(params, updates)
        ema = fzero.tree_map(lambda e, p: 0.9 * e + 0.1 * p, ema, params)
        return params, state, ema, {"loss": loss, "norm": fzero.tree_norm(grads)}

    run = fzero.jit(step, cfg, donate_argnums=(0, 1, 2) if donate else ())
    full = _params()
    params = fzero.shard(full, cfg) if stage == 3 else tree.map(torch.clone, full)
    state, ema = opt.init(params), fzero.tree_map(lambda p: p * 1.0, params)
    world, rank = dist.get_world_size(), dist.get_rank()
    data = torch.randn(20, world, 4, 7, generator=torch.Generator().manual_seed(2), dtype=F64)

    theirs = {k: v.clone().requires_grad_() for k, v in full.items()}
    plain = torch.optim.AdamW(theirs.values(), 1e-2, weight_decay=0.1)
    average = {k: v.clone() for k, v in full.items()}
    gaps = []
    for batch in data:
        before, old = params, _full(tree.map(lambda x: x.clone(), params))
        params, state, ema, told = run(params, state, ema, batch[rank])
        if not donate:  # what came in is as it was
            assert all(torch.equal(x, old[k]) for k, x in _full(before).items())
        plain.zero_grad()
        loss = torch.stack([_loss(theirs, x) for x in batch]).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(list(theirs.values()), 0.5)
        plain.step()
        with torch.no_grad():
            average = {k: 0.9 * average[k] + 0.1 * theirs[k] for k in average}
        gaps += [(told["loss"] - loss).abs(), (told["norm"] - norm).abs()]
    for ours, expected in ((params, theirs), (ema, average)):
        ours = _full(ours)
        gaps += [(ours[k] - expected[k]).abs().max() for k in expected]
    assert len(run._recordings) == 1
    return {"gap": torch.stack(gaps).max().item()}


@pytest.mark.parametrize(
    ("world", "stage", "donate"), [(1, 3, True), (2, 3, True), (2, 3, False), (2, 0, True)]
)
def test_a_step_of_ones_own_trains_as_torch_does(world: int, stage: int, donate: bool) -> None:
    for found in run_ranks(world, _trained, stage, donate, timeout=120):
        assert found["gap"] < 1e-12


def test_a_donated_tree_is_written_over_and_another_is_not() -> None:
    swap = fzero.jit(lambda a, b: ({"x": b["x"] * 1, "y": a["x"]}, b), donate_argnums=0)
    a, b = {"x": torch.zeros(3)}, {"x": torch.ones(3)}
    (new, same), memory = swap(a, b), a["x"].data_ptr()
    assert new["x"].data_ptr() == memory or new["y"].data_ptr() == memory
    assert torch.equal(new["x"], torch.ones(3))
    assert torch.equal(new["y"], torch.zeros(3))
    assert same["x"].data_ptr() != b["x"].data_ptr()  # the caller's stays the caller's
    assert torch.equal(b["x"], torch.ones(3))


def test_what_is_donated_is_read_to_the_end_before_it_is_written() -> None:
    # the first result is there, and would fit, before the second reads the donated tree
    run = fzero.jit(lambda a, b: (b * 2, a + 1), donate_argnums=0)
    first, second = run(torch.full((4,), 5.0), torch.full((4,), 3.0))
    assert torch.equal(first, torch.full((4,), 6.0))
    assert torch.equal(second, torch.full((4,), 6.0))


def test_donated_trees_of_one_shape_can_change_places() -> None:
    swap = fzero.jit(lambda a, b: (b, a), donate_argnums=(0, 1))
    a, b = torch.zeros(4), torch.ones(4)
    first, second = swap(a, b)
    assert torch.equal(first, torch.ones(4))
    assert torch.equal(second, torch.zeros(4))


def test_what_changes_an_argument_in_place_is_refused_by_name() -> None:
    def step(params: Params, x: Tensor) -> Params:
        params["w"].add_(1.0)
        return params

    with pytest.raises(FzeroError, match=r"step changes its argument params\.w in place"):
        fzero.jit(step)({"w": torch.ones(2)}, torch.ones(2))
    with pytest.raises(FzeroError, match=r"argument params\.w in place"):
        fzero.jit(step)(fzero.shard({"w": torch.ones(2)}), torch.ones(2))


OPTIMIZERS = {"adamw": lambda: optim.adamw(1e-2), "sgd": lambda: optim.sgd(0.1, momentum=0.9)}


def _in_place(executor: Any) -> list[str]:
    """Where gradients and an update in place, each a function, differ from a step of the two."""
    wrong = []
    data = torch.randn(5, 2, 4, 7, generator=torch.Generator().manual_seed(2), dtype=F64)
    rank = dist.get_rank() if dist.is_initialized() else 0
    for stage, name in itertools.product((0, 3), OPTIMIZERS):
        cfg, opt = fzero.Config(stage=stage, executor=executor), OPTIMIZERS[name]()

        def update(params: Params, state: Any, grads: Params, opt: Any = opt) -> Any:
            state = opt.apply_(grads, state, params)
            return params, state, fzero.tree_norm(grads)

        graded = fzero.value_and_grad(_loss, cfg)
        run = fzero.jit(lambda p, s, g: update(p, s, g), cfg, donate_argnums=(0, 1))
        step_fn = fzero.make_train_step(_loss, opt, cfg)
        wanted = step_fn.init(_params())
        params = fzero.shard(_params(), cfg)
        state = opt.init(params)
        memory = [x.data_ptr() for x in locals_of([*tree.leaves(params), *tree.leaves(state)])]
        for batch in data:
            wanted = step_fn(*wanted, batch[rank])
            _, grads = graded(params, batch[rank])
            params, state, norm = run(params, state, grads)
            torch.testing.assert_close(norm, wanted[1].metrics["grad_norm"])
        now = [x.data_ptr() for x in locals_of([*tree.leaves(params), *tree.leaves(state)])]
        ours, theirs = _full(params), _full(wanted[0])
        if now != memory or not all(torch.equal(ours[k], theirs[k]) for k in theirs):
            wrong.append(f"stage {stage}, {name}")
    return wrong


@pytest.mark.parametrize("executor", ["traced", "eager"])
def test_what_is_donated_may_be_updated_in_place_as_a_step_does_it(executor: Any) -> None:
    assert not _in_place(executor)
    assert run_ranks(2, _in_place, executor, timeout=120) == [[], []]


@pytest.mark.parametrize("executor", ["traced", "eager"])
def test_what_is_updated_in_place_lends_no_memory_to_other_results(executor: Any) -> None:
    def update(state: Any, x: Tensor) -> Any:
        state["count"].add_(1)
        return x.sum(), x

    cfg = fzero.Config(executor=executor)
    state, x = {"count": torch.zeros(()), "rate": torch.tensor(0.1)}, torch.ones(2)
    total, same = fzero.jit(update, cfg, donate_argnums=0)(state, x)
    assert state == {"count": torch.tensor(1.0), "rate": torch.tensor(0.1)}
    assert total == 2
    assert same.data_ptr() != x.data_ptr()  # which is not donated


def test_what_takes_a_derivative_writes_into_nothing_that_it_was_given() -> None:
    def step(params: Params, x: Tensor) -> Params:
        grads = fzero.grad(lambda p, x: (p["w"] * x).sum())(params, x)
        params["w"].sub_(grads["w"])
        return params

    with pytest.raises(FzeroError, match=r"params\.w in place, and takes a derivative or gathers"):
        fzero.jit(step, donate_argnums=0)({"w": torch.ones(2)}, torch.ones(2))


def test_what_is_staged_out_ahead_runs_on_flat_lists() -> None:
    def update(params: Params, x: Tensor) -> Tensor:
        params["w"].add_(x)
        return params["w"].sum()

    run = fzero.jit(update, donate_argnums=0)
    params, x = {"w": torch.zeros(2)}, torch.ones(2)
    staged = run.staged(params, x, choice=Choice(0))
    assert run.staged(params, x, choice=Choice(0)) is staged
    assert staged([params["w"], x], lambda: 0) == 2
    assert run(params, x) == 4
    assert staged.program.inputs == ("params.w", "x")


def test_a_closure_that_changes_is_recorded_anew() -> None:
    scale = 2.0
    inner = fzero.value_and_grad(lambda p, x: (p["w"] * x).sum() * scale)
    outer = fzero.jit(lambda p, x: inner(p, x)[1])
    p, x = {"w": torch.ones(2)}, torch.ones(2)
    assert (inner(p, x)[0], outer(p, x)["w"][0]) == (4, 2)
    scale = 3.0
    assert (inner(p, x)[0], outer(p, x)["w"][0]) == (6, 3)


def test_a_dense_argument_is_one_kind_whatever_it_is_cut_from() -> None:
    calls = []
    double = fzero.sharded(lambda p, x: calls.append(x.shape) or x * p["w"])
    p, text = {"w": torch.full((), 2.0)}, torch.ones(1, 20)
    for end in range(8, 20):
        assert double(p, text[:, :end][:, -8:]).sum() == 16
    assert len(calls) == 1


def test_images_of_one_channel_keep_their_memory_format() -> None:
    conv = fzero.sharded(lambda p, x: torch.conv2d(torch.conv2d(x, p["a"]), p["b"]).flatten(1))
    p = {"a": torch.randn(4, 1, 3, 3), "b": torch.randn(5, 4, 3, 3)}
    x = torch.randn(3, 1, 8, 8)
    dense = conv(p, x)
    last = x.to(memory_format=torch.channels_last)
    assert last.is_contiguous()  # and still what a convolution takes for another format
    torch.testing.assert_close(conv(p, last), dense)


@pytest.mark.parametrize("executor", ["traced", "eager"])
def test_random_numbers_are_a_function_of_the_call(executor: Any) -> None:
    cfg = fzero.Config(executor=executor)
    drop = fzero.sharded(lambda p, x: torch.nn.functional.dropout(x * p["w"], 0.5), cfg)
    p, x = {"w": torch.ones(())}, torch.ones(64)
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    first = drop(p, x)
    assert torch.equal(first, drop(p, x))
    assert not torch.equal(first, drop(p, x, rng=1))
    assert torch.equal(before, torch.random.get_rng_state())


def test_statics_are_a_part_of_the_signature() -> None:
    pick = fzero.sharded(lambda p, name, k=1: p[name] * k)
    p = {"a": torch.ones(1), "b": torch.zeros(1)}
    assert (pick(p, "a"), pick(p, "b"), pick(p, "a", k=3)) == (1, 0, 3)


def test_a_function_without_a_program_says_so() -> None:
    eager = fzero.sharded(lambda p: p["w"] * 2, fzero.Config(executor="eager"))
    with pytest.raises(TraceError, match="stages nothing out"):
        eager.lower({"w": torch.ones(1)})


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: fzero.sharded(3), "sharded was given a int"),
        (lambda: fzero.jit(lambda rng: rng), "an argument `rng`"),
        (lambda: fzero.grad(len, argnums=(0, 0)), "twice"),
        (lambda: fzero.grad(len, argnums=-1), "from 0 on"),
        (lambda: fzero.sharded(len, reduce="max"), "'mean', 'sum' or None"),
        (lambda: fzero.jit(len, 3), "cfg is a int"),
    ],
)
def test_what_can_not_be_a_function_is_refused(make: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make()


def test_calls_that_do_not_fit_are_refused() -> None:
    both = fzero.value_and_grad(lambda p, x: (p["w"] * x).sum())
    with pytest.raises(ShardError, match="argument 0 is a tree of shards"):
        both()
    with pytest.raises(ConfigError, match="rng=-1"):
        both({"w": torch.ones(1)}, torch.ones(1), rng=-1)
    hvp = fzero.hvp(lambda p, x: (p["w"] * x).sum())
    with pytest.raises(ShardError, match=r"vectors\['w'\] is torch.float32 \(2,\)"):
        hvp({"w": torch.ones(1)}, {"w": torch.ones(2)}, torch.ones(1))
    with pytest.raises(FzeroError, match="depends on no"):
        fzero.grad(lambda p: torch.ones(()))({"w": torch.ones(1)})


def test_two_threads_record_one_after_the_other() -> None:
    both = fzero.value_and_grad(lambda p, x: (p["w"] * x).sum())
    found: list[Any] = []
    threads = [
        threading.Thread(
            target=lambda n: found.append(both({"w": torch.ones(n)}, torch.ones(n))[0].item()),
            args=(n,),
        )
        for n in (2, 3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [2.0, 3.0]


def test_evaluation_never_holds_the_model() -> None:
    width, layers = 64, 16
    with fake_ranks(8):
        cfg = fzero.Config(bucket_mb=0.02)
        full = {f"{i:02}": torch.zeros(width, width) for i in range(layers)}
        params = fzero.shard(full, cfg)

        def predict(p: Params, x: Tensor) -> Tensor:
            for w in p.values():
                x = torch.tanh(x @ w)
            return x

        program = fzero.sharded(predict, cfg).lower(params, torch.zeros(2, width))
        nbytes = 4 * width * width
        shards = layers * nbytes // 8
        # two leaves, whole and as they came, and next to nothing else
        assert shards < program.peak_bytes() < shards + 4 * nbytes
        rows = program.collectives()
        assert [row.kind for row in rows] == ["all_gather"] * layers
        assert {row.phase for row in rows} == {"forward"}


@pytest.mark.parametrize("first", ["the tree", "its tensors"])
def test_a_donated_tree_that_is_another_argument_is_refused_by_name(first: str) -> None:
    def step(params: Params, ema: Params) -> Any:
        twice = fzero.tree_map(lambda p, e: p + e, params, ema)
        return twice, fzero.tree_map(lambda p, e: p * e, params, ema)

    params = fzero.shard(_params())
    other = params if first == "the tree" else {k: v.detach() for k, v in params.items()}
    with pytest.raises(ShardError, match=r"params\.b and ema\.b lie in the same memory, and"):
        fzero.jit(step, donate_argnums=(0, 1))(params, other)
    # what nobody writes over may come twice
    once, times = _full(fzero.jit(step)(params, other))
    for k, v in _params().items():
        assert torch.equal(once[k], v + v)
        assert torch.equal(times[k], v * v)


def test_a_donated_tensor_that_reaches_into_another_argument_is_refused() -> None:
    run = fzero.jit(lambda a, b: (a * 2, b * 3), donate_argnums=(0,))
    run(torch.zeros(4), torch.ones(4))  # recorded for tensors that lie apart
    memory = torch.arange(5.0)
    with pytest.raises(ShardError, match="a and b lie in the same memory"):
        run(memory[:4], memory[1:])
    apart, _ = run(memory[:2].repeat(2), memory[1:])
    torch.testing.assert_close(apart, torch.tensor([0.0, 2.0, 0.0, 2.0]))
    a, b = torch.zeros(4), torch.ones(4)
    run(a, b)
    b.data = a.data  # the same tensors as at the last call, elsewhere
    with pytest.raises(ShardError, match="a and b lie in the same memory"):
        run(a, b)


@pytest.mark.parametrize("executor", ["traced", "eager"])
def test_whether_two_arguments_are_one_tensor_is_asked_at_each_call(executor: Any) -> None:
    def scores(params: Params, query: Tensor, key: Tensor) -> Tensor:
        return (query @ params["w"] if query is key else key @ params["w"] - 1).sum()

    run = fzero.sharded(scores, fzero.Config(executor=executor))
    full, x, y = _params(), torch.randn(4, 7, dtype=F64), torch.randn(4, 7, dtype=F64)
    params = fzero.shard(full)
    for query, key in [(x, x), (x, y), (y, y), (y, x)]:
        torch.testing.assert_close(run(params, query, key), scores(full, query, key))


@pytest.mark.parametrize("numbers", [(-1,), ("params",), (0, 0), True])
def test_positions_that_are_none_are_refused(numbers: Any) -> None:
    with pytest.raises(ConfigError, match="donate_argnums="):
        fzero.jit(lambda params: params, donate_argnums=numbers)


def test_a_donated_argument_must_be_there() -> None:
    with pytest.raises(ShardError, match=r"donate_argnums=\(1,\), and it was called with 1"):
        fzero.jit(lambda params: params, donate_argnums=(1,))(fzero.shard(_params()))


@dataclasses.dataclass
class _Kept:
    values: dict[str, Any]
    task: str = "qa"


def _kept(executor: Any) -> None:
    """A function changes the containers that it was given."""
    cfg = fzero.Config(executor=executor)
    params, x = fzero.shard({"w": torch.ones(3)}, cfg), torch.zeros(2)
    one, some, more = [x], collections.UserDict(x=x), _Kept({"x": x})

    def keeping(params: Any, one: Any, *, some: Any, more: Any) -> Any:
        params["w"] = params["new"] = params["w"] * 2
        one.append(params["w"])
        some["y"] = more.values["y"] = one[0] + 1
        more.task = "none"
        return params, one, some["y"] + more.values["y"]

    new, made, total = fzero.jit(keeping, cfg)(params, one, some=some, more=more)
    assert (list(new), len(made), total.tolist()) == (["w", "new"], 2, [2.0, 2.0])
    assert (list(params), len(one), list(some), list(more.values)) == (["w"], 1, ["x"], ["x"])
    assert more.task == "qa"


@pytest.mark.parametrize("executor", ["traced", "eager"])
def test_containers_are_a_functions_own(executor: Any) -> None:
    _kept(executor)

    def writes(params: Any, more: Any) -> Any:
        params["a"] = more.pop("x").add_(1)  # a place before that of what is written
        return params

    with pytest.raises(FzeroError, match=r"writes changes its argument more\.x in place"):
        fzero.jit(writes, fzero.Config(executor=executor))(_params(), {"x": torch.zeros(2)})


@pytest.mark.parametrize("executor", ["traced", "eager"])
def test_a_refused_write_that_was_made_is_told(executor: Any) -> None:
    def scaled(params: Params, x: Tensor) -> Tensor:
        return (params["w"] * x.add_(1)).sum()

    cfg = fzero.Config(executor=executor)
    step_fn = fzero.make_train_step(scaled, optim.sgd(0.1), cfg)
    runs: list[Any] = [
        make(scaled, cfg) for make in (fzero.jit, fzero.value_and_grad, fzero.sharded)
    ]
    if executor == "eager":  # a step that is staged out keeps the write to itself
        runs.append(lambda params, x: step_fn(*step_fn.init(params), x))
    for run in runs:
        params, x = {"w": torch.ones(2)}, torch.zeros(2)
        with pytest.raises(FzeroError, match=r"in place") as caught:
            run(params, x)
        written = "holds what was written to it" in str(caught.value)
        assert written == (executor == "eager") == bool(x.sum())


@pytest.mark.parametrize("make", [fzero.jit, fzero.sharded])
def test_what_runs_eagerly_is_refused_to_change_an_argument_too(make: Any) -> None:
    def scaled(params: Params, x: Tensor) -> Tensor:
        x.mul_(2)
        return x.sum()

    with pytest.raises(FzeroError, match="scaled changes its argument x in place"):
        make(scaled, fzero.Config(executor="eager"))(_params(), torch.ones(3))


@pytest.mark.parametrize("write", [lambda w: w.mul_(2), lambda w: w.to_local().mul_(2)])
@pytest.mark.parametrize("executor", ["traced", "eager"])
def test_a_tree_of_shards_that_is_not_donated_is_not_changed(executor: Any, write: Any) -> None:
    def scaled(params: Params) -> Tensor:
        write(params["w"])
        return fzero.tree_norm(params)

    params = fzero.shard(_params())
    with pytest.raises(FzeroError, match=r"scaled changes its argument params\.w in place"):
        fzero.jit(scaled, fzero.Config(executor=executor))(params)
    fzero.jit(scaled, fzero.Config(executor=executor), donate_argnums=(0,))(params)


def test_programs_of_functions_answer_as_those_of_steps_do() -> None:
    with fake_ranks(2):
        params = fzero.shard(_params())
        x, opt = torch.zeros(4, 7, dtype=F64), optim.adam(1e-3)

        def step(params: Params, state: Any, x: Tensor) -> Any:
            loss, grads = fzero.value_and_grad(_loss)(params, x)
            again = fzero.grad(_loss)(fzero.apply_updates(params, grads), x)
            updates, state = opt.update(again, state, params)
            return fzero.apply_updates(params, updates), state, loss

        run = fzero.jit(step, donate_argnums=(0, 1))
        programs = [
            run.lower(params, opt.init(params), x),
            fzero.hvp(_loss).lower(params, params, x),
            fzero.jvp(_loss).lower(params, params, x),
            fzero.sharded(_loss, reduce="mean").lower(params, x),
        ]
        for program in programs:
            program.verify()
            peak = program.peak()
            assert sum(row.bytes for row in peak) == program.peak_bytes()
            assert {"params.w", "p.w"} & {*program.inputs}
        assert {"p.w", "vectors.w", "x"} < {*programs[1].inputs}
        # forward and backward twice over, and each gathers for itself
        phases = [row.phase for row in programs[0].collectives() if row.kind == "all_gather"]
        assert phases.count("forward") == 2
        assert "donate:" in "".join(programs[0].log)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("executor", ["eager", "traced"])
def test_results_have_memory_of_their_own(stage: int, executor: Any) -> None:
    cfg = fzero.Config(stage=stage, executor=executor)

    def passing(params: Params, x: Tensor) -> Any:
        made = x * 2
        more = {"made": made, "once more": made, "tail": made[1:]}
        return params, x, {"again": x, "view": x[1:], "b": params["b"].view(-1), **more}

    full, x = _params(), torch.randn(4, 7, dtype=F64)
    params = fzero.shard(full, cfg) if stage == 3 else tree.map(torch.clone, full)
    before = x.clone()
    given, same, more = fzero.jit(passing, cfg)(params, x)
    results = tree.leaves((given, same, more))
    expected = [_full(y).clone() for y in results]
    for i, y in enumerate(results):  # what is written to one is in no other, nor in what was given
        (y._local_tensor if isinstance(y, DTensor) else y).zero_()
        for other, value in zip(results[i + 1 :], expected[i + 1 :], strict=True):
            torch.testing.assert_close(_full(other), value)
    torch.testing.assert_close(x, before)
    torch.testing.assert_close(_full(params), full)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("executor", ["eager", "traced"])
def test_gradients_that_are_one_value_can_be_clipped_in_place(stage: int, executor: Any) -> None:
    cfg = fzero.Config(stage=stage, executor=executor)
    params = fzero.shard({"a": torch.ones(3), "b": torch.ones(3)}, cfg)
    x = torch.tensor([1.0, 2.0, 3.0])
    _, grads = fzero.value_and_grad(lambda p, x: ((p["a"] + p["b"]) * x).sum(), cfg)(params, x)
    for g in grads.values():
        (g._local_tensor if isinstance(g, DTensor) else g).mul_(0.5)
    for g in _full(grads).values():
        torch.testing.assert_close(g, x / 2)


@pytest.mark.parametrize("executor", ["eager", "traced"])
def test_a_callers_no_grad_does_not_reach_a_function(executor: Any) -> None:
    cfg = fzero.Config(executor=executor)
    params, x = fzero.shard(_params(), cfg), torch.randn(4, 7, dtype=F64)
    run = fzero.jit(lambda p, x: fzero.value_and_grad(_loss, cfg)(p, x), cfg)
    expected = _full(run(params, x))
    with torch.no_grad():
        torch.testing.assert_close(_full(run(params, x)), expected)


_INDICES = torch.tensor([[0, 1, 1], [0, 2, 4]])


def _graph_loss(p: Params, values: Tensor) -> Tensor:
    """A sparse matrix in forward, and a sparse gradient in backward."""
    adjacency = torch.sparse_coo_tensor(_INDICES, values, (2, 7))
    rows = torch.nn.functional.embedding(torch.tensor([0, 3, 3]), p["w"], sparse=True)
    return torch.sparse.mm(adjacency, p["w"]).square().mean() + rows.sin().mean()


@pytest.mark.parametrize("stage", [0, 3])
def test_values_between_may_be_sparse(stage: int) -> None:
    cfg, full, values = fzero.Config(stage=stage), {"w": _params()["w"]}, torch.tensor([1.0, 2, 3])
    function = fzero.value_and_grad(_graph_loss, cfg)
    params = fzero.shard({"w": full["w"].clone()}, cfg)
    loss, grads = function(params, values.double())
    w = full["w"].requires_grad_()
    expected = _graph_loss({"w": w}, values.double())
    expected.backward()
    assert w.grad is not None
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(fzero.unshard(grads)["w"], w.grad.to_dense())
    program = function.lower(params, values.double())
    program.verify()
    assert program.peak_bytes() > 0
    assert program.cost().bytes_moved > 0


def test_an_argument_that_is_sparse_is_refused_by_name() -> None:
    params = fzero.shard({"w": _params()["w"]}, fzero.Config())
    adjacency = torch.sparse_coo_tensor(_INDICES, torch.ones(3, dtype=F64), (2, 7))
    product = fzero.sharded(lambda params, graph: torch.sparse.mm(graph, params["w"]))
    with pytest.raises(ShardError, match=r"argument graph of .* is a sparse tensor .*indices\(\)"):
        product(params, adjacency)


@pytest.mark.parametrize("executor", ["traced", "eager"])
def test_a_batch_that_is_jagged_is_refused_by_name(executor: Any) -> None:
    rows = [torch.ones(2, 3), torch.ones(1, 3)]
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    cfg = fzero.Config(executor=executor)
    step_fn = fzero.make_train_step(lambda p, x: (p["w"] * x).mean(), fzero.optim.sgd(0.1), cfg)
    with pytest.raises(ShardError, match=r"batch is a jagged nested .* values\(\) and offsets\(\)"):
        step_fn(*step_fn.init({"w": torch.ones(3)}), jagged)


def _differentiates_on_one_rank(leaf: str, alone: int) -> str:
    dist.init_process_group("gloo")
    cfg = fzero.Config(executor="eager", stage=3, timeout=60.0)
    leaves = {"w": torch.ones(4, 4), "v": torch.ones(6, 4), "s": torch.tensor(2.0)}
    params = fzero.shard(leaves, cfg)

    def fn(params: Any, x: Tensor) -> Tensor:
        out = (x @ params["w"]).sum()
        return out + params[leaf].sum() if dist.get_rank() == alone else out

    dist.barrier()
    try:
        fzero.value_and_grad(fn, cfg)(params, torch.ones(2, 4))
    except fzero.RankMismatchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("leaf", ["v", "s"])
@pytest.mark.parametrize("alone", [0, 1])
def test_ranks_that_differentiate_other_leaves_eagerly_are_told(leaf: str, alone: int) -> None:
    """Gloo would end the process where buffers have other sizes."""
    for said in run_fresh(2, _differentiates_on_one_rank, leaf, alone, timeout=120):
        assert "eager function 1, fn 1, collective" in said


@pytest.mark.parametrize("executor", ["traced", "eager"])
def test_a_graph_that_gets_no_gradient_is_told_with_the_users_line(executor: Any) -> None:
    encoder, params = torch.nn.Linear(3, 3), {"w": torch.ones(3, 3)}
    cfg = fzero.Config(executor=executor)

    def loss(p: Any, x: Tensor) -> Tensor:
        return (x @ p["w"]).square().mean()

    step_fn = fzero.make_train_step(loss, fzero.optim.sgd(0.1), cfg)
    state = step_fn.init(params)
    gradient = fzero.grad(loss, cfg)
    with pytest.warns(UserWarning, match=r"batch.* comes with a graph \(\w+Backward") as told:
        state = step_fn(*state, encoder(torch.ones(2, 3)))
    assert told[0].filename == __file__
    with pytest.warns(UserWarning, match="the argument x of .* comes with a graph") as told:
        gradient(state[0], encoder(torch.ones(2, 3)))
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step_fn(*state, encoder(torch.ones(2, 3)).detach())


def test_a_number_that_changes_at_each_call_is_named_with_its_values() -> None:
    run = fzero.jit(lambda x, opts, *, t: x * opts["k"] * t)
    for i in range(8):
        run(torch.ones(2), {"k": i}, t=0.5)
    with pytest.warns(UserWarning, match=r"changed opts\['k'\] from 7 to 8\..*torch.tensor\(x\)"):
        run(torch.ones(2), {"k": 8}, t=0.5)
    with pytest.warns(UserWarning, match=r"changed t from 0.5 to 0.25\. .*torch.tensor\(x\)"):
        run(torch.ones(2), {"k": 8}, t=0.25)
    with pytest.warns(UserWarning, match=r"changed the shapes of its arguments"):
        run(torch.ones(3), {"k": 8}, t=0.25)
