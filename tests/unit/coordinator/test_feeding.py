"""Features for a remote drafter, event by event: who sends which positions, and what a lost ticket costs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from distspec.coordinator.events import FromWorker
from distspec.coordinator.feed import Feed
from distspec.protocol.messages import Draft, Drop, Extend, Received, SendFeatures, TransferLost
from distspec.protocol.values import FeatureTicket
from tests.machines import Bench, drafted, kinds, left, says, submit, verdict


def started(*workers: str, policy: str = "sd", **settings: object) -> Bench:
    """The prompt of three tokens is prefilled at home; token 8 was drawn, and its node id is 1."""
    bench = Bench("decode", *workers, features=True, **settings)
    bench.handle(submit(policy=policy))
    return bench


def fetched(out: list[tuple[str, object]]) -> tuple[str, SendFeatures, Draft]:
    """Who sends, what it was told, and the draft that waits for it; both must mean the same."""
    [(source, sent)] = [(name, message) for name, message in out if isinstance(message, SendFeatures)]
    [(drafter, draft)] = [(name, message) for name, message in out if isinstance(message, Draft)]
    assert isinstance(draft, Draft)
    assert isinstance(sent, SendFeatures)
    assert sent.peer == drafter
    assert sent.start + sent.length == draft.keep + len(draft.tokens) - 1
    assert draft.features == FeatureTicket(ticket=sent.ticket, peer=source, peer_incarnation=1, start=sent.start)
    return source, sent, draft


def lost(worker: str, ticket: int) -> FromWorker:
    return says(worker, TransferLost(request=1, epoch=1, ticket=ticket, reason="link"))


def test_the_first_draft_waits_for_features_of_all_but_the_last_token() -> None:
    bench = started("draft")
    source, sent, draft = fetched(bench.handle(verdict("decode", 1, 8)))
    assert (source, sent.start, sent.length, sent.nodes) == ("decode", 0, 3, ())
    assert draft.tokens == (5, 6, 7, 8)


def test_what_was_accepted_is_still_nodes_to_the_worker_that_judged_it() -> None:
    bench = started("draft")
    _, _, draft = fetched(bench.handle(verdict("decode", 1, 8)))
    [(_, extend)] = bench.handle(drafted(draft.task, 9, 10))
    nodes = [node.id for node in extend.nodes]
    out = bench.handle(verdict("decode", extend.task, 9, (nodes[0], 10), (nodes[1], 11)))
    source, sent, draft = fetched(out)
    assert (source, sent.start, sent.length) == ("decode", 3, 3)
    assert sent.nodes[-2:] == tuple(nodes)
    assert draft.tokens == (9, 10, 11)
    assert bench.handle(drafted(draft.task, 12, base=7))[0][1].commit == tuple(nodes)  # told after it was asked for


def test_a_draft_of_the_same_text_needs_no_more_features() -> None:
    bench = started("draft", policy="dsi")
    out = bench.handle(verdict("decode", 1, 8))
    _, _, draft = fetched(out)
    again = [message for _, message in bench.handle(drafted(draft.task, 9)) if isinstance(message, Draft)]
    assert [message.features for message in again] == [None]


def test_the_quick_drafter_needs_none_and_the_other_gets_them_later() -> None:
    bench = started("draft", policy="ssd", quick=True)
    [quick] = [message for _, message in bench.handle(verdict("decode", 1, 8)) if isinstance(message, Draft)]
    assert quick.shape.quick
    assert quick.features is None
    source, sent, draft = fetched(bench.handle(drafted(quick.task, 9)))
    assert (source, sent.start, sent.length) == ("decode", 0, 3)
    assert (draft.keep, draft.tokens) == (4, ())


def judged_by_a_verifier() -> tuple[Bench, list[int], list[tuple[str, object]]]:
    """The second round is judged away from home; what came of the verdict."""
    bench = started("verify", "draft")
    out = bench.handle(verdict("decode", 1, 8))
    ticket = next(message.ticket for name, message in out if kinds([(name, message)]) == [("verify", "ReceiveKV")])
    _, _, draft = fetched(out)
    bench.handle(says("verify", Received(request=1, epoch=1, ticket=ticket)))
    [(name, extend)] = bench.handle(drafted(draft.task, 9, 10))
    assert name == "verify"
    nodes = [node.id for node in extend.nodes]
    return bench, nodes, bench.handle(verdict("verify", extend.task, 9, (nodes[0], 10), (nodes[1], 11)))


def test_a_verifier_sends_what_only_it_has_judged() -> None:
    _, nodes, out = judged_by_a_verifier()
    source, sent, _ = fetched(out)
    assert (source, sent.start, sent.length) == ("verify", 3, 3)
    assert sent.nodes[-2:] == tuple(nodes)


def test_without_anybody_who_has_them_the_text_goes_on_before_the_drafter_is_asked_again() -> None:
    bench, _, out = judged_by_a_verifier()
    _, sent, _ = fetched(out)
    [(name, extend)] = bench.handle(left("verify"))
    assert name == "decode"
    assert isinstance(extend, Extend)
    assert (extend.tokens, extend.nodes) == ((8, 9, 10, 11), ())
    source, again, draft = fetched(bench.handle(verdict("decode", extend.task, 12)))
    assert (source, again.start, again.length, again.nodes) == ("decode", sent.start, 4, ())
    assert draft.tokens == (12,)


def test_a_drafter_at_home_reads_there_and_is_sent_nothing() -> None:
    """For a policy that keeps one verifier busy, home is the one."""
    bench = Bench("verify", features=True, local_drafts=True)
    bench.join("decode", drafts=True)
    bench.handle(submit(policy="ssd"))
    out = bench.handle(verdict("decode", 1, 8))
    assert kinds(out) == [("c", "Output"), ("decode", "Draft")]
    assert out[1][1].features is None


def test_a_drafter_at_home_drafts_below_nothing_that_only_others_have_judged() -> None:
    bench = Bench("verify", features=True, local_drafts=True)
    bench.join("decode", drafts=True)
    bench.handle(submit(policy="dsi"))
    out = bench.handle(verdict("decode", 1, 8))
    ticket = next(message.ticket for name, message in out if kinds([(name, message)]) == [("verify", "ReceiveKV")])
    [draft] = [message for _, message in out if isinstance(message, Draft)]
    [root] = [message for _, message in out if isinstance(message, Extend)]  # home judges the root alone
    bench.handle(says("verify", Received(request=1, epoch=1, ticket=ticket)))
    out = bench.handle(drafted(draft.task, 9, worker="decode"))
    for again in [message for _, message in out if isinstance(message, Draft)]:
        bench.handle(drafted(again.task, 9, worker="decode"))
    [extend] = [message for name, message in bench.sent if name == "verify" and isinstance(message, Extend)]
    out = bench.handle(verdict("verify", extend.task, 9, (extend.nodes[0].id, 10)))
    assert not [message for _, message in out if isinstance(message, Draft)]
    out = bench.handle(verdict("decode", root.task, 9))
    assert not [message for _, message in out if isinstance(message, Draft)]


def test_a_lost_ticket_is_replaced_once_and_then_the_request_does_without_the_drafter() -> None:
    for told in ("draft", "decode"):  # the side that notices
        bench = started("draft")
        _, first, draft = fetched(bench.handle(verdict("decode", 1, 8)))
        _, second, again = fetched(bench.handle(lost(told, first.ticket)))
        assert (second.start, second.length) == (first.start, first.length)
        assert (again.keep, again.tokens) == (4, ())
        assert bench.handle(lost(told, first.ticket)) == []
        assert bench.handle(drafted(draft.task)) == []
        out = bench.handle(lost(told, second.ticket))
        assert kinds(out) == [("draft", "Drop"), ("decode", "Lease")]
        assert isinstance(out[0][1], Drop)


def test_tickets_that_brought_something_are_no_loss_later() -> None:
    bench = started("draft")
    for _ in range(5):
        out = bench.handle(verdict("decode", bench.sent[-1][1].task, 8))
        _, first, _ = fetched(out)
        _, second, draft = fetched(bench.handle(lost("draft", first.ticket)))
        bench.handle(drafted(draft.task, 9, base=draft.keep + len(draft.tokens)))
        assert bench.handle(lost("draft", second.ticket)) == []


@given(st.lists(st.tuples(st.sampled_from(["send", "lose", "leave", "arrived"]), st.integers(0, 8))))
def test_tickets_under_way_reach_without_a_gap_to_what_was_sent(events: list[tuple[str, int]]) -> None:
    feed, number, right = Feed(), 0, 0
    for what, value in events:
        if what == "send":
            number += 1
            feed.send(number, f"w{value % 2}", feed.sent + 1 + value)
        elif what == "lose":
            known = value in feed.tickets
            assert feed.lose(value) == known
        elif what == "leave":
            feed.leave(f"w{value % 2}")
            assert all(name != f"w{value % 2}" for name, _ in feed.tickets.values())
        else:
            feed.arrived()
            right = feed.sent
        starts = [start for _, start in feed.tickets.values()]
        assert starts == sorted(set(starts))
        assert all(right <= start < feed.sent for start in starts)
        assert feed.sent == right or min(starts) == right
