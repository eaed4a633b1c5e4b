"""The order of the passes, and why."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from fzero.program.choice import Thrift
from fzero.program.fitting import Fitting
from fzero.program.foreign import note_foreign
from fzero.program.hardware import Hardware
from fzero.program.ladder import Plan
from fzero.program.passes.bucket import bucket, bucket_at, bucket_sizes
from fzero.program.passes.clean import clean
from fzero.program.passes.functionalise import functionalise
from fzero.program.passes.gathers import hoist_reductions, regather, sink_gathers
from fzero.program.passes.groups import ALIKE, Growth
from fzero.program.passes.offload import offload
from fzero.program.passes.order import in_order, order_of_leaves
from fzero.program.passes.over import await_late, mark_copied
from fzero.program.passes.place import place
from fzero.program.passes.recompute import recompute
from fzero.program.passes.remat import rematerialise
from fzero.program.passes.rewrite import is_gather, is_reduction
from fzero.program.passes.schedule import Early
from fzero.program.passes.seed import draws, insert_seeds, number_sites
from fzero.program.passes.users import Named, run_passes
from fzero.program.program import Program


def optimise(
    program: Program,
    *,
    reshard_after_forward: bool,
    bucket_bytes: int,
    prefetch: int | None,
    slack: float = 0.1,
    exact: bool = False,
    growth: Growth = ALIKE,
    early: Early | None = None,
    limit: int | None = None,
    thrift: Thrift | None = None,
    passes: Named = (),
    machine: Hardware | None = None,
    uneven: int = 0,
    placing: bool = True,
) -> Program:
    """Make the Program of a gradient function fit to run.

    Args:
        reshard_after_forward: gather leaves again in backward instead of keeping them.
        bucket_bytes: most bytes of full leaves that share a collective.
        prefetch: how many buckets ahead a gather is launched; None: as the backend warrants.
        slack: share of the lowest peak that larger buckets may cost.
        exact: take `bucket_bytes` as it is instead of looking for a better size below it.
        growth: with `exact`, how much larger than that buckets may be.
        early: with `exact`, how early gathers are, which takes the place of `prefetch`.
        limit: bytes that the peak has to stay under, with as little done twice as that takes.
        thrift: what all ranks settled for that, with `exact`; None: this rank's own, the first that
            fits. See [Note: ranks under a limit].
        passes: a user's, by name: see [Note: passes of users].
        machine: to whose host a plan for `limit` may send values away; None: to none.
        uneven: bytes that the rank with the largest shards holds more than this one.
        placing: compute gradients into the buffers that carry them. Not where a compiler joins
            operators: it joins none that write where they are told.

    Raises:
        ConfigError: nothing stays under the limit.
        TraceError: a user's pass is wrong.
    """
    program = functionalise(program)  # first: the others take values for granted
    note_foreign(program.graph)
    program = number_sites(program)  # before nodes are copied: a copy draws the same numbers
    program = clean(program)
    program = rematerialise(program)  # before regather: what is computed again reads new gathers

    def build(
        plan: Plan | None = None, within: int = 0, late: bool = False, alone: bool = False
    ) -> Program:
        done, shared = program, None if alone or limit is None else thrift
        given = exact and not alone
        if plan is not None:
            done = recompute(done, plan.recomputed)
            done = regather(done, plan.regathered)
            if machine is not None and plan.offloaded:
                done = offload(done, plan.offloaded, machine)
        elif reshard_after_forward:
            done = regather(done)
        # the last moment at which each collective is one node of one leaf
        done = run_passes(_laid(done), passes, late=False)
        if shared is not None:
            done = in_order(done, shared.order)
        order = order_of_leaves(done) if limit is not None and plan is not None else ()
        most, settled = bucket_bytes, given
        if plan is not None and not within and not given:  # to see what it can hold at least
            most, settled = bucket_sizes(done, bucket_bytes)[-1], True
        done = share_collectives(
            done,
            bucket_bytes=most,
            prefetch=0 if late else prefetch,
            slack=slack,
            exact=settled,
            growth=growth if given else ALIKE,
            early=early if given else None,
            within=within or None,
        )
        done = place(done) if placing else done
        done = run_passes(insert_seeds(done), passes, late=True)
        if limit is None or plan is None:
            return done
        own = Thrift(0, tuple(sorted(plan.regathered)), order, tuple(sorted(plan.recomputed)))
        return replace(done, thrift=tuple(shared or own))

    fitting = Fitting(lambda: _laid(program), reshard_after_forward, build, machine, uneven)
    if limit is None:
        done = build()
    else:
        done = fitting.under(limit) if thrift is None else fitting.settled(limit, thrift)
    return replace(done, fitting=fitting)


def in_place(
    program: Program,
    *,
    bucket_bytes: int,
    prefetch: int | None,
    budget: int = 0,
    slack: float = 0.1,
    exact: bool = False,
    passes: Named = (),
    at_home: Mapping[int, int] = MappingProxyType({}),
) -> Program:
    """Make a Program fit to run that writes into its inputs, such as an update.

    Its operators stay as they were recorded: in place, and so in their order. Collectives are
    shared, for what reads and what writes a value is known of all of them.

    Args:
        bucket_bytes, prefetch, slack, exact, passes: as for `optimise`.
        budget: bytes that the peak may reach in any case.
        at_home: of each flat whose full leaves lie in memory as it does, how many they are: see
            [Note: at home].

    Raises:
        TraceError: a user's pass is wrong.
    """
    note_foreign(program.graph)
    if draws(program):
        program = number_sites(program)
    program = share_collectives(
        mark_copied(run_passes(program, passes, late=False), at_home),
        bucket_bytes=bucket_bytes,
        prefetch=prefetch,
        slack=slack,
        budget=budget,
        exact=exact,
    )
    return run_passes(insert_seeds(await_late(program)), passes, late=True)


def _laid(program: Program) -> Program:
    """Gathers at their first use, reductions where they are ready."""
    return hoist_reductions(sink_gathers(program))


def share_collectives(
    program: Program,
    *,
    bucket_bytes: int,
    prefetch: int | None,
    slack: float = 0.1,
    budget: int = 0,
    exact: bool = False,
    growth: Growth = ALIKE,
    early: Early | None = None,
    within: int | None = None,
) -> Program:
    """`bucket`, where there is anything to share."""
    if not any(is_gather(node) or is_reduction(node) for node in program.graph.nodes):
        return program
    if exact:
        return bucket_at(program, bucket_bytes, prefetch=prefetch, early=early, growth=growth)
    return bucket(
        program,
        limit=bucket_bytes,
        prefetch=prefetch,
        slack=slack,
        budget=budget,
        within=within,
    )
