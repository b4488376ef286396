"""Sequences against a plain model: every token and node is where the books say, whatever moved."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from distspec.errors import IllegalTransition, OutOfPages
from distspec.kv.pages import PageAllocator
from distspec.kv.radix import PrefixCache
from distspec.kv.sequence import Books, Move, Sequence, Spots
from distspec.protocol.values import ROOT, Node


def books(num_pages: int = 8, page_size: int = 4, cache: bool = True) -> Books:
    pages = PageAllocator(num_pages, page_size)
    return Books(pages, PrefixCache(pages) if cache else None)


def chain(*ids: int, parent: int = ROOT) -> list[Node]:
    return [Node(id=id, parent=above, token=100 + id) for above, id in zip((parent, *ids), ids, strict=False)]


def test_an_accepted_chain_is_in_place_already() -> None:
    seq = books().open([1, 2])
    seq.reserve(6)
    assert seq.append([1, 2]) == [0, 1]
    assert seq.add(chain(0, 1, 2)) == [2, 3, 4]
    assert seq.commit([0, 1], drop=[2]) == []
    assert seq.tokens == [1, 2, 100, 101]


def test_a_branch_moves_to_the_committed_end_and_a_live_node_makes_room() -> None:
    seq = books().open([1])
    seq.reserve(5)
    seq.append([1])
    assert seq.add([*chain(0), *chain(1), *chain(2, 3, parent=1)]) == [1, 2, 3, 4]
    assert seq.ancestors(3) == [4, 3, 2]
    assert [seq.position(id) for id in range(4)] == [1, 1, 2, 3]
    # node 1 lands on the index of node 0, which nothing will look at again
    assert seq.commit([1]) == [(2, 1)]
    assert seq.tokens == [1, 101]
    assert (seq.ancestors(0), seq.ancestors(3)) == ([2], [4, 3])


def test_a_node_in_the_way_changes_places_with_the_path() -> None:
    seq = books().open([1])
    seq.reserve(5)
    seq.append([1])
    assert seq.add([*chain(0), *chain(1)]) == [1, 2]
    seq.drop([0])
    assert seq.add(chain(2, 3, parent=1)) == [1, 3]
    assert sorted(seq.commit([1])) == [(1, 2), (2, 1)]
    assert seq.ancestors(3) == [3, 2]


def rows(spots: Spots, length: int) -> list[int]:
    """Of the pool, all in the pages that are named."""
    pages, offset, size = spots
    assert len(pages) == -(-(offset + length) // size) or not length
    return [pages[at // size] * size + at % size for at in range(offset, offset + length)]


@given(st.sampled_from([1, 4, 16]), st.integers(0, 40), st.integers(0, 40), st.integers(0, 40))
def test_spots_of_a_run_are_the_locations_of_its_indices(page_size: int, start: int, length: int, behind: int) -> None:
    seq = books(num_pages=80, page_size=page_size).open([])
    seq.reserve(start + length)
    seq.pages.reverse()
    wanted = [seq.location(index) for index in range(start, start + length)]
    spots = seq.spots(start, length)
    assert rows(spots, length) == wanted
    left = max(0, length - behind)
    assert rows(spots.behind(length - left), left) == wanted[length - left :]


def test_tokens_that_were_taken_back_leave_room_and_no_children() -> None:
    seq = books().open([1])
    seq.reserve(6)
    seq.append([1, 2, 3])
    seq.retract(2)
    assert (seq.tokens, seq.room) == ([1], 7)
    assert seq.append([4]) == [1]
    assert seq.add(chain(0)) == [2]
    assert seq.position(0) == 2


def test_nodes_spell_a_text_as_far_as_they_do() -> None:
    seq = books().open([1])
    seq.reserve(8)
    seq.append([1])
    seq.add([*chain(0, 1), *chain(2, 3)])
    assert seq.spell([102, 103, 7]) == [3, 4]
    assert seq.spell([100, 103]) == [1]
    seq.commit([2])
    assert (seq.spell([103]), seq.spell([100])) == ([4], [])


def test_trim_keeps_the_room_it_is_told_to() -> None:
    book = books(num_pages=8)
    seq = book.open([1])
    seq.reserve(32)
    seq.append([1, 2, 3])
    seq.add(chain(0, 1))
    assert (seq.trim(7), len(seq.pages), seq.room) == (5, 3, 7)
    assert (seq.trim(7), seq.trim(3), seq.trim()) == (0, 1, 0)
    assert book.allocator.free == 6


def test_reserve_counts_what_is_reserved_and_trim_gives_it_back() -> None:
    book = books(num_pages=4)
    seq = book.open([1])
    seq.reserve(5)
    seq.reserve(5)
    assert (len(seq.pages), seq.room) == (2, 8)
    seq.append([1])
    seq.add(chain(0))
    seq.trim()
    assert (len(seq.pages), book.allocator.free) == (1, 3)
    with pytest.raises(OutOfPages):
        seq.reserve(15)
    assert (len(seq.pages), seq.room) == (1, 2)


def test_nothing_is_written_without_room() -> None:
    seq = books().open([1])
    seq.reserve(4)
    for use in (lambda: seq.append(range(5)), lambda: seq.add(chain(*range(5)))):
        with pytest.raises(ValueError, match="reserved"):
            use()
    assert (seq.length, len(seq.nodes)) == (0, 0)


def test_illegal_transitions_change_nothing() -> None:
    seq = books().open([1])
    seq.reserve(8)
    seq.append([1])
    seq.add([*chain(0, 1), *chain(2)])
    for use in (
        lambda: seq.add(chain(5, 0)),
        lambda: seq.add(chain(5, 5)),
        lambda: seq.add(chain(6, -7)),
        lambda: seq.check(0, chain(5, parent=9)),
        lambda: seq.check(1, chain(5, parent=1)),
        lambda: seq.add(chain(5, parent=9)),
        lambda: seq.commit([1]),
        lambda: seq.commit([0, 2]),
        lambda: seq.commit([0], drop=[0]),
        lambda: seq.commit([0], drop=[7]),
        lambda: seq.drop([1, 7]),
    ):
        with pytest.raises(IllegalTransition):
            use()
    assert (seq.tokens, sorted(seq.nodes), seq.room) == ([1], [0, 1, 2], 4)


def test_nothing_grows_below_a_root_of_the_past() -> None:
    seq = books().open([1])
    seq.reserve(8)
    seq.append([1])
    seq.add([*chain(0, 1), *chain(2)])
    seq.commit([0])
    with pytest.raises(IllegalTransition):
        seq.add(chain(3, parent=2))
    seq.add([*chain(3, parent=0), *chain(4)])
    assert seq.position(3) == seq.position(4) == seq.position(1) == 2
    seq.append([7])
    assert min(seq.ancestors(id)[0] for id in seq.nodes) == seq.length
    with pytest.raises(IllegalTransition):
        seq.add(chain(5, parent=1))
    with pytest.raises(IllegalTransition):
        seq.add(chain(5, parent=0))


def test_a_closed_sequence_serves_the_next_but_never_its_last_token() -> None:
    book = books()
    seq = book.open(list(range(8)))
    seq.reserve(8)
    seq.append(range(8))
    book.close(seq)
    again = book.open(list(range(8)))
    assert (again.length, again.tokens) == (4, [0, 1, 2, 3])
    longer = book.open(list(range(9)))
    assert longer.length == 8
    assert book.open(list(range(9)), use_cache=False).length == 0
    book.check([again, longer])


def test_what_is_not_kept_is_not_cached() -> None:
    book = books()
    seq = book.open([1] * 9)
    seq.reserve(9)
    seq.append([1] * 9)
    book.close(seq, keep=False)
    assert book.open([1] * 9).length == 0
    assert book.allocator.free == 8


def test_check_names_a_page_that_leaks() -> None:
    book = books()
    seq = book.open([1])
    seq.reserve(4)
    book.check([seq])
    with pytest.raises(AssertionError, match="page 0"):
        book.check([])


class Content(RuleBasedStateMachine):
    """Several sequences over few pages, with what a pool of tensors would hold: one token per location."""

    @initialize(page_size=st.sampled_from([1, 2, 3, 4, 16]), cache=st.booleans())
    def start(self, page_size: int, cache: bool) -> None:
        self.books = books(max(4, 40 // page_size), page_size, cache)
        self.pool: dict[int, int] = {}
        self.open: list[Sequence] = []
        self.next_id = 0
        self.paths: dict[int, list[int]] = {}

    def write(self, seq: Sequence, index: int, token: int) -> None:
        location = seq.location(index)
        assert self.books.allocator.references(location // self.books.page_size) == 1, "a shared page is written"
        self.pool[location] = token

    def move(self, seq: Sequence, moves: list[Move]) -> None:
        content = [self.pool[seq.location(source)] for source, _ in moves]
        for (_, to), token in zip(moves, content, strict=True):
            self.write(seq, to, token)

    def pick(self, data: st.DataObject) -> Sequence:
        return data.draw(st.sampled_from(self.open))

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20), use_cache=st.booleans())
    def open_one(self, tokens: list[int], use_cache: bool) -> None:
        seq = self.books.open(tokens, use_cache)
        assert seq.tokens == tokens[: seq.length]
        assert seq.length < len(tokens)
        self.open.append(seq)
        self.grow(seq, tokens[seq.length :])

    def grow(self, seq: Sequence, tokens: list[int]) -> None:
        before = (list(seq.pages), seq.room)
        try:
            seq.reserve(len(tokens))
        except OutOfPages:
            assert (seq.pages, seq.room) == before
            return
        for index, token in zip(seq.append(tokens), tokens, strict=True):
            self.write(seq, index, token)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), max_size=6))
    def append(self, data: st.DataObject, tokens: list[int]) -> None:
        self.grow(self.pick(data), tokens)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), count=st.integers(1, 6))
    def add(self, data: st.DataObject, count: int) -> None:
        seq = self.pick(data)
        try:
            seq.reserve(count)
        except OutOfPages:
            return
        nodes: list[Node] = []
        for _ in range(count):
            parent = data.draw(st.sampled_from([ROOT, *self.alive(seq), *(node.id for node in nodes)]))
            nodes.append(Node(id=self.next_id, parent=parent, token=1000 + self.next_id))
            above = seq.tokens if parent == ROOT else self.paths[parent]
            self.paths[self.next_id] = [*above, 1000 + self.next_id]
            self.next_id += 1
        assert seq.check(0, nodes) == max(len(self.paths[node.id]) for node in nodes)
        for index, node in zip(seq.add(nodes), nodes, strict=True):
            self.write(seq, index, node.token)

    def alive(self, seq: Sequence) -> list[int]:
        """Nodes whose path, by parents as they were added, is all that is committed and then live nodes."""
        return [id for id in seq.nodes if self.paths[id][: -len(seq.ancestors(id))] == seq.tokens]

    @precondition(lambda self: self.open)
    @rule(data=st.data(), drop_rest=st.booleans())
    def commit(self, data: st.DataObject, drop_rest: bool) -> None:
        seq = self.pick(data)
        alive = self.alive(seq)
        if not alive:
            return
        leaf = data.draw(st.sampled_from(alive))
        by_index = {seq.ancestors(id)[0]: id for id in seq.nodes}
        path = [by_index[index] for index in reversed(seq.ancestors(leaf))]
        others = sorted(set(seq.nodes) - set(path))
        drop = (
            others
            if drop_rest
            else data.draw(st.lists(st.sampled_from(others), unique=True) if others else st.just([]))
        )
        want = seq.tokens + [seq.token(id) for id in path]
        positions = {id: seq.position(id) for id in others}
        self.move(seq, seq.commit(path, drop))
        assert seq.tokens == want
        assert {id: seq.position(id) for id in seq.nodes} == {id: positions[id] for id in others if id not in drop}

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        seq = self.pick(data)
        if seq.nodes:
            seq.drop(data.draw(st.lists(st.sampled_from(sorted(seq.nodes)), unique=True)))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def trim_and_publish(self, data: st.DataObject) -> None:
        seq = self.pick(data)
        seq.trim()
        self.books.publish(seq)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), keep=st.booleans())
    def close(self, data: st.DataObject, keep: bool) -> None:
        seq = self.pick(data)
        self.open.remove(seq)
        self.books.close(seq, keep)

    @invariant()
    def everything_is_where_the_books_say(self) -> None:
        if not hasattr(self, "books"):
            return
        self.books.check(self.open)
        for seq in self.open:
            assert [self.pool[seq.location(i)] for i in range(seq.length)] == seq.tokens
            for id in seq.nodes:
                index = seq.ancestors(id)[0]
                assert index >= seq.length
                assert seq.token(id) == 1000 + id
            for id in self.alive(seq):
                path = [self.pool[seq.location(index)] for index in reversed(seq.ancestors(id))]
                assert path == self.paths[id][seq.length :]

    def teardown(self) -> None:
        if not hasattr(self, "books"):
            return
        for seq in self.open:
            self.books.close(seq)
        if self.books.cache is not None:
            self.books.cache.evict(self.books.allocator.num_pages)
        assert self.books.allocator.free == self.books.allocator.num_pages


TestContent = Content.TestCase
TestContent.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
