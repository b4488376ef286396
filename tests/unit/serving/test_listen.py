"""A port is free or it is refused by name, however its holder holds it."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest

from distspec.errors import InvalidValue
from distspec.serving.listen import refuse_taken


def _free() -> int:
    with socket.create_server(("127.0.0.1", 0)) as once:
        return int(once.getsockname()[1])


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("holder", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("asker", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_a_port_on_which_somebody_listens_is_refused(holder: str, asker: str, shared: bool) -> None:
    """Also one that its holder would share."""
    with socket.create_server((holder, 0), reuse_port=shared) as server:
        port = server.getsockname()[1]
        with pytest.raises(InvalidValue, match=rf"server\.port: got {port}, need a free one on {asker} "):
            refuse_taken(asker, port)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_a_free_port_passes_and_stays_free(host: str) -> None:
    port = _free()
    for _ in range(2):
        refuse_taken(host, port)
    socket.create_server(("127.0.0.1", port)).close()


def test_a_server_that_has_just_ended_leaves_its_port() -> None:
    """Its connections linger for a minute (TIME_WAIT), on the side that closed first."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with closing(socket.create_connection(("127.0.0.1", port))) as client:
            server.accept()[0].close()
            client.recv(1)
    refuse_taken("127.0.0.1", port)


@pytest.mark.parametrize("host", ["203.0.113.7", "no such host"])
def test_a_host_that_is_not_here_is_refused(host: str) -> None:
    with pytest.raises(InvalidValue, match=r"server\.host"):
        refuse_taken(host, _free())
