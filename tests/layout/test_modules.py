"""What names tell of modules, whatever they are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fzero
from fzero.errors import ConfigError
from fzero.layout.modules import (
    block_of,
    check_together,
    is_numbered,
    module_of,
    module_within,
    modules_around,
    natural_order,
)

parts = st.from_regex(r"[a-z]{1,3}|[0-9]{1,2}|[a-z][0-9]{1,2}", fullmatch=True)
names = st.lists(parts, min_size=1, max_size=5).map(".".join)


@given(names)
def test_a_block_and_a_module_are_around_the_leaf(name: str) -> None:
    around = modules_around(name)
    assert around[0] == ""
    assert around[-1] == module_of(name)
    assert all(x == "" or name.startswith(f"{x}.") for x in around)
    assert block_of(name) in around
    # the outermost one that is a number in a list
    assert is_numbered(name) == any(x.rpartition(".")[2].isdecimal() for x in around)
    if is_numbered(name):
        first = next(x for x in around if x.rpartition(".")[2].isdecimal())
        assert block_of(name) == first


@given(names, st.lists(names, max_size=3))
def test_of_modules_that_globs_match_the_outermost_counts(name: str, globs: list[str]) -> None:
    found = module_within(name, globs)
    matched = [x for x in modules_around(name) if x in globs]
    assert found == (matched[0] if matched else None)
    assert module_within(name, ["*"]) == ""


@given(st.lists(names, unique=True))
def test_a_blocks_leaves_are_neighbours_and_blocks_in_the_order_of_their_numbers(
    found: list[str],
) -> None:
    order = [found[i] for i in natural_order(found)]
    assert sorted(order) == sorted(found)
    numbers = [int(x[1:].partition(".")[0]) for x in order if x[0] == "a" and x[1:2].isdecimal()]
    assert numbers == sorted(numbers)


def test_a_glob_that_matches_no_module_is_refused_by_names_that_are_there() -> None:
    check_together(["experts.*", ""], ["experts.0.w", "w"])
    check_together(["experts.*"], [])
    with pytest.raises(ConfigError, match=r"'expert' matches no module.*such as 'experts'"):
        check_together(["experts", "expert"], ["experts.0.w"])
    with pytest.raises(ConfigError, match=r"'expert' matches no module.*no leaf is in one"):
        check_together(["expert"], ["w"])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_steps_and_engines_refuse_it(stage: int) -> None:
    model, sgd = nn.Sequential(nn.Linear(2, 1)), fzero.optim.sgd(0.1)
    cfg = fzero.Config(stage=stage, gather_together=["layers.*"])
    apply, params = fzero.functionalize(model)
    with pytest.raises(ConfigError, match=r"gather_together='layers\.\*' matches no module.*'0'"):
        fzero.make_train_step(lambda p, x: apply(p, x).mean(), sgd, cfg).init(params)
    with pytest.raises(ConfigError, match=r"gather_together='layers\.\*' matches no module.*'0'"):
        fzero.Engine(model, sgd, cfg)
