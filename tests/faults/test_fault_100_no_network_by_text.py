"""Fault 100: "no network" enforced by scanning the command's text. A socket opened by a Python one-liner is refused."""

import asyncio
import os
import socket

import pytest

from composer2.env.pod import open_backend
from composer2.types import PodError

ATTEMPT = """
import socket
outcomes = []
for family, kind, address in ATTEMPTS:
    try:
        s = socket.socket(family, kind)
        s.settimeout(2)
        s.connect(address)
        s.send(b"x")
        outcomes.append("sent")
    except OSError as error:
        outcomes.append(type(error).__name__)
print(outcomes)
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


def test_no_socket_reaches_anything(backend):
    with socket.create_server(("0.0.0.0", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind("\0composer2-fault-100")  # abstract: not protected by any file system
        local.listen()
        port = server.getsockname()[1]
        attempts = [
            (int(socket.AF_INET), int(socket.SOCK_STREAM), ("127.0.0.1", port)),
            (int(socket.AF_INET), int(socket.SOCK_STREAM), ("169.254.169.254", 80)),
            (int(socket.AF_INET), int(socket.SOCK_STREAM), ("192.0.2.1", 443)),
            (int(socket.AF_INET), int(socket.SOCK_DGRAM), ("192.0.2.1", 53)),
            (int(socket.AF_INET6), int(socket.SOCK_STREAM), ("2001:db8::1", 443)),
            (int(socket.AF_UNIX), int(socket.SOCK_STREAM), "\0composer2-fault-100"),
        ]
        source = ATTEMPT.replace("ATTEMPTS", repr(attempts))

        async def body():
            pod = await backend.create({})
            result = await pod.exec(["python3", "-c", source.replace("\0", "\\0")])
            await pod.destroy()
            return result

        result = asyncio.run(body())
    refused = ["ConnectionRefusedError", "OSError", "OSError", "OSError", "OSError", "ConnectionRefusedError"]
    assert result.stdout.decode().strip() == str(refused), result
