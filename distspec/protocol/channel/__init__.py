"""The channel: a Hub in the coordinator, a Link in every worker and client, frames over ZeroMQ between them.

Knows peers, terms, incarnations, sequence numbers and heartbeats. Does not know what a message asks for.

One Link is one life of a peer (an incarnation) in one life of the coordinator (a term). It never mends itself:
a lost or repeated frame, silence beyond the timeout, a closed connection or a full queue ends it on both sides,
and the peer comes back as a new incarnation, so that both sides agree on what was forgotten. Frames of another
term or incarnation are dropped here and nowhere else. Silence is told by heartbeats alone, since neither a
stopped process nor a cut cable closes a connection. A ROUTER drops what it cannot route unless routing is
mandatory, so it is, and an unroutable frame ends the link.

All messages queued in one turn of the event loop leave in one frame per peer, or at once by `Hub.flush`.
"""

from __future__ import annotations

from distspec.protocol.channel.hub import Hub, HubHandler, Peer
from distspec.protocol.channel.link import Link

__all__ = ["Hub", "HubHandler", "Link", "Peer"]
