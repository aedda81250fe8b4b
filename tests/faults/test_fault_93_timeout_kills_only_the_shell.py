"""Fault 93: a timeout kills the shell but not its children. `sleep 300 & wait`, 1 s: no `sleep` is left."""

import asyncio
import os
import time

import pytest

from composer2.env.pod import open_backend
from composer2.types import PodError


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


@pytest.mark.parametrize("script", ["sleep 300 & wait", "setsid sleep 300; echo x", "(setsid sleep 300 &); sleep 300"])
def test_no_child_outlives_the_timeout(backend, script):
    async def body():
        pod = await backend.create({})
        started = time.monotonic()
        result = await pod.exec(["sh", "-c", script], timeout=1.0)
        seconds = time.monotonic() - started
        left = await pod.exec(["pgrep", "-c", "sleep"])
        await pod.destroy()
        return result, seconds, left.stdout

    result, seconds, left = asyncio.run(body())
    assert result.timed_out
    assert 1.0 <= seconds < 1.5
    assert left == b"0\n"
