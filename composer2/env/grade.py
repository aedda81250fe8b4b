"""Verdicts: tests run as calls inside a pod, their outcomes compared here, outside of it.

In: a task and the files a policy left. Out: a `Grade`. The policy's pod is never graded: its final files go into a
fresh one that holds no test and no expected value, so there is nothing in it to forge.

Source: report §2 (a reward for correct code), MiniMax-M2 report (fail-to-pass and pass-to-pass tests), rows E6 V1.
Choice: tests are hidden from the policy; the Composer 2 report does not say how correctness is tested.
Choice: a test is a call and the repr of its value. Only calls travel into the pod and only outcomes come back.
Choice: files that look like tests are restored to their first state before grading, and new ones of that kind dropped.
Choice: equal final files of one task share one verdict, also while it is still being found; eight samples of a prompt
often end in the same edit.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from composer2.types import CallOutcome, CallStatus, Grade, Pod, PodBackend, PodError, PodLimits, Task, TestCase

PROTECTED_PATTERNS = ("test_*.py", "*_test.py", "conftest.py", "sitecustomize.py", "tests/*")
"""Matched against a path's last part and against the whole path."""


def compare_outcome(test: TestCase, outcome: CallOutcome) -> bool:
    """True when the call did what the test expects. Text is compared; nothing is evaluated."""
    if test.raises:
        return outcome.status is CallStatus.RAISED and outcome.value == test.raises
    return outcome.status is CallStatus.RETURNED and outcome.value == test.expected


async def run_tests(pod: Pod, tests: Sequence[TestCase], *, timeout: float) -> list[CallOutcome]:
    """Outcome of every test, in order. `timeout`: CPU seconds for each call. Calls of one module share one process."""
    by_module: dict[str, list[int]] = {}
    for index, test in enumerate(tests):
        by_module.setdefault(test.module, []).append(index)
    outcomes: list[CallOutcome] = [CallOutcome(status=CallStatus.CRASHED)] * len(tests)
    for module, indices in by_module.items():
        answers = await pod.run_calls(module, [tests[i].call for i in indices], timeout=timeout)
        if len(answers) != len(indices):
            raise PodError(f"run_calls gave {len(answers)} outcomes for {len(indices)} calls of {module}")
        for index, answer in zip(indices, answers, strict=True):
            outcomes[index] = answer
    return outcomes


def is_protected(path: str, patterns: Sequence[str] = PROTECTED_PATTERNS) -> bool:
    """Whether a path belongs to the tests rather than to the solution."""
    name = path.rsplit("/", 1)[-1]
    return any(fnmatchcase(name, pattern) or fnmatchcase(path, pattern) for pattern in patterns)


class PodGrader:
    """A `Grader` that uses one fresh pod per distinct result. Holds finished verdicts, so keep one per backend."""

    def __init__(
        self,
        backend: PodBackend,
        *,
        timeout: float = 2.0,
        limits: PodLimits | None = None,
        protected: Sequence[str] = PROTECTED_PATTERNS,
        num_cached: int = 8192,
    ) -> None:
        """`timeout`: CPU seconds for each test. `num_cached`: verdicts kept, the least recently used go first."""
        if timeout <= 0:
            raise ValueError(f"PodGrader timeout is {timeout}, accepted is above 0 seconds")
        if num_cached < 1:
            raise ValueError(f"PodGrader num_cached is {num_cached}, accepted is 1 or more")
        self._backend, self._timeout, self._limits = backend, timeout, limits
        self._protected, self._num_cached = tuple(protected), num_cached
        self._done: OrderedDict[bytes, tuple[CallOutcome, ...]] = OrderedDict()
        self._running: dict[bytes, asyncio.Task[tuple[CallOutcome, ...]]] = {}
        self.num_requests = 0
        self.num_pods = 0

    async def grade(self, task: Task, final_files: Mapping[str, str]) -> Grade:
        """Verdict on `task.files` overlaid with `final_files`. PodError when the machine fails."""
        outcomes = await self.outcomes(task, final_files)
        tests = (*task.fail_to_pass, *task.pass_to_pass)
        verdicts = [compare_outcome(test, outcome) for test, outcome in zip(tests, outcomes, strict=True)]
        split = len(task.fail_to_pass)
        return Grade(
            passed=bool(verdicts) and all(verdicts),
            passed_frac=sum(verdicts) / len(verdicts) if verdicts else 0.0,
            fail_to_pass={test.name: ok for test, ok in zip(tests[:split], verdicts[:split], strict=True)},
            pass_to_pass={test.name: ok for test, ok in zip(tests[split:], verdicts[split:], strict=True)},
        )

    async def outcomes(self, task: Task, final_files: Mapping[str, str]) -> tuple[CallOutcome, ...]:
        """Outcomes of the fail-to-pass tests, then of the pass-to-pass tests, from the store or from a fresh pod."""
        self.num_requests += 1
        tests = (*task.fail_to_pass, *task.pass_to_pass)
        if not tests:
            return ()
        files = self._files(task, final_files)
        key = _content_key(task.task_id, files, tests)
        known = self._done.get(key)
        if known is not None:
            self._done.move_to_end(key)
            return known
        running = self._running.get(key)
        if running is None:
            running = asyncio.create_task(self._run(key, files, tests))
            self._running[key] = running
            running.add_done_callback(lambda task: self._forget(key, task))
        # A waiter that is cancelled must not take the others' verdict with it.
        return await asyncio.shield(running)

    def _forget(self, key: bytes, task: asyncio.Task[tuple[CallOutcome, ...]]) -> None:
        del self._running[key]
        if not task.cancelled():
            task.exception()  # every waiter may be gone; a failure is theirs to see, not the event loop's

    async def _run(self, key: bytes, files: dict[str, str], tests: Sequence[TestCase]) -> tuple[CallOutcome, ...]:
        self.num_pods += 1
        pod = await self._backend.create(files, self._limits)
        try:
            outcomes = tuple(await run_tests(pod, tests, timeout=self._timeout))
        finally:
            await pod.destroy()
        self._done[key] = outcomes
        if len(self._done) > self._num_cached:
            self._done.popitem(last=False)
        return outcomes

    def _files(self, task: Task, final_files: Mapping[str, str]) -> dict[str, str]:
        files = dict(task.files)
        files.update((p, text) for p, text in final_files.items() if not is_protected(p, self._protected))
        return files


def _content_key(task_id: str, files: Mapping[str, str], tests: Sequence[TestCase]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    parts = [task_id]
    for path in sorted(files):
        parts += (path, files[path])
    for test in tests:
        parts += (test.module, test.call)
    for part in parts:
        data = part.encode("utf-8", errors="surrogatepass")
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.digest()


async def validate_task(task: Task, backend: PodBackend, *, timeout: float = 2.0) -> None:
    """ValueError unless the reference passes every test, every F2P fails before it and every P2P passes before it."""
    tests = (*task.fail_to_pass, *task.pass_to_pass)
    if not task.fail_to_pass:
        raise ValueError(f"task {task.task_id}: fail_to_pass is empty, accepted is at least one test")
    names = [test.name for test in tests]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"task {task.task_id}: test name {name!r} is used twice, accepted are distinct names")
    grader = PodGrader(backend, timeout=timeout)
    after = await grader.outcomes(task, task.reference)
    before = await grader.outcomes(task, {})
    for index, (test, fixed, broken) in enumerate(zip(tests, after, before, strict=True)):
        if not compare_outcome(test, fixed):
            raise ValueError(f"task {task.task_id}: the reference fails {test.name!r}: {_describe(test, fixed)}")
        if compare_outcome(test, broken) != (index >= len(task.fail_to_pass)):
            kind = "fail-to-pass test passes" if index < len(task.fail_to_pass) else "pass-to-pass test fails"
            raise ValueError(f"task {task.task_id}: {kind} before the fix: {test.name!r}: {_describe(test, broken)}")


def _describe(test: TestCase, outcome: CallOutcome) -> str:
    wanted = f"raising {test.raises}" if test.raises else test.expected
    return f"{test.call} {outcome.status.value} {outcome.value[:200]}, accepted is {wanted[:200]}"
