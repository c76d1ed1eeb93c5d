"""Run as a script: `relay.py HOST PORT`. Copies stdin to a TCP connection and the connection to stdout, until either ends.

It is the client process that a storm kills: only this process holds the socket, so a SIGKILL leaves its end to the kernel.
"""

import os
import selectors
import socket
import sys

READ_BYTES = 65_536


def relay(host: str, port: int) -> None:
    with socket.create_connection((host, port)) as peer, selectors.DefaultSelector() as selector:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        selector.register(0, selectors.EVENT_READ)
        selector.register(peer, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                data = os.read(0, READ_BYTES) if key.fd == 0 else peer.recv(READ_BYTES)
                if not data:
                    return
                if key.fd == 0:
                    peer.sendall(data)
                else:
                    _write_all(data)


def _write_all(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


if __name__ == "__main__":
    relay(sys.argv[1], int(sys.argv[2]))
