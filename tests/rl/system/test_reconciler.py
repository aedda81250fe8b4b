"""The life cycle by hand, and under every order of completions, failures and restarts that hypothesis finds."""

import json
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from composer2.rl.system.reconciler import BoundedStaleness, GroupState, Reconciler, ReconcilerConfig
from composer2.types import Admission


def small(**fields):
    defaults = {"prompts_per_step": 2, "group_size": 2, "num_slots": 8, "max_staleness": 1, "max_retries": 1}
    return ReconcilerConfig(**(defaults | fields))


def offered(config, count=12):
    machine = Reconciler(config)
    for index in range(count):
        assert machine.offer(f"t{index}")
    return machine


def finish(machine, start):
    for sample in range(machine.config.group_size):
        assert machine.rollout_ended(start.position, start.attempt, sample)
        assert machine.verified(start.position, start.attempt, sample)


def run_step(machine):
    while (start := machine.next_start()) is not None:
        finish(machine, start)
    plan = machine.begin_step()
    machine.end_step()
    return plan


def test_steps_train_their_own_positions_in_order():
    machine = offered(small(max_staleness=0))
    assert run_step(machine).task_ids == ("t0", "t1")
    assert run_step(machine).task_ids == ("t2", "t3")
    assert machine.version == 2
    assert machine.trained == ["t0", "t1", "t2", "t3"]


def test_zero_staleness_is_synchronous():
    machine = offered(small(max_staleness=0))
    first, second = machine.next_start(), machine.next_start()
    assert machine.next_start() is None
    finish(machine, second)
    assert machine.begin_step() is None
    finish(machine, first)
    assert machine.next_start() is None
    assert machine.begin_step().positions == (0, 1)
    assert machine.next_start() is None
    machine.end_step()
    assert machine.next_start().policy_version == 1


def test_staleness_bounds_how_far_groups_run_ahead():
    machine = offered(small(max_staleness=2, num_slots=100))
    starts = []
    while (start := machine.next_start()) is not None:
        starts.append(start.position)
    assert starts == [0, 1, 2, 3, 4, 5]  # steps 0, 1, 2
    policy = BoundedStaleness(prompts_per_step=2, max_staleness=2)
    assert isinstance(policy, BoundedStaleness)
    admission: Admission = policy
    assert admission.may_start(groups_started=5, policy_version=0)
    assert not admission.may_start(groups_started=6, policy_version=0)
    assert admission.may_start(groups_started=6, policy_version=1)


def test_slots_bound_what_is_in_flight():
    machine = offered(small(num_slots=5, max_staleness=9))
    first, _ = machine.next_start(), machine.next_start()
    assert machine.next_start() is None  # 4 of 5 slots used, a group needs 2
    assert machine.rollout_ended(first.position, first.attempt, 0)
    assert machine.num_in_flight == 4  # verifying holds the slot
    assert machine.verified(first.position, first.attempt, 0)
    assert machine.num_in_flight == 3
    assert machine.next_start().position == 2


def test_fast_groups_do_not_overtake_slow_ones():
    machine = offered(small())
    slow = machine.next_start()
    while (start := machine.next_start()) is not None:
        finish(machine, start)
    assert machine.begin_step() is None
    assert machine.groups_by_state() == {"pending": 0, "running": 1, "ready": 3, "training": 0}
    finish(machine, slow)
    assert machine.begin_step().positions == (0, 1)


def test_a_failed_group_is_retried_then_replaced():
    machine = offered(small(max_retries=1), count=5)
    first = machine.next_start()
    assert machine.group_failed(first.position, first.attempt)
    retry = machine.next_start()
    assert (retry.position, retry.task_id, retry.num_failures) == (0, "t0", 1)
    assert machine.group_failed(retry.position, retry.attempt)
    other = machine.next_start()
    assert (other.position, other.task_id, other.num_failures) == (0, "t1", 0)
    assert machine.counters.num_replaced_tasks == 1
    assert machine.counters.num_failed_attempts == 2
    assert not machine.offer("t0")  # given up, and still never offered again


def test_too_few_valid_samples_fail_the_attempt():
    machine = offered(small(group_size=3, min_valid=2))
    start = machine.next_start()
    assert machine.sample_failed(start.position, start.attempt, 0)
    assert machine.sample_failed(start.position, start.attempt, 1)
    assert machine.rollout_ended(start.position, start.attempt, 2)
    assert machine.state_of(0) is GroupState.RUNNING
    assert machine.verified(start.position, start.attempt, 2)
    assert machine.state_of(0) is GroupState.PENDING
    again = machine.next_start()
    assert machine.sample_failed(again.position, again.attempt, 0)  # one lost sample of three is data, not a failure
    for sample in (1, 2):
        assert machine.rollout_ended(again.position, again.attempt, sample)
        assert machine.verified(again.position, again.attempt, sample)
    assert machine.state_of(0) is GroupState.READY


def test_late_events_change_nothing():
    machine = offered(small())
    start = machine.next_start()
    assert machine.group_failed(start.position, start.attempt)
    retry = machine.next_start()
    before = machine.snapshot()["groups"]
    assert not machine.rollout_ended(start.position, start.attempt, 0)
    assert not machine.group_failed(start.position, start.attempt)
    assert not machine.verified(retry.position, retry.attempt, 0)  # not sampled yet
    assert machine.rollout_ended(retry.position, retry.attempt, 0)
    assert not machine.rollout_ended(retry.position, retry.attempt, 0)
    assert machine.snapshot()["groups"] == before
    assert machine.counters.num_late_events == 4


def test_a_task_is_accepted_once():
    machine = offered(small())
    assert not machine.offer("t3")
    run_step(machine)
    assert not machine.offer("t0")
    assert machine.counters.num_refused == 2
    assert machine.trained_twice == 0


def test_needs_task_says_when_the_queue_holds_things_up():
    machine = Reconciler(small())
    assert machine.needs_task
    assert machine.next_start() is None
    machine.offer("a")
    assert not machine.needs_task
    start = machine.next_start()
    assert machine.needs_task
    machine.group_failed(start.position, start.attempt)
    assert not machine.needs_task  # the retry brings its own task


def test_the_run_ends():
    machine = offered(small(num_steps=1))
    assert run_step(machine) is not None
    assert machine.is_finished
    assert machine.next_start() is None
    assert not machine.needs_task
    assert machine.begin_step() is None


def test_an_aborted_step_is_trained_later():
    machine = offered(small(max_staleness=0))
    while (start := machine.next_start()) is not None:
        finish(machine, start)
    plan = machine.begin_step()
    assert machine.begin_step() is None
    machine.abort_step()
    assert machine.begin_step() == plan
    machine.end_step()
    with pytest.raises(ValueError, match="accepted is a step that has begun"):
        machine.end_step()


def test_restart_keeps_ready_groups_and_reruns_the_rest():
    machine = offered(small(num_slots=20))
    first, second, third = (machine.next_start() for _ in range(3))
    finish(machine, first)
    finish(machine, second)
    machine.rollout_ended(third.position, third.attempt, 0)
    machine.begin_step()
    snapshot = json.loads(json.dumps(machine.snapshot()))
    restored = Reconciler.restore(snapshot, machine.config)
    assert [restored.state_of(p) for p in range(4)] == [GroupState.READY, GroupState.READY, GroupState.PENDING, None]
    again = restored.next_start()
    assert (again.position, again.task_id, again.num_failures) == (2, third.task_id, 0)
    assert again.attempt > third.attempt
    assert restored.begin_step().task_ids == ("t0", "t1")
    lost_data = Reconciler.restore(snapshot, machine.config, kept_positions=[1])
    assert lost_data.state_of(0) is GroupState.PENDING
    assert lost_data.state_of(1) is GroupState.READY
    assert lost_data.next_start().task_id == "t0"


def test_restart_refuses_another_shape_or_format():
    snapshot = offered(small()).snapshot()
    with pytest.raises(ValueError, match=r"is \[3, 2\], accepted on restart is \[2, 2\]"):
        Reconciler.restore(snapshot, small(prompts_per_step=3))
    with pytest.raises(ValueError, match="snapshot format is 7"):
        Reconciler.restore(snapshot | {"format": 7}, small())


@pytest.mark.parametrize("seed", range(5))
def test_synchronous_runs_train_the_same_tasks_in_the_same_order_whatever_completes_first(seed):
    """Without failures the batches depend on nothing but the offers."""
    chance = random.Random(seed)
    machine = offered(small(max_staleness=1, prompts_per_step=3, num_slots=20), count=18)
    running = []
    while machine.version < 5:
        while (start := machine.next_start()) is not None:
            running.append(start)
        finish(machine, running.pop(chance.randrange(len(running))))
        if machine.begin_step() is not None:
            machine.end_step()
    assert machine.trained == [f"t{index}" for index in range(15)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompts_per_step": 0}, "ReconcilerConfig.prompts_per_step is 0"),
        ({"max_staleness": -1}, "ReconcilerConfig.max_staleness is -1"),
        ({"num_slots": 1}, "ReconcilerConfig.num_slots is 1"),
        ({"min_valid": 3}, "ReconcilerConfig.min_valid is 3"),
        ({"num_steps": -1}, "ReconcilerConfig.num_steps is -1"),
    ],
)
def test_config_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        small(**fields)


class AnyOrder(RuleBasedStateMachine):
    """Checks a model of the outside world against the reconciler: who was offered, given up, trained."""

    samples = Bundle("samples")

    @initialize(
        prompts=st.integers(1, 3), size=st.integers(1, 3), staleness=st.integers(0, 2), retries=st.integers(0, 2)
    )
    def begin(self, prompts, size, staleness, retries):
        self.config = ReconcilerConfig(
            prompts_per_step=prompts,
            group_size=size,
            num_slots=size * 4,
            max_staleness=staleness,
            max_retries=retries,
            min_valid=1,
        )
        self.machine = Reconciler(self.config)
        self.num_offered = 0
        self.saved = self.machine.snapshot(), 0
        self.plan = None

    @rule(repeat=st.booleans())
    def offer(self, repeat):
        if repeat and self.num_offered:
            assert not self.machine.offer("task0")
        else:
            assert self.machine.offer(f"task{self.num_offered}")
            self.num_offered += 1

    @rule(target=samples)
    def start(self):
        start = self.machine.next_start()
        if start is None:
            return multiple()
        assert start.position // self.config.prompts_per_step - self.machine.version <= self.config.max_staleness
        assert start.task_id not in self.machine.trained
        return multiple(*((start.position, start.attempt, i) for i in range(self.config.group_size)))

    @rule(target=samples, key=consumes(samples))
    def sampled_or_again(self, key):
        self.machine.rollout_ended(*key)
        return key

    @rule(key=consumes(samples))
    def complete(self, key):
        self.machine.rollout_ended(*key)
        self.machine.verified(*key)

    @rule(key=samples)
    def repeat_an_event(self, key):
        if self.machine.verified(*key):
            assert not self.machine.verified(*key)

    @rule(key=consumes(samples))
    def lose_sample(self, key):
        self.machine.sample_failed(*key)

    @rule(key=consumes(samples))
    def lose_group(self, key):
        self.machine.group_failed(*key[:2])

    @rule()
    def train(self):
        if self.plan is None:
            self.plan = self.machine.begin_step()
        else:
            before = len(self.machine.trained)
            self.machine.end_step()
            assert self.machine.trained[before:] == list(self.plan.task_ids)
            self.plan = None

    @rule()
    def abort(self):
        if self.plan is not None:
            self.machine.abort_step()
            self.plan = None

    @rule()
    def save(self):
        self.saved = json.loads(json.dumps(self.machine.snapshot())), self.num_offered

    @rule(keep=st.booleans())
    def crash_and_restart(self, keep):
        snapshot, self.num_offered = self.saved
        self.machine = Reconciler.restore(snapshot, self.config, kept_positions=None if keep else ())
        self.plan = None

    @invariant()
    def nothing_is_lost_or_doubled(self):
        machine = self.machine
        assert machine.trained_twice == 0
        assert len(machine.trained) == machine.version * self.config.prompts_per_step
        snapshot = machine.snapshot()
        live = [group["task_id"] for group in snapshot["groups"]]
        places = machine.trained + live + snapshot["queue"]
        assert len(places) == len(set(places))
        assert len(places) + machine.counters.num_replaced_tasks == self.num_offered == len(snapshot["offered"])
        assert 0 <= machine.num_in_flight <= self.config.num_slots
        assert all(group["position"] >= machine.version * self.config.prompts_per_step for group in snapshot["groups"])

    def teardown(self):
        """From any state reached, a machine that works finishes everything that can be filled."""
        if not hasattr(self, "machine"):
            return
        machine = Reconciler.restore(self.machine.snapshot(), self.config)
        for _ in range(200):
            while (start := machine.next_start()) is not None:
                finish(machine, start)
            if machine.begin_step() is None:
                break
            machine.end_step()
        left = len(machine.snapshot()["groups"]) + len(machine.snapshot()["queue"])
        assert left < self.config.prompts_per_step
        assert machine.trained_twice == 0


# After a restart from an old snapshot attempt numbers repeat, and keys drawn before it may name new attempts. A dead
# process sends no such events, but the invariants have to hold even then, so the keys stay in play.
TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
