"""Streamed text is the text: no character split, no stop string leaked, nothing lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import chain, pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers, processors

from distspec.errors import InvalidField
from distspec.serving.text import Decoder, Detokenizer, StopFinder, Text, spelled
from tests.stops import reference_end
from tests.words import byte_fallback, byte_level

UNICODE = st.text(alphabet=st.characters(codec="utf-8"), max_size=40)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def pieces(text: Text, ids: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(text)
    return [*map(detokenizer.push, ids), detokenizer.flush()]


def single_bytes(text: Text, whole: str) -> list[int]:
    """One token for each byte, whatever merges the vocabulary has."""
    names = text._backend.get_vocab()
    return [names[name] for spelled, _ in BYTES.pre_tokenize_str(whole) for name in spelled]


@given(ids=st.lists(st.integers(0, 400), max_size=120))
def test_pieces_of_any_tokens_join_to_the_whole(text: Text, ids: list[int]) -> None:
    assert "".join(pieces(text, ids)) == text._tokenizer.decode(ids, skip_special_tokens=True)


@given(whole=UNICODE)
def test_each_character_comes_with_its_last_byte(text: Text, whole: str) -> None:
    whole = whole.replace("\ufffd", "?")
    found = pieces(text, single_bytes(text, whole))
    ends = [i for i, piece in enumerate(found) if piece]
    assert [found[i] for i in ends] == list(whole)
    assert [i + 1 for i in ends] == [len(whole[: n + 1].encode()) for n in range(len(whole))]


@given(whole=UNICODE)
def test_byte_fallback_text_joins_to_the_whole(fallback_text: Text, whole: str) -> None:
    ids = fallback_text.encode(whole)
    assert "".join(pieces(fallback_text, ids)) == fallback_text._tokenizer.decode(ids, skip_special_tokens=True)


@given(words=st.lists(st.integers(256, 268), max_size=40))
def test_spaces_between_words_survive(fallback_text: Text, words: list[int]) -> None:
    assert "".join(pieces(fallback_text, words)) == fallback_text._tokenizer.decode(words, skip_special_tokens=True)


@pytest.mark.parametrize("byte", ["ÿ", "ð"])
def test_the_window_stays_short_however_bad_the_bytes(text: Text, byte: str) -> None:
    token = text._backend.get_vocab()[byte]  # the spelling of a byte that is no text by itself
    detokenizer = Detokenizer(text)
    found = []
    for _ in range(3000):
        found.append(detokenizer.push(token))
        assert len(detokenizer._window) <= 40
    assert "".join([*found, detokenizer.flush()]) == text.decode([token] * 3000)


def reference_cut(whole: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The text before the stop that ends first, the longest one if several end there."""
    for end in range(1, len(whole) + 1):
        ending = [stop for stop in stops if whole[:end].endswith(stop)]
        if ending:
            return whole[: end - max(map(len, ending))], True
    return whole, False


@given(
    whole=st.text("ab", max_size=40),
    stops=st.lists(st.text("ab", min_size=1, max_size=6), max_size=4),
    cuts=st.lists(st.integers(0, 40), max_size=10),
)
def test_stops_are_found_however_the_text_is_cut(whole: str, stops: list[str], cuts: list[int]) -> None:
    finder = StopFinder(stops)
    want, found = reference_cut(whole, stops)
    edges = sorted({0, *(cut for cut in cuts if cut < len(whole)), len(whole)})
    given_out = ""
    for begin, end in pairwise(edges):
        piece, stopped = finder.push(whole[begin:end])
        given_out += piece
        assert want.startswith(given_out), "text was given out that a stop cuts"
        if stopped:
            assert found
            assert given_out == want
            return
        # Nothing is held that no stop could still cut.
        held = whole[len(given_out) : end]
        assert not held or any(stop.startswith(held) for stop in stops)
    assert not found
    assert given_out + finder.flush() == want


def test_stops_that_overlap_themselves_are_found() -> None:
    """All texts of two letters up to nine long, against all stops up to four long."""
    words = [["".join(letters) for letters in product("ab", repeat=size)] for size in range(10)]
    for stop in chain(*words[1:5]):
        for whole in words[9]:
            finder, given_out = StopFinder([stop]), ""
            for char in whole:
                piece, stopped = finder.push(char)
                given_out += piece
                if stopped:
                    break
            else:
                given_out += finder.flush()
            assert (given_out, stopped) == reference_cut(whole, [stop]), (whole, stop)


def test_a_stop_that_does_not_count_yet_may_begin_one_that_does() -> None:
    """All texts of two letters six long, a letter a token, against all stops up to four long, from each token on."""
    words = [["".join(letters) for letters in product("ab", repeat=size)] for size in range(7)]
    for stop, whole, least in product(chain(*words[1:5]), words[6], range(7)):
        finder = StopFinder([stop])
        ends = [finder.push(char, armed=count > least)[1] for count, char in enumerate(whole, 1)]
        want = [count > least and whole[:count].endswith(stop) for count in range(1, 7)]
        assert ends[: want.index(True) + 1 if any(want) else 6] == want[: want.index(True) + 1 if any(want) else 6]


@given(
    whole=st.text("abc 漢😀", max_size=40),
    stops=st.lists(st.text("abc 漢😀", min_size=1, max_size=4), min_size=1, max_size=3),
    runs=st.lists(st.integers(1, 5), min_size=100, max_size=100),
    least=st.one_of(st.just(0), st.integers(0, 60)),
    include=st.booleans(),
)
def test_decoding_ends_with_the_token_that_completes_a_stop(
    text: Text, whole: str, stops: list[str], runs: list[int], least: int, include: bool
) -> None:
    """However the tokens come in runs, and their bytes in tokens; and nothing is given out before that is cut later."""
    ids = single_bytes(text, whole)
    want, tokens, found = reference_end([*map(Detokenizer(text).push, ids)], stops, least, include)
    decoder = Decoder(text, stops, min_tokens=least, include_stop=include)
    given_out, count, stopped = "", 0, False
    while not stopped and count < len(ids):
        run = ids[count : count + runs.pop()]
        piece, taken, stopped = decoder.push(run, last=count + len(run) == len(ids))
        given_out, count = given_out + piece, count + taken
        assert want.startswith(given_out), "text was given out that a stop cuts"
    assert (given_out, count, stopped) == (want, tokens, found)


@given(whole=st.text("ab", max_size=30), cut=st.integers(0, 30), include=st.booleans())
def test_a_stop_token_has_text_only_where_stops_are_included(text: Text, whole: str, cut: int, include: bool) -> None:
    ids = single_bytes(text, whole)[:cut]
    end = text.encode(" the")[-1]
    decoder = Decoder(text, ["aab"], silent=() if include else [end], include_stop=include)
    pieces, stopped = [], False
    for i, token in enumerate([*ids, end]):
        piece, _, stopped = decoder.push([token], last=i == len(ids))
        pieces.append(piece)
        if stopped:
            break
    want, found = reference_cut(text.decode(ids), ["aab"])
    assert stopped == found
    assert "".join(pieces) == want + (("aab" if found else text.decode([end])) if include else "")


def test_a_stop_may_complete_at_the_very_end(text: Text) -> None:
    decoder = Decoder(text, ["ab"])
    assert decoder.push(single_bytes(text, "xab"), last=True) == ("x", 3, True)


def test_special_tokens_end_answers_and_have_no_text(text: Text) -> None:
    end = text._backend.get_vocab()["<|im_end|>"]
    assert end in text.stop_ids
    assert text.decode([*text.encode("ab"), end]) == "ab"


def test_a_tokenizer_that_cuts_texts_cuts_no_prompts(fallback_text: Text) -> None:
    """Some are stored as they were set for training."""
    tokenizer = byte_fallback()
    tokenizer.backend_tokenizer.enable_truncation(5)
    tokenizer.backend_tokenizer.enable_padding(length=200)
    assert Text(tokenizer).encode("the quick ab") == fallback_text.encode("the quick ab")


@given(st.lists(st.sampled_from(["the quick", " ab", "漢", "\n", "é", "<|im_start|>", "<|im_end|>"]), max_size=8))
@pytest.mark.parametrize("begin", [None, "<|endoftext|>"])
def test_a_prompt_is_spelled_as_it_was_written(begin: str | None, parts: list[str]) -> None:
    """Special tokens that were written stay, those that its tokenizer puts before every text do not show."""
    tokenizer = byte_level()
    if begin is not None:
        first = [(begin, tokenizer.convert_tokens_to_ids(begin))]
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(f"{begin} $A", None, first)
    text = Text(tokenizer)
    tokens = text.encode("".join(parts))
    whole, offsets = spelled(text, tokens)
    assert whole == "".join(parts)
    assert len(offsets) == len(tokens)
    named = [(token, at) for token, at in zip(tokens, offsets, strict=True) if token in text.special_ids]
    for token, at in named[begin is not None :]:
        assert whole[at:].startswith(text.spell(token).decode())


async def test_others_go_on_while_a_long_text_is_tokenized(text: Text) -> None:
    tokenized = asyncio.create_task(asyncio.to_thread(text.encode, "the quick \u6f22 " * 100_000))
    turns = 0
    while not tokenized.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert turns > 20  # two or three where the tokenizer holds all others up
    assert text.decode(await tokenized) == "the quick \u6f22 " * 100_000


def test_the_template_is_applied_once(text: Text) -> None:
    spelled = text.render([{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}])
    assert spelled == "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_what_the_template_refuses_is_the_clients_fault(text: Text) -> None:
    with pytest.raises(InvalidField, match="the assistant cannot speak last"):
        text.render([{"role": "assistant", "content": "hi"}])
