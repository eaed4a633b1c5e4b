"""Random programs on a real engine: their gradients and updates are plain torch's."""

from collections.abc import Sequence
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tests.engine.parity import STAGES, here
from tests.engine.session import WAYS, Session
from tests.ranks import run_ranks

number = st.integers(0, 11)
configs = st.fixed_dictionaries(
    {"accum_steps": st.integers(1, 3), "loss_scale": st.sampled_from([None, None, 128.0])}
)
# what programs mostly do comes more often
OPERATIONS = [
    *WAYS,
    *["backward"] * 5,
    *["step"] * 2,
    *[
        "backward_of_two",
        "only_grad",
        "fail",
        "pause",
        "zero_grad",
        "compare",
        "look",
        "look",
        "write",
    ],
]


class Machine(RuleBasedStateMachine):
    @initialize(stage=st.sampled_from(STAGES), fields=configs)
    def make(self, stage: int, fields: dict[str, Any]) -> None:
        self.session = Session(0, 1, stage=stage, **fields)

    @rule(operation=st.sampled_from(OPERATIONS), a=number, b=number)
    def do(self, operation: str, a: int, b: int) -> None:
        self.session.do(operation, a, b)

    def teardown(self) -> None:
        if hasattr(self, "session"):
            self.session.compare()


def test_any_program_on_one_rank() -> None:
    run_state_machine_as_test(Machine, settings=settings(max_examples=60, stateful_step_count=30))


def run(program: Sequence[tuple[str, int, int]], stage: int, fields: dict[str, Any]) -> None:
    rank, world = here()
    Session(rank, world, stage=stage, **fields).run(program)


@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    st.lists(st.tuples(st.sampled_from(OPERATIONS), number, number), min_size=8, max_size=25),
    st.sampled_from(STAGES),
    configs,
    st.sampled_from([25, 1e-4]),
)
def test_any_program_on_two_ranks(
    program: list[tuple[str, int, int]], stage: int, fields: dict[str, Any], bucket_mb: float
) -> None:
    run_ranks(2, run, program, stage, {**fields, "bucket_mb": bucket_mb})
