"""Whose code and whose classes: the user's, or torch's, numpy's, Python's and this package's.

Test runners are among the latter: a test module names `pytest`, which knows every plugin and every
test of a session, and no model computes with these.
"""

import functools
import os
import sys
import sysconfig
import types
from pathlib import Path as File

from torch import nn

# Py_TPFLAGS_HEAPTYPE: of classes that Python code made, whose attributes can be set.
HEAP_TYPE = 1 << 9


@functools.cache
def is_library(filename: str) -> bool:
    """Whether code of this file is torch's, numpy's, Python's or this package's.

    >>> import torch
    >>> is_library(torch.__file__), is_library("train.py")
    (True, False)
    """
    ours = [File(str(sys.modules[name].__file__)).parent for name in ("torch", "fzero", "optree")]
    if filename.startswith(tuple(f"{folder}{os.sep}" for folder in ours)):
        return True
    parts = File(filename).parts
    for packages in ("site-packages", "dist-packages"):
        if packages in parts:
            return parts[parts.index(packages) + 1 :][:1] in _PACKAGES
    return filename.startswith((sysconfig.get_paths()["stdlib"] + os.sep, "<frozen"))


_RUNNERS = ("_pytest", "pytest", "pluggy", "xdist", "execnet", "hypothesis")
_PACKAGES = {(name,) for name in ("numpy", *_RUNNERS)}


def is_library_module(module: types.ModuleType) -> bool:
    """Whether it is one of theirs, also where it has no file, as those of C."""
    file = module.__dict__.get("__file__")
    if isinstance(file, str):
        return is_library(file)
    root = str(module.__dict__.get("__name__")).partition(".")[0]
    return root in ("torch", "numpy") or root in sys.stdlib_module_names


def is_library_class(cls: type) -> bool:
    """Whether it was defined in a module of theirs."""
    module = sys.modules.get(cls.__module__)
    return module is not None and is_library_module(module)


def is_machinery(cls: type) -> bool:
    """Torch's own classes and this package's, whose objects hold no settings of users'.

    A function may reach its own step function (`self.step_fn`), and so what is watching it: to
    watch that as well would never end.
    """
    root, _, _ = cls.__module__.partition(".")
    if root == "fzero":
        return True
    return root == "torch" and not (issubclass(cls, nn.Module) or cls.__module__.startswith(_OPEN))


_OPEN = ("torch.nn.", "torch.distributions.", "torch.optim.")
