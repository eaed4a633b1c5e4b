"""A module with other tensors in its slots, for one call. See [Note: slots] in slots.py."""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fzero.errors import TraceError
from fzero.functional.fit import check_fit, check_structure, rebuilt, shown
from fzero.functional.held import Saved, held_by_nobody, holder, note_left, restore, snapshot
from fzero.functional.slots import Buffers, SlotTable, fill_template
from fzero.functional.torch_checkpoint import recomputing
from fzero.functional.transforms import Over, is_over


@contextlib.contextmanager
def swapped(
    plan: SlotTable,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    given: Mapping[str, Tensor],
    *,
    again: bool = False,
) -> Iterator[None]:
    """The module with these tensors in its slots; as it was before on the way out.

    To be entered by who has `plan.turn`.

    `buffers` are copies of `given`, which the module may change. What a part leaves that is
    computed `again` has been left before: nobody reads it.
    """
    check_fit(plan, params, plan.params, "params")
    check_structure(plan)
    held = holder()
    entry = None if held is None else held.enter(plan, params)
    saved = snapshot(plan.modules)
    call: _Call | None = None
    over = False
    try:
        for tensors, slots in ((params, plan.params), (buffers, plan.buffers)):
            for name, _, entries in slots:
                for index, table, key in entries:
                    plan.modules[index].__dict__[table][key] = tensors[name]
        if plan.caches:
            tensors = {**params, **buffers}
            for index, attr, template in plan.caches:
                attrs = plan.modules[index].__dict__
                try:
                    attrs[attr] = fill_template(attrs[attr], template, tensors)
                # forward has rebuilt the attribute in another form since its template was made
                except (LookupError, TypeError):
                    raise rebuilt(plan, index, f"its attribute {attr!r}") from None
        # what tells, when something is called back, whether forward has written into a copy
        versions = {name: buffer._version for name, buffer in buffers.items()}
        call = _Call(plan, params, buffers, versions, given)
        _wrap_hooks(plan, call.again)
        with recomputing(call.again):
            yield
        over = True
    finally:
        if call is not None:
            call.over = True
        if call is not None and call.goes_on:
            call.left.extend(_left(plan, saved))
        try:
            if held is not None and entry is not None:
                held.leave(entry, saved, buffers, over=over)
            elif over and not again:
                note_left(plan, saved, buffers)
        finally:
            if held is None or not over:
                restore(saved)
            if held is not None and entry is not None:
                held.show(entry)


def _there(name: str, value: Any) -> Any:
    """`value` for a computation in backward, or what raises when it is read."""
    return Over(value, repr(name)) if isinstance(value, Tensor) and is_over(value) else value


@dataclass(eq=False)
class _Call:
    """What one call of `apply` put into the slots, and the buffers it was given.

    Args:
        goes_on: whether something of it will be called back.
        over: whether it has ended.
        left: once it is over and goes on, the attributes that forward has set.
    """

    plan: SlotTable
    params: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    versions: Mapping[str, int]
    given: Mapping[str, Tensor]
    goes_on: bool = False
    over: bool = False
    left: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)

    def again(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn`, a part of this call, as it will be called back in backward.

        By then the slots hold the module's own tensors again, so it swaps for itself. The buffers
        are those of now; what a recomputation changes in them is lost, as it was done before.
        Attributes are as forward has left them, such as the seeds of a reversible layer. See
        [Note: called back] in `fzero.functional.callbacks`.
        """
        self.goes_on = True
        buffers_then = {
            name: self.given[name]
            if value is self.buffers[name] and value._version == self.versions[name]
            else clone(value)
            for name, value in read_buffers(self.plan, self.buffers).items()
        }

        def called_back(*args: Any, **kwargs: Any) -> Any:
            params, buffers = (
                {name: _there(name, value) for name, value in tensors.items()}
                for tensors in (self.params, buffers_then)
            )
            clones = {name: x if isinstance(x, Over) else clone(x) for name, x in buffers.items()}
            # while the call goes on this is a part of it, whichever thread autograd runs it in
            turn = self.plan.turn if self.over else contextlib.nullcontext()
            with turn, held_by_nobody(), swapped(self.plan, params, clones, buffers, again=True):
                for attrs, values in self.left:
                    attrs.update({name: _there(name, x) for name, x in values.items()})
                return fn(*args, **kwargs)

        return called_back


def _wrap_hooks(plan: SlotTable, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Let hooks on the modules' backward see the tensors of this call, too."""
    for module in plan.modules:
        attrs = module.__dict__
        for table in ("_backward_hooks", "_backward_pre_hooks"):
            if hooks := attrs.get(table):
                # a dict of the call's own: the module's stays as it is, for the calls around this
                # one
                attrs[table] = OrderedDict((key, wrap(hook)) for key, hook in hooks.items())


def _left(plan: SlotTable, saved: Saved) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The attributes that are others than before the call, but for what `swapped` has put there."""
    before = {id(attrs): copy for attrs, copy in saved if isinstance(copy, dict)}
    ours = {(index, attr) for index, attr, _ in plan.caches}
    for index, module in enumerate(plan.modules):
        attrs = module.__dict__
        then = before[id(attrs)]
        found = {
            name: value
            for name, value in attrs.items()
            if value is not then.get(name) and name not in _PUT and (index, name) not in ours
        }
        if found:
            yield attrs, found


_PUT = frozenset({"_backward_hooks", "_backward_pre_hooks", "forward"})


def clone(tensor: Tensor) -> Tensor:
    """A copy that knows whether it was written to, in inference mode, too."""
    # Inference tensors have no version counter, which is what tells a changed buffer.
    if torch.is_inference_mode_enabled() or tensor.is_inference():
        with torch.inference_mode(False):
            return tensor.clone()
    return tensor.clone()


def read_buffers(plan: SlotTable, given: Mapping[str, Tensor]) -> Buffers:
    """The buffers after the call: changed in place, or replaced (`self.ema = 0.9 * self.ema`)."""
    new: Buffers = {}
    for name, shape, entries in plan.buffers:
        found = [plan.modules[index].__dict__[table].get(key) for index, table, key in entries]
        # of a tied buffer forward may have replaced one slot only: that one is the new value
        replaced = {id(value): value for value in found if value is not given[name]}
        value = next(iter(replaced.values())) if replaced else given[name]
        if len(replaced) > 1 or not isinstance(value, Tensor) or value.shape != shape:
            found = ", ".join(shown(v) for v in replaced.values())
            raise TraceError(
                f"The call replaced buffer {name!r} ({tuple(shape)}) by {found}. A buffer must "
                "stay one tensor of the same shape: reset it outside the call, or keep such "
                "state as an input and output of forward."
            )
        new[name] = value
    return new
