"""Policies in random play: what each may wish, whatever arrives in whatever order."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distspec.speculation.policies import POLICIES, Growth, Policy, Situation, Submission, depth
from distspec.speculation.tree import Tree


@dataclass
class Play:
    """One request with real futures: what was wished is in flight until `happen` picks it."""

    policy: Policy
    verifiers: list[str]
    width: int
    depth: int
    lookahead: int
    accept: float
    rng: Random
    tree: Tree = field(default_factory=Tree)
    tasks: dict[str, tuple[int, ...]] = field(default_factory=dict)
    drafting: Growth | None = None
    dry: bool = False

    def now(self) -> Situation:
        return Situation(
            tree=self.tree,
            in_flight={node for nodes in self.tasks.values() for node in nodes},
            free=[name for name in self.verifiers if name not in self.tasks],
            total=len(self.verifiers),
            drafting=self.drafting is not None,
            dry=self.dry,
            width=self.width,
            depth=self.depth,
            lookahead=self.lookahead,
        )

    def wish(self) -> list[Submission]:
        """Ask the policy as the coordinator does, and hold its answer to what any policy must keep."""
        grow = self.policy.grow(self.now())
        if grow is not None:
            assert self.drafting is None, "two drafts at once"
            assert not self.dry, "asked a drafter that has nothing to add"
            assert grow.leaf in self.tree
            assert 1 <= grow.count <= self.depth - len(self.tree)
            self.drafting = grow
        before = self.now()
        wishes = self.policy.submit(before)
        assert len({wish.verifier for wish in wishes}) == len(wishes)
        for wish in wishes:
            assert wish.verifier in before.free
            assert all(node in self.tree for node in wish.nodes)
            assert not set(wish.nodes) & {n for nodes in self.tasks.values() for n in nodes}, "twice in flight"
            assert all(self.tree.nodes[node].outcome is None for node in wish.nodes)
            self.tasks[wish.verifier] = (self.tree.root, *wish.nodes)
        return wishes

    def happen(self) -> None:
        """One future ends: a draft, a verdict, or a verifier that gives its task up."""
        pending = [*self.tasks, *(["draft"] if self.drafting else [])]
        assert pending, "nothing in flight, and nothing wished: the request stands still"
        what = self.rng.choice(pending)
        if what != "draft":
            nodes = self.tasks.pop(what)
            if self.rng.random() < 0.9:
                self._judge(nodes)
        elif self.drafting is not None:
            growth, self.drafting = self.drafting, None
            count = self.rng.choice((growth.count, growth.count, self.rng.randint(0, growth.count)))
            self.dry = count == 0
            if growth.leaf in self.tree:
                self.tree.add(growth.leaf, [self.rng.randrange(2) for _ in range(count)], range(-1, count - 1))

    def _judge(self, nodes: tuple[int, ...]) -> None:
        for node in nodes:
            if node in self.tree:
                children = self.tree.nodes[node].children
                right = children and self.rng.random() < self.accept
                self.tree.judge(node, self.tree.token(children[0]) if right else 7)
        while (step := self.tree.step()) is not None:
            self.dry = False
            if step.node is None:
                self.drafting = None


@st.composite
def plays(draw: st.DrawFn, name: str) -> Play:
    verifiers = [f"v{i}" for i in range(draw(st.integers(1, 4)))]
    width, lookahead = draw(st.integers(0, 5)), draw(st.integers(1, 3))
    deep = draw(st.sampled_from((depth(name, width, lookahead, len(verifiers)), 1, 0)))
    accept, seed = draw(st.sampled_from((0.0, 0.5, 1.0))), draw(st.integers(0, 2**32))
    return Play(POLICIES[name](), verifiers, min(width, deep), deep, lookahead, accept, Random(seed))


@pytest.mark.parametrize("name", POLICIES)
@given(data=st.data())
def test_a_request_always_goes_on_and_no_node_is_in_flight_twice(name: str, data: st.DataObject) -> None:
    """Asked again with nothing changed, a policy wishes nothing more."""
    play = data.draw(plays(name))
    for _ in range(40):
        play.wish()
        drafting = play.drafting
        assert play.wish() == []
        assert play.drafting is drafting
        play.happen()


@given(data=st.data())
def test_ar_judges_the_root_and_never_drafts(data: st.DataObject) -> None:
    play = data.draw(plays("ar"))
    for _ in range(10):
        play.wish()
        assert play.drafting is None
        assert list(play.tasks.values()) == [(play.tree.root,)]
        play.happen()


@given(data=st.data())
def test_sd_drafts_then_verifies_never_both(data: st.DataObject) -> None:
    play = data.draw(plays("sd"))
    for _ in range(40):
        play.wish()
        assert bool(play.tasks) != (play.drafting is not None)
        assert len(play.tasks) <= 1
        assert all(len(nodes) <= 1 + play.width for nodes in play.tasks.values())
        play.happen()


@given(data=st.data())
def test_dsi_never_waits(data: st.DataObject) -> None:
    """The root is judged at once, the drafter runs on while there is room, and a verifier is idle only while less
    than a full submission waits and more is being drafted."""
    play = data.draw(plays("dsi"))
    for _ in range(40):
        play.wish()
        now = play.now()
        assert play.tree.root in now.in_flight or not now.free
        assert now.drafting or now.dry or len(play.tree) >= play.depth
        if now.free:
            idle = [n for n in play.tree.chain() if n not in now.in_flight and play.tree.nodes[n].outcome is None]
            assert len(idle) < play.lookahead
            assert now.drafting or not idle
        play.happen()


@pytest.mark.parametrize("verifiers", [1, 3])
def test_dsi_sends_every_lookahead_nodes_to_the_next_free_verifier(verifiers: int) -> None:
    names = [f"v{i}" for i in range(verifiers)]
    play = Play(POLICIES["dsi"](), names, 2, 8, 2, 1.0, Random(0))
    assert play.wish() == [Submission("v0", ())]  # the root alone, before anything was drafted
    ids = play.tree.add(play.tree.root, [1, 2, 3, 4, 5], range(-1, 4))
    free = names[1:]
    assert play.wish() == [Submission(name, tuple(ids[2 * i : 2 * i + 2])) for i, name in enumerate(free)]


def test_dsi_judges_the_root_with_what_waits_where_it_starts_late() -> None:
    play = Play(POLICIES["dsi"](), ["v0"], 2, 8, 2, 1.0, Random(0))
    ids = play.tree.add(play.tree.root, [1, 2, 3], range(-1, 2))
    assert play.wish() == [Submission("v0", tuple(ids))]


def test_depth_keeps_every_verifier_fed_and_the_drafter_ahead() -> None:
    assert depth("dsi", 5, 2, 3) == 8
    assert depth("sd", 5, 2, 3) == 5
