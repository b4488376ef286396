"""Whether this machine can listen where a server is told to.

Knows addresses and sockets. Does not know who will listen.
"""

from __future__ import annotations

import errno
import socket

from distspec.errors import InvalidValue


def refuse_taken(host: str, port: int) -> None:
    """Raises InvalidValue for server.host or server.port.

    To be asked before a server starts, since Ray Serve cannot say it: its proxies share a port with each other
    (SO_REUSEPORT), so that a second server would come up too, and each get some of the connections.
    """
    wanted = socket.AF_INET6 if ":" in host else socket.AF_INET  # of a name, Serve takes this too
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, wanted, socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise InvalidValue("server.host", host, f"an address of this machine ({error.strerror})") from None
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that have ended hold no port
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise InvalidValue("server.host", host, "an address of this machine") from None
            raise InvalidValue("server.port", port, f"a free one on {host} ({error.strerror})") from None
