"""Reading calls of tools from text: in whatever pieces it comes, and whatever a model makes of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distspec.serving.calls import HERMES, LIST, LLAMA3_JSON, Calls, Named, Reader, Style

NAMES = ("point", "stop/now", 'qu"ote')
STYLES = {"hermes": HERMES, "llama3_json": LLAMA3_JSON, "list": LIST}
Found = tuple[str, list[tuple[str, str]], str]


def read(reader: Reader, pieces: Sequence[str]) -> Found:
    """Content, calls as (name, arguments), and finish_reason of an answer that ended by itself; held to the rules of
    OpenAI's streams."""
    content = ""
    calls: list[tuple[str, str]] = []
    for i, piece in enumerate(pieces):
        said = reader.push(piece, last=i == len(pieces) - 1)
        content += said.content
        assert len({part.index for part in said.calls}) == len(said.calls)
        for part in said.calls:
            assert (part.id is None) == (part.name is None)
            if part.name is not None:
                assert part.index == len(calls), "calls begin in order"
                calls.append((part.name, ""))
            name, arguments = calls[part.index]
            calls[part.index] = (name, arguments + part.arguments)
    return content, calls, reader.reason("stop")


def call(name: str = "point", arguments: Any = None, key: str = "arguments") -> str:
    return json.dumps({"name": name, key: {"x": 7} if arguments is None else arguments})


def tagged(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


def cut(text: str, at: Sequence[int]) -> list[str]:
    ends = sorted({min(i, len(text)) for i in at} | {len(text)})
    return [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('a"\\{}[]<>/,é \n'), max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["x", "y}", '"']), inner, max_size=2),
    max_leaves=4,
)
ARGUMENTS = st.dictionaries(st.sampled_from(["x", "<tool_call>", "</tool_call>"]), VALUES, max_size=2)
CALLS = st.builds(
    lambda name, arguments, key, turned, indent: json.dumps(
        dict(sorted({"name": name, key: arguments}.items(), reverse=turned)), indent=indent
    ),
    st.sampled_from([*NAMES, "other"]),
    ARGUMENTS | st.just("{}"),
    st.sampled_from(["arguments", "parameters"]),
    st.booleans(),
    st.sampled_from([None, 1]),
)
SCRAPS = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<tool",
        "<",
        " ",
        "\n",
        "}",
        "{",
        '"',
        ";",
        ",",
        "[",
        "]",
        "so",
        "\\",
        '{"name": "',
    ]
)
TEXTS = st.lists(CALLS | CALLS.map(tagged) | SCRAPS, max_size=6).map("".join)


@given(style=st.sampled_from(sorted(STYLES)), text=TEXTS, at=st.lists(st.integers(0, 300), max_size=12))
def test_how_the_text_is_cut_changes_nothing(style: str, text: str, at: list[int]) -> None:
    def reader() -> Calls:
        return Calls(STYLES[style], NAMES)

    whole = read(reader(), [text])
    assert read(reader(), cut(text, at)) == whole
    assert read(reader(), [*text, ""]) == whole


@given(
    before=st.text("so <>\n", max_size=8),
    calls=st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3),
    at=st.lists(st.integers(0, 300), max_size=12),
)
def test_what_is_well_spelled_is_found(before: str, calls: list[tuple[str, Any]], at: list[int]) -> None:
    reason = "tool_calls"
    text = before + "\n".join(tagged(call(*one)) for one in calls)
    content, found, ended = read(Calls(HERMES, NAMES), cut(text, at))
    assert (content, ended) == (before.rstrip(), reason)
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls
    parts = [call(*one, key="parameters") for one in calls]
    for style, text in ((LLAMA3_JSON, "; ".join(parts)), (LIST, f"[{','.join(parts)}]")):
        content, found, ended = read(Calls(style, NAMES), cut(text, at))
        assert (content, ended) == ("", reason)
        assert [(name, json.loads(arguments)) for name, arguments in found] == calls


@pytest.mark.parametrize(
    "text",
    [
        "",
        "just text, a < b <tool",
        "  white space around \n",
        tagged("no JSON"),
        tagged('{"name": "point"}'),
        tagged('{"name": "point", "arguments": "x"}'),
        tagged('{"name": 3, "arguments": {}}'),
        tagged('{"arguments": {"x": }, "name": "point"}'),
        tagged(call("other")),
        tagged("[" + call() + "]"),
        "<tool_call>" + '{"name": "point", "argu',
        "<tool_call>",
        "\n <tool_call> \n",
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    assert read(Calls(HERMES, NAMES), [text]) == (text, [], "stop")


def test_a_call_after_what_is_none_is_found() -> None:
    turned = '{"arguments": {"x": 7}, "name": "point"}'
    text = tagged(call("other")) + tagged(turned)
    assert read(Calls(HERMES, NAMES), list(text)) == (tagged(call("other")), [("point", '{"x": 7}')], "tool_calls")


@pytest.mark.parametrize("text", ["Here: " + call(), '{"x": 7}', "[1]", call("other"), "[", ' {"name": "po'])
def test_where_calls_have_no_begin_they_begin_the_answer(text: str) -> None:
    assert read(Calls(LLAMA3_JSON, NAMES), [text]) == (text, [], "stop")


def test_a_call_that_was_cut_is_told_as_far_as_it_came() -> None:
    for style, text in ((HERMES, "ok <tool_call>" + call()), (LLAMA3_JSON, call()), (LIST, "[" + call())):
        full = text.index("7") + 1
        assert read(Calls(style, NAMES), [text[:full]])[1] == [("point", '{"x": 7')]


@pytest.mark.parametrize(
    "end", ["", "}", "}\n", "}</tool_", "}\n</tool_call>", "</tool_call>", "\n}\n\n</tool_call>\n"]
)
def test_a_call_needs_no_end(end: str) -> None:
    text = '<tool_call>{"name": "point", "arguments": {"x": 7}' + end
    assert read(Calls(HERMES, NAMES), [text]) == ("", [("point", '{"x": 7}')], "tool_calls")


def test_what_follows_calls_is_content() -> None:
    text = f"One. {tagged(call())}\nTwo. \n{tagged(call())} Three.\n"
    assert read(Calls(HERMES, NAMES), [text]) == ("One. Two. \nThree.", [("point", '{"x": 7}')] * 2, "tool_calls")
    assert read(Calls(LLAMA3_JSON, NAMES), [call() + " Done."])[0] == "Done."


def test_arguments_are_told_as_they_come() -> None:
    """All of a piece is given out with it, once name and arguments have begun."""
    for style, text in ((HERMES, tagged(call())), (LIST, f"[{call()}]")):
        reader, begin = Calls(style, NAMES), text.index('{"x"')
        assert not reader.push(text[:begin])
        for char in '{"x": 7}':
            [part] = reader.push(char).calls
            assert part.arguments == char
            assert part.name == ("point" if char == "{" else None)


def test_content_is_told_as_it_comes() -> None:
    """But for what may be a begin, and white space, which may stand before one."""
    reader = Calls(HERMES, NAMES)
    told = [reader.push(piece).content for piece in ("I say", " so: ", "a <", " b <tool_", "call", "s>")]
    assert told == ["I say", " so:", " a", " < b", "", " <tool_calls>"]


def test_no_more_calls_are_told_than_may_be() -> None:
    text = f"{tagged(call())}\n{tagged(call('stop/now'))}!"
    assert read(Calls(HERMES, NAMES, most=1), list(text)) == ("!", [("point", '{"x": 7}')], "tool_calls")


@pytest.mark.parametrize("pieces", [[""], ["", '{"x"', "", ":7}"], ['{"x":7}', ""]])
def test_of_a_named_call_all_text_is_arguments(pieces: list[str]) -> None:
    assert read(Named("point"), pieces) == ("", [("point", "".join(pieces))], "stop")


def test_styles_spell_what_they_read() -> None:
    """What a constraint makes by a style, its reader understands."""

    def spelled(style: Style) -> str:
        head = f'{style.begin}{style.gap}{{"name": "point", "{style.arguments}": '
        return f"{head}{{}}}}{style.gap}{style.end}"

    for style in (HERMES, LLAMA3_JSON):
        assert read(Calls(style, NAMES), [spelled(style)]) == ("", [("point", "{}")], "tool_calls")
