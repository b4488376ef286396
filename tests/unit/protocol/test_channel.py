"""Links: order, loss, repetition, silence, keys and lives. Real sockets on the loopback interface."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from distspec.errors import LinkLost
from distspec.protocol.channel import Hub, Link, Peer
from distspec.protocol.codec import MAX_FRAME_BYTES, encode
from distspec.protocol.keys import Endpoint, FleetKeys
from distspec.protocol.messages import (
    Cancel,
    ClientHello,
    ClientWelcome,
    Fault,
    Hello,
    Message,
    Output,
    Refuse,
    Welcome,
)
from distspec.workers.bell import Bell

TERM = 7
pytestmark = pytest.mark.asyncio


class Recorder:
    """A handler that writes down what it is told, and can be waited upon."""

    def __init__(self) -> None:
        self.log: list[tuple[str, Any, Any]] = []
        self.messages: list[Message] = []
        self.refusal: str | None = None
        self._changed = asyncio.Event()

    def hello(self, peer: Peer, hello: Any) -> Any:
        if self.refusal is not None:
            return Refuse(reason=self.refusal)
        if peer.is_client:
            return ClientWelcome(term=TERM, heartbeat_s=0.05)
        return Welcome(term=TERM, heartbeat_s=0.05)

    def joined(self, peer: Peer, hello: Any) -> None:
        self._note("joined", peer, hello)

    def arrived(self, peer: Peer, messages: list[Message]) -> None:
        self.messages += messages
        self._note("arrived", peer, messages)

    def left(self, peer: Peer, reason: str) -> None:
        self._note("left", peer, reason)

    def _note(self, what: str, peer: Peer, detail: Any) -> None:
        self.log.append((what, peer, detail))
        self._changed.set()

    async def until(self, condition: Any) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def lefts(self) -> list[str]:
        return [detail for what, _, detail in self.log if what == "left"]


class Fleet:
    def __init__(self, timeout_s: float) -> None:
        self.keys = FleetKeys.create()
        self.handler = Recorder()
        self.hub = Hub(self.keys, TERM, heartbeat_s=0.05, timeout_s=timeout_s)
        self.endpoint = self.hub.start(self.handler)
        self.links: list[Link] = []

    def link(
        self, name: str = "verify:0", incarnation: int = 1, **kw: Any
    ) -> tuple[Link, list[Message], asyncio.Future[LinkLost]]:
        inbox: list[Message] = []
        lost: asyncio.Future[LinkLost] = asyncio.get_running_loop().create_future()
        link = Link(
            kw.get("endpoint", self.endpoint),
            kw.get("hello", hello_of(name, incarnation)),
            incarnation,
            arrived=inbox.extend,
            lost=lost.set_result,
            timeout_s=kw.get("timeout_s", 5.0),
            wake=kw.get("wake"),
        )
        self.links.append(link)
        return link, inbox, lost


def hello_of(name: str, incarnation: int) -> Hello:
    return Hello(
        worker=name, role="verify", incarnation=incarnation, fingerprint={}, slots=1, capacity=1, page_size=1,
        max_model_len=1, vocab_size=1,
    )  # fmt: skip


@pytest_asyncio.fixture
async def fleet() -> AsyncIterator[Fleet]:
    made = Fleet(timeout_s=5.0)
    yield made
    for link in made.links:
        link.close()
    made.hub.close()


async def settle(condition: Any) -> None:
    while not condition():  # noqa: ASYNC110 - the inbox is a plain list
        await asyncio.sleep(0.002)


async def test_messages_arrive_once_and_in_order_both_ways(fleet: Fleet) -> None:
    link, inbox, _ = fleet.link()
    welcome = await link.open()
    assert welcome == Welcome(term=TERM, heartbeat_s=0.05)
    up = [Fault(reason=str(i)) for i in range(500)]
    down = [Output(key=str(i), start=i, tokens=(i,)) for i in range(500)]
    for i in range(500):
        link.send(up[i])
        fleet.hub.send("verify:0", down[i])
        if i % 7 == 0:
            await asyncio.sleep(0)
    await settle(lambda: len(inbox) == 500 and len(fleet.handler.messages) == 500)
    assert inbox == down
    assert fleet.handler.messages == up


async def test_messages_of_one_turn_share_a_frame(fleet: Fleet) -> None:
    link, _, _ = fleet.link()
    await link.open()
    for i in range(20):
        link.send(Fault(reason=str(i)))
    await fleet.handler.until(lambda: len(fleet.handler.messages) == 20)
    assert sum(what == "arrived" for what, _, _ in fleet.handler.log) == 1


async def test_a_flush_sends_once_what_is_queued(fleet: Fleet) -> None:
    link, inbox, _ = fleet.link()
    await link.open()
    for i in range(3):
        fleet.hub.send("verify:0", Cancel(key=str(i)))
        fleet.hub.flush()
        assert link._pump._socket.poll(1000)  # with the event loop held up
    await settle(lambda: len(inbox) == 3)
    assert inbox == [Cancel(key=str(i)) for i in range(3)]


async def test_a_link_that_fails_ends_when_its_handler_has_done_what_it_does(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would hear that a peer left before it has said that it joined."""

    def joined(peer: Peer, hello: Any) -> None:
        for message in (Fault(reason="\ud800"), Cancel(key="after what was not sent")):
            assert fleet.hub.send(peer.name, message)
            fleet.hub.flush()
        fleet.handler._note("joined", peer, hello)

    monkeypatch.setattr(fleet.handler, "joined", joined)
    link, inbox, lost = fleet.link()
    with pytest.raises(LinkLost, match="cannot be sent"):
        await link.open()
    assert [what for what, _, _ in fleet.handler.log] == ["joined", "left"]
    assert not inbox
    assert not lost.done()


@pytest.mark.parametrize("jump", [1, -1])
async def test_a_gap_or_a_repeated_frame_ends_the_link_on_both_sides(fleet: Fleet, jump: int) -> None:
    link, _, lost = fleet.link()
    await link.open()
    last = link._sent
    link._pump.send([encode([Fault(reason="?")], term=TERM, incarnation=1, sequence=last + 1 + jump)])
    await fleet.handler.until(fleet.handler.lefts)
    assert fleet.handler.messages == []
    assert fleet.handler.lefts() == [f"frame {last + 1 + jump} after {last}"]
    assert str(await lost) == fleet.handler.lefts()[0]


async def test_a_gap_downwards_ends_the_link(fleet: Fleet) -> None:
    link, inbox, lost = fleet.link()
    await link.open()
    fleet.hub._sessions["verify:0"].sent += 1
    fleet.hub.send("verify:0", Cancel(key="x"))
    assert "after" in str(await lost)
    assert inbox == []
    await fleet.handler.until(fleet.handler.lefts)


async def test_frames_of_another_term_or_incarnation_are_dropped(fleet: Fleet) -> None:
    link, _, _ = fleet.link()
    await link.open()
    message = [Fault(reason="from the past")]
    for term, incarnation in ((TERM - 1, 1), (TERM + 1, 1), (TERM, 2), (TERM, 0)):
        link._pump.send([encode(message, term=term, incarnation=incarnation, sequence=2)])
    link.send(Fault(reason="now"))
    await fleet.handler.until(lambda: fleet.handler.messages)
    assert fleet.handler.messages == [Fault(reason="now")]


async def test_a_link_of_another_term_is_refused(fleet: Fleet) -> None:
    old = Endpoint(
        fleet.endpoint.address, TERM - 1, fleet.keys.server_public, fleet.keys.client_public, fleet.keys.client_secret
    )
    link, _, _ = fleet.link(endpoint=old)
    with pytest.raises(LinkLost, match="term 6 is not 7") as caught:
        await link.open()
    assert caught.value.refused
    assert fleet.handler.log == []


async def test_a_newer_incarnation_replaces_and_an_older_is_refused(fleet: Fleet) -> None:
    first, _, first_lost = fleet.link(incarnation=1)
    await first.open()
    second, inbox, _ = fleet.link(incarnation=2)
    await second.open()
    await first_lost
    assert [(what, peer.incarnation) for what, peer, _ in fleet.handler.log] == [
        ("joined", 1),
        ("left", 1),
        ("joined", 2),
    ]
    woken, _, _ = fleet.link(incarnation=1)
    with pytest.raises(LinkLost, match="incarnation 2"):
        await woken.open()
    fleet.hub.send("verify:0", Cancel(key="still here"))
    await settle(lambda: inbox)


async def test_refusal_carries_its_reason(fleet: Fleet) -> None:
    fleet.handler.refusal = "dtype: fleet has float32, verify:0 has bfloat16"
    link, _, _ = fleet.link()
    with pytest.raises(LinkLost, match="dtype: fleet has float32") as caught:
        await link.open()
    assert caught.value.refused
    assert fleet.hub.peers() == []


@pytest.mark.parametrize("which", ["client", "server"])
async def test_only_the_fleets_keys_may_connect(fleet: Fleet, which: str) -> None:
    other, own = FleetKeys.create(), fleet.keys
    keys = {
        "client": FleetKeys(own.server_public, "", other.client_public, other.client_secret),
        "server": FleetKeys(other.server_public, "", own.client_public, own.client_secret),
    }[which]
    link, _, _ = fleet.link(endpoint=keys.endpoint(fleet.endpoint.address, TERM), timeout_s=1.0)
    with pytest.raises(LinkLost):
        await link.open()
    assert fleet.handler.log == []
    good, _, _ = fleet.link()
    await good.open()


async def test_a_closed_peer_is_noticed_without_waiting_for_the_timeout(fleet: Fleet) -> None:
    link, _, _ = fleet.link("client:a", hello=ClientHello(client="client:a", version=1))
    await link.open()
    link.close()
    await fleet.handler.until(fleet.handler.lefts)
    assert fleet.handler.lefts() == ["connection closed"]
    assert fleet.hub.send("client:a", Cancel(key="x")) is False


async def test_a_closed_hub_is_noticed(fleet: Fleet) -> None:
    """Whoever reads, if anybody does: what came last says why."""
    for wake in (None, lambda: None):
        hub = Hub(fleet.keys, TERM, heartbeat_s=0.05, timeout_s=5.0)
        endpoint = hub.start(Recorder())
        link, _, lost = fleet.link(endpoint=endpoint, wake=wake)
        await link.open()
        hub.close()
        assert str(await lost) == "the coordinator closed"


async def test_reset_tells_both_sides_and_the_peer_may_return(fleet: Fleet) -> None:
    link, _, lost = fleet.link(incarnation=1)
    await link.open()
    fleet.hub.reset("verify:0", "missed a deadline")
    assert fleet.handler.lefts() == []
    await fleet.handler.until(fleet.handler.lefts)
    assert str(await lost) == "missed a deadline"
    again, _, _ = fleet.link(incarnation=2)
    await again.open()
    assert [peer.incarnation for peer in fleet.hub.peers()] == [2]


async def test_garbage_ends_a_link_and_is_refused_outside_one(fleet: Fleet) -> None:
    link, _, lost = fleet.link()
    await link.open()
    link._pump.send([b"\xc1\xff\x00"])
    await lost
    await fleet.handler.until(fleet.handler.lefts)
    assert "no frame" in fleet.handler.lefts()[0]


async def test_a_late_event_loop_does_not_blame_its_peers() -> None:
    fleet = Fleet(timeout_s=0.4)
    link, _, lost = fleet.link(timeout_s=0.4)
    await link.open()
    time.sleep(0.8)  # noqa: ASYNC251 - the point: this process was held up, nobody else
    await asyncio.sleep(0.2)
    assert fleet.handler.lefts() == []
    assert not lost.done()
    link.close()
    fleet.hub.close()


async def test_whoever_was_held_up_waits_for_its_peers_once_more_and_no_longer(fleet: Fleet) -> None:
    """They may have been heard since."""
    link, _, lost = fleet.link()
    await link.open()
    [session] = fleet.hub._sessions.values()
    for heard_s in (0.0, 50.0, 100.0):
        link.heard_s = session.heard_s = heard_s
        link._beat(100.0, 100.0)
        fleet.hub._beat(100.0, 100.0)
        assert link.heard_s == session.heard_s == 100.0
    assert link.is_open
    assert not lost.done()
    assert fleet.handler.lefts() == []


async def test_a_stopped_peer_is_told_by_its_silence_and_refused_when_it_wakes(tmp_path: Any) -> None:
    fleet = Fleet(timeout_s=0.5)
    fields = msgspec.structs.astuple(fleet.endpoint)
    script = f"""
import asyncio
from distspec.protocol.channel import Link
from distspec.protocol.keys import Endpoint
from distspec.protocol.messages import ClientHello
async def main():
    lost = asyncio.get_running_loop().create_future()
    endpoint = Endpoint(*{fields!r})
    hello = ClientHello(client="client:frozen", version=1)
    link = Link(endpoint, hello, 1, arrived=print, lost=lost.set_result, timeout_s=60)
    await link.open()
    print("lost:", await lost)
asyncio.run(main())
"""
    child = await asyncio.to_thread(subprocess.Popen, [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        await fleet.handler.until(lambda: fleet.handler.log)
        os.kill(child.pid, signal.SIGSTOP)
        await fleet.handler.until(fleet.handler.lefts)
        assert "silent" in fleet.handler.lefts()[0]
        os.kill(child.pid, signal.SIGCONT)
        out, _ = await asyncio.to_thread(child.communicate)
        assert out.startswith("lost: silent")
    finally:
        child.kill()
        fleet.hub.close()


async def test_heartbeats_alone_keep_an_idle_link(fleet: Fleet) -> None:
    short = Fleet(timeout_s=0.5)
    link, inbox, lost = short.link(timeout_s=0.5)
    await link.open()
    await asyncio.sleep(1.5)
    assert short.handler.lefts() == []
    assert not lost.done()
    assert inbox == []
    assert short.handler.messages == []
    link.close()
    short.hub.close()


async def test_a_hub_closes_whatever_handshake_is_under_way() -> None:
    """libzmq waits for ever for some of these; this test then ends with its time."""
    for i in range(400):
        hub = Hub(FleetKeys.create(), TERM, heartbeat_s=0.05, timeout_s=5.0)
        link = Link(
            hub.start(Recorder()),
            ClientHello(client="early", version=1),
            1,
            arrived=lambda messages: None,
            lost=lambda error: None,
            timeout_s=5.0,
        )
        opening = asyncio.create_task(link.open())
        await asyncio.sleep((0.0, 0.0005, 0.001, 0.002, 0.003)[i % 5])
        opening.cancel()
        if i % 2:
            link.close()
        hub.close()
        link.close()
        await asyncio.gather(opening, return_exceptions=True)


async def test_what_is_too_much_for_a_frame_goes_in_several(fleet: Fleet) -> None:
    link, inbox, lost = fleet.link()
    await link.open()
    large = "x" * (MAX_FRAME_BYTES * 3 // 8)
    up = [Fault(reason=f"{i}{large}") for i in range(3)]
    down = [Refuse(reason=f"{i}{large}") for i in range(3)]
    link.send(*up)
    for message in down:
        fleet.hub.send("verify:0", message)
    await settle(lambda: lost.done() or len(inbox) == len(fleet.handler.messages) == 3)
    assert not lost.done()
    assert inbox == down
    assert fleet.handler.messages == up


async def test_a_message_that_cannot_be_sent_ends_its_link_alone(fleet: Fleet) -> None:
    one, other = fleet.link("verify:0"), fleet.link("verify:1")
    for link, _, _ in (one, other):
        await link.open()
    fleet.hub.send("verify:0", Refuse(reason="\ud800"))
    fleet.hub.send("verify:1", Refuse(reason="fine"))
    await settle(lambda: other[1])
    assert "cannot be sent" in str(await one[2])
    other[0].send(Fault(reason="\ud800"))
    assert "cannot be sent" in str(await other[2])


class Reader(threading.Thread):
    """Receives what comes on a link, as a compute thread does, and answers each message at once."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__()
        self._bell = Bell()
        self.link, self.inbox, self.lost = fleet.link(wake=self._bell.ring)
        self.threads = set[int]()
        self.stopped = False

    def run(self) -> None:
        answered = 0
        while not self.stopped:
            self.link.receive()
            for message in self.inbox[answered:]:
                assert isinstance(message, Cancel)
                self.link.say([Fault(reason=message.key)])
                answered += 1
            self._bell.wait(None, self.link.descriptor)

    def stop(self) -> None:
        self.stopped = True
        self._bell.ring()
        self.join()


async def test_a_thread_that_receives_by_itself_misses_nothing(fleet: Fleet) -> None:
    """What the event loop sends and receives beside it swallows signals of the socket."""
    reader = Reader(fleet)
    reader.start()
    try:
        await reader.link.open()
        for i in range(400):
            fleet.hub.send("verify:0", Cancel(key=str(i)))
            if i % 3 == 0:
                reader.link.send(Fault(reason="beside"))
            if i % 5 == 0:
                reader.link._beat(asyncio.get_running_loop().time(), 0.0)
            await fleet.handler.until(lambda i=i: Fault(reason=str(i)) in fleet.handler.messages)
        assert reader.inbox == [Cancel(key=str(i)) for i in range(400)]
        answers = [message for message in fleet.handler.messages if message != Fault(reason="beside")]
        assert answers == [Fault(reason=str(i)) for i in range(400)]
        assert not reader.lost.done()
    finally:
        reader.stop()


async def test_whoever_swallows_the_signal_of_a_frame_wakes_its_reader(fleet: Fleet) -> None:
    wakes: list[None] = []
    link, inbox, _ = fleet.link(wake=lambda: wakes.append(None))
    await link.open()
    link.receive()
    wakes.clear()
    fleet.hub.send("verify:0", Cancel(key="x"))
    fleet.hub.flush()
    assert link.descriptor is not None
    assert select.select([link.descriptor], [], [], 30)[0]
    link.say([Fault(reason="y")])
    assert wakes
    link.receive()
    assert inbox == [Cancel(key="x")]


async def test_many_threads_may_speak_on_one_link(fleet: Fleet) -> None:
    link, _, lost = fleet.link(wake=lambda: None)
    await link.open()

    def speak(who: int) -> None:
        for i in range(200):
            link.say([Fault(reason=f"{who} {i}")])

    await asyncio.gather(*(asyncio.to_thread(speak, who) for who in range(4)))
    await settle(lambda: lost.done() or len(fleet.handler.messages) == 800)
    assert not lost.done()
    for who in range(4):
        said = [m.reason for m in fleet.handler.messages if isinstance(m, Fault) and m.reason.startswith(f"{who} ")]
        assert said == [f"{who} {i}" for i in range(200)]


async def test_a_thread_that_is_busy_keeps_its_link_and_hears_of_its_end() -> None:
    fleet = Fleet(timeout_s=0.5)
    link, inbox, lost = fleet.link(timeout_s=0.5, wake=lambda: None)  # nobody ever receives
    await link.open()
    fleet.hub.send("verify:0", Cancel(key="x"))
    await asyncio.sleep(1.5)
    assert not lost.done()
    assert fleet.handler.lefts() == []
    assert inbox == [Cancel(key="x")]
    fleet.hub.reset("verify:0", "enough")
    assert str(await lost) == "enough"
    fleet.hub.close()


async def test_what_cannot_be_said_ends_the_link_once_on_its_event_loop(fleet: Fleet) -> None:
    link, _, lost = fleet.link(wake=lambda: None)
    link.say([Fault(reason="before the Welcome")])
    await link.open()
    for _ in range(2):
        await asyncio.to_thread(link.say, [Fault(reason="\ud800")])
    assert "cannot be sent" in str(await lost)
    link.say([Fault(reason="after the end")])
    assert fleet.handler.messages == []
