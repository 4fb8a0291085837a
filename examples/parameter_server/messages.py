"""Messages between workers and servers: a kind, some numbers, some tensors; JSON and safetensors over a socket.

Sockets rather than a process group: of a process group no rank may die, and here a server shall.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from multiprocessing.connection import Connection

import safetensors.torch
from torch import Tensor

_HEADER_SIZE = 4  # bytes of the header's length


@dataclass(frozen=True)
class Message:
    """What one side says to the other.

    Attributes:
        kind: push, pull, values or done.
        numbers: by name.
        tensors: by name.
    """

    kind: str
    numbers: dict[str, int]
    tensors: dict[str, Tensor]


def send(connection: Connection, kind: str, tensors: dict[str, Tensor] | None = None, **numbers: int) -> None:
    """Send a message.

    Raises:
        OSError: the other side is gone.
    """
    header = json.dumps({"kind": kind, "numbers": numbers}).encode()
    body = safetensors.torch.save(tensors or {})
    connection.send_bytes(len(header).to_bytes(_HEADER_SIZE, "big") + header + body)


def receive(connection: Connection) -> Message:
    """Wait for a message.

    Raises:
        EOFError, OSError: the other side is gone.
    """
    data = connection.recv_bytes()
    start = _HEADER_SIZE + int.from_bytes(data[:_HEADER_SIZE], "big")
    header = json.loads(data[_HEADER_SIZE:start])
    return Message(header["kind"], header["numbers"], safetensors.torch.load(data[start:]))
