"""Fault 95: a child that ignores SIGTERM holds the pipe and the tool never returns. It returns; the child is dead."""

import asyncio
import os
import time

import pytest

from composer2.env.pod import open_backend
from composer2.types import PodError

STUBBORN = """
import os, signal, sys, time
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
print("holding", flush=True)
time.sleep(300)
"""


@pytest.fixture
def backend():
    try:
        opened, _ = open_backend("local")
    except PodError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error))
        pytest.skip(str(error))
    yield opened
    asyncio.run(opened.close())


def test_a_child_that_ignores_signals_ends_at_the_limit(backend):
    async def body():
        pod = await backend.create({"stubborn.py": STUBBORN})
        started = time.monotonic()
        result = await pod.exec(["sh", "-c", "trap '' TERM; python3 stubborn.py | cat"], timeout=1.0)
        seconds = time.monotonic() - started
        left = await pod.exec(["pgrep", "-fc", "stubborn"])
        await pod.destroy()
        return result, seconds, left.stdout

    result, seconds, left = asyncio.run(body())
    assert result.timed_out
    assert result.stdout == b"holding\n"
    assert seconds < 1.5
    assert left == b"0\n"
