"""Random legal histories of an engine, without autograd: what can happen, and what must come of it.

`Walk` plays the user and autograd: passes nest, forwards end in reverse order, a graph task brings
each leaf at most once. Gradients are numbers in dictionaries that actions move, so that at any time
it can be said where each one is; `Truth` says, from what happened alone, where each must be.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from fzero.engine import events, phases
from fzero.engine.backward_state import GATHERED, LOCAL, BackwardState, Rules
from fzero.engine.counts import masks
from fzero.engine.phases import transition
from fzero.errors import BackwardError

Piles = dict[int, list[int]]
"""For each leaf the gradients, each a number of its own."""


def move(source: Piles, target: Piles) -> None:
    for leaf, ids in source.items():
        target.setdefault(leaf, []).extend(ids)
    source.clear()


def label(action: events.Action) -> tuple[str, *tuple[Any, ...]]:
    """An action as something that differs from other kinds (named tuples of equal fields don't)."""
    return (type(action).__name__, *action)


def ids_in(piles: Piles) -> Counter[int]:
    return Counter(i for ids in piles.values() for i in ids)


@dataclass
class Hands:
    """Carries out actions as an engine does, on numbers."""

    buckets: list[list[int]]
    arrived: int = -1
    waiting: Piles = field(default_factory=dict)  # arrived, and not told yet
    task: Piles = field(default_factory=dict)
    early: dict[int, Piles] = field(default_factory=dict)
    adopted: dict[int, Piles] = field(default_factory=dict)
    unreduced: Piles = field(default_factory=dict)
    used: set[int] = field(default_factory=set)
    landed: Piles = field(default_factory=dict)
    reduced: Piles = field(default_factory=dict)
    launched: list[int] = field(default_factory=list)
    updates: list[Counter[int]] = field(default_factory=list)

    def do(self, action: events.Action, reduces: bool) -> None:
        match action:
            case events.Take(leaf):
                self.task.setdefault(leaf, []).append(self.arrived)
            case events.TakeAll():
                move(self.waiting, self.task)
            case events.TakeEarly(leaf, forward):
                self.early.setdefault(forward, {}).setdefault(leaf, []).append(self.arrived)
            case events.Adopt(forward):
                self.adopted[forward] = self.early.pop(forward)
                move({leaf: [*ids] for leaf, ids in self.adopted[forward].items()}, self.task)
            case events.Forget(forward):
                del (self.early if forward in self.early else self.adopted)[forward]
            case events.Launch(bucket):
                self.launched.append(bucket)
                for leaf in self.buckets[bucket]:
                    self.used |= {leaf} & self.unreduced.keys()
                    ids = [*self.unreduced.get(leaf, []), *self.task.pop(leaf, [])]
                    self.landed.setdefault(leaf, []).extend(ids)
            case events.Commit():
                for leaf in self.used:
                    del self.unreduced[leaf]
                self.used.clear()
                self.adopted.clear()
                self.launched.clear()
                move(self.landed, self.reduced)
                move(self.task, self.unreduced)
            case events.Discard():
                for gone in (self.task, self.waiting, self.landed, self.used, self.launched):
                    gone.clear()
                self.early |= self.adopted
                self.adopted.clear()
            case events.Flush():
                assert reduces
                move(self.unreduced, self.reduced)
            case events.Update():
                self.updates.append(ids_in(self.reduced if reduces else self.unreduced))
                assert not (self.unreduced if reduces else self.reduced), "some were not reduced"
                self.reduced.clear()
                self.unreduced.clear()
            case events.Clear():
                self.reduced.clear()
                self.unreduced.clear()


@dataclass
class Frame:
    """A pass that is running: a forward, or a graph task and the leaves that it has brought."""

    kind: str
    number: int
    brought: set[int] = field(default_factory=set)
    graph: bool = True


@dataclass
class Tape:
    """Choices from bytes; all zeros when they are used up."""

    bytes: bytes
    at: int = 0

    def pick(self, options: int) -> int:
        self.at += 1
        return self.bytes[self.at - 1] % options if self.at <= len(self.bytes) else 0

    @property
    def left(self) -> bool:
        return self.at < len(self.bytes)


class Walk:
    """One history; `run` plays it and checks the laws at every event."""

    def __init__(self, choices: bytes) -> None:
        self.tape = tape = Tape(choices)
        self.leaves = 1 + tape.pick(6)
        buckets: list[list[int]] = [[]]
        for leaf in range(self.leaves):
            if buckets[-1] and tape.pick(2):
                buckets.append([])
            buckets[-1].append(leaf)
        bits = list(masks(buckets))
        if tape.pick(4) == 3:  # a bucket that waits for the end, as modules of some ranks do
            bits[-1] |= 1 << self.leaves
        reduces = tape.pick(4) != 3
        self.rules = Rules(
            tuple(bits) if reduces else (),
            reduces=reduces,
            accum_steps=max(1, tape.pick(7) - 2),
            scaled=tape.pick(4) == 3,
            counts=tape.pick(3) != 2,
        )
        self.hands = Hands(buckets)
        # any history: the last task may have been anything
        last = tuple(tape.pick(1 << self.leaves) for _ in range(tape.pick(3)))
        last = tuple(m for k, m in enumerate(last) if (m and not k) or m & last[k - 1] == m != 0)
        self.state = BackwardState(last=last if last and last[0] else ())
        self.frames: list[Frame] = []
        self.forwards = self.tasks = self.gradients = 0
        self.live: list[int] = []  # forwards that have ended and whose outputs are there
        self.paused = 0
        self.blocks: list[str] = []
        self.events = 0
        # the truth: where each gradient must be
        self.open: int | None = None  # the outermost task that has touched the engine
        self.before: BackwardState | None = None
        self.synced = self.scaled = self.taken = self.brought = False
        self.pending: Counter[int] = Counter()  # of the open task
        self.reached: set[int] = set()  # by the open task
        self.early: dict[int, Counter[int]] = {}
        self.adopted: dict[int, Counter[int]] = {}
        self.alive: Counter[int] = Counter()  # what the next update must have
        self.micro: set[int] = set()  # micro-batches
        self.latest: set[int] = set()  # what a backward that reaches no output counts as
        self.moved, self.fresh = False, True
        self.counted = False  # whether one of the backwards since the last step has a micro-batch
        self.unscaled: bool | None = None  # whether gradients were finite when a scaler came

    def run(self) -> None:
        while self.tape.left:
            self.play()
            micro_step = len(self.micro) - (not self.fresh)
            boundary = micro_step + 1 >= self.rules.accum_steps
            assert phases.is_boundary(self.rules, self.state) == boundary
        while self.frames:
            self.leave()
        while self.paused:
            self.resume()
        while self.blocks:
            self.leave_block()
        self.zero()
        for forward in [*self.live]:
            self.gone(forward)
        assert self.state._replace(last=()) == BackwardState(), "state is left over"
        hands = self.hands
        assert hands == Hands(hands.buckets, hands.arrived), "gradients are left over"

    # --- what can happen ---

    def play(self) -> None:
        kind = self.frames[-1].kind if self.frames else "none"
        moves = {
            "none": [self.whole_pass] * 6
            + [self.step] * 4
            + [self.start_task, self.start_forward, self.pause, self.resume, self.gone]
            + [self.zero, self.stale, self.enter_block, self.leave_block, self.unscale],
            "forward": [self.leave] * 3
            + [self.start_task] * 2
            + [self.start_forward, self.throw, self.step, self.zero, self.unscale],
            "task": [self.gradient] * 8
            + [self.leave] * 4
            + [self.start_task, self.start_task, self.scale, self.output, self.start_forward]
            + [self.throw, self.step, self.stale, self.gone, self.unscale],
        }[kind]
        moves[self.tape.pick(len(moves))]()

    def whole_pass(self) -> None:
        """What most programs do: a forward, and a backward from its output."""
        self.start_forward(graph=True)
        if self.tape.pick(3) == 2 and self.unscaled is None:
            self.start_task()
            self.gradient()
            self.gradient()
            self.leave()
        self.leave()
        self.start_task()
        if self.rules.scaled:
            self.scale()
        self.output(self.live[-1])

    def start_forward(self, graph: bool | None = None) -> None:
        self.forwards += 1
        graph = self.tape.pick(4) < 3 if graph is None else graph
        self.frames.append(Frame("forward", self.forwards, graph=graph))
        rests = self.open is None and not any(f.kind == "forward" for f in self.frames[:-1])
        clears = self.unscaled is False and graph and rests
        if clears:
            self.forget()
        self.fresh |= graph
        actions = self.send(events.ForwardStarted(self.forwards, graph))
        assert actions == ([("Clear",)] if clears else [])

    def enter_block(self) -> None:
        self.blocks.append((LOCAL, GATHERED)[self.tape.pick(2)])
        assert not self.send(events.BlockEntered(self.blocks[-1]))

    def leave_block(self) -> None:
        if self.blocks:
            assert not self.send(events.BlockLeft(self.blocks.pop()))

    def start_task(self) -> None:
        self.tasks += 1
        self.frames.append(Frame("task", self.tasks))

    def leave(self) -> None:
        """The innermost pass ends well."""
        frame = self.frames.pop()
        if frame.kind == "forward" and not frame.graph:
            assert not self.send(events.ForwardEnded(frame.number, graph=False))
            self.live.append(frame.number)
            self.gone(frame.number)  # nothing holds it
        elif frame.kind == "forward":
            self.live.append(frame.number)
            self.latest = {frame.number}
            assert not self.send(events.ForwardEnded(frame.number))
        elif frame.number == self.open:
            self.end()
        else:  # nested, or nothing of the engine's was in it: nobody asked to be told
            assert self.state.task is None or self.state.task.number != frame.number

    def throw(self) -> None:
        """The innermost pass raises, and so do those around it up to whoever catches it."""
        while self.frames:
            frame = self.frames.pop()
            if frame.kind == "forward":
                actions = self.send(events.ForwardRaised(frame.number))
                assert (frame.number in self.early) == (("Forget", frame.number) in actions)
                assert (("Reshard",) in actions) == (self.open is None)
                self.early.pop(frame.number, None)
            elif frame.number == self.open:
                self.broken()
            if self.tape.pick(2):
                break

    def gradient(self) -> None:
        frame = self.frames[-1]
        missing = [leaf for leaf in range(self.leaves) if leaf not in frame.brought]
        if not missing:
            return
        leaf = missing[self.tape.pick(len(missing))]
        frame.brought.add(leaf)
        self.gradients += 1
        self.hands.arrived = self.gradients
        running = [f.number for f in self.frames if f.kind == "forward" and f.graph]
        if self.tape.pick(12) == 11:  # a function has none for it
            assert not self.send(events.LeafReached(frame.number))
            self.brought |= self.open is not None and LOCAL not in self.blocks
            return
        if self.unscaled is not None:
            self.refused(events.GradientReady(leaf, frame.number), "GradScaler")
            self.throw()
            return
        if self.open is None and running:
            assert self.send(events.GradientReady(leaf, frame.number)) == [
                ("TakeEarly", leaf, running[-1])
            ]
            self.early.setdefault(running[-1], Counter())[self.gradients] += 1
            return
        if LOCAL in self.blocks:
            self.refused(events.GradientReady(leaf, frame.number), "local_forward")
            self.throw()
            return
        if self.rules.scaled and not (self.open is not None and self.scaled):
            self.refused(events.GradientReady(leaf, frame.number), "scale")
            self.throw()
            return
        # nothing waits for it: told at the end
        if self.open is not None and self.taken and not self.synced:
            self.hands.waiting.setdefault(leaf, []).append(self.gradients)
            self.pending[self.gradients] += 1
            return
        actions = self.send(events.GradientReady(leaf, frame.number), opens=frame.number)
        assert [a for a in actions if a[0] == "Take"] == [("Take", leaf)]
        self.taken = self.brought = True
        self.pending[self.gradients] += 1

    def output(self, forward: int | None = None) -> None:
        if not self.live:
            return
        forward = forward or self.live[self.tape.pick(len(self.live))]
        number = self.frames[-1].number
        actions = self.send(events.OutputReached(forward, number), opens=number)
        assert (("Adopt", forward) in actions) == (forward in self.early)
        self.reached.add(forward)
        if forward in self.early:
            self.adopted[forward] = self.early.pop(forward)
            self.pending += self.adopted[forward]

    def scale(self) -> None:
        number = self.frames[-1].number
        self.send(events.ScaleApplied(number), opens=number)
        self.scaled = True

    def pause(self) -> None:
        self.paused += 1
        assert not self.send(events.SyncPaused())

    def resume(self) -> None:
        if self.paused:
            self.paused -= 1
            assert not self.send(events.SyncResumed())

    def gone(self, forward: int | None = None) -> None:
        if not self.live:
            return
        forward = forward or self.live[self.tape.pick(len(self.live))]
        self.live.remove(forward)
        actions = self.send(events.ForwardGone(forward))
        held = self.early if forward in self.early else self.adopted
        assert actions == ([("Forget", forward)] if forward in held else [])
        held.pop(forward, None)

    def stale(self) -> None:
        """Word of a task that is over comes a second time."""
        if self.tasks and self.tasks != self.open:
            number = 1 + self.tape.pick(self.tasks)
            if number not in (self.open, *(f.number for f in self.frames if f.kind == "task")):
                kind = (events.TaskRaised, events.TaskEnded)[self.tape.pick(2)]
                before = self.state
                assert not self.send(kind(number))
                assert self.state == before

    def step(self) -> None:
        if self.frames and (self.open is not None or self.running):
            return self.refused(events.StepCalled(), "step")
        if self.frames:  # inside a backward that has not touched the engine: nobody can know
            return None
        if self.blocks:
            return self.refused(events.StepCalled(), self.blocks[-1])
        if self.paused:
            return self.refused(events.StepCalled(), "no_sync")
        if not self.moved:
            return self.refused(events.StepCalled(), "no backward")
        if self.rules.accum_steps > 1 and not self.counted:
            return self.refused(events.StepCalled(), "no micro-batch")
        actions = self.send(events.StepCalled())
        self.moved, self.fresh, self.counted = False, True, False
        if self.rules.accum_steps > 1 and len(self.micro) < self.rules.accum_steps:
            assert not actions
            return None
        assert actions[-2:] == [("Update",), ("Reshard",)]
        assert self.hands.updates.pop() == self.alive, "the update has other gradients"
        assert not self.hands.unreduced
        assert not self.hands.reduced
        self.alive, self.micro, self.latest, self.unscaled = Counter(), set(), set(), None
        state = self.state
        assert (state.task, state.reached, state.unreduced, state.moved) == (None, set(), 0, False)
        return None

    def zero(self) -> None:
        if self.frames and (self.open is not None or self.running):
            return self.refused(events.GradientsZeroed(), "zero_grad")
        if not self.frames:
            assert self.send(events.GradientsZeroed()) == [("Clear",)]
            self.forget()
        return None

    def forget(self) -> None:
        """There are no gradients."""
        self.alive, self.micro, self.moved, self.fresh = Counter(), set(), False, True
        self.latest, self.counted, self.unscaled = set(), False, None

    def unscale(self) -> None:
        """A scaler divides what is there, and tells whether it was finite."""
        event = events.GradientsUnscaled(finite=bool(self.tape.pick(2)))
        few = self.rules.accum_steps > 1 and len(self.micro) < self.rules.accum_steps
        if self.frames and (self.open is not None or self.running):
            return self.refused(event, "GradScaler")
        if self.frames:  # inside a backward that has not touched the engine: nobody can know
            return None
        if self.blocks:
            return self.refused(event, self.blocks[-1])
        if not self.moved:
            return self.refused(event, "no backward")
        if self.unscaled is not None:
            return self.refused(event, "twice")
        if few:
            return self.refused(event, "micro-batches")
        self.unscaled = event.finite
        assert not self.send(event)
        return None

    @property
    def running(self) -> bool:
        return any(frame.kind == "forward" for frame in self.frames)

    # --- the outermost task ---

    def begin(self, number: int, before: BackwardState) -> None:
        self.open, self.before = number, before
        self.synced, self.scaled = self.rules.reduces and not self.paused, False
        self.taken = self.brought = False

    def end(self) -> None:
        number = self.open
        assert number is not None
        if not self.brought:  # torch.autograd.grad: as if it had never been
            self.broken(events.TaskEnded(number))
            return
        self.open = None
        if self.hands.waiting:
            assert self.send(events.GradientsReady(number)) == [("TakeAll",)]
        early = [*self.hands.launched]
        actions = self.send(events.TaskEnded(number))
        rest = [action[1] for action in actions if action[0] == "Launch"]
        assert actions[-1] == ("Reshard",), "the last thing is not to free parameters"
        assert actions[-2] == ("Commit",)
        assert actions.count(("Commit",)) == 1
        every = list(range(len(self.rules.buckets))) if self.synced else []
        assert early + rest == every, "not every bucket was launched once"
        self.micro |= self.reached or self.latest
        self.counted |= bool(self.reached or self.latest)
        self.moved, self.fresh, self.latest = True, False, set()
        self.alive += self.pending
        self.close()

    def broken(self, event: events.Event | None = None) -> None:
        number, self.open = self.open, None
        assert number is not None
        assert self.before is not None
        event = event or events.TaskRaised(number)
        assert self.send(event) == [("Discard",), ("Reshard",)]
        # of forwards inside it, which live
        ignored = {"running": (), "training": (), "fresh": True, "early": (), "latest": ()}
        assert self.state._replace(**ignored) == self.before._replace(**ignored)
        for forward, ids in self.adopted.items():
            self.early[forward] = ids
            assert ids_in(self.hands.early[forward]) == ids
        self.close()

    def close(self) -> None:
        self.pending, self.reached, self.adopted = Counter(), set(), {}

    # --- one event ---

    def send(
        self, event: events.Event, opens: int | None = None
    ) -> list[tuple[str, *tuple[Any, ...]]]:
        """Send an event, carry out its actions, compare with the truth."""
        self.events += 1
        before = self.state
        self.state, actions = transition(self.rules, before, event)
        assert hash(before) is not None  # immutable all the way down
        watched = [action.task for action in actions if isinstance(action, events.Watch)]
        assert watched == ([opens] if self.open is None and opens is not None else [])
        if watched:
            assert isinstance(actions[0], events.Watch)
            self.begin(watched[0], before)
        launches = [action.bucket for action in actions if isinstance(action, events.Launch)]
        first = len(self.hands.launched)
        assert launches == list(range(first, first + len(launches))), "out of order, or twice"
        assert not launches or self.synced, "reduced in a pass that must not"
        assert len(actions) - len(launches) <= 4, "work that grows with something"
        for action in actions:
            self.hands.do(action, self.rules.reduces)
        if not isinstance(event, (events.GradientReady, events.TaskEnded)):
            assert not launches
        self.compare()
        return [label(action) for action in actions]

    def compare(self) -> None:
        """Masks in the state are what the hands hold."""
        state, hands = self.state, self.hands
        assert state.unreduced == bool(hands.unreduced)
        assert {forward for forward, _ in state.early} == hands.early.keys()
        for forward, counts in state.early:
            for k, mask in enumerate(counts):
                piles = hands.early[forward].items()
                assert mask == sum(1 << leaf for leaf, ids in piles if len(ids) > k)
        idle = not (hands.task or hands.landed or hands.adopted or hands.waiting)
        assert state.task is not None or idle

    def refused(self, event: events.Event, word: str) -> None:
        """The event is an error of the user's, which says so and changes nothing."""
        before = self.state
        with pytest.raises(BackwardError, match=word):
            transition(self.rules, before, event)
        assert self.state is before
