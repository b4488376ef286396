"""The tree against a naive model of it: a set of token paths below the committed text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distspec.protocol.values import TokenLogprobs
from distspec.speculation.tree import Tree

Path = tuple[int, ...]


class Naive:
    """Paths of live nodes below the root, and the outcomes known after them. The text is what was committed."""

    def __init__(self) -> None:
        self.paths: set[Path] = {()}
        self.outcomes: dict[Path, int] = {}
        self.text: list[int] = []

    def add(self, at: Path, proposal: list[Path]) -> None:
        self.paths |= {at + path for path in proposal}

    def judge(self, at: Path, token: int) -> None:
        if at in self.paths:
            self.outcomes.setdefault(at, token)

    def reset(self) -> None:
        self.paths, self.outcomes = {()}, {}

    def walk(self) -> None:
        while () in self.outcomes:
            token = self.outcomes[()]
            self.text.append(token)
            self.paths = {path[1:] for path in self.paths if path[:1] == (token,)} | {()}
            self.outcomes = {path[1:]: y for path, y in self.outcomes.items() if path[:1] == (token,)}


def path(tree: Tree, node: int) -> Path:
    return tuple(tree.token(n) for n in tree.path(node))


def rank(tree: Tree, node: int) -> int:
    return list(tree[tree[node].parent].children or ()).index(tree.token(node))


def walk(tree: Tree) -> list[int]:
    out = []
    while (step := tree.step()) is not None:
        out.append(step.token)
    return out


@st.composite
def proposals(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    tokens = draw(st.lists(st.integers(0, 2), max_size=6))
    return tokens, [draw(st.integers(-1, i - 1)) for i in range(len(tokens))]


@given(st.data())
def test_it_is_a_set_of_paths(data: st.DataObject) -> None:
    """Whatever is hung, judged and walked in whatever order, the tree holds what a set of paths holds."""
    tree, naive, text = Tree(), Naive(), []
    ever = {tree.root}
    for _ in range(data.draw(st.integers(1, 12))):
        known = data.draw(st.sampled_from(sorted(ever)))
        what = data.draw(st.sampled_from(("add", "add", "judge", "judge", "reset")))
        if what == "reset":
            tree.reset()
            naive.reset()
        elif what == "add" and known in tree:
            tokens, parents = data.draw(proposals())
            at = path(tree, known)
            ids = tree.add(known, tokens, parents)
            below: list[Path] = []
            for token, parent in zip(tokens, parents, strict=True):
                below.append((below[parent] if parent >= 0 else ()) + (token,))
            naive.add(at, below)
            assert [path(tree, i) for i in ids] == [at + p for p in below]
            tree.submit(data.draw(st.lists(st.sampled_from(ids), max_size=2)) if ids else [])
        else:
            outcome = data.draw(st.integers(0, 2))
            if known in tree:
                naive.judge(path(tree, known), outcome)
            tree.judge(known, outcome)
        text += walk(tree)
        naive.walk()
        ids = tree.ids()
        ever |= set(ids)
        assert text == naive.text
        assert {n for n in ever if n in tree} == set(ids)
        found = {path(tree, n): tree[n].outcome for n in ids}
        assert len(found) == len(ids), "two nodes of one path"
        assert found == {p: naive.outcomes.get(p) for p in naive.paths}
        assert len(tree) == len(naive.paths) - 1
        assert tree.height() == max(map(len, naive.paths))
        assert all(tree.depth(n) == len(path(tree, n)) for n in ids)


def test_a_proposal_that_goes_on_from_the_last_one_joins_it() -> None:
    tree = Tree()
    first = tree.add(tree.root, [1, 2], [-1, 0])
    assert tree.add(tree.root, [1, 2, 3, 1], [-1, 0, 1, -1])[:2] == first
    assert tree.shape()[1:] == ([1, 2, 3], [-1, 0, 1])


def test_a_proposal_that_only_looks_like_the_last_one_is_hung_where_it_says() -> None:
    """Deeper, with more room, of other tokens, at another leaf, with other parents, or below a root with more room."""
    tree = Tree()
    a, _ = tree.add(tree.root, [1, 2], [-1, -1])
    assert a is not None
    for hung, ids in [
        (tree.add(a, [5], [-1], most=9, deepest=1), [None]),
        (tree.add(a, [5], [-1], most=9), [3]),
        (tree.add(a, [6], [-1], most=3), [None]),
        (tree.add(a, [6], [-1], most=9), [4]),
        (tree.add(a, [7], [-1], most=9), [5]),
        (tree.add(tree.root, [7], [-1], most=9), [6]),
        (tree.add(tree.root, [7, 8], [-1, -1], most=9), [6, 7]),
        (tree.add(tree.root, [7, 8], [-1, 0], most=9), [6, 8]),
        (tree.add(a, [9], [-1], most=8), [None]),
    ]:
        assert hung == ids
    tree.judge(tree.root, 1)
    tree.step()
    assert tree.add(a, [9], [-1], most=8) == [9]


@given(st.data())
def test_the_text_does_not_depend_on_the_order_of_verdicts(data: st.DataObject) -> None:
    tokens, parents = data.draw(proposals())
    outcomes = data.draw(st.lists(st.integers(0, 2), min_size=len(tokens) + 1, max_size=len(tokens) + 1))
    texts = []
    for order in (list(range(len(outcomes))), data.draw(st.permutations(range(len(outcomes))))):
        tree = Tree()
        ids = [tree.root, *tree.add(tree.root, tokens, parents)]
        verdict = dict(zip(ids, outcomes, strict=True))  # of doubled nodes, the last: one law for one path
        text = []
        for i in order:
            tree.judge(ids[i], verdict[ids[i]])
            text += walk(tree)
        texts.append(text)
    assert texts[0] == texts[1]


@given(st.lists(proposals(), max_size=8), st.lists(st.integers(0, 2), max_size=8))
def test_ids_are_never_used_again(hung: list[tuple[list[int], list[int]]], outcomes: list[int]) -> None:
    tree = Tree()
    seen: dict[int, int] = {tree.root: id(tree[tree.root])}
    keep = [tree[tree.root]]  # or Python may use an address again
    for (tokens, parents), outcome in zip(hung, outcomes, strict=False):
        tree.add(tree.root, tokens, parents)
        tree.judge(tree.root, outcome)
        tree.step()
        for node in tree.ids():
            keep.append(tree[node])
            assert seen.setdefault(node, id(tree[node])) == id(tree[node])
    old = set(seen)
    tree.reset()
    assert tree.root not in old


def test_a_step_says_who_became_the_root_and_who_died() -> None:
    tree = Tree()
    a, b, c, d, e = tree.add(tree.root, [2, 1, 3, 4, 5], [-1, -1, 1, 0, 0])
    tree.submit([c, d])
    assert tree.step() is None
    tree.judge(tree.root, 1)
    step = tree.step()
    assert step is not None
    assert (step.token, step.node, step.rank, step.children, step.died) == (1, b, 1, 2, (a, d))
    assert (tree.root, tree.path(c)) == (b, [c])
    tree.judge(b, 9)
    step = tree.step()
    assert step is not None
    assert (step.token, step.node, step.rank, step.children, step.died) == (9, None, None, 1, (c,))
    assert len(tree) == 0
    assert tree.root not in (a, b, c, d, e)


@given(st.data())
def test_steps_say_of_each_node_that_was_submitted_that_it_died_once(data: st.DataObject) -> None:
    """And of no other; whoever knows nodes by their ids need not look for what is gone."""
    tree, known = Tree(), set[int]()
    for _ in range(data.draw(st.integers(1, 8))):
        tree.add(tree.root, *data.draw(proposals()))
        some = data.draw(st.lists(st.sampled_from(tree.ids()), max_size=3))
        tree.submit(some)
        known.update(above for node in some for above in tree.path(node))
        tree.judge(data.draw(st.sampled_from(tree.ids())), data.draw(st.integers(0, 2)))
        while (step := tree.step()) is not None:
            known.discard(step.node if step.node is not None else tree.root)
            assert known >= set(step.died)
            assert len(set(step.died)) == len(step.died)
            known -= set(step.died)
            assert known == {node for node in known if node in tree}


@pytest.mark.parametrize("width", [0, 1, 40])
@pytest.mark.parametrize("is_right", [True, False])
def test_what_the_walk_leaves_behind_does_not_pile_up(width: int, is_right: bool) -> None:
    tree = Tree()
    for _ in range(200):
        tree.add(tree.root, range(width), [-1] * width)
        tree.judge(tree.root, 0 if is_right else -1)
        tree.step()
    assert len(tree._nodes) <= 4 * (width + 1)


def test_the_first_verdict_is_law() -> None:
    tree = Tree()
    assert tree.judge(tree.root, 4)
    assert not tree.judge(tree.root, 5)
    assert walk(tree) == [4]


def test_a_verdict_of_a_node_that_is_gone_says_nothing() -> None:
    tree = Tree()
    (node,) = tree.add(tree.root, [1], [-1])
    tree.judge(tree.root, 2)
    walk(tree)
    assert not tree.judge(node, 3)
    assert walk(tree) == []


def test_nodes_are_ranked_by_the_probability_of_their_path() -> None:
    tree = Tree()
    a, b, c, d = tree.add(tree.root, [1, 2, 3, 4], [-1, -1, 0, 1])
    assert [node for _, node in tree.ranked((0.6, 0.3))] == [a, c, b, d]  # .6, .36, .3, .18
    assert list(tree.ranked((0.6, 0.3)))[1][0] == pytest.approx(0.36)
    assert tree.height() == 2


@given(st.lists(proposals(), min_size=1, max_size=4), st.lists(st.integers(0, 2), max_size=2), st.integers(1, 3))
def test_a_ranking_is_a_sort_of_all_nodes_whatever_the_root(
    hung: list[tuple[list[int], list[int]]], came: list[int], ranks: int
) -> None:
    odds, tree = (0.6, 0.6, 0.1), Tree()  # equal odds: of two nodes that are as likely the older is first
    for tokens, parents in hung:
        tree.add(tree.root, tokens, parents)
    for token in came:
        tree.judge(tree.root, token)
        tree.step()
    value: dict[int, float] = {}
    for node in tree.ids():
        above = tree[node].parent
        value[node] = 1.0 if node == tree.root else value[above] * odds[rank(tree, node)]
    inside = [n for n in value if n != tree.root and all(rank(tree, above) < ranks for above in tree.path(n))]
    wanted = sorted(((value[n], n) for n in inside), key=lambda pair: (-pair[0], pair[1]))
    assert list(tree.ranked(odds, ranks)) == wanted


def test_without_odds_the_drafters_own_scores_count() -> None:
    tree = Tree()
    ids = tree.add(tree.root, [1, 2, 3], [-1, -1, 1], scores=[-3.0, -0.1, -0.2])
    assert [node for _, node in tree.ranked(())] == [ids[1], ids[2], ids[0]]


def test_a_full_tree_takes_nothing_more_and_says_what_it_left_out() -> None:
    tree = Tree()
    assert tree.add(tree.root, [1, 2, 3, 1], [-1, 0, 1, -1], most=2) == [1, 2, None, 1]
    assert len(tree) == 2


def test_nothing_is_hung_deeper_than_allowed_but_what_is_there_is_found() -> None:
    tree = Tree()
    tree.add(tree.root, [1, 2, 3], [-1, 0, 1])
    tree.judge(tree.root, 1)
    tree.step()
    assert tree.add(tree.root, [2, 3, 4, 9], [-1, 0, 1, 0], deepest=2) == [2, 3, None, 4]


def test_a_proposal_must_pair_tokens_and_parents() -> None:
    tree = Tree()
    with pytest.raises(ValueError, match="2 tokens, 1 parents"):
        tree.add(0, [1, 2], [-1])
    assert tree.ids() == [0]


def test_logprobs_are_those_of_the_first_verdict() -> None:
    tree, first, other = Tree(), TokenLogprobs(logprob=-1.0, rank=1), TokenLogprobs(logprob=-2.0, rank=2)
    [node] = tree.add(tree.root, [5], [-1])
    assert node is not None
    assert tree.judge(node, 6, first)
    assert not tree.judge(node, 6, other)
    assert tree.judge(tree.root, 5)
    steps = [tree.step(), tree.step()]
    assert [step and (step.token, step.logprobs) for step in steps] == [(5, None), (6, first)]
