"""Fakes of what the environment package talks to. Their pods run trusted test code in this process."""

import asyncio
import json

import numpy as np

from composer2.env.grade import PodGrader
from composer2.env.harness import EpisodeLimits, run_episode
from composer2.types import (
    CallOutcome,
    CallStatus,
    ExecResult,
    Generation,
    PodError,
    SamplingParams,
    Task,
    TestCase,
)

SPECIALS = (
    *("pad", "doc", "task", "file", "read", "search", "edit", "run", "finish", "sep", "end", "result"),
    *("error", "ok", "pass", "fail", "summarize", "summary", "agent"),
)
FIRST_BYTE = len(SPECIALS)
TEST_CODE_ERRORS = (ArithmeticError, ImportError, LookupError, NameError, SyntaxError, TypeError, ValueError)
PAIRS = (b"re", b"tu", b"rn", b" x", b" >")


class ByteTokenizer:
    """One id a byte, and a few pairs that `encode` prefers: so some texts have several id sequences."""

    def __init__(self):
        self.vocab_size = FIRST_BYTE + 256 + len(PAIRS)
        self.num_encoded = 0

    def encode(self, text):
        self.num_encoded += 1
        data, ids, i = text.encode("utf-8", errors="replace"), [], 0
        while i < len(data):
            pair = data[i : i + 2]
            if pair in PAIRS:
                ids.append(FIRST_BYTE + 256 + PAIRS.index(pair))
                i += 2
            else:
                ids.append(FIRST_BYTE + data[i])
                i += 1
        return ids

    def _bytes(self, i):
        if i < FIRST_BYTE:
            return f"<|{SPECIALS[i]}|>".encode()
        return bytes([i - FIRST_BYTE]) if i < FIRST_BYTE + 256 else PAIRS[i - FIRST_BYTE - 256]

    def decode(self, token_ids):
        return b"".join(map(self._bytes, token_ids)).decode("utf-8", errors="replace")

    def special_id(self, name):
        return SPECIALS.index(name)

    def is_special(self, token_id):
        return token_id < FIRST_BYTE

    def ids(self, text):
        """Ids of a text in which `<|name|>` stands for special tokens."""
        out = []
        for i, piece in enumerate(text.split("<|")):
            if i:
                name, piece = piece.split("|>", 1)
                out.append(self.special_id(name))
            out += self.encode(piece)
        return out


class ScriptedSampler:
    """Says what it is told to. Log-probs and versions number the generations; routes name position and generation."""

    def __init__(self, script, *, max_len=100_000, fail_at=None):
        self.script = [list(ids) for ids in script]
        self.requests, self.released = [], []
        self.max_len, self.fail_at = max_len, fail_at

    async def generate(self, token_ids, params, *, session, group, seed):
        await asyncio.sleep(0)
        number = len(self.requests)
        self.requests.append((tuple(token_ids), params, session, group, seed))
        if number == self.fail_at:
            raise PodError("sampler died")
        room = min(params.max_tokens, self.max_len - len(token_ids))
        ids = self.script[number][:room]
        done = bool(ids) and ids[-1] in params.stop_ids
        total = len(token_ids) + len(ids)
        routes = np.zeros((total, 2, 2), dtype=np.int16)
        routes[:, 0, :] = np.arange(total)[:, None]
        routes[:, 1, :] = number
        routes[-1] = -1
        return Generation(
            token_ids=np.array(ids, dtype=np.int32),
            logprobs=-(number + 1) - np.arange(len(ids), dtype=np.float32) / 100,
            policy_versions=np.full(len(ids), 10 + number, dtype=np.int32),
            routes=routes,
            finish_reason="stop" if done else "length",
        )

    def release(self, session):
        self.released.append(session)


class MemoryPod:
    """Files in a dict. A module holding `while True` never ends."""

    def __init__(self, backend, files):
        self.backend, self.pod_id, self.is_destroyed = backend, str(backend.num_created), False
        self.files = {path: text.encode() for path, text in files.items()}
        self.num_runs = 0

    async def exec(self, argv, *, timeout=30.0, stdin=b"", cwd="/repo"):
        return ExecResult(exit_code=0, stdout=b"", stderr=b"")

    async def read(self, path):
        if path not in self.files:
            raise FileNotFoundError(path)
        return self.files[path]

    async def write(self, path, data):
        assert not self.is_destroyed
        self.backend.num_writes += 1
        self.files[path] = data

    async def list_files(self, path="."):
        return sorted(self.files)

    async def run_calls(self, module, calls, *, timeout=2.0):
        assert not self.is_destroyed
        await asyncio.sleep(self.backend.delay)
        self.backend.num_runs += 1
        source = self.files.get(module, b"raise ImportError").decode(errors="replace")
        if "while True" in source:
            return [CallOutcome(status=CallStatus.TIMEOUT)] * len(calls)
        names = {"__name__": module, "POD_FILES": self.files}
        try:
            exec(compile(source, module, "exec"), names)
        except TEST_CODE_ERRORS:
            return [CallOutcome(status=CallStatus.CRASHED)] * len(calls)
        return [self._call(call, names) for call in calls]

    def _call(self, call, names):
        try:
            return CallOutcome(status=CallStatus.RETURNED, value=repr(eval(call, names)))
        except TEST_CODE_ERRORS as error:
            return CallOutcome(status=CallStatus.RAISED, value=type(error).__name__)

    async def destroy(self):
        await asyncio.sleep(0)
        if not self.is_destroyed:
            self.backend.num_destroyed += 1
        self.is_destroyed = True


class MemoryBackend:
    """Counts what it makes; fails from the `fail_from`-th pod on."""

    name = "memory"

    def __init__(self, *, delay=0.0, fail_from=None):
        self.num_created = self.num_destroyed = self.num_writes = self.num_runs = 0
        self.delay, self.fail_from, self.pods = delay, fail_from, []

    async def create(self, files, limits=None):
        await asyncio.sleep(0)
        if self.fail_from is not None and self.num_created >= self.fail_from:
            raise PodError("no pod today")
        self.num_created += 1
        self.pods.append(MemoryPod(self, files))
        return self.pods[-1]

    async def close(self):
        for pod in self.pods:
            await pod.destroy()


SOURCE = "def f(x):\n    if x > 3:\n        return x\n    return 0\n"


def make_task(**changes):
    """`f` should keep 3: `>` ought to be `>=`. One F2P and three P2P tests."""
    fields = {
        "task_id": "keep-three",
        "instruction": "x from 3 on",
        "files": {"solution.py": SOURCE},
        "recent_files": ("solution.py",),
        "fail_to_pass": (TestCase(name="t0", module="solution.py", call="f(3)", expected="3"),),
        "pass_to_pass": (
            TestCase(name="t1", module="solution.py", call="f(4)", expected="4"),
            TestCase(name="t2", module="solution.py", call="f(1)", expected="0"),
            TestCase(name="t3", module="solution.py", call="f('')", raises="TypeError"),
        ),
        "reference": {"solution.py": SOURCE.replace("x > 3", "x >= 3")},
    }
    return Task(**(fields | changes))


def json_line(name, **arguments):
    return json.dumps({"name": name, "arguments": arguments})


async def run_script(task, script, *, template, sampler=None, backend=None, grader=None, seed=5, **limits):
    """One episode on scripted turns; the rollout, the sampler and the backend."""
    sampler = sampler or ScriptedSampler(script)
    backend = backend or MemoryBackend()
    rollout = await run_episode(
        task,
        sampler=sampler,
        backend=backend,
        grader=grader or PodGrader(backend),
        template=template,
        limits=EpisodeLimits(**({"context_budget": 2000, "max_tokens_per_turn": 100} | limits)),
        sampling=SamplingParams(temperature=0.7),
        session="s",
        group="g",
        seed=seed,
        sample_index=1,
    )
    return rollout, sampler, backend
