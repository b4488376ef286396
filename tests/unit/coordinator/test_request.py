"""One request's books: legal transitions, what each worker is known to hold, what it still lacks."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distspec.coordinator.request import TRANSITIONS, Drafting, Holding, Request, State, Task
from distspec.errors import IllegalTransition
from distspec.protocol.messages import Drafted
from distspec.protocol.values import ROOT, Node
from tests.machines import params, plain


def request(prompt: tuple[int, ...] = (5, 6, 7)) -> Request:
    return Request(1, "c", "a", prompt, (), params(), "dsi", None, 0.0)


def walk(it: Request) -> None:
    while (step := it.tree.step()) is not None:
        it.commit(step)


@pytest.mark.parametrize("old", State)
@pytest.mark.parametrize("new", State)
def test_an_illegal_transition_raises_and_changes_nothing(old: State, new: State) -> None:
    it = request()
    it.state = old
    before = plain(it)
    if new in TRANSITIONS[old]:
        it.move(new)
        assert it.state is new
    else:
        with pytest.raises(IllegalTransition, match=f"{old.value} -> {new.value}"):
            it.move(new)
        assert plain(it) == before


def test_every_state_can_end_and_none_comes_back_from_the_end() -> None:
    assert all(State.DONE in arrows for state, arrows in TRANSITIONS.items() if state is not State.DONE)
    assert not TRANSITIONS[State.DONE]


@given(st.integers(0, 2**32))
def test_the_books_of_a_worker_are_what_it_would_hold(seed: int) -> None:
    """A worker that does what its messages say holds exactly what the coordinator believes: committed tokens and
    live nodes, after any order of drafts, verdicts and submissions."""
    rng, it = Random(seed), request()
    it.holds["w"] = hold = Holding(epoch=0, opened=True)
    text: list[int] = []  # committed positions with KV at the worker
    nodes: dict[int, tuple[int, int]] = {}  # live there: parent, token
    for _ in range(15):
        for node in rng.sample(it.tree.ids(), k=min(2, len(it.tree) + 1)):
            it.tree.add(node, [rng.randrange(3) for _ in range(2)], [ROOT, rng.choice((ROOT, 0))])
        for node in rng.sample(it.tree.ids(), k=min(3, len(it.tree) + 1)):
            it.tree.judge(node, rng.randrange(4))
        walk(it)
        if rng.random() < 0.2:
            it.void()
        wanted = rng.sample(it.tree.ids(), k=min(3, len(it.tree) + 1))
        it.tree.submit(wanted)
        missing = it.missing("w", wanted)
        start = hold.computed
        commit, drop = hold.take_fates()
        for node in commit:
            text.append(nodes.pop(node)[1])
        for node in drop:
            del nodes[node]
        assert start == len(text), "the coordinator counts other positions than the worker"
        text += it.tokens[start:]
        for entry in missing:
            assert entry.id not in nodes
            assert entry.parent == ROOT or entry.parent in nodes, "a parent that the worker never computed"
            nodes[entry.id] = entry.parent, entry.token
        hold.computed, hold.nodes = len(it.tokens), hold.nodes | {entry.id for entry in missing}
        assert text == it.tokens
        assert set(nodes) == hold.nodes
        assert {n for node in wanted for n in it.tree.path(node)} <= set(nodes)


def test_what_is_missing_comes_parents_first_and_hangs_on_the_root() -> None:
    it = request()
    it.holds["w"] = Holding(epoch=0, nodes={1})
    it.holds["v"] = Holding(epoch=0)
    ids = it.tree.add(it.tree.root, [9, 10, 11], [-1, 0, 1])
    assert ids == [1, 2, 3]
    assert it.missing("w", [3]) == [Node(id=2, parent=1, token=10), Node(id=3, parent=2, token=11)]
    assert it.missing("v", [2, 3])[0] == Node(id=1, parent=ROOT, token=9)


def test_a_worker_holds_for_sure_what_it_was_told_before_its_oldest_future() -> None:
    it = request()
    it.holds["w"] = Holding(epoch=0, computed=9, commit=[4, 5])
    assert it.computed_by("w") == 7  # it does not know yet that 4 and 5 are committed
    it.tasks = {2: Task("w", 0, (), 6, 0.0), 1: Task("w", 0, (), 3, 0.0), 3: Task("v", 0, (), 1, 0.0)}
    assert it.computed_by("w") == 3


def test_a_drafter_is_asked_anew_when_the_root_changes_and_its_draft_is_void_on_a_fresh_one() -> None:
    it = request()
    a, *_ = it.tree.add(it.tree.root, [8, 9, 10], [-1, 0, 1])
    it.drafting = Drafting(worker="d", epoch=0, told=3, task=7, asked=True, dry=True)
    it.tree.judge(it.tree.root, 8)
    walk(it)
    assert (it.drafting.told, it.drafting.task, it.drafting.asked, it.drafting.dry) == (3, 7, False, False)
    assert a is not None
    it.tree.judge(a, 30)
    walk(it)
    assert (it.drafting.told, it.drafting.task) == (3, None)


def test_a_proposal_is_grafted_where_the_text_has_gone() -> None:
    """Below [1, 2] the text went on with 8: of two branches, the one of 8 is left, but for what is too deep."""
    it = request()
    it.tree.judge(it.tree.root, 8)
    walk(it)
    base = len(it.tokens) - 1
    proposal = Drafted(request=1, epoch=0, task=1, base=base, tokens=(9, 8, 5, 6), parents=(-1, -1, 1, 2))
    assert it.graft(proposal, most=64) == 2
    assert it.graft(proposal, most=64) == 0
    assert it.tree.shape()[1:] == ([5, 6], [-1, 0])
    other = Drafted(request=1, epoch=0, task=1, base=base, tokens=(7, 5), parents=(-1, 0))
    assert it.graft(other, most=64) == 0
    wide = Drafted(request=1, epoch=0, task=1, base=base + 1, tokens=(1, 2, 3), parents=(-1, -1, -1))
    assert it.graft(wide, most=4) == 2


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=10), st.lists(st.integers(0, 2), max_size=3))
def test_what_is_grafted_are_the_paths_that_the_text_followed(drawn: list[tuple[int, int]], came: list[int]) -> None:
    it = request()
    base = len(it.tokens)
    parents = [min(below, i) - 1 for i, (_, below) in enumerate(drawn)]
    paths: list[list[int]] = []
    for (token, _), parent in zip(drawn, parents, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else ()), token])
    for token in came:
        it.tree.judge(it.tree.root, token)
        walk(it)
    wanted = {tuple(path[len(came) :]) for path in paths if path[: len(came)] == came and len(path) > len(came)}
    tokens = tuple(token for token, _ in drawn)
    new = it.graft(Drafted(request=1, epoch=0, task=1, base=base, tokens=tokens, parents=tuple(parents)), most=64)
    found = [tuple(it.tree.token(node) for node in it.tree.path(n)) for n in it.tree.ids() if n != it.tree.root]
    if len(set(map(tuple, paths))) == len(paths):  # siblings differ, as drafters promise
        assert sorted(found) == sorted(wanted)
        assert new == len(found)


def test_the_epoch_grows_on_a_fresh_root_and_not_when_siblings_die() -> None:
    it = request()
    it.tree.add(it.tree.root, [8, 9], [-1, -1])
    it.tree.judge(it.tree.root, 8)
    walk(it)
    assert it.epoch == 0
    it.tree.judge(it.tree.root, 9)
    walk(it)
    assert it.epoch == 1


def test_void_forgets_futures_and_has_every_node_dropped() -> None:
    it = request()
    it.holds["w"] = Holding(epoch=0, computed=3, nodes={1, 2}, drop=[9])
    it.tasks = {1: Task("w", 0, (1, 2), 3, 0.0)}
    root, epoch = it.tree.root, it.epoch
    it.void()
    assert (it.tasks, it.holds["w"].nodes, sorted(it.holds["w"].drop)) == ({}, set(), [1, 2, 9])
    assert it.tree.root != root
    assert it.epoch > epoch
