"""The generator that a thread draws from on the CPU, in place of torch's global one.

[Note: own draws] A step's random numbers are a function of its seed, so whoever draws beside it may
not move them, nor be moved. But a model calls `F.dropout`, which takes no generator, and torch has
one for all threads. What such operators are made of does take one: so each operator of torch's with
a `generator` argument gets a kernel that puts the thread's own where none was given. The kernels
stand at a dispatch key that is off unless a thread switches it on, for itself: others go past them.
Torch takes that key for a device's, so all other operators are told to fall through it. (It takes
0.2 s, once. An operator that is made later, and has kernels both for any device and for the CPU,
runs the one for any.)

Two things of torch's go with that into the threads in which autograd runs backward, as grad mode
does: the keys that are on, and objects under a name. Here: the generator. The key is one of those
right before the devices' kernels, below autograd, `torch.func` and modes. Nobody who looks at calls
or records them sees another one, and what they call themselves comes here, too.

That some operators draw inside of a kernel without such an argument is so on GPUs alone. So this is
for the CPU, where loaders draw.

Private in torch. The public alternatives: a dispatch mode, which costs Python at every operator and
leaves what torch.compile has compiled uncompiled; or to seed the global generator and put it back,
which other threads disturb, and are disturbed by.
"""

import contextlib
import ctypes
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._ops
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

# What runs in the midst of a compiled part is compiled, too, and would keep the first generator.
_never_compiled: Any = torch.compiler.disable


@_never_compiled
def thread_generator() -> torch.Generator:
    """What this thread draws from on the CPU.

    Examples:
        >>> own = torch.Generator()
        >>> with drawing_from(own):
        ...     thread_generator() is own
        True
        >>> thread_generator() is torch.default_generator
        True
    """
    return _own() or torch._C.default_generator


@contextlib.contextmanager
def drawing_from(generator: torch.Generator) -> Iterator[None]:
    """What this thread draws on the CPU comes from `generator`, in backward, too.

    The numbers are those that torch's global generator would give from the same state.

    Raises:
        RuntimeError, AttributeError: of a torch that `check_draws` does not know.

    Examples:
        >>> with drawing_from(torch.Generator().manual_seed(3)):
        ...     x = torch.rand(4)
        >>> torch.equal(x, torch.rand(4, generator=torch.Generator().manual_seed(3)))
        True
    """
    key, before = _key(), _own()
    _keep(_NAME, generator)
    try:
        with torch._C._IncludeDispatchKeyGuard(key):
            yield
    finally:
        _keep(_NAME, before)


@contextlib.contextmanager
def drawing_as_torch() -> Iterator[None]:
    """Inside of `drawing_from`, as if it was not.

    For what calls kernels on tensors that are written in Python: they would be asked again.
    """
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_key())):
        yield


@functools.cache
def check_draws() -> bool:
    """Whether this torch is seen to draw from a thread's own generator, and from no other then.

    Nothing is drawn from its global generator: that would move what the user draws.
    """
    try:
        with _disable_current_modes(), torch.no_grad():
            ours, same = (torch.Generator("cpu").manual_seed(1) for _ in range(2))
            with drawing_from(ours):
                seen = [_drawn(None), _drawn(torch._C.default_generator)]
            on = torch._C._dispatch_tls_is_dispatch_key_included(_key())
            wanted = [_drawn(same), _drawn(same)]
    except Exception:  # whatever a torch of another make raises
        return False
    pairs = [(ours.get_state(), same.get_state()), *zip(seen, wanted, strict=True)]
    return not on and thread_generator() is not ours and all(torch.equal(a, b) for a, b in pairs)


def _drawn(generator: torch.Generator | None) -> Tensor:
    """Numbers of operators that are called with a generator, or, if it is None, without."""
    given: dict[str, Any] = {} if generator is None else {"generator": generator}
    x = torch.ones(8, device="cpu", dtype=torch.float32)
    mask = torch.empty_like(x).bernoulli_(0.5, **given)
    return torch.stack([mask, torch.rand(8, device="cpu", dtype=torch.float32, **given)])


# ------------------------------------------------------------------------------------ the thread's
_NAME = "fzero_thread_generator"


def _own() -> torch.Generator | None:
    return torch._C._get_obj_in_tls(_NAME) if torch._C._is_key_in_tls(_NAME) else None


def _keep(name: str, value: Any) -> None:
    """Under a name of this thread's, in place of what is there."""
    if _takes_uncounted():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    torch._C._stash_obj_in_tls(name, value)


@functools.cache
def _takes_uncounted() -> bool:
    """Whether torch keeps a value without counting that, and later counts that it drops it.

    2.11 does: whoever gave a value must not drop it himself.
    """
    value = object()
    count = sys.getrefcount(value)
    torch._C._stash_obj_in_tls(f"{_NAME}, tried", value)
    uncounted = sys.getrefcount(value) == count
    if uncounted:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    return uncounted


# ------------------------------------------------------------------------------------- the kernels
_KEY = "CustomRNGKeyId"  # for generators that others make; torch has no kernel there
_LOCK = threading.Lock()


def _key() -> Any:
    with _LOCK:  # threads may be the first at the same time
        return _registered()[0]


@functools.cache
def _registered() -> tuple[Any, ...]:
    """The key; and what holds the kernels for as long as the process lives."""
    key = torch._C._dispatch_key_parse(_KEY)
    below = torch._C._dispatch_keyset_full_after(key)
    places = _places_of_generators()
    libraries: dict[str, Any] = {}
    for name in torch._C._dispatch_get_all_op_names():
        space, _, operator = name.partition("::")
        if name in places:
            kernel = _kernel(name, places[name], below)
        elif _runs_default(name):
            kernel = torch.library.fallthrough_kernel
        else:
            continue
        if space not in libraries:
            libraries[space] = torch.library.Library(space, "IMPL")
        libraries[space].impl(operator, kernel, _KEY, with_keyset=name in places)
        if _has(name, _COMPOSITE) and not _has(name, _OTHERS):
            libraries[space].impl(operator, _taken_apart(name), _OTHERS)
    libraries["_"] = torch.library.Library("_", "IMPL")
    libraries["_"].fallback(torch.library.fallthrough_kernel, _KEY)
    # operators that are written in Python ask for no fallback: those that are, and will be
    torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(key)
    for operator in torch._ops._higher_order_ops.values():
        operator.fallthrough(key)
    return key, libraries


# Autograd's of all devices that have no key of their own there: of mkldnn's, and of ours. Where one
# of those has a kernel, torch no longer says what an operator does that is made of others.
_OTHERS, _COMPOSITE = "AutogradOther", "CompositeImplicitAutograd"
_has = torch._C._dispatch_has_kernel_for_dispatch_key


def _runs_default(name: str) -> bool:
    """Whether an operator would run at our key what it has for any device, in place of a device's.

    Where a device is selected first the key comes again, past what is said to be fallen through.
    """
    computed = torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, _KEY)
    same = _has(name, _COMPOSITE) and not any(_has(name, device) for device in _DEVICES)
    return computed and not same and not _has(name, "BackendSelect")


_DEVICES = ("CPU", "CUDA", "Meta", "NestedTensorCPU", "NestedTensorCUDA")


def _taken_apart(name: str) -> Callable[..., Any]:
    """An operator as what it is made of."""
    space, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, space), packet), overload or "default").decompose


def _places_of_generators() -> dict[str, int]:
    """Where among its arguments each of torch's operators takes one, by the operator's name."""
    found = {}
    for schema in torch._C._jit_get_all_schemas():
        names = [argument.name for argument in schema.arguments]
        if schema.name.startswith("aten::") and "generator" in names:
            name = f"{schema.name}.{schema.overload_name}".rstrip(".")
            found[name] = names.index("generator")
    return found


def _kernel(name: str, place: int, below: Any) -> Callable[..., Any]:
    """What calls an operator with the thread's own generator where torch would take the global one.

    Args:
        name: of the operator.
        place: of `generator` among its arguments.
        below: the dispatch keys after ours.
    """

    packet, _, overload = name.removeprefix("aten::").partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
    default = torch._C.default_generator._cdata  # pyright: ignore[reportAttributeAccessIssue]

    @_never_compiled
    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        given = args[place] if place < len(args) else kwargs.get("generator")
        # the global one comes in another object than its own
        is_torchs = given is None or given._cdata == default
        if is_torchs and keys.has(torch._C.DispatchKey.CPU):
            if place < len(args):
                args = (*args[:place], _own(), *args[place + 1 :])
            else:
                kwargs["generator"] = _own()
        return operator.redispatch(keys & below, *args, **kwargs)

    return kernel
