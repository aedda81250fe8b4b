"""The training loop with a real model, the real engine, and a pool that lives in this process."""

from dataclasses import replace

import pytest

from composer2.rl.advantage import AdvantageConfig
from composer2.rl.reward import RewardComponent, RewardConfig
from composer2.rl.system.loop import LoopHooks, LoopState, RLLoop, TaskSourceError, step_metrics
from composer2.rl.system.weight_sync import FolderSink, read_weights
from composer2.rl.train import RLConfig, make_optimizer
from composer2.types import RolloutStats, Task

CONFIG = RLConfig(
    num_steps=4,
    prompts_per_step=3,
    group_size=4,
    max_staleness=0,
    lr=1e-2,
    row_length=24,
    rows_per_batch=4,
    checkpoint_every=1,
    reward=RewardConfig(components=(RewardComponent(name="correctness", weight=1.0),)),
)


class LocalPool:
    """A `RolloutPool` without processes: a group is sampled when it is polled, `per_poll` groups at a time."""

    def __init__(self, policy, *, per_poll=2, lost=lambda request, attempt: ()):
        self.policy, self.per_poll, self.lost = policy, per_poll, lost
        self.sampler = policy.engine(policy.model(99))
        self.open, self.requests, self.attempts = [], [], {}

    def publish(self, version, path):
        self.sampler.load_weights(read_weights(path), version)

    def submit(self, requests):
        self.open += requests
        self.requests += requests

    def poll(self, timeout):
        now, self.open = self.open[: self.per_poll], self.open[self.per_poll :]
        return [(request.key, self.answer(request)) for request in now]

    def answer(self, request):
        name = request.task.task_id
        attempt = self.attempts[name] = self.attempts.get(name, -1) + 1
        found = self.policy.group(
            self.sampler,
            name,
            request.num_samples,
            seed=request.seed % 10_007,
            temperature=request.temperature,
            lost=self.lost(request, attempt),
        )
        return replace(found, task=request.task)


def task_at(index):
    return Task(task_id=f"task{index}", instruction="", files={})


class Training:
    """One loop and everything it reports."""

    def __init__(
        self, policy, folder, *, config=CONFIG, pool=None, state=None, model=None, optimizer=None, source=task_at
    ):
        self.policy = policy
        self.model = model or policy.model()
        self.optimizer = optimizer or make_optimizer(self.model, config)
        self.pool = pool or LocalPool(policy)
        self.loop = RLLoop(
            self.model,
            self.optimizer,
            config,
            pool=self.pool,
            sink=FolderSink(folder),
            task_at=source,
            seed=3,
            state=state,
        )
        self.metrics, self.tasks, self.states, self.evaluated = {}, [], {}, []

    def run(self, stop_after=None, should_stop=None):
        def on_step(done, metrics, groups):
            self.metrics[done] = metrics
            self.tasks.append([group.task.task_id for group in groups])

        def checkpoint(done, state):
            self.states[done] = state

        stops = should_stop or (lambda: stop_after is not None and len(self.metrics) >= stop_after)
        return self.loop.run(
            LoopHooks(on_step=on_step, checkpoint=checkpoint, evaluate=self.evaluated.append, should_stop=stops)
        )


def test_a_synchronous_run(policy, tmp_path):
    before = policy.weights(policy.model())
    training = Training(policy, tmp_path, config=replace(CONFIG, eval_every=2))
    assert training.run()
    assert sorted(training.metrics) == [1, 2, 3, 4]
    # Steps train the tasks in the order they were drawn, each once.
    assert training.tasks == [[f"task{3 * step + i}" for i in range(3)] for step in range(4)]
    for metrics in training.metrics.values():
        assert metrics["trained_twice"] == 0
        assert metrics["staleness_max"] == 0
        assert metrics["mismatch_max"] < 1e-4 if metrics["num_tokens"] else True
        assert metrics["num_rollouts"] == 12
        assert metrics["time/step_s"] >= metrics["time/train_s"] > 0
    assert [request.policy_version for request in training.pool.requests] == [n // 3 for n in range(12)]
    assert training.evaluated == [2]  # not at the end: that is another stage
    assert not policy.same_weights(policy.weights(training.model), before)
    published = read_weights(FolderSink(tmp_path).path(4))
    assert policy.same_weights(published, policy.weights(training.model))


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_asynchronous_staleness_is_bounded_and_reached(policy, tmp_path, max_staleness):
    config = replace(CONFIG, num_steps=6, max_staleness=max_staleness)
    training = Training(policy, tmp_path, config=config)
    assert training.run()
    ages = [metrics["staleness_max"] for metrics in training.metrics.values()]
    assert max(ages) <= max_staleness
    assert any(age > 0 for age in ages)
    assert training.loop.reconciler.trained_twice == 0
    assert len({task for tasks in training.tasks for task in tasks}) == 18
    assert all(n // 3 - r.policy_version <= max_staleness for n, r in enumerate(training.pool.requests))


def test_groups_lost_to_the_machinery_run_again(policy, tmp_path):
    def lost(request, attempt):
        return range(3) if request.task.task_id in ("task1", "task4") and attempt == 0 else ()

    training = Training(policy, tmp_path, pool=LocalPool(policy, lost=lost))
    assert training.run()
    assert training.tasks == [[f"task{3 * step + i}" for i in range(3)] for step in range(4)]
    tries = [request for request in training.pool.requests if request.task.task_id == "task1"]
    assert len(tries) == 2
    assert tries[0].key != tries[1].key
    assert tries[0].seed != tries[1].seed
    assert all(metrics["infra_failure_rate"] == 0 for metrics in training.metrics.values())
    # No group that was trained shows them, so the log has totals: three of each group's four were lost once.
    last = training.metrics[4]
    assert (last["failed_samples"], last["failed_attempts"], last["replaced_tasks"]) == (6, 2, 0)


def test_single_losses_stay_in_the_group_and_are_counted(policy, tmp_path):
    pool = LocalPool(policy, lost=lambda request, attempt: (0,))
    training = Training(policy, tmp_path, pool=pool)
    assert training.run()
    assert len(pool.requests) == 12
    assert all(metrics["infra_failure_rate"] == 0.25 for metrics in training.metrics.values())


def test_a_task_that_never_works_is_replaced(policy, tmp_path):
    pool = LocalPool(policy, lost=lambda request, attempt: range(4) if request.task.task_id == "task1" else ())
    training = Training(policy, tmp_path, pool=pool)
    assert training.run()
    trained = [task for tasks in training.tasks for task in tasks]
    assert "task1" not in trained
    assert len(set(trained)) == len(trained) == 12
    assert sum(request.task.task_id == "task1" for request in pool.requests) == 3
    assert training.loop.reconciler.counters.num_replaced_tasks == training.metrics[4]["replaced_tasks"] == 1
    assert "task1" not in training.loop.state().live_tasks


@pytest.mark.parametrize("in_mid_step", [False, True])
def test_an_interrupted_synchronous_run_goes_on_bit_for_bit(policy, tmp_path, in_mid_step):
    whole = Training(policy, tmp_path / "whole")
    assert whole.run()

    first = Training(policy, tmp_path / "first")
    if in_mid_step:  # two steps are done, and of the three groups of the third two have ended
        assert not first.run(should_stop=lambda: len(first.metrics) == 2 and len(first.pool.open) == 1)
    else:
        assert not first.run(stop_after=2)
    assert max(first.states) == 2

    model = policy.model(5)
    model.load_state_dict(policy.weights(first.model))
    optimizer = make_optimizer(model, CONFIG)
    optimizer.load_state_dict(first.optimizer.state_dict())
    state = LoopState(**vars(first.states[2]))
    rest = Training(policy, tmp_path / "rest", model=model, optimizer=optimizer, state=state)
    assert rest.run()
    assert sorted(rest.metrics) == [3, 4]
    assert rest.tasks == whole.tasks[2:]
    assert policy.same_weights(policy.weights(model), policy.weights(whole.model))
    for step in (3, 4):
        drop = {name for name in whole.metrics[step] if name.startswith("time/")}
        assert {k: v for k, v in rest.metrics[step].items() if k not in drop} == {
            k: v for k, v in whole.metrics[step].items() if k not in drop
        }


def test_an_interrupted_asynchronous_run_trains_no_task_twice(policy, tmp_path):
    config = replace(CONFIG, num_steps=5, max_staleness=2)
    first = Training(policy, tmp_path / "first", config=config)
    assert not first.run(stop_after=2)
    rest = Training(policy, tmp_path / "rest", config=config, model=first.model, state=first.states[2])
    assert rest.run()
    trained = [task for tasks in first.tasks + rest.tasks for task in tasks]
    assert len(trained) == len(set(trained)) == 15


def test_a_finished_run_does_nothing(policy, tmp_path):
    training = Training(policy, tmp_path)
    assert training.run()
    again = Training(policy, tmp_path, model=training.model, state=training.states[4])
    assert again.run()
    assert again.pool.requests == []
    assert again.metrics == {}


def test_a_source_that_repeats_itself_is_refused(policy, tmp_path):
    training = Training(policy, tmp_path, source=lambda index: task_at(index % 4))
    with pytest.raises(TaskSourceError, match=r"1000 tasks in a row .* larger source"):
        training.run()
    assert training.tasks == [["task0", "task1", "task2"]]


def test_a_few_repeated_tasks_are_skipped(policy, tmp_path):
    training = Training(policy, tmp_path, source=lambda index: task_at(index // 2))
    assert training.run()
    assert [task for tasks in training.tasks for task in tasks] == [f"task{index}" for index in range(12)]


def test_groups_of_equal_rewards_change_no_weight(policy, tmp_path):
    config = replace(CONFIG, reward=RewardConfig(components=(RewardComponent(name="correctness", weight=0.0),)))
    training = Training(policy, tmp_path, config=config)
    before = policy.weights(training.model)
    assert training.run()
    assert policy.same_weights(policy.weights(training.model), before)
    for metrics in training.metrics.values():
        assert metrics["degenerate_frac"] == 1.0
        assert metrics["num_tokens"] == 0


def test_groups_of_other_callers_are_ignored(policy, tmp_path):
    class Noisy(LocalPool):
        def poll(self, timeout):
            return [(1 << 40, self.policy.group(self.sampler, "evaluation", 4)), *super().poll(timeout)]

    training = Training(policy, tmp_path, pool=Noisy(policy))
    assert training.run()
    assert not any("evaluation" in tasks for tasks in training.tasks)


def test_withheld_rollouts_are_counted(build):
    parts = [(build.segment(versions=version),) for version in (5, 5, 5, 2)]
    group = build.group([1.0, 0.0, 0.0, 1.0], segments=parts)
    for oldest, expected in ((None, 0.0), (4, 0.0), (3, 0.25), (0, 1.0)):
        config = replace(CONFIG, advantage=AdvantageConfig(max_token_age=oldest))
        assert step_metrics([group], config, 6)["withheld_frac"] == expected


def test_summaries_of_a_step_are_counted_without_lost_rollouts(build):
    group = build.group([1.0, 0.0, 0.0], lost=(2,))
    counts = (2, 1, 5)
    rollouts = tuple(
        replace(rollout, stats=RolloutStats(num_summaries=count))
        for rollout, count in zip(group.rollouts, counts, strict=True)
    )
    assert step_metrics([replace(group, rollouts=rollouts)], CONFIG, 0)["summaries"] == 3


def test_the_weights_in_force_are_logged():
    component = RewardComponent(name="correctness", weight=1.0, schedule=((3, 0.5),))
    config = replace(CONFIG, reward=RewardConfig(components=(component,)))
    assert [step_metrics([], config, step)["reward_weight/correctness"] for step in (0, 2, 3, 9)] == [1, 1, 0.5, 0.5]
