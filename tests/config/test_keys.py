"""Each key of DeepSpeed's has one row, and its row decides what becomes of it."""

import itertools
import warnings
from typing import Any

import pytest

import fzero
from fzero.config import Config
from fzero.config.keys import IGNORED, INERT, REFUSED, SECTIONS, WRITES, Keys


def _nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def _problems(key: str, value: Any) -> list[str]:
    keys = Keys(_nested(key, value))
    keys.refuse_the_rest()
    return keys.problems


def test_no_key_is_in_two_tables() -> None:
    for one, other in itertools.combinations((IGNORED, INERT.keys(), REFUSED.keys(), SECTIONS), 2):
        assert not set(one) & set(other)


@pytest.mark.parametrize("key", sorted(IGNORED))
def test_a_key_that_changes_no_result_may_say_anything(key: str) -> None:
    assert not _problems(key, 12345)


@pytest.mark.parametrize("key", sorted(INERT))
def test_a_key_may_say_what_asks_for_nothing_and_no_more(key: str) -> None:
    allowed, advice = INERT[key]
    assert not any(_problems(key, value) for value in allowed)
    assert _problems(key, "another") == [f'{key} = "another": {advice}']
    # 1 is equal to True and 0 to False, and neither is what was meant
    for value in allowed:
        if isinstance(value, bool):
            assert len(_problems(key, int(value))) == 1


@pytest.mark.parametrize("key", sorted(REFUSED))
def test_a_section_without_a_counterpart_may_say_no(key: str) -> None:
    for no in (None, False, {"enabled": False, "depth": 3}, {"enabled": False}):
        assert not _problems(key, no)
    for yes in (True, {"enabled": True}, "x"):
        (problem,) = _problems(key, yes)
        assert REFUSED[key] in problem


@pytest.mark.parametrize("key", sorted(SECTIONS))
def test_a_section_must_be_one(key: str) -> None:
    assert not _problems(key, {})
    assert len(_problems(key, 3)) == 1


@pytest.mark.parametrize(
    ("asked", "value", "expected"),
    [
        ("flag", True, True), ("flag", False, False), ("flag", None, False),
        ("flag", "auto", False),
        ("flag", 1, "problem"), ("flag", "true", "problem"),
        ("number", 2.5, 2.5), ("number", "auto", None), ("number", -1, "problem"),
        ("number", True, "problem"), ("number", float("nan"), "problem"),
        ("integer", 5e8, 500_000_000), ("integer", 2.5, "problem"), ("integer", None, None),
    ],
)  # fmt: skip
def test_values_are_typed(asked: str, value: Any, expected: Any) -> None:
    keys = Keys({"key": value})
    found = getattr(keys, asked)("key")
    assert bool(keys.problems) == (expected == "problem")
    if expected != "problem":
        assert found == expected
        assert type(found) is type(expected)


def test_an_unknown_key_is_named_with_its_neighbour() -> None:
    (problem,) = _problems("zero_optimization.overlap_com", True)
    assert "unknown; did you mean 'zero_optimization.overlap_comm'?" in problem


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("zero_optimization.ofload_optimizer", "zero_optimization.offload_optimizer"),
        ("zero_optimization.leaf_modules", "zero_optimization.leaf_module"),
        ("zero_optimisation", "zero_optimization"),
        ("torch_autocasts", "torch_autocast"),
    ],
)
def test_an_unknown_section_is_named_with_the_section_that_is_meant(
    written: str, meant: str
) -> None:
    (problem,) = _problems(written, {"device": "cpu"})
    assert problem.endswith(f"unknown; did you mean {meant!r}?")


def test_what_is_ignored_is_told_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        fzero.Config.from_deepspeed({"steps_per_print": 10, "gradient_clipping": 1.0})
    assert "ignored: steps_per_print" in caplog.text
    assert "gradient_clipping" not in caplog.text


@pytest.mark.parametrize("key", WRITES)
def test_what_would_be_written_says_that_it_is_not(key: str) -> None:
    for on, said in ((True, key), ({"enabled": True, "job_name": "run"}, f"{key}.enabled")):
        with pytest.warns(UserWarning, match=rf"DeepSpeed's {said}: true.*nothing is written") as w:
            Config.from_deepspeed({key: on})
        assert w[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Config.from_deepspeed({key: {"enabled": False, "job_name": "run"}})


def test_a_device_that_is_none_may_have_options() -> None:
    none = {"device": "none", "pin_memory": True, "buffer_count": 5, "max_in_cpu": 1e9}
    zero = {"stage": 3, "offload_param": none, "overlap_comm": True}
    assert Config.from_deepspeed({"zero_optimization": zero}).stage == 3
