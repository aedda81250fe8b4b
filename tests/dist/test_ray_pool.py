"""Actors of a real local Ray cluster: workers, environments, and finished groups that do not fit into memory."""

import asyncio
import importlib
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from composer2.rl.system.worker import GroupRequest, WorkerError
from composer2.types import CallOutcome, CallStatus, Group, PodError, Rollout, RolloutStatus, Segment, Task

ray = pytest.importorskip("ray", reason="ray is not installed: pip install ray -c constraints.txt")

from composer2.dist.ray.cluster import (  # noqa: E402
    MIN_STORE_BYTES,
    Cluster,
    ClusterError,
    RayConfig,
    in_bundle,
    store_figures,
)
from composer2.dist.ray.environments import EnvironmentActor, RemotePods  # noqa: E402
from composer2.dist.ray.executor import raised_as_there  # noqa: E402
from composer2.dist.ray.pool import ObjectShelf, RayPool, SamplerActor  # noqa: E402
from composer2.runner import PodsConfig  # noqa: E402

pytestmark = [pytest.mark.dist, pytest.mark.slow]
SECONDS = 60.0


@pytest.fixture(scope="module")
def cluster():
    with Cluster(RayConfig(object_store_bytes=MIN_STORE_BYTES), num_samplers=2) as opened:
        yield opened


@pytest.fixture(scope="module")
def fake():
    """tests/rl/system/fake_runner.py: the runner of the local pool's tests; it travels to the actors by value."""

    folder = str(Path(__file__).parents[1] / "rl" / "system")
    sys.path.insert(0, folder)
    try:
        module = importlib.import_module("fake_runner")
    finally:
        sys.path.remove(folder)
    ray.cloudpickle.register_pickle_by_value(module)
    yield module
    ray.cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture
def open_pool(cluster, fake):
    pools = []

    def make(payload=None, *, lockstep=False, **options):
        def start(index):
            placed = in_bundle(cluster.group, 1 + index)
            return ray.remote(SamplerActor).options(num_cpus=0, **placed).remote(fake.make, payload or {}, lockstep)

        pools.append(RayPool(start, **options))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def deadline():
    """A `should_stop` that ends a test which would wait for ever."""
    end = time.monotonic() + SECONDS
    return lambda: time.monotonic() > end


def request(fake, key, instruction=""):
    task = fake.task(f"t{key}", instruction, 0)
    return GroupRequest(key=key, task=task, num_samples=2, seed=key, policy_version=5)


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
    """Running, and no zombie."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


# ---------------------------------------------------------------------------------------------------------------------
# Workers: what the local pool promises (tests/rl/system/test_worker.py)


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
    assert len(pool.nodes()) == 2


def test_lockstep_weights_and_what_collect_leaves(fake, open_pool, tmp_path):
    pool = open_pool(lockstep=True)
    pool.submit([request(fake, key, "slow") for key in range(3)])
    pool.publish(7, tmp_path)
    pool.submit([request(fake, key) for key in (3, 4)])
    found = pool.collect([3], should_stop=deadline()) | dict(pool.poll(5.0))
    # What `collect` left is still there; some of it may be a moment late.
    found |= pool.collect([key for key in range(5) if key not in found], should_stop=deadline())
    got = {key: notes(group) for key, group in found.items()}
    assert [got[key]["cohort"] for key in range(5)] == [3, 3, 3, 2, 2]
    assert [got[key]["version"] for key in range(5)] == [0, 0, 0, 7, 7]
    assert max(got[key]["ended"] for key in range(3)) < min(got[key]["begun"] for key in (3, 4))
    assert pool.poll(0.0) == []


def test_messages_are_taken_in_the_order_they_were_sent(fake):
    """Whatever order the transport delivers them in: here the second one first."""

    async def body():
        actor = SamplerActor(fake.make, {}, True)
        late = actor.run(1, [request(fake, 0)])
        answer = asyncio.ensure_future(anext(late))
        await asyncio.sleep(0.05)
        assert not answer.done()
        await actor.tell(0, ("weights", 9, Path("nowhere")))
        key, group, counters = await answer
        assert (key, notes(group)["version"], counters) == (0, 9, {"num_done": 1.0})
        await late.aclose()
        await actor.stop()

    asyncio.run(asyncio.wait_for(body(), SECONDS))


def test_a_killed_actor_is_replaced_and_its_open_groups_run_again(fake, open_pool, tmp_path):
    lost = []
    pool = open_pool({"folder": str(tmp_path)}, on_loss=lost.append)
    pool.publish(3, tmp_path)
    pool.submit([request(fake, 0), request(fake, 1, "wait")])
    first = int(wait_for(tmp_path / "t1.pid"))
    done = pool.collect([0], should_stop=deadline())
    ray.kill(pool._workers[0].actor)
    done |= pool.collect([1], should_stop=deadline())
    assert notes(done[0])["pid"] == first
    assert notes(done[1])["pid"] != first
    assert notes(done[1])["version"] == 3  # the newest weights reach the new worker first
    assert (pool.num_restarts, pool.num_pending, lost) == (1, 0, [0])
    assert pool.poll(0.1) == []


def test_an_actor_that_keeps_dying_is_given_up(fake, open_pool, tmp_path):
    pool = open_pool({"folder": str(tmp_path)}, max_restarts=0)
    pool.submit([request(fake, 0, "always wait")])
    os.kill(int(wait_for(tmp_path / "t0.pid")), signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"(?s)a rollout worker died 1 times, the last time with: .*; 1 groups were"):
        pool.collect([0], should_stop=deadline())


def test_a_bug_in_the_runner_arrives_with_its_traceback(fake, open_pool):
    pool = open_pool()
    pool.submit([request(fake, 4, "fail")])
    with pytest.raises(WorkerError, match=r"(?s)a rollout worker failed:.*no answer to t4"):
        pool.collect([4], should_stop=deadline())


def test_a_bug_in_the_setup_arrives_too(fake, open_pool):
    pool = open_pool({"broken_setup": True})
    with pytest.raises(WorkerError, match=r"(?s)does not start.*no such engine"):
        pool.nodes()


def test_close_ends_the_actor_in_the_middle_of_work(fake, open_pool, tmp_path):
    pool = open_pool({"folder": str(tmp_path)})
    pool.submit([request(fake, 0, "always wait")])
    pid = int(wait_for(tmp_path / "t0.pid"))
    assert is_alive(pid)
    pool.close()
    stop = deadline()
    while is_alive(pid) and not stop():
        time.sleep(0.05)
    assert not is_alive(pid)


def test_numbers_are_checked(fake):
    with pytest.raises(ValueError, match="num_workers is 0, accepted is 1 or more"):
        RayPool(lambda index: None, num_workers=0)
    with pytest.raises(ValueError, match=f"object_store_bytes is 5, accepted is {MIN_STORE_BYTES} or more"):
        RayConfig(object_store_bytes=5)


def test_services_that_have_no_place_are_refused_with_what_is_free(cluster, monkeypatch):
    monkeypatch.setattr("composer2.dist.ray.cluster.PLACEMENT_SECONDS", 0.5)
    with pytest.raises(ClusterError, match=r"the services need \[\{'CPU': 99\}\], the cluster has \{'CPU': "):
        Cluster._place([{"CPU": 99}])


class Raising:
    def refuse(self):
        raise OSError(28, "No space left on device")

    def leave(self):
        os._exit(3)


def test_what_a_service_raises_is_raised_here(cluster):
    actor = ray.remote(Raising).options(num_cpus=0).remote()
    with pytest.raises(OSError, match="No space left") as refused, raised_as_there():
        ray.get(actor.refuse.remote())
    assert refused.value.errno == 28
    assert "Traceback" not in str(refused.value)
    with pytest.raises(WorkerError, match="a service of the run is gone"), raised_as_there():
        ray.get(actor.leave.remote())


# ---------------------------------------------------------------------------------------------------------------------
# Finished groups


def large_group(position):
    """A group of 30 MB."""
    tokens = np.full(2_000_000, position, dtype=np.int32)
    segment = Segment(
        token_ids=tokens,
        sampled=np.ones(len(tokens), dtype=bool),
        logprobs=np.zeros(len(tokens), dtype=np.float32),
        routes=np.zeros((len(tokens), 1, 1), dtype=np.int16),
        policy_versions=np.full(len(tokens), position, dtype=np.int32),
    )
    rollout = Rollout(task_id=f"t{position}", sample_index=0, segments=(segment,), status=RolloutStatus.FINISHED)
    return Group(task=Task(task_id=f"t{position}", instruction="", files={}), rollouts=(rollout,))


def test_groups_that_do_not_fit_are_spilled_and_come_back_whole(cluster):
    shelf, before = ObjectShelf(), store_figures()
    for position in range(10):
        shelf[position] = large_group(position)
    assert sorted(shelf) == list(range(10))
    assert shelf.num_samples == 10
    stop = deadline()
    while store_figures()["ray_spilled_bytes"] == before["ray_spilled_bytes"] and not stop():
        time.sleep(0.1)
    after = store_figures()
    size = sum(
        array.nbytes for array in vars(large_group(0).rollouts[0].segments[0]).values() if hasattr(array, "nbytes")
    )
    assert after["ray_stored_bytes"] - before["ray_stored_bytes"] >= 10 * size > MIN_STORE_BYTES
    assert after["ray_spilled_bytes"] - before["ray_spilled_bytes"] >= 10 * size - MIN_STORE_BYTES
    assert after["ray_spilled_objects"] > before["ray_spilled_objects"]
    for position in range(10):
        group = shelf.pop(position)
        assert group.task.task_id == f"t{position}"
        assert np.array_equal(
            group.rollouts[0].segments[0].token_ids, large_group(position).rollouts[0].segments[0].token_ids
        )
    assert len(shelf) == 0
    with pytest.raises(KeyError):
        shelf.pop(3)


# ---------------------------------------------------------------------------------------------------------------------
# Environments


@pytest.fixture(scope="module")
def environment(cluster):
    actor = (
        ray.remote(EnvironmentActor)
        .options(num_cpus=0, max_restarts=-1, **in_bundle(cluster.group, 1))
        .remote(PodsConfig(backend="auto", allow_unsafe=True))
    )
    ray.get(actor.open.remote())
    yield actor
    ray.get(actor.close.remote())


def test_a_remote_pod_answers_like_one_here(environment):
    async def body():
        pods = RemotePods(environment, "test")
        pod = await pods.create({"solution.py": "def twice(x):\n    return 2 * x\n"})
        done = await pod.exec(["sh", "-c", "cat; pwd"], stdin=b"in ")
        await pod.write("new.txt", b"text")
        assert (done.exit_code, done.stdout) == (0, b"in /repo\n")
        assert await pod.read("new.txt") == b"text"
        assert await pod.list_files() == ["new.txt", "solution.py"]
        outcome = CallOutcome(status=CallStatus.RETURNED, value="6")
        assert await pod.run_calls("solution.py", ["twice(3)"], timeout=2.0) == [outcome]
        with pytest.raises(FileNotFoundError) as missing:
            await pod.read("absent.txt")
        assert missing.value.errno == 2
        assert "Traceback" not in str(missing.value)  # a policy reads these words
        with pytest.raises(ValueError, match="argv is"):
            await pod.exec([])
        await pod.destroy()
        await pod.destroy()
        with pytest.raises(PodError, match="is gone"):
            await pod.read("new.txt")

    asyncio.run(asyncio.wait_for(body(), SECONDS))


def test_a_cancelled_call_ends_the_command_and_the_pods_of_an_owner_go_alone(environment):
    async def body():
        mine, other = RemotePods(environment, "mine"), RemotePods(environment, "other")
        pods = [await mine.create({}), await mine.create({}), await other.create({"kept": "x"})]
        waiting = asyncio.ensure_future(pods[0].exec(["sleep", "1000"], timeout=1000.0))
        await asyncio.sleep(0.3)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        with pytest.raises(PodError):  # an answer is under way: as in one process, the pod cannot be used again
            await pods[0].read("kept")
        await mine.close()
        for pod in pods[:2]:
            with pytest.raises(PodError, match="is gone"):
                await pod.read("kept")
        assert await pods[2].read("kept") == b"x"
        assert await environment.release.remote("other") == 1

    asyncio.run(asyncio.wait_for(body(), SECONDS))


def test_environments_that_died_are_a_pod_error_and_come_back(environment):
    async def body():
        pods = RemotePods(environment, "test")
        pod = await pods.create({"a": "b"})
        ray.kill(environment, no_restart=False)
        with pytest.raises(PodError, match="gone"):
            await pod.read("a")
        stop = deadline()
        while not stop():
            try:
                fresh = await pods.create({"a": "c"})
            except PodError:
                await asyncio.sleep(0.2)
                continue
            assert await fresh.read("a") == b"c"
            await fresh.destroy()
            return
        raise AssertionError("the environments did not come back")

    asyncio.run(asyncio.wait_for(body(), 2 * SECONDS))
