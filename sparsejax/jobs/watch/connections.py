"""Connections between processes, outside of JAX, over which they send lines of JSON."""

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any


_LONGEST = 1 << 14  # bytes of a line


class Line:
    """One end of a connection.

    Attributes:
        process: The index of the process at the other end.
    """

    def __init__(self, connection: socket.socket, process: int):
        self.process = process
        self._connection = connection
        self._sending = threading.Lock()
        self._rest = b""

    def say(self, **what: Any) -> None:
        """Sends a line; it is lost if the other end has closed."""
        text = json.dumps(what).encode() + b"\n"
        with self._sending:
            try:
                self._connection.sendall(text)
            except OSError:
                pass  # The thread that reads from this connection will notice.

    def hand_over(self) -> None:
        """Closes this end in this process, after another process has taken it over."""
        self._connection.close()

    def read(self, timeout: float | None) -> dict[str, Any] | None:
        """Returns the next line as an object; None if the connection has closed.

        It is None for a line that is no JSON object, too.

        Args:
            timeout: Seconds to wait; None for no limit.

        Raises:
            TimeoutError: Nothing was received within the timeout.
        """
        while b"\n" not in self._rest and len(self._rest) < _LONGEST:
            try:
                # Inside the try, since another thread may have closed this end.
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
        """Yields all lines until the connection closes; raises as `read`."""
        while (said := self.read(timeout)) is not None:
            yield said

    def fileno(self) -> int:
        """Returns the file descriptor of this end."""
        return self._connection.fileno()

    def close(self) -> None:
        """Closes this end."""
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._connection.close()


def listening(port: int) -> socket.socket:
    """Returns a socket that listens at a port (a free one if 0) on all addresses."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=both)
