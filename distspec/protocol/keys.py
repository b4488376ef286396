"""CURVE keys of a fleet: one pair for its coordinator, one shared by all who may connect.

Made afresh by each coordinator life and handed out through Ray, so who may call the fleet's actors may join
its channel, and nobody else. Knows no socket.
"""

from __future__ import annotations

from msgspec import Struct
from zmq import curve_keypair


class Endpoint(Struct, frozen=True):
    """All that a peer needs to reach a coordinator. address: `tcp://host:port`. Keys are Z85 text."""

    address: str
    term: int
    server_public: str
    client_public: str
    client_secret: str

    def __repr__(self) -> str:
        return f"Endpoint({self.address}, term={self.term})"  # a secret has no place in a log


class FleetKeys(Struct, frozen=True):
    """What a coordinator listens with, and what it tells those who may connect. All Z85 text."""

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str

    @classmethod
    def create(cls) -> FleetKeys:
        server_public, server_secret = (key.decode() for key in curve_keypair())
        client_public, client_secret = (key.decode() for key in curve_keypair())
        return cls(server_public, server_secret, client_public, client_secret)

    def endpoint(self, address: str, term: int) -> Endpoint:
        return Endpoint(address, term, self.server_public, self.client_public, self.client_secret)

    def __repr__(self) -> str:
        return f"FleetKeys({self.server_public})"
