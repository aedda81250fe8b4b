"""Messages between the host and a pod. In: a JSON object and raw bytes. Out: one frame on a stream socket, and back.

Source: rows E1 E5.
A frame is two lengths (unsigned 32 bit, big endian), then the JSON text, then the bytes. Standard library only: pods
import this file.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

LENGTHS = struct.Struct("!II")
MAX_FRAME_BYTES = 64 << 20


def pack(head: Mapping[str, Any], body: bytes = b"") -> bytes:
    text = json.dumps(head).encode("ascii")
    if len(text) + len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"frame of {len(text) + len(body)} bytes, accepted is at most {MAX_FRAME_BYTES}")
    return LENGTHS.pack(len(text), len(body)) + text + body


def lengths(prefix: bytes) -> tuple[int, int]:
    """Lengths of the JSON text and of the bytes. ValueError when they exceed the accepted size."""
    head_length, body_length = LENGTHS.unpack(prefix)
    if head_length + body_length > MAX_FRAME_BYTES:
        raise ValueError(f"frame of {head_length + body_length} bytes, accepted is at most {MAX_FRAME_BYTES}")
    return head_length, body_length


def receive(stream: socket.socket) -> tuple[dict[str, Any], bytes] | None:
    """The next frame of a blocking socket, None at its end."""
    prefix = _receive_exactly(stream, LENGTHS.size)
    if prefix is None:
        return None
    head_length, body_length = lengths(prefix)
    payload = _receive_exactly(stream, head_length + body_length)
    if payload is None:
        return None
    return json.loads(payload[:head_length]), payload[head_length:]


def _receive_exactly(stream: socket.socket, count: int) -> bytes | None:
    chunks = []
    while count:
        chunk = stream.recv(min(count, 1 << 20))
        if not chunk:
            return None
        chunks.append(chunk)
        count -= len(chunk)
    return b"".join(chunks)
