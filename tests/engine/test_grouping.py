"""Which leaves travel together: every leaf once, in bounds, and in the order of readiness."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fzero.config import Config
from fzero.distributed.mesh import Axis
from fzero.engine.grouping import Grouping, plan_grouping, plan_order, plan_units, units_ahead
from fzero.errors import ConfigError
from fzero.layout import Layout, LeafLayout
from fzero.layout.flats import plan_flats
from fzero.layout.modules import block_of, module_of, natural_order

NAMES = st.lists(
    st.from_regex(r"(embed|layers\.[0-4]\.(attn|mlp)|experts\.[01]|head)\.(w|b)", fullmatch=True),
    min_size=1,
    max_size=12,
    unique=True,
)


def leaves_of(names: list[str], frozen: frozenset[str] = frozenset()) -> list[LeafLayout]:
    return [
        LeafLayout(name, (1 + i % 3, 4), torch.float32, trainable=name not in frozen)
        for i, name in enumerate(names)
    ]


@given(NAMES, st.data())
def test_modules_inside_of_one_that_is_named_may_be_named_too(
    names: list[str], data: st.DataObject
) -> None:
    """In any order: the outermost are the units, and no glob that fits a module is in vain."""
    parts = [name.split(".")[:-1] for name in names]
    around = {".".join(part[:n]) for part in parts for n in range(1, len(part) + 1)}
    together = data.draw(st.lists(st.sampled_from(sorted(around | {"*"})), min_size=1, unique=True))
    _, special = plan_units(leaves_of(names), range(len(names)), 10**9, together)
    outer = [x for x in together if not any(x.startswith(f"{y}.") for y in together)]
    # "*" is the whole model, whose own name is empty
    assert set(special) == ({""} if "*" in together else set(outer))


@given(NAMES, st.integers(1, 200), st.booleans())
def test_units_hold_every_leaf_once_and_no_more_than_the_largest_block(
    names: list[str], limit: int, apart: bool
) -> None:
    leaves = leaves_of(names)
    experts = {module_of(name) for name in names if name.startswith("experts")}
    together = ["experts.*"] if apart and experts else []
    units, special = plan_units(leaves, range(len(leaves)), limit, together)
    assert sorted(i for unit in units for i in unit) == list(range(len(leaves)))
    assert set(special) == (experts if together else set())
    # each module that a glob matches is a unit of its own, and they come last
    last = units[len(units) - len(special) :]
    found = [{module_of(names[i]) for i in unit} for unit in last]
    assert found == [{module} for module in special]
    blocks: dict[str, int] = {}
    modules: dict[str, int] = {}
    for i, leaf in enumerate(leaves):
        blocks[block_of(names[i])] = blocks.get(block_of(names[i]), 0) + leaf.nbytes
        modules[module_of(names[i])] = modules.get(module_of(names[i]), 0) + leaf.nbytes
    for unit in units[: len(units) - len(special)]:
        nbytes = sum(leaves[i].nbytes for i in unit)
        assert nbytes <= max(limit, *(modules[module_of(names[i])] for i in unit))
    shared = [unit for unit in units[: len(units) - len(special)] if unit]
    left = total = sum(leaf.nbytes for unit in shared for leaf in map(leaves.__getitem__, unit))
    for unit in shared:
        nbytes = sum(leaves[i].nbytes for i in unit)
        # where forward ends no unit is more than a block
        assert left > 0.4 * total or nbytes <= max(blocks.values())
        left -= nbytes


def blocks(count: int, nbytes: int) -> list[LeafLayout]:
    return [LeafLayout(f"layers.{i}.w", (nbytes // 4,), torch.float32) for i in range(count)]


def test_numbered_modules_are_units_until_there_are_more_than_32() -> None:
    few, many = blocks(32, 1_600_000), blocks(128, 1_600_000)
    assert len(plan_units(few, range(32), 2**30)[0]) == 32
    assert len(plan_units(many, range(128), 2**30)[0]) == 32


def test_small_blocks_share_a_collective_away_from_the_end_of_forward() -> None:
    small = blocks(8, 800_000)
    assert plan_units(small, range(8), 2**30)[0] == [[0, 1], [2, 3], [4], [5], [6], [7]]
    # a large block beside small ones stays the bound of what is shared
    large = [*blocks(8, 800_000), LeafLayout("layers.8.w", (500_000,), torch.float32)]
    units = plan_units(large, range(9), 2**30)[0]
    assert max(sum(large[i].nbytes for i in unit) for unit in units) == 2_000_000
    # the user's bound is a bound
    assert plan_units(small, range(8), 900_000)[0] == [[i] for i in range(8)]


def test_a_glob_that_matches_no_module_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'expert' matches no module.*'a'"):
        plan_units(leaves_of(["a.w"]), range(1), 64, ["expert"])


@given(NAMES, st.integers(30, 400), st.booleans(), st.data())
def test_what_lies_in_a_flat_is_gathered_and_reduced_together(
    names: list[str], least: int, apart: bool, data: st.DataObject
) -> None:
    frozen = frozenset(data.draw(st.sets(st.sampled_from(names))))
    kinds = data.draw(st.lists(st.sampled_from([None, torch.bfloat16]), min_size=12, max_size=12))
    leaves = [
        replace(leaf, dim=data.draw(st.sampled_from([0, 0, 0, None])), world=2, compute=kind)
        for leaf, kind in zip(leaves_of(names, frozen), kinds, strict=False)
    ]
    experts = {module_of(name) for name in names if name.startswith("experts")}
    together = ["experts.*"] if apart and experts else []
    leaves = plan_flats(Layout(tuple(leaves), 2), 10**6, least, together).leaves
    cfg = Config(gather_together=together)
    units = plan_grouping(leaves, range(len(leaves)), cfg, lazy=True, alone=False)
    shared = plan_grouping(leaves, range(len(leaves)), cfg, lazy=False, alone=False)
    assert sorted(i for unit in units.units for i in unit) == list(range(len(leaves)))
    for groups in (units.units, units.buckets, shared.buckets):
        found = [{home.flat for i in group if (home := leaves[i].home)} for group in groups]
        assert sum(map(len, found)) == len(set().union(*found))
    # and what only some ranks run shares nothing with the rest
    last = units.units[len(units.units) - len(units.special) :]
    assert [{module_of(names[i]) for i in unit} for unit in last] == [{x} for x in units.special]
    # a unit is left before the next is entered, in the order of use
    if any(leaf.home for leaf in leaves):
        common = units.units[: len(units.units) - len(units.special)]
        indices = [i for unit in common for i in unit]
        order = [indices[at] for at in natural_order([names[i] for i in indices])]
        place = {i: at for at, i in enumerate(order)}
        ends = sorted((min(place[i] for i in u), max(place[i] for i in u)) for u in common)
        assert all(stop < start for (_, stop), (start, _) in itertools.pairwise(ends))


@given(NAMES, st.booleans(), st.data())
def test_a_bucket_is_reduced_when_the_last_of_its_gradients_has_come_and_stays_what_it_is(
    names: list[str], lazy: bool, data: st.DataObject
) -> None:
    frozen = frozenset(data.draw(st.sets(st.sampled_from(names))))
    leaves = leaves_of(names, frozen=frozen)
    arrivals = data.draw(st.permutations(range(len(leaves))))
    experts = any(name.startswith("experts") for name in names)
    apart = ["experts.*"] if experts and lazy else ()
    # some leaves share a bucket, some don't
    cfg = Config(stage=3, gather_together=apart, bucket_mb=data.draw(st.sampled_from([1e-4, 25])))
    registered = data.draw(st.permutations(range(len(leaves))))
    before = plan_grouping(leaves, registered, cfg, lazy=lazy, alone=False)
    grouping = plan_order(before, leaves, arrivals, cfg)
    # where an element lies in its bucket is the same before the first backward and after it
    assert sorted(grouping.buckets) == sorted(before.buckets)
    trained = [i for i in range(len(leaves)) if leaves[i].trainable]
    assert sorted(i for bucket in grouping.buckets for i in bucket) == trained
    complete = [max(map(arrivals.index, bucket)) for bucket in grouping.buckets]
    waits = [mask >> len(leaves) for mask in grouping.masks]
    # what only some ranks run is last, and waits for the end on a bit that no leaf has
    assert waits == sorted(waits)
    common = complete[: waits.count(0)]
    assert common == sorted(common)
    assert waits.count(1) == sum(
        lazy and names[bucket[0]].startswith("experts") for bucket in grouping.buckets
    )
    for bucket, mask in zip(grouping.buckets, grouping.masks, strict=True):
        assert mask & (1 << len(leaves)) - 1 == sum(1 << i for i in bucket)


def test_a_lone_rank_has_no_buckets_and_whole_parameters_fill_them_up() -> None:
    leaves = leaves_of(["a.w", "b.w"])
    alone = plan_grouping(leaves, range(2), Config(), lazy=False, alone=True)
    assert alone == Grouping(range(2), [], [], [], ())
    found = plan_grouping(leaves, range(2), Config(), lazy=False, alone=False)
    assert (found.buckets, found.masks) == ([[1, 0]], (0b11,))


def test_nothing_is_gathered_ahead_on_one_rank_unless_asked_for() -> None:
    assert units_ahead(Config(), Axis("", 1, 0)) == 0
    assert units_ahead(Config(), Axis("", 2, 0)) == 1
    assert units_ahead(Config(prefetch=3), Axis("", 1, 0)) == 3
