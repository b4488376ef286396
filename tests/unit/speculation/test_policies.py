"""Policies in random play: what each may wish, whatever arrives in whatever order."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distspec.speculation.policies import POLICIES, Growth, Policy, Situation, Submission
from distspec.speculation.sizes import Sizes
from distspec.speculation.tree import Tree

ODDS = (0.6, 0.2, 0.1)


@dataclass
class Play:
    """One request with real futures: what was wished is in flight until `happen` picks it."""

    policy: Policy
    verifiers: list[str]
    sizes: Sizes
    accept: float = 1.0
    rng: Random = field(default_factory=lambda: Random(0))
    depth: int = 1000
    quick: bool = False
    tree: Tree = field(default_factory=Tree)
    tasks: dict[str, tuple[int, ...]] = field(default_factory=dict)
    drafting: Growth | None = None
    dry: bool = False
    asked: bool = False

    def now(self) -> Situation:
        return Situation(
            tree=self.tree,
            in_flight={node for nodes in self.tasks.values() for node in nodes},
            free=[name for name in self.verifiers if name not in self.tasks],
            total=len(self.verifiers),
            drafting=self.drafting is not None,
            asked=self.asked,
            dry=self.dry,
            quick=self.quick,
            depth=self.depth,
            sizes=self.sizes,
            odds=ODDS,
        )

    def wish(self) -> list[Submission]:
        """Ask the policy as the coordinator does, and hold its answer to what any policy must keep."""
        self._wish_growth()
        before = self.now()
        wishes = self.policy.submit(before)
        assert len({wish.verifier for wish in wishes}) == len(wishes)
        judged = {node for wish in wishes for node in wish.nodes} | {self.tree.root, *before.in_flight}
        for wish in wishes:
            assert wish.verifier in before.free
            assert all(node in self.tree for node in wish.nodes)
            assert not set(wish.nodes) & {n for nodes in self.tasks.values() for n in nodes}, "twice in flight"
            assert all(self.tree[node].outcome is None for node in wish.nodes)
            above = [self.tree[node].parent for node in wish.nodes]
            known = [node in judged or self.tree[node].outcome is not None for node in above]
            assert all(known), "a node without its path"
            self.tasks[wish.verifier] = (self.tree.root, *wish.nodes)
        self._wish_growth()
        return wishes

    def _wish_growth(self) -> None:
        growth = self.policy.grow(self.now())
        if growth is not None:
            assert self.drafting is None or not self.asked, "two drafts at once"
            assert not self.dry, "asked a drafter that has nothing to add"
            assert growth.steps >= 1
            assert self.depth > 0
            self.drafting, self.asked = growth, True

    def grow(self, steps: int, topk: int, width: int, most: int) -> int:
        """As a drafter does; the number of new nodes."""
        before = len(self.tree)
        for _ in range(steps):
            nodes = [self.tree.root, *(node for _, node in self.tree.ranked(ODDS))]
            able = [n for n in nodes if not self.tree[n].children and len(self.tree.path(n)) < self.depth]
            for node in able[:width]:
                tokens = self.rng.sample(range(9), topk)
                self.tree.add(node, tokens, [-1] * topk, most=most)
        return len(self.tree) - before

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
            steps = self.rng.choice((growth.steps, growth.steps, self.rng.randint(0, growth.steps)))
            new = self.grow(steps, growth.topk, growth.width, growth.nodes)
            self.dry = not new and not growth.quick

    def _judge(self, nodes: tuple[int, ...]) -> None:
        for node in nodes:
            if node in self.tree:
                children = self.tree[node].children
                right = children and self.rng.random() < self.accept
                self.tree.judge(node, self.rng.choice(list(children)) if right else 99)
        while (step := self.tree.step()) is not None:
            self.dry = self.asked = False
            if step.node is None:
                self.drafting = None


@st.composite
def plays(draw: st.DrawFn, name: str) -> Play:
    verifiers = [f"v{i}" for i in range(draw(st.integers(1, 4)))]
    sizes = Sizes(
        steps=draw(st.integers(1, 5)),
        topk=draw(st.integers(1, 3)),
        nodes=draw(st.integers(1, 12)),
        lookahead=draw(st.integers(1, 3)),
        branch_topk=draw(st.integers(1, 3)),
        branch_width=draw(st.integers(1, 4)),
        max_live_nodes=draw(st.integers(5, 30)),
        branch_nodes=draw(st.integers(1, 9)),
    )
    accept, seed = draw(st.sampled_from((0.0, 0.5, 1.0))), draw(st.integers(0, 2**32))
    depth, quick = draw(st.sampled_from((0, 1, 3, 1000))), draw(st.booleans())
    return Play(POLICIES[name](), verifiers, sizes, accept, Random(seed), depth, quick)


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
        assert all(len(nodes) <= 1 + play.sizes.nodes for nodes in play.tasks.values())
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
        ahead = min(play.sizes.max_live_nodes, play.sizes.lookahead * (len(play.verifiers) + 1), play.depth)
        assert now.drafting or now.dry or play.tree.height() >= ahead
        if now.free:
            idle = now.best(1000, 1)
            assert len(idle) < play.sizes.lookahead
            assert now.drafting or not idle
        play.happen()


@given(data=st.data())
def test_ssd_drafts_while_it_verifies_and_has_one_verifier_at_work(data: st.DataObject) -> None:
    play = data.draw(plays("ssd"))
    for _ in range(40):
        play.wish()
        now = play.now()
        assert len(play.tasks) <= 1
        full = len(play.tree) >= play.sizes.max_live_nodes or not play.depth
        assert now.drafting or now.dry or full or not play.tasks
        play.happen()


@given(data=st.data())
def test_pearl_has_one_verifier_at_work_and_a_drafter_ahead(data: st.DataObject) -> None:
    play = data.draw(plays("pearl"))
    for _ in range(40):
        play.wish()
        now = play.now()
        assert len(play.tasks) <= 1
        assert (
            now.drafting
            or now.dry
            or play.tree.height() >= min(play.sizes.max_live_nodes, 2 * play.sizes.steps, play.depth)
        )
        play.happen()


SIZES = Sizes(steps=2, nodes=8, lookahead=2)


def chained(name: str, verifiers: int, tokens: int, sizes: Sizes = SIZES) -> tuple[Play, list[int]]:
    """A play whose drafter has already made a chain; and its ids."""
    play = Play(POLICIES[name](), [f"v{i}" for i in range(verifiers)], sizes)
    ids = play.tree.add(play.tree.root, range(tokens), range(-1, tokens - 1))
    return play, [node for node in ids if node is not None]


@pytest.mark.parametrize("verifiers", [1, 3])
def test_dsi_sends_every_lookahead_nodes_to_the_next_free_verifier(verifiers: int) -> None:
    play, _ = chained("dsi", verifiers, 0)
    assert play.wish() == [Submission("v0", ())]  # the root alone, before anything was drafted
    ids = play.tree.add(play.tree.root, [1, 2, 3, 4, 5], range(-1, 4))
    free = play.verifiers[1:]
    assert play.wish() == [Submission(name, tuple(ids[2 * i : 2 * i + 2])) for i, name in enumerate(free)]


def test_dsi_judges_the_root_with_what_waits_where_it_starts_late() -> None:
    play, ids = chained("dsi", 1, 3)
    assert play.wish() == [Submission("v0", tuple(ids))]


def test_pearl_judges_the_first_node_early_and_then_what_was_drafted_meanwhile() -> None:
    play, (first,) = chained("pearl", 2, 1, replace(SIZES, steps=3))
    assert play.wish() == [Submission("v0", (first,))]
    ids = play.tree.add(first, [1, 2, 3, 4], range(-1, 3))
    assert play.wish() == []
    play.tasks.clear()
    play.tree.judge(play.tree.root, 0)
    play.tree.step()
    play.tree.judge(play.tree.root, 1)
    play.tree.step()
    assert play.wish() == [Submission("v0", tuple(ids[1:4]))]


def test_sd_judges_the_likeliest_nodes_of_a_tree() -> None:
    play = Play(POLICIES["sd"](), ["v0"], replace(SIZES, topk=2, nodes=3))
    best, second = play.tree.add(play.tree.root, [1, 2], [-1, -1])
    below, _ = play.tree.add(best or 0, [3, 4], [-1, -1])
    # path probabilities: .6, .2, .36, .12
    assert play.wish() == [Submission("v0", (best, below, second))]


def test_ssd_judges_the_chain_and_leaves_the_branches() -> None:
    play, chain = chained("ssd", 1, 2)
    play.tree.add(play.tree.root, [7, 8], [-1, -1])
    play.tree.add(chain[0], [7, 8], [-1, -1])
    assert play.wish() == [Submission("v0", tuple(chain))]
    assert play.drafting == Growth(SIZES.lookahead, SIZES.branch_topk, SIZES.branch_width, SIZES.max_live_nodes)


def test_ssd_asks_the_fallback_drafter_first_after_a_miss() -> None:
    play = Play(POLICIES["ssd"](), ["v0"], SIZES, quick=True)
    assert play.wish() == []
    assert play.drafting is not None
    assert play.drafting.quick
    play.drafting = None
    ids = play.tree.add(play.tree.root, [1], [-1])
    assert play.wish() == [Submission("v0", tuple(ids))]  # although it is shorter than a round


def test_ssd_waits_for_its_drafter_once_however_shallow_the_answer_is() -> None:
    play = Play(POLICIES["ssd"](), ["v0"], replace(SIZES, steps=5))
    assert play.wish() == []
    assert play.drafting == Growth(5, SIZES.branch_topk, 1, SIZES.max_live_nodes)
    play.drafting = None
    [first, _] = play.tree.add(play.tree.root, [1, 2], [-1, -1])
    assert play.wish() == [Submission("v0", (first,))]
    assert play.drafting == Growth(SIZES.lookahead, SIZES.branch_topk, SIZES.branch_width, SIZES.max_live_nodes)


def test_ssd_tells_a_busy_drafter_at_once_where_the_text_went() -> None:
    play, chain = chained("ssd", 1, 3)
    play.wish()
    growing = play.drafting
    play.tasks.clear()
    play.tree.judge(play.tree.root, 0)
    play._judge(())
    assert play.wish() == [Submission("v0", tuple(chain[1:]))]
    assert play.drafting is not growing


def test_bvsp_starts_a_new_round_beside_the_verdict_of_a_dead_one() -> None:
    play, _ = chained("bvsp", 2, 2, replace(SIZES, branch_nodes=1))
    play.tasks["v1"] = (play.tree.root,)
    play.tree.judge(play.tree.root, 99)
    play._judge(())
    play.tree.add(play.tree.root, [1, 2], [-1, 0])
    assert [wish.verifier for wish in play.wish()] == ["v0"]
    assert list(play.tasks["v0"]) == [play.tree.root, *(n for n in sorted(play.tree.ids()) if n != play.tree.root)]


def test_bvsp_sends_a_second_verifier_to_the_branches_before_the_first_has_answered() -> None:
    play, chain = chained("bvsp", 2, 2, replace(SIZES, branch_nodes=3))
    assert play.wish() == [Submission("v0", tuple(chain))]
    branches = play.tree.add(play.tree.root, [7, 8], [-1, -1])
    assert play.wish() == []
    branches += play.tree.add(chain[0], [7], [-1])
    [wish] = play.wish()
    assert wish.verifier == "v1"
    assert set(wish.nodes) == set(branches)
