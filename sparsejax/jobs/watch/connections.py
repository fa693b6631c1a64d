"""Connections between processes, outside of JAX: lines of JSON each way."""

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any


_LONGEST = 1 << 14  # bytes of a line


class Line:
    """One end of a connection.

    Attributes:
        process: The number of the process at the other end.
    """

    def __init__(self, connection: socket.socket, process: int):
        self.process = process
        self._connection = connection
        self._sending = threading.Lock()
        self._rest = b""

    def say(self, **what: Any) -> None:
        """Sends a line; where the other end is gone, it is lost."""
        text = json.dumps(what).encode() + b"\n"
        with self._sending:
            try:
                self._connection.sendall(text)
            except OSError:
                pass  # The one who reads finds the end.

    def hand_over(self) -> None:
        """Closes this end for this process alone, which gave it to another one."""
        self._connection.close()

    def read(self, timeout: float | None) -> dict[str, Any] | None:
        """The next line; None where the other end has closed.

        Args:
            timeout: Seconds to wait; None for ever.

        Raises:
            TimeoutError: Nothing came within the timeout.
        """
        while b"\n" not in self._rest and len(self._rest) < _LONGEST:
            try:
                # Inside, since another thread may have closed this end.
                self._connection.settimeout(timeout)
                more = self._connection.recv(_LONGEST)
            except TimeoutError:
                raise
            except OSError:
                return None
            if not more:
                return None
            self._rest += more
        text, _, self._rest = self._rest.partition(b"\n")
        try:
            said = json.loads(text)
        except ValueError:
            return None
        return said if isinstance(said, dict) else None

    def heard(self, timeout: float | None) -> Iterator[dict[str, Any]]:
        """All lines until the other end closes; as `read` raises."""
        while (said := self.read(timeout)) is not None:
            yield said

    def fileno(self) -> int:
        """The descriptor of this end."""
        return self._connection.fileno()

    def close(self) -> None:
        """Closes this end."""
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._connection.close()


def listening(port: int) -> socket.socket:
    """A socket at a port, or at a free one if 0, on all of this host's addresses."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=both)
