"""Edits of a step against tests/chain.py, the chain by the book."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import Tensor

from distspec.protocol.values import SamplingParams
from distspec.sampling import Asked, Editor
from distspec.sampling.edits import packed
from tests import chain

CPU = torch.device("cpu")
VOCAB = 35
tokens = st.integers(0, 9)  # few, so that bad words do come up

wishes = st.builds(
    SamplingParams,
    max_tokens=st.just(50),
    stop_token_ids=st.lists(tokens, max_size=3).map(tuple),
    prompt_tokens=st.integers(1, 4),
    min_tokens=st.sampled_from([0, 3, 8]),
    allowed_token_ids=st.one_of(st.just(()), st.lists(st.integers(0, VOCAB - 1), min_size=1).map(tuple)),
    bad_words=st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=6).map(tuple),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-9, 9, width=32), max_size=5).map(
        lambda bias: tuple(bias.items())
    ),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 1.7, -0.3]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -1.1]),
)
texts = st.lists(tokens, min_size=4, max_size=14)
paths = st.lists(st.lists(tokens, max_size=5).map(tuple), min_size=1, max_size=5)


def edit(editor: Editor, asked: Sequence[Asked], logits: Tensor) -> Tensor:
    edited = logits.clone()
    for change in editor.edits(asked):
        change.apply_(edited)
    return edited


@settings(max_examples=60)
@given(st.lists(st.tuples(wishes, texts, paths), min_size=1, max_size=4), st.integers(0, 2**20))
def test_each_row_is_edited_as_its_own_text_wants(
    slots: list[tuple[SamplingParams, list[int], list[tuple[int, ...]]]], seed: int
) -> None:
    editor, asked, rows = Editor(VOCAB, CPU), [], 0
    for slot, (params, text, below) in enumerate(slots):
        editor.open(slot, params)
        rows += 1  # of a slot that asks for nothing
        if slot in editor:
            asked.append(Asked(slot, rows, [*text, 7], len(text), below))
        rows += len(below)
    logits = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))
    want: list[Tensor] = []
    for params, text, below in slots:
        want.append(logits[len(want)])
        want += [chain.edited(logits[len(want) + i], (*text, *path), params) for i, path in enumerate(below)]
    assert torch.equal(edit(editor, asked, logits), torch.stack(want))


class Even:
    """Lets even tokens follow even texts, odd ones odd texts."""

    def fill(self, text: Sequence[int], paths: Sequence[tuple[int, ...]], bits: Tensor) -> None:
        for path, row in zip(paths, bits, strict=True):
            row &= packed(torch.arange(VOCAB) % 2 == (sum(text) + sum(path)) % 2)


def test_a_constraint_is_asked_for_each_path_and_is_never_bent() -> None:
    editor, plain = Editor(VOCAB, CPU), SamplingParams(max_tokens=9, stop_token_ids=(2,))
    editor.open(0, plain, Even())
    editor.open(1, replace(plain, allowed_token_ids=(1, 2, 3, 4)), Even())
    editor.open(2, replace(plain, allowed_token_ids=(2,), min_tokens=5), Even())
    editor.open(3, replace(plain, bad_words=((31,), (0,), *((token,) for token in range(2, VOCAB, 2)))), Even())
    asked = [Asked(slot, 2 * slot, [2, 4, 9], 2, [(), (3,)]) for slot in range(4)]
    stays = edit(editor, asked, torch.zeros(8, VOCAB)).isfinite()
    even, odd = list(range(0, VOCAB, 2)), list(range(1, VOCAB, 2))
    # allowed tokens and bans narrow the constraint, but where they leave nothing of it they are not followed
    kept = [row.nonzero()[:, 0].tolist() for row in stays]
    assert kept[:6] == [even, odd, [2, 4], [1, 3], [2], odd]
    assert kept[6:] == [even, [token for token in odd if token != 31]]


def test_a_slot_that_asks_for_nothing_is_not_known() -> None:
    editor = Editor(VOCAB, CPU)
    editor.open(3, SamplingParams(max_tokens=9, temperature=0.7, top_k=3, stop_token_ids=(2,)))
    assert 3 not in editor
    assert editor.edits([]) == []
    editor.open(3, SamplingParams(max_tokens=9, min_tokens=2))
    assert 3 in editor
    editor.close(3)
    assert 3 not in editor
