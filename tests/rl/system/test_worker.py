"""Rollout workers as real processes around a runner without a model."""

import importlib
import os
import signal
import time
from pathlib import Path

import pytest

from composer2.rl.system.worker import GroupRequest, RolloutPool, WorkerError


@pytest.fixture
def fake(monkeypatch):
    """tests/rl/system/fake_runner.py, importable here and in the worker processes."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return importlib.import_module("fake_runner")


@pytest.fixture
def open_pool(fake):
    pools = []

    def make(**options):
        payload = options.pop("payload", {})
        pools.append(RolloutPool(fake.make, payload, **options))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def deadline(seconds=30.0):
    """A `should_stop` that ends a test which would wait for ever."""
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end


def request(fake, key, instruction="", *, size=0, num_samples=2):
    return GroupRequest(
        key=key, task=fake.task(f"t{key}", instruction, size), num_samples=num_samples, seed=key, policy_version=5
    )


def notes(group):
    """What the runner noted: {"pid": 1, "version": 0, ...}."""
    words = group.rollouts[0].error.split()
    return dict(zip(words[::2], map(int, words[1::2]), strict=True))


def wait_for(path, other_than=""):
    stop = deadline()
    while not stop():
        if path.exists() and path.read_text() != other_than:
            return path.read_text()
        time.sleep(0.01)
    raise AssertionError(f"{path} did not appear")


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_groups_come_back_from_the_worker_their_key_names(fake, open_pool):
    pool = open_pool(num_workers=2)
    pool.submit([request(fake, key) for key in range(6)])
    assert pool.num_pending == 6
    got = pool.collect(range(6), should_stop=deadline())
    assert pool.num_pending == 0
    assert {key: group.task.task_id for key, group in got.items()} == {key: f"t{key}" for key in range(6)}
    assert all(len(group.rollouts) == 2 and group.policy_version_start == 5 for group in got.values())
    pids = {key: notes(group)["pid"] for key, group in got.items()}
    assert pids[0] == pids[2] == pids[4] != pids[1] == pids[3] == pids[5]
    assert pool.stats() == {"num_done": 6.0}


def test_lockstep_runs_one_cohort_after_the_other(fake, open_pool):
    pool = open_pool(lockstep=True)
    pool.submit([request(fake, key, "slow") for key in range(3)])
    pool.submit([request(fake, key) for key in range(3, 5)])
    got = {key: notes(group) for key, group in pool.collect(range(5), should_stop=deadline()).items()}
    assert [got[key]["cohort"] for key in range(5)] == [3, 3, 3, 2, 2]
    assert max(got[key]["ended"] for key in range(3)) < min(got[key]["begun"] for key in (3, 4))


def test_without_lockstep_cohorts_overlap(fake, open_pool):
    pool = open_pool()
    pool.submit([request(fake, 0, "slow")])
    pool.submit([request(fake, 1)])
    got = {key: notes(group) for key, group in pool.collect([0, 1], should_stop=deadline()).items()}
    assert got[1]["begun"] < got[0]["ended"]


def test_weights_keep_their_place_among_the_requests(fake, open_pool, tmp_path):
    pool = open_pool(lockstep=True)
    pool.submit([request(fake, 0)])
    pool.publish(7, tmp_path)
    pool.submit([request(fake, 1)])
    got = pool.collect([0, 1], should_stop=deadline())
    assert [notes(got[key])["version"] for key in (0, 1)] == [0, 7]


@pytest.mark.parametrize("lockstep", [False, True])
def test_a_killed_worker_is_replaced_and_its_open_groups_run_again(fake, open_pool, tmp_path, lockstep):
    pool = open_pool(payload={"folder": str(tmp_path)}, lockstep=lockstep)
    pool.publish(3, tmp_path)
    pool.submit([request(fake, 0), request(fake, 1, "wait")])
    first = int(wait_for(tmp_path / "t1.pid"))
    done = pool.collect([0], should_stop=deadline())
    os.kill(first, signal.SIGKILL)
    done |= pool.collect([1], should_stop=deadline())
    assert notes(done[0])["pid"] == first
    assert notes(done[1])["pid"] != first
    assert notes(done[1])["version"] == 3  # the newest weights reach the new worker first
    assert pool.num_restarts == 1
    assert pool.num_pending == 0
    assert pool.poll(0.1) == []


def test_the_other_worker_is_left_alone(fake, open_pool, tmp_path):
    pool = open_pool(payload={"folder": str(tmp_path)}, num_workers=2)
    pool.submit([request(fake, 0, "wait"), request(fake, 1)])
    other = notes(pool.collect([1], should_stop=deadline())[1])["pid"]
    os.kill(int(wait_for(tmp_path / "t0.pid")), signal.SIGKILL)
    assert pool.collect([0], should_stop=deadline()).keys() == {0}
    pool.submit([request(fake, 3)])
    assert notes(pool.collect([3], should_stop=deadline())[3])["pid"] == other


def test_a_worker_that_keeps_dying_is_given_up(fake, open_pool, tmp_path):
    pool = open_pool(payload={"folder": str(tmp_path)}, max_restarts=1)
    pool.submit([request(fake, 0, "always wait")])
    first = wait_for(tmp_path / "t0.pid")
    os.kill(int(first), signal.SIGKILL)
    assert pool.collect([0], should_stop=lambda: pool.num_restarts == 1) == {}
    os.kill(int(wait_for(tmp_path / "t0.pid", first)), signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"died 2 times, the last time with exit code -9; 1 groups were open"):
        pool.collect([0], should_stop=deadline())


@pytest.mark.parametrize("lockstep", [False, True])
def test_a_bug_in_the_runner_arrives_with_its_traceback(fake, open_pool, lockstep):
    pool = open_pool(lockstep=lockstep)
    pool.submit([request(fake, 4, "fail")])
    with pytest.raises(WorkerError, match=r"(?s)a rollout worker failed:.*fake_runner.py.*no answer to t4"):
        pool.collect([4], should_stop=deadline())


def test_a_bug_in_the_setup_arrives_too(fake, open_pool):
    pool = open_pool(payload={"broken_setup": True})
    with pytest.raises(WorkerError, match="no such engine"):
        pool.collect([0], should_stop=deadline())


def test_collect_keeps_other_groups_for_the_next_poll(fake, open_pool):
    pool = open_pool(lockstep=True)
    for key in range(4):
        pool.submit([request(fake, key)])
    assert pool.collect([3], should_stop=deadline()).keys() == {3}
    assert sorted(key for key, _ in pool.poll(0.0)) == [0, 1, 2]
    assert pool.poll(0.0) == []
    pool.submit([request(fake, key) for key in (4, 5)])
    assert pool.collect([5], should_stop=deadline()).keys() == {5}
    assert pool.collect([4], should_stop=deadline()).keys() == {4}


def test_collect_stops_when_asked(fake, open_pool, tmp_path):
    pool = open_pool(payload={"folder": str(tmp_path)})
    pool.submit([request(fake, 0), request(fake, 1, "always wait")])
    wait_for(tmp_path / "t1.pid")
    asked = []
    got = pool.collect([0, 1], should_stop=lambda: asked.append(1) or len(asked) > 3, timeout=0.2)
    assert got.keys() == {0}


@pytest.mark.parametrize("lockstep", [False, True])
def test_many_large_requests_and_answers_do_not_block_each_other(fake, open_pool, lockstep):
    # Far more than the buffers of a pipe in both directions.
    pool = open_pool(payload={"answer_bytes": 20_000}, lockstep=lockstep)
    wave = [[request(fake, key, size=20_000, num_samples=1)] for key in range(300)]
    for requests in wave:
        pool.submit(requests)
    assert len(pool.collect(range(300), should_stop=deadline(60))) == 300


def test_one_request_list_larger_than_the_pipe(fake, open_pool):
    pool = open_pool(payload={"answer_bytes": 20_000})
    pool.submit([request(fake, key, size=20_000, num_samples=1) for key in range(300)])
    assert len(pool.collect(range(300), should_stop=deadline(60))) == 300


@pytest.mark.parametrize("lockstep", [False, True])
def test_close_ends_the_processes_even_in_the_middle_of_work(fake, tmp_path, lockstep):
    started = time.monotonic()
    with RolloutPool(fake.make, {"folder": str(tmp_path)}, num_workers=2, lockstep=lockstep) as pool:
        pool.submit([request(fake, 0, "always wait"), request(fake, 1)])
        idle = notes(pool.collect([1], should_stop=deadline())[1])["pid"]
        busy = int(wait_for(tmp_path / "t0.pid"))
        assert is_alive(idle)
        assert is_alive(busy)
    assert not is_alive(idle)
    assert not is_alive(busy)
    assert time.monotonic() - started < 20
    pool.close()


def test_a_worker_ends_when_its_trainer_is_gone(fake, tmp_path):
    pool = RolloutPool(fake.make, {"folder": str(tmp_path)})
    pool.submit([request(fake, 0, "always wait")])
    pid = int(wait_for(tmp_path / "t0.pid"))
    process = pool._workers[0].process
    pool._workers[0].connection.close()
    process.join(10)
    assert not is_alive(pid)


def test_num_workers_is_checked(fake):
    with pytest.raises(ValueError, match="num_workers is 0, accepted is 1 or more"):
        RolloutPool(fake.make, {}, num_workers=0)
