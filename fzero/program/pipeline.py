"""The order of the passes, and why."""

from fzero.program.passes.bucket import bucket, bucket_at
from fzero.program.passes.clean import clean
from fzero.program.passes.functionalise import functionalise
from fzero.program.passes.gathers import hoist_reductions, regather, sink_gathers
from fzero.program.passes.remat import rematerialise
from fzero.program.passes.rewrite import is_gather, is_reduction
from fzero.program.passes.seed import insert_seeds, number_sites
from fzero.program.program import Program


def optimise(
    program: Program,
    *,
    reshard_after_forward: bool,
    bucket_bytes: int,
    prefetch: int | None,
    slack: float = 0.1,
    exact: bool = False,
) -> Program:
    """Make the Program of a gradient function fit to run.

    Args:
        reshard_after_forward: gather leaves again in backward instead of keeping them.
        bucket_bytes: most bytes of full leaves that share a collective.
        prefetch: how many buckets ahead a gather is launched; None: as the backend warrants.
        slack: share of the lowest peak that larger buckets may cost.
        exact: take `bucket_bytes` as it is instead of looking for a better size below it.
    """
    program = functionalise(program)  # first: the others take values for granted
    program = number_sites(program)  # before nodes are copied: a copy draws the same numbers
    program = clean(program)
    program = rematerialise(program)  # before regather: what is computed again reads new gathers
    if reshard_after_forward:
        program = regather(program)
    program = sink_gathers(program)
    program = hoist_reductions(program)
    program = share_collectives(
        program, bucket_bytes=bucket_bytes, prefetch=prefetch, slack=slack, exact=exact
    )
    return insert_seeds(program)


def share_collectives(
    program: Program,
    *,
    bucket_bytes: int,
    prefetch: int | None,
    slack: float = 0.1,
    budget: int = 0,
    exact: bool = False,
) -> Program:
    """`bucket`, where there is anything to share."""
    if not any(is_gather(node) or is_reduction(node) for node in program.graph.nodes):
        return program
    if exact:
        return bucket_at(program, bucket_bytes, prefetch=prefetch)
    return bucket(program, limit=bucket_bytes, prefetch=prefetch, slack=slack, budget=budget)
