"""Constraints of every kind become grammars that hold, or an error that says why not."""

from __future__ import annotations

import json
import re

import pytest
import xgrammar
from hypothesis import given
from hypothesis import strategies as st

from distspec.constraints import Matcher, choice_grammar
from distspec.constraints.grammar import keeps_strings
from distspec.errors import BadConstraint
from distspec.protocol.values import Constraint
from tests.spelling import TURN, encode, end_id, grammars, tokenizer, vocab_size, walk


def matcher(kind: str, text: str = "") -> Matcher:
    return Matcher(grammars().find(Constraint(kind=kind, text=text)).result())


def allows(of: Matcher, text: str) -> bool:
    """The whole text, and then its end."""
    tokens = [*encode(text), end_id()]
    of.follow(())
    return of.allowed(tokens) == len(tokens)


@pytest.mark.parametrize("text", ["{}", '{"a":[1,{"b":null}],"c":"\\n"}'])
def test_any_object_is_a_json_object(text: str) -> None:
    assert allows(matcher("json_object"), text)


@pytest.mark.parametrize("text", ["[]", "1", '{"a":1', '{"a": 1}', "{}{}", ""])
def test_nothing_else_is_and_white_space_is_not_written(text: str) -> None:
    assert not allows(matcher("json_object"), text)


def test_a_string_of_bounded_length_holds_no_bytes_that_are_no_text() -> None:
    """Half of a surrogate pair would come out as three characters."""
    constraint = Constraint(kind="json_schema", text=json.dumps({"type": "string", "maxLength": 3}))
    found = xgrammar.GrammarMatcher(grammars().find(constraint).result())
    assert found.accept_string('"\U0010ffff\ue000')
    assert not found.accept_string(b"\xed\xa0\x80")
    assert found.accept_string('\ud7ff"')


def test_a_regex_matches_all_of_the_output() -> None:
    found = matcher("regex", "[a-c]{2}|x+")
    assert [text for text in ("ab", "cc", "xxx", "a", "abc", "aab", "yab") if allows(found, text)] == [
        "ab",
        "cc",
        "xxx",
    ]


def test_a_grammar_in_ebnf() -> None:
    found = matcher("grammar", 'root ::= number ("+" number)*\nnumber ::= [0-9]+')
    assert [text for text in ("1+22", "3", "+1", "1+") if allows(found, text)] == ["1+22", "3"]


@given(st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=4), st.text(max_size=5))
def test_a_choice_is_one_of_its_texts_whatever_characters_they_have(choices: list[str], other: str) -> None:
    found = matcher("grammar", choice_grammar(choices))
    assert all(allows(found, choice) for choice in choices)
    assert allows(found, other) == (other in choices)


def test_a_structural_tag_constrains_what_follows_its_trigger() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    tag = {"begin": "<call>", "schema": schema, "end": "</call>"}
    text = json.dumps({"type": "structural_tag", "structures": [tag], "triggers": ["<call>"]})
    found = matcher("structural_tag", text)
    assert allows(found, 'free text <call>{"a":true}</call> and more')
    assert not allows(found, 'free text <call>{"b":true}</call>')
    assert not allows(found, 'free text <call>{"a": true}</call>')
    assert allows(found, "free text\nof \x01 any kind")


def test_control_characters_are_in_no_string_wherever_its_schema_is() -> None:
    """xgrammar's own strings of bounded length have them, and its classes are printed as literals can not be."""
    schema = {"type": "object", "properties": {'[^"\\\r\n]': {"type": "string", "maxLength": 3}}}
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    for found in (matcher("json_schema", json.dumps(schema)), matcher("structural_tag", json.dumps(tag))):
        assert allows(found, json.dumps({'[^"\\\r\n]': "a b"}, separators=(",", ":")))
        assert not allows(found, json.dumps({'[^"\\\r\n]': "a#b"}, separators=(",", ":")).replace("#", "\x01"))


def test_a_rule_may_have_a_name_for_what_it_matches() -> None:
    found = matcher("grammar", 'root ::= "a" b\nb[capture="temperature=1"] ::= "c"')
    assert found.allowed([*encode("ac"), end_id()]) == len(encode("ac")) + 1


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("regex", "(a", "parenthesis"),
        ("regex", "(?=a)b", "looking around"),
        ("json_schema", '{"type":"string","pattern":"^(?!a).$"}', "pattern: looking around"),
        ("grammar", "root ::= other", "other"),
        ("grammar", "no rule", "EBNF"),
        ("grammar", 'root ::= "a" b\nb[capture="x", temperature=0.5] ::= "c"', "temperature: only a request"),
        ("json_schema", "{", "JSON"),
        ("json_schema", "[]", "schema"),
        ("json_schema", "false", "cannot accept"),
        ("json_schema", '{"not":{}}', "not"),
        ("json_schema", '{"$ref":"#/$defs/x"}', r"\$defs"),
        ("json_schema", '{"$ref":"#"}', "Circular"),
        ("json_schema", '{"type":"string","pattern":"\\""}', "pattern: matches"),
        ("structural_tag", '{"format":{"type":"regex","pattern":"a^"}}', "only supported at the ends"),
        ("structural_tag", "{}", "format"),
        ("structural_tag", '{"structures":[{"begin":"a","schema":{}}],"triggers":["a"]}', r"structures\[0\]\.end"),
        ("structural_tag", '{"structures":["a"],"triggers":["a"]}', r"structures\[0\]\.begin"),
        ("structural_tag", '{"structures":{},"triggers":["a"]}', "structures: need"),
        ("structural_tag", '{"structures":[]}', "triggers"),
        ("structural_tag", '{"format":{"type":"json_schema","json_schema":{"not":{}}}}', "not"),
        ("structural_tag", '{"format":{"type":"json_schema","json_schema":{},"any_order":true}}', "any_order"),
        ("structural_tag", '{"format":{"type":"json_schema","json_schema":{},"style":"qwen_xml"}}', "style"),
        ("structural_tag", '{"format":{"type":"json_schema","json_schema":{},"excludes":["a"]}}', "excludes"),
        ("structural_tag", '{"format":{"type":"qwen_xml_parameter","json_schema":{}}}', "type"),
        ("structural_tag", '{"format":{"type":"json_schema"}}', "schema"),
        ("poem", "", "kind"),
    ],
)
def test_what_is_no_grammar_says_what_is_wrong_with_it(kind: str, text: str, says: str) -> None:
    with pytest.raises(BadConstraint, match=says) as error:
        matcher(kind, text)
    assert ".cc" not in str(error.value)


@pytest.mark.parametrize("kind", ["json_object", "regex"])
def test_no_grammar_allows_a_special_token(kind: str) -> None:
    """Its text is not shown, so it would be missing from what the grammar saw."""
    found = matcher(kind, ".*" if kind == "regex" else "")
    turn = tokenizer().convert_tokens_to_ids(TURN)
    for path in ((), encode('{"')):
        found.follow(path)
        assert not found.allowed([turn])
    assert turn < vocab_size()


PATTERNS = (
    "^.$",
    "^[^a]$",
    "^\\S$",
    "^é[a-z]$",
    "^[\u0430-\u044f]{2}$",
    "a|b",
    "^[ -~]{1,2}$",
    "é\\w",
    "^\\d{3}-\\d{4}$",
    "^\\[x\\]é$",
    "^[\u00800-9a-f]é$",
)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_that_keeps_strings_is_only_matched_by_strings(pattern: str) -> None:
    assert keeps_strings(pattern)
    for seed in range(40):
        text = walk(Constraint(kind="json_schema", text=json.dumps({"type": "string", "pattern": pattern})), seed)
        assert re.search(pattern, json.loads(text))


@pytest.mark.parametrize("pattern", ['"', "\\\\", "\\n", "é.", "é[^a]", 'é["]', "[A-zé]", "é\\s", '^[é"]+$', "\\x1d"])
def test_a_pattern_that_would_break_out_of_its_string_is_found(pattern: str) -> None:
    assert not keeps_strings(pattern)
