"""What a pass of your own needs: see docs/passes.md.

A pass is a function from a `Program` to a `Program`. `Config(passes=(fn, ...))` and
`step_fn.with_pass(fn)` let it run on every Program that is staged out; it is verified afterwards.

    def my_pass(program):
        graph = fzero.passes.copy_graph(program.graph)
        ...
        return program.logged(graph, "what was done")
"""

from fzero.distributed.mesh import Axis
from fzero.layout import LeafLayout
from fzero.program.graph import copy_graph, output_node, phases, placeholders, tensors_of
from fzero.program.passes.overlap import overlap
from fzero.program.passes.rewrite import call, is_gather, is_reduction, legalise
from fzero.program.passes.users import (
    calls,
    gather,
    inline,
    leaf_and_axis,
    replace_value,
    scheduled,
)
from fzero.program.program import Pass

__all__ = [
    "Axis",
    "LeafLayout",
    "Pass",
    "call",
    "calls",
    "copy_graph",
    "gather",
    "inline",
    "is_gather",
    "is_reduction",
    "leaf_and_axis",
    "legalise",
    "output_node",
    "overlap",
    "phases",
    "placeholders",
    "replace_value",
    "scheduled",
    "tensors_of",
]
