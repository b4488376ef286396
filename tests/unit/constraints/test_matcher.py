"""Masks are a function of the text alone, one for each path, and say exactly what the grammar allows."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
import torch
import xgrammar
from hypothesis import given
from hypothesis import strategies as st

from distspec.constraints import Guide, Matcher
from distspec.protocol.values import Constraint, SamplingParams
from distspec.sampling.edits import WORD, unpacked
from tests.schemas import SCHEMAS
from tests.spelling import decode, encode, end_id, grammars, vocab_size, walk

PERSON = Constraint(kind="json_schema", text=json.dumps(SCHEMAS["person"]))
THOUGHT = Constraint(kind="regex", text=r"(a|b)*</think>(\{\"x\":[0-9]\})")
"""Free at first, strict from a mark on, which no token spells alone."""

TOKENS = st.integers(0, vocab_size() - 1)


@st.composite
def texts(draw: st.DrawFn) -> list[int]:
    """How an output begins that the grammar allows, perhaps all of it, perhaps with something else behind it."""
    whole = [*encode(walk(PERSON, draw(st.integers(0, 20)))), end_id()]
    return whole[: draw(st.integers(0, len(whole)))] + draw(st.lists(TOKENS, max_size=2))


def masks(of: Matcher, paths: Sequence[Sequence[int]]) -> list[set[int]]:
    bits = torch.full((len(paths), -(-vocab_size() // WORD)), -1, dtype=torch.int32)
    of.fill(paths, bits)
    return [set(row.nonzero()[:, 0].tolist()) for row in unpacked(bits, vocab_size())]


def by_the_book(text: Sequence[int], constraint: Constraint = PERSON) -> set[int]:
    """A new matcher for every text, which is offered every token."""
    matcher = xgrammar.GrammarMatcher(grammars().find(constraint).result())

    def accepts(token: int) -> bool:
        if matcher.is_terminated() or not matcher.accept_token(token):
            return False
        matcher.rollback(1)
        return True

    follows = all(not matcher.is_terminated() and matcher.accept_token(token) for token in text)
    return {token for token in range(vocab_size()) if follows and accepts(token)} or {end_id()}


def matcher(constraint: Constraint = PERSON, begin: int = 0) -> Matcher:
    return Matcher(grammars().find(constraint).result(), begin)


@given(texts())
def test_a_mask_is_what_the_grammar_accepts_and_where_that_is_nothing_the_end(text: list[int]) -> None:
    found = matcher()
    found.follow(text)
    assert masks(found, [()]) == [by_the_book(text)]


@given(st.lists(texts(), min_size=1, max_size=5), st.integers(0, 3))
def test_masks_do_not_depend_on_what_was_followed_before(history: list[list[int]], prompt: int) -> None:
    """Hand-over, preemption, dropped nodes, a fresh root: all of them are a text that is not the last one."""
    old, new = matcher(begin=prompt), matcher()
    for text in history:
        old.follow([7] * prompt + text)
        masks(old, [text, text[::2], ()])
    new.follow(history[-1])
    assert masks(old, [()]) == masks(new, [()])


@given(texts(), st.lists(texts(), min_size=1, max_size=6))
def test_every_node_of_a_tree_has_the_mask_of_its_own_path(text: list[int], branches: list[list[int]]) -> None:
    found = matcher()
    found.follow(text)
    paths = [[*branch[: i % 4], *branch[-1:]] for i, branch in enumerate(branches)]
    want = []
    for path in paths:
        fresh = matcher()
        fresh.follow([*text, *path])
        want += masks(fresh, [()])
    assert masks(found, paths) == want


@given(texts(), texts())
def test_of_a_path_as_much_is_allowed_as_masks_let_through(text: list[int], path: list[int]) -> None:
    found = matcher()
    found.follow(text)
    count = found.allowed(path)
    before = masks(found, [path[:i] for i in range(len(path))])
    lost = not all(token in by_the_book(text[:i]) for i, token in enumerate(text))
    ended = end_id() in text
    if not lost and not ended:
        assert count == next((i for i, token in enumerate(path) if token not in before[i]), len(path))
    elif lost:
        assert count == 0


@given(texts())
def test_what_is_forced_spells_the_only_way_on(text: list[int]) -> None:
    """The only way in letters: where other tokens may come too, they begin the same text."""
    found = matcher()
    found.follow(text)
    forced = found.forced()
    assert found.allowed(forced) == len(forced)
    [mask] = masks(found, [()])
    if len(mask) == 1 and mask != {end_id()}:
        assert forced[:1] in ([], list(mask))


def test_forced_text_is_found_from_its_beginning() -> None:
    found = matcher()
    found.follow(encode('{"name":"a"'))
    assert decode(found.forced()) == ',"age":'
    found.follow(())
    assert decode(found.forced(encode('{"name":"a"'))) == ',"age":'
    assert found.forced(encode('{"name":"a')) == []
    assert found.forced(encode("xyz")) == []


def test_a_constraint_that_begins_in_the_middle_of_a_drafted_run_holds_from_there_on() -> None:
    """The end of thinking inside a run: nodes before it are free, those after it are not."""
    found = matcher(THOUGHT)
    run = encode('ab</think>{"x":1}')
    found.follow(())
    free, *_, strict = masks(found, [run[:1], run[:2], run[: len(encode("ab</think>"))]])
    assert encode("a")[0] in free
    assert strict == {encode("{")[0], encode('{"')[0]}
    assert found.allowed([*run[:-2], *encode("}")]) == len(run) - 2
    assert found.allowed([*run, end_id()]) == len(run) + 1


def test_a_text_that_begins_with_a_prompt_is_only_seen_from_its_output_on() -> None:
    prompt, bits = encode('"x"}'), torch.empty(1, -(-vocab_size() // WORD), dtype=torch.int32)
    params = SamplingParams(max_tokens=9, constraint=PERSON, prompt_tokens=len(prompt))
    guide = Guide.of(params, grammars())
    assert guide is not None
    assert guide.is_ready()
    guide.fill([*prompt, *encode('{"name"')], [encode(":")], bits)
    assert set(unpacked(bits, vocab_size())[0].nonzero()[:, 0].tolist()) == by_the_book(encode('{"name":'))


def test_what_is_forced_for_long_is_spelled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the same as if it were spelled again behind each token, and stays so where a text takes another way."""
    asked: list[int] = []
    spell = xgrammar.GrammarMatcher.find_jump_forward_tokens
    long = Constraint(kind="regex", text="a{60}b{60}(c{40}d|x{40})")
    compiled = grammars().find(long).result()
    one, text = Matcher(compiled), encode("a" * 60 + "b" * 60 + "c" * 40 + "d")
    expected = []
    for end in range(len(text)):
        fresh = Matcher(compiled)
        fresh.follow(text[:end])
        expected.append(fresh.forced())

    def counted(self: xgrammar.GrammarMatcher) -> list[int]:
        asked.append(1)
        return spell(self)

    monkeypatch.setattr(xgrammar.GrammarMatcher, "find_jump_forward_tokens", counted)
    found = []
    for end in range(len(text)):
        one.follow(text[:end])
        found.append(one.forced())
    assert found == expected
    assert len(asked) < 8
    other = encode("a" * 60 + "b" * 60 + "x")
    one.follow(text[:3])
    assert one.forced(other[3:]) == encode("x" * 39)
    assert one.forced() == expected[3]
