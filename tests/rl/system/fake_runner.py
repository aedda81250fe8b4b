"""A `GroupRunner` without a model, for rollout workers of the tests; imported by the worker processes too."""

import asyncio
import os
from contextlib import asynccontextmanager
from pathlib import Path

from composer2.types import Group, Rollout, RolloutStatus, Task


class Clock:
    """Counts up in every process."""

    def __init__(self):
        self.value = 0

    def tick(self):
        self.value += 1
        return self.value


class FakeRunner:
    """Answers with groups whose `error` fields say what happened. `payload` may name a folder for marks.

    Instructions of tasks: `wait` sleeps for ever the first time, `always wait` every time, `fail` raises, `slow` sleeps
    a moment."""

    def __init__(self, payload):
        if payload.get("broken_setup"):
            raise ValueError("no such engine")
        self.payload, self.version, self.clock, self.num_done = payload, 0, Clock(), 0

    @asynccontextmanager
    async def session(self):
        yield self

    def load_weights(self, version, path):
        self.version = version

    def stats(self):
        return {"num_done": float(self.num_done)}

    async def run_cohort(self, requests, done):
        await asyncio.gather(*(self.one(request, len(requests), done) for request in requests))

    async def one(self, request, cohort_size, done):
        begun = self.clock.tick()
        text = request.task.instruction
        if text == "fail":
            raise RuntimeError(f"no answer to {request.task.task_id}")
        if text == "slow":
            await asyncio.sleep(0.05)
        if text in ("wait", "always wait"):
            mark = Path(self.payload["folder"]) / f"{request.task.task_id}.pid"
            first = not mark.exists()
            partial = mark.with_suffix(".partial")
            partial.write_text(str(os.getpid()))
            os.replace(partial, mark)
            if first or text == "always wait":
                await asyncio.sleep(3600)
        await asyncio.sleep(0)
        self.num_done += 1
        note = f"pid {os.getpid()} version {self.version} cohort {cohort_size} begun {begun} ended {self.clock.tick()}"
        rollouts = tuple(
            Rollout(
                task_id=request.task.task_id,
                sample_index=index,
                segments=(),
                status=RolloutStatus.FINISHED,
                error=note,
                final_files={"answer": "x" * self.payload.get("answer_bytes", 0)},
            )
            for index in range(request.num_samples)
        )
        done(request.key, Group(task=request.task, rollouts=rollouts, policy_version_start=request.policy_version))


def make(payload):
    return FakeRunner(payload)


def task(name, instruction="", size=0):
    return Task(task_id=name, instruction=instruction, files={"big.py": "#" * size})
