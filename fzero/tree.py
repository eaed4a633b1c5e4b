"""Pytrees: the one place that knows optree.

Dict keys are sorted, `None` is an empty subtree, and a leaf's path reads like the Python that
reaches it (`['head.weight']`, `.mu['w']`, `[0]`).
"""

import builtins
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import optree
from torch import Tensor
from torch.utils import _pytree as pytree

PyTree = Any
Spec = optree.PyTreeSpec


class Known:
    """A structure that trees of tensors probably have: seen in a quarter of the time.

    What its dicts are is seen of those alone that have leaves. Leaves of an `OrderedDict` come in
    the order of its keys as they stand, so another order is another structure.

    >>> known = Known(flatten({"b": Tensor(), "a": ()})[1])
    >>> known.leaves({"a": (), "b": Tensor([1.0])}), known.leaves({"b": [Tensor()]})
    ([tensor([1.])], None)
    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        # dicts of another class would be taken for one, and have another order of leaves
        self._dicts: dict[str, tuple[Any, type]] = {}
        keys: dict[str, dict[Any, None]] = {}
        for accessor in spec.accessors():
            for depth, entry in enumerate(accessor):
                at = accessor[:depth]
                if issubclass(entry.type, dict):
                    self._dicts[at.codify("")] = at, entry.type
                if issubclass(entry.type, OrderedDict):
                    keys.setdefault(at.codify(""), {})[entry.entry] = None
        self._ordered = [(self._dicts[code][0], found) for code, found in keys.items()]

    def leaves(self, tree: PyTree) -> list[Any] | None:
        """The leaves of a tree of this structure; None of another."""
        try:
            leaves = self.spec.flatten_up_to(tree)
        except ValueError:
            return None
        # at the place of a leaf there may be a tree
        alike = all(issubclass(kind, Tensor) for kind in {*builtins.map(type, leaves)})
        if not alike or any(type(at(tree)) is not kind for at, kind in self._dicts.values()):
            return None
        for at, keys in self._ordered:
            if list(filter(keys.__contains__, at(tree))) != list(keys):
                return None
        return leaves


def flatten(tree: PyTree, known: Known | None = None) -> tuple[list[Any], Spec]:
    """The leaves of `tree` in the library's one order, and the spec that rebuilds it.

    Args:
        known: a structure that it probably has.

    >>> leaves, spec = flatten({"b": 2, "a": (1, None)})
    >>> leaves, unflatten(spec, leaves)
    ([1, 2], {'b': 2, 'a': (1, None)})
    """
    if known is not None and (leaves := known.leaves(tree)) is not None:
        return leaves, known.spec
    return optree.tree_flatten(tree)


def orders(tree: PyTree) -> tuple[tuple[Any, ...], ...]:
    """The keys of each dict as they stand in it, which no spec tells apart.

    Leaves come in the order of sorted keys. But a function may ask in which order its dicts are:
    `model(*batch.values())`.

    >>> orders({"b": 1, "a": [{"c": 2}]}), orders([{"a": [{"c": 2}], "b": 1}])
    ((('b', 'a'), ('c',)), (('a', 'b'), ('c',)))

    Nor does a spec tell keys apart that Python takes for one; these are.

    >>> orders({1: 0}) == orders({True: 0})
    False
    """
    found: list[tuple[Any, ...]] = []
    todo = [tree]
    while todo:
        x = todo.pop()
        if isinstance(x, dict):
            # strings are all there is to them, and mostly there is nothing else
            names = {*builtins.map(type, x)} <= {str}
            found.append(tuple(x) if names else tuple(builtins.map(exact, x)))
        children = x.values() if type(x) in (dict, OrderedDict, defaultdict) else _children(x)
        # nearly all are leaves, which take no line of Python each
        if not all(issubclass(kind, Tensor) for kind in {*builtins.map(type, children)}):
            todo += [child for child in children if not isinstance(child, Tensor)]
    return tuple(found)


def exact(value: Any) -> Any:
    """A key that is equal for the same values alone, as code could tell them apart.

    To Python's `==` the numbers 1, 1.0 and True are one, so are 0.0 and -0.0, and NaN is never
    itself.

    Args:
        value: what can be hashed, and lists, dicts and sets of it.

    >>> exact((1, "a")) == exact((True, "a")), exact(0.0) == exact(-0.0)
    (False, False)
    >>> exact({"t": float("nan")}) == exact({"t": float("nan")})
    True
    """
    kind = type(value)
    if isinstance(value, float):
        return kind, float.__repr__(value)
    if isinstance(value, complex):
        return kind, complex.__repr__(value)
    if isinstance(value, list | tuple):
        return kind, *builtins.map(exact, value)
    if isinstance(value, dict):
        return kind, *((exact(k), exact(v)) for k, v in value.items())
    if isinstance(value, set | frozenset):
        return kind, frozenset(builtins.map(exact, value))
    return kind, value


def _children(x: Any) -> Iterable[Any]:
    if type(x) in (list, tuple):
        return x
    if optree.tree_is_leaf(x, none_is_leaf=True):
        return ()
    return optree.tree_flatten_one_level(x)[0]


def unflatten(spec: Spec, leaves: Any) -> PyTree:
    """The tree of `spec` with these leaves."""
    return optree.tree_unflatten(spec, leaves)


def leaves(tree: PyTree) -> list[Any]:
    """The leaves of `tree`."""
    return optree.tree_leaves(tree)


def map(fn: Callable[..., Any], tree: PyTree, *rest: PyTree) -> PyTree:
    """`fn` on every leaf, and on the leaves of `rest` at the same places.

    >>> map(lambda a, b: a + b, {"x": 1}, {"x": 2})
    {'x': 3}
    """
    return optree.tree_map(fn, tree, *rest)


def nodes(kind: type, tree: PyTree) -> list[Any]:
    """The outermost nodes of a class.

    >>> nodes(tuple, {"a": (1, (2,)), "b": [(3,)], "c": 4})
    [(1, (2,)), (3,)]
    """
    found = optree.tree_leaves(tree, is_leaf=lambda x: isinstance(x, kind))
    return [x for x in found if isinstance(x, kind)]


def map_nodes(
    kind: type, fn: Callable[..., Any], tree: PyTree, *rest: PyTree, alone: bool = False
) -> PyTree:
    """`fn` on the outermost nodes of a class, and on what `rest` has there.

    Leaves stay; with `alone` they are None.

    >>> map_nodes(tuple, len, {"a": (5, 6), "b": 7}), map_nodes(tuple, len, {"b": 7}, alone=True)
    ({'a': 2, 'b': 7}, {'b': None})
    """

    def of(x: Any, *more: Any) -> Any:
        return fn(x, *more) if isinstance(x, kind) else None if alone else x

    return optree.tree_map(of, tree, *rest, is_leaf=lambda x: isinstance(x, kind))


def either(tree: PyTree, other: PyTree) -> PyTree:
    """The leaves of `tree`, and those of `other` where it has None.

    >>> either({"x": 1, "y": None}, {"x": None, "y": 2})
    {'x': 1, 'y': 2}
    """
    return optree.tree_map(lambda a, b: b if a is None else a, tree, other, none_is_leaf=True)


def paths(tree: PyTree) -> list[str]:
    """One path per leaf, as it would be written after the tree's name.

    >>> paths({"w": [1, 2], "b": 3})
    ["['b']", "['w'][0]", "['w'][1]"]
    """
    return [accessor.codify("") for accessor in optree.tree_accessors(tree)]


def leaves_at(spec: Spec, tree: PyTree) -> list[Any] | None:
    """The leaves of `tree` in the order of those of `spec`; None if they have other paths.

    Trees may have leaves of the same paths in other orders: an `OrderedDict`'s come as its keys
    stand, and a dict's sorted.

    >>> leaves_at(flatten({"a": 0, "b": 0})[1], OrderedDict(b=2, a=1))
    [1, 2]
    """
    found, own = flatten(tree)
    if own == spec:
        return found
    at = dict(zip(paths(tree), found, strict=True))
    wanted = paths(unflatten(spec, range(spec.num_leaves)))
    return [at[path] for path in wanted] if at.keys() == {*wanted} else None


def is_node_of_torch(x: Any) -> bool:
    """Whether a value is a tree in `torch.utils._pytree`, which optree does not ask."""
    return type(x) in pytree.SUPPORTED_NODES


def absent(tree: PyTree) -> list[str]:
    """The paths at which a tree has None: frozen leaves, or others' in a part of a tree.

    >>> absent({"w": [1, None], "b": None})
    ["['b']", "['w'][1]"]
    """
    found = optree.tree_leaves(tree, none_is_leaf=True)
    places = optree.tree_accessors(tree, none_is_leaf=True)
    return [at.codify("") for at, x in zip(places, found, strict=True) if x is None]


def names(tree: PyTree) -> list[str]:
    """One dotted name per leaf, for globs and listings: `blocks.0.weight`.

    Where two leaves would share a name they have their paths, so that none is taken for the other.

    >>> names({"w": [1, 2], "blocks.0.b": 3})
    ['blocks.0.b', 'w.0', 'w.1']
    >>> names({"a.b": 1, "a": {"b": 2}})
    ["['a']['b']", "['a.b']"]
    """
    found = [".".join(str(entry) for entry in path) for path in optree.tree_paths(tree)]
    if len(set(found)) == len(found):
        return found
    many = {name for name, count in Counter(found).items() if count > 1}
    pairs = zip(found, paths(tree), strict=True)
    return [path if name in many else name for name, path in pairs]


def labels(tree: PyTree) -> list[str]:
    """`names`, with the fields of namedtuples and dataclasses by name: `mu.blocks.0.weight`.

    >>> labels({"w": [1, 2], "blocks.0.b": 3})
    ['blocks.0.b', 'w.0', 'w.1']
    """
    return [
        ".".join([_label(entry) for entry in accessor]) for accessor in optree.tree_accessors(tree)
    ]


def _label(entry: optree.PyTreeEntry) -> str:
    for known in ("field", "name"):  # of a namedtuple; of a dataclass
        if isinstance(label := getattr(entry, known, None), str):
            return label
    return str(entry.entry)
