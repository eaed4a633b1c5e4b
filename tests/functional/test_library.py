"""Code and classes of users are told from those of torch, numpy, Python and fzero."""

import collections
import enum
import fractions
import json

import numpy as np
import optree
import pytest
import torch
from torch import nn

import fzero
from fzero.functional.library import (
    is_library,
    is_library_class,
    is_library_module,
    is_machinery,
)
from fzero.functional.outside import Walk


class Net(nn.Linear):
    """A user's module."""


@pytest.mark.parametrize("module", [torch, fzero, np, json, optree, enum])
def test_files_of_libraries(module: object) -> None:
    file = module.__file__  # pyright: ignore[reportAttributeAccessIssue]
    assert is_library(file)


@pytest.mark.parametrize(
    "file", [__file__, "/home/me/torch/train.py", "/x/site-packages/other/a.py", "<string>"]
)
def test_files_of_users(file: str) -> None:
    assert not is_library(file)


@pytest.mark.parametrize("file", ["_pytest/config/__init__.py", "hypothesis/core.py"])
def test_test_runners_are_none_of_the_users(file: str) -> None:
    assert is_library(f"/x/site-packages/{file}")


def test_modules_without_a_file_go_by_name() -> None:
    import sys

    assert is_library_module(sys)
    assert not is_library_module(type(sys)("mine"))


def test_classes() -> None:
    assert all(map(is_library_class, (nn.Linear, fractions.Fraction, np.random.Generator)))
    assert not is_library_class(Net)


def test_machinery_holds_no_settings() -> None:
    assert is_machinery(fzero.Config)
    assert is_machinery(torch.Generator)
    # these and their subclasses have attributes that users set
    for cls in (nn.Linear, torch.optim.SGD, torch.distributions.Normal, Net, collections.Counter):
        assert not is_machinery(cls)


def test_what_names_a_test_runner_is_not_followed_into_all_tests() -> None:
    def reads() -> object:
        with pytest.raises(ValueError, match="invalid literal"):
            int("a")
        return str(pytest), Net

    facts = Walk({"reads": reads}).facts
    assert any(fact.key == "pytest" for fact in facts)
    assert len(facts) < 200  # it was 16,036 in a session of this file alone


def test_code_that_no_compiler_has_made_is_read_too() -> None:
    def reads() -> object:
        return [Net, None]

    code = reads.__code__
    reads.__code__ = code.replace(co_consts=(*code.co_consts, []))
    assert any(fact.key == "Net" for fact in Walk({"reads": reads}).facts)
