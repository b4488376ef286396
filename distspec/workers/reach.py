"""Whether a Ray cluster answers at all. Knows addresses and sockets, and nothing of fleets.

Ray tries for minutes to reach a cluster that is not there, and remembers one that died as this machine's.
"""

from __future__ import annotations

import os
import socket

from ray._private.services import canonicalize_bootstrap_address

from distspec.errors import FleetError

_ANSWER_S = 5.0


def refuse_unreachable(address: str) -> None:
    """address: as ray.init takes it, of a cluster that exists. Raises FleetError if nobody listens there."""
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or address
    try:
        # Ray Client's addresses have a scheme; what `auto` finds on this machine is Ray's to say.
        found = address.partition("://")[2] or canonicalize_bootstrap_address(address)
        host, _, port = str(found).rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()
    except ConnectionRefusedError:
        hint = "; the one that ran there last on this machine is gone" if address == "auto" else ""
        raise FleetError(f"no Ray cluster at {found}{hint}") from None
    except (OSError, ValueError) as error:
        raise FleetError(f"Ray at {address}: {error}") from None
