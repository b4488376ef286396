"""Driven futures, event by event: what each worker is asked, with what it lacks of the path, and what is counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from distspec.coordinator import events
from distspec.protocol.messages import (
    Draft,
    Drop,
    Extend,
    Output,
    Received,
    ReceiveKV,
    SendKV,
    Verdict,
    Withdraw,
)
from distspec.protocol.values import ROOT, Node, TokenLogprobs, Usage
from tests.machines import (
    PROMPT,
    Bench,
    draft,
    drafted,
    extend,
    kinds,
    left,
    output,
    params,
    says,
    started,
    submit,
    verdict,
)


def chain(*nodes: tuple[int, int], below: int = ROOT) -> tuple[Node, ...]:
    """Nodes (id, token), each below the one before."""
    parents = [below, *(node for node, _ in nodes)]
    return tuple(
        Node(id=node, parent=parent, token=token) for (node, token), parent in zip(nodes, parents, strict=False)
    )


def to(peer: str, ticket: int, *tokens: int, source: str = "decode", epoch: int = 1) -> list[tuple[str, object]]:
    """The two messages of a transfer."""
    length = len(tokens)
    ends = {"request": 1, "epoch": epoch, "ticket": ticket, "peer_incarnation": 1, "start": 0, "length": length}
    return [
        (peer, ReceiveKV(**ends, peer=source, tokens=tokens, params=params())),
        (source, SendKV(**ends, peer=peer)),
    ]


def arrived(worker: str, ticket: int) -> events.FromWorker:
    return says(worker, Received(request=1, epoch=1, ticket=ticket))


def test_sd_drafts_then_verifies_at_a_remote_verifier_once_it_has_the_kv() -> None:
    """Two rounds: the first at home, while KV is on its way; the second with everything that the verifier lacks.
    What became of its nodes is told to it with the next message. The drafter is told even what it proposed."""
    bench = started("sd", "verify", "draft")
    bench.play(
        [
            (
                verdict("decode", 1, 8),
                [output(0, 8), *to("verify", 2, *PROMPT), ("draft", draft(3, 0, *PROMPT, 8))],
            ),
            (drafted(3, 9, 10), [("decode", extend(4, 3, 8, nodes=chain((2, 9), (3, 10))))]),
            (arrived("verify", 2), []),
            (
                verdict("decode", 4, 9, (2, 10), (3, 11)),
                [output(1, 9, 10, 11), ("draft", draft(5, 4, 9, 10, 11, epoch=2))],
            ),
            (
                drafted(5, 12, 13, base=7),
                [("verify", extend(6, 3, 8, 9, 10, 11, epoch=2, nodes=chain((5, 12), (6, 13))))],
            ),
            (
                verdict("verify", 6, 12, (5, 40), (6, 41)),
                [output(4, 12, 40), ("draft", draft(7, 7, 12, 40, epoch=3))],
            ),
            (drafted(7, base=9), [("verify", extend(8, 8, 40, epoch=3, commit=(5,), drop=(6,)))]),
        ]
    )


def test_dsi_sends_each_verifier_the_ancestors_that_it_lacks() -> None:
    """Of node 3, verify2 has seen nothing: it gets node 2 as well, which verify1 is judging."""
    bench = started("dsi", "verify1", "verify2", "draft")
    bench.play(
        [
            (
                verdict("decode", 1, 8),
                [
                    output(0, 8),
                    *to("verify1", 2, *PROMPT),
                    *to("verify2", 3, *PROMPT),
                    ("draft", draft(4, 0, *PROMPT, 8, steps=1, nodes=8)),
                    ("decode", extend(5, 3, 8)),
                ],
            ),
            (arrived("verify1", 2), []),
            (arrived("verify2", 3), []),
            (
                drafted(4, 9),
                [
                    ("draft", draft(6, 4, steps=1, nodes=8)),
                    ("verify1", extend(7, 3, 8, nodes=chain((2, 9)))),
                ],
            ),
            (
                drafted(6, 9, 10),
                [
                    ("draft", draft(8, 4, steps=1, nodes=8)),
                    ("verify2", extend(9, 3, 8, nodes=chain((2, 9), (3, 10)))),
                ],
            ),
            # The root's verdict comes from home, which then lacks token 9 as committed text, and node 4 alone waits.
            (drafted(8, 9, 10, 11), [("draft", draft(10, 4, steps=1, nodes=8))]),
            (
                verdict("decode", 5, 9),
                [output(1, 9), ("decode", extend(11, 4, 9, nodes=chain((3, 10), (4, 11))))],
            ),
            # verify2 judges all three: 9 is committed there already, 10 is right, and what follows it is not 11. What
            # decode does for 11 is not wanted any more.
            (
                verdict("verify2", 9, 9, (2, 10), (3, 30)),
                [
                    output(2, 10, 30),
                    ("draft", draft(12, 4, 9, 10, 30, epoch=2, steps=1, nodes=8)),
                    ("verify2", extend(13, 6, 30, epoch=2, commit=(2, 3))),
                ],
            ),
        ]
    )


def test_dsi_goes_on_with_what_another_verifier_already_judges() -> None:
    """A root that is in flight as a node is not judged again, and the epoch grows on a fresh root alone."""
    bench = started("dsi", "verify", "draft")
    bench.handle(verdict("decode", 1, 8))
    bench.handle(arrived("verify", 2))
    assert kinds(bench.handle(drafted(3, 9))) == [("draft", "Draft"), ("verify", "Extend")]
    assert bench.handle(verdict("decode", 4, 9)) == [output(1, 9)]
    request = bench.machine.request(1)
    assert request is not None
    assert (request.epoch, request.tree.root, request.in_flight()) == (1, 2, {1, 2})


def test_a_verdict_of_a_node_that_outlived_its_root_counts() -> None:
    """verify's task was sent below a root that is gone when it answers."""
    bench = started("dsi", "verify", "draft")
    bench.handle(verdict("decode", 1, 8))
    bench.handle(arrived("verify", 2))
    bench.handle(drafted(3, 9))
    bench.handle(verdict("decode", 4, 9))
    verify = next(message for name, message in bench.sent if name == "verify" and isinstance(message, Extend))
    assert bench.handle(verdict("verify", verify.task, 9, (2, 33)))[0] == output(2, 33)


def test_a_lost_verifier_leaves_its_nodes_to_others() -> None:
    bench = started("dsi", "verify", "draft")
    bench.handle(verdict("decode", 1, 8))
    bench.handle(arrived("verify", 2))
    bench.handle(drafted(3, 9))
    bench.handle(left("verify"))
    commands = bench.handle(verdict("decode", 4, 9))
    extends = [(name, message) for name, message in commands if isinstance(message, Extend)]
    assert extends == [("decode", extend(extends[0][1].task, 4, 9))]


def test_without_a_drafter_the_rest_is_leased_once_nothing_is_in_flight() -> None:
    bench = started("sd", "draft")
    bench.handle(verdict("decode", 1, 8))
    bench.handle(drafted(2, 9, 10))
    assert bench.handle(left("draft")) == []
    commands = bench.handle(verdict("decode", 3, 9, (2, 30), (3, 31)))
    assert kinds(commands) == [("c", "Output"), ("decode", "Lease")]
    message = commands[1][1]
    assert (message.start, message.tokens, message.commit, message.drop) == (5, (30,), (2,), (3,))


def test_a_node_that_could_never_be_emitted_is_left_out() -> None:
    bench = Bench("decode", "draft")
    bench.handle(submit(policy="sd", max_tokens=4))
    bench.handle(verdict("decode", 1, 8))
    assert bench.handle(drafted(2, 9, 10, 11, 12)) == [("decode", extend(3, 3, 8, nodes=chain((2, 9), (3, 10))))]


def test_work_that_a_miss_made_stale_is_withdrawn() -> None:
    """verify judges what hangs below 9; home says 30."""
    bench = started("dsi", "verify", "draft")
    bench.handle(verdict("decode", 1, 8))
    bench.handle(arrived("verify", 2))
    bench.handle(drafted(3, 9))
    task = next(message.task for name, message in bench.sent if name == "verify" and isinstance(message, Extend))
    commands = bench.handle(verdict("decode", 4, 30))
    assert ("verify", Withdraw(request=1, epoch=2, tasks=(task,))) in commands


def test_a_chain_is_judged_along_the_best_guesses_and_a_tree_by_probability() -> None:
    """Of 9, 10 below the root and 11, 12 below 9, path probabilities are .6, .12, .36, .07."""
    judged = {1: chain((2, 9), (4, 11)), 2: (*chain((2, 9), (4, 11)), Node(id=3, parent=ROOT, token=10))}
    for topk, nodes in judged.items():
        bench = started("sd", "draft", steps=2, topk=topk, nodes=3)
        bench.handle(verdict("decode", 1, 8))
        commands = bench.handle(drafted(2, 9, 10, 11, 12, parents=(-1, -1, 0, 0)))
        assert commands == [("decode", extend(3, 3, 8, nodes=nodes))]


def test_no_worker_gets_more_nodes_than_its_scratch_has_room_for() -> None:
    bench = started("sd", "draft", steps=4, topk=2, nodes=64, room=3)
    bench.handle(verdict("decode", 1, 8))
    ((_, message),) = bench.handle(drafted(2, 9, 10, 11, 12, parents=(-1, -1, 0, 0)))
    assert len(message.nodes) == 3


@pytest.mark.parametrize("policy", ["sd", "dsi"])
@pytest.mark.parametrize("most", [1, 2, 3, 4])
def test_nothing_is_drafted_that_could_never_be_emitted(policy: str, most: int) -> None:
    """The prefill gives one token and the root another, so most - 2 drafts at the start, and fewer later."""
    bench = Bench("decode", "draft", steps=8, lookahead=8)
    bench.handle(submit(policy=policy, max_tokens=most))
    commands = bench.handle(verdict("decode", 1, 8))
    shapes = [message.shape for _, message in commands if isinstance(message, Draft)]
    assert [(shape.steps, shape.depth) for shape in shapes] == [(most - 2, most - 2)] * (most > 2)


def test_usage_counts_rounds_and_drafts_by_depth() -> None:
    bench = Bench("decode", "draft")
    bench.now_s = 1.0
    bench.handle(submit(policy="sd", max_tokens=4))
    bench.now_s = 1.5
    bench.handle(verdict("decode", 1, 8))
    bench.handle(drafted(2, 9, 10))
    bench.handle(verdict("decode", 3, 9, (2, 40), (3, 41)))
    bench.now_s = 3.0
    ((_, last), *drops) = bench.handle(verdict("decode", 4, 42))
    assert last.finish_reason == "length"
    assert last.usage == Usage(
        prompt_tokens=3,
        completion_tokens=4,
        rounds=2,
        drafted=2,
        accepted=1,
        position_drafted=(1, 1),
        position_accepted=(1, 0),
        policy="sd",
        first_token_s=0.5,
        total_s=2.0,
    )
    assert drops == [("draft", Drop(request=1, epoch=3)), ("decode", Drop(request=1, epoch=3))]
    # A client may end a stream at any token, so every output says what it cost so far.
    assert [(usage.completion_tokens, usage.rounds) for usage in bench.usages if usage] == [(1, 0), (3, 1), (4, 2)]


def test_acceptance_is_learned_from_drafts_that_the_walk_reached() -> None:
    bench = started("sd", "draft")
    before = bench.machine.snapshot()["acceptance"]
    bench.handle(verdict("decode", 1, 8))
    bench.handle(drafted(2, 9, 10))
    bench.handle(verdict("decode", 3, 9, (2, 10), (3, 11)))
    assert bench.machine.snapshot()["acceptance"] > before


def test_what_is_told_of_an_outcome_goes_with_its_token() -> None:
    """Also if it was judged long before, and by another; of the prompt, once."""
    told = [TokenLogprobs(logprob=-float(i), rank=i) for i in range(6)]
    bench = Bench("decode", "verify", "draft")
    bench.handle(submit(policy="dsi", logprobs=0, prompt_logprobs=0))

    def judged(worker: str, task: int, *outcomes: tuple[int, int], said: Sequence[int], prompt: bytes = b"") -> Any:
        logprobs = tuple(told[i] for i in said)
        whole: dict[str, Any] = {"outcomes": outcomes, "logprobs": logprobs, "prompt_logprobs": prompt}
        return says(worker, Verdict(request=1, epoch=0, task=task, **whole))

    def sent(commands: list[tuple[str, Any]]) -> list[Output]:
        return [message for _, message in commands if isinstance(message, Output)]

    [first] = sent(bench.handle(judged("decode", 1, (ROOT, 8), said=[0], prompt=b"packed")))
    assert (first.tokens, first.logprobs, first.prompt_logprobs) == ((8,), (told[0],), b"packed")
    bench.handle(arrived("verify", 2))
    bench.handle(drafted(3, 9))
    verify = next(message for name, message in bench.sent if name == "verify" and isinstance(message, Extend))
    [node] = verify.nodes
    early = bench.handle(judged("verify", verify.task, (node.id, 33), said=[2]))
    assert not sent(early)
    [both] = sent(bench.handle(judged("decode", 4, (ROOT, 9), said=[1])))
    assert (both.tokens, both.logprobs, both.prompt_logprobs) == ((9, 33), (told[1], told[2]), b"")
