"""From a constraint to a compiled grammar over one vocabulary, by xgrammar (Dong et al., arXiv 2411.15100).

Knows constraints, tokenizers and xgrammar's compiler. Does not know requests, caches, threads or time limits.

JSON is written without white space: the shortest valid text, which ends by itself, where free white space would let a
model pad for ever. Properties come in the schema's order, and objects that name properties hold no others unless the
schema says additionalProperties. So it is inside structural tags too, around which text is free. A regex matches the
whole output.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from distspec.constraints.patterns import common
from distspec.constraints.schema import exact
from distspec.constraints.shortest import PARTS, shortest
from distspec.errors import BadConstraint
from distspec.protocol.values import Constraint

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar

KINDS = ("json_object", "json_schema", "regex", "grammar", "structural_tag")
_COMPACT: dict[str, Any] = {"any_whitespace": False, "separators": (",", ":")}
_EXACT: dict[str, Any] = {"type": "json_schema", "style": "json", "any_order": False, "excludes": []}
"""How a structural tag may have a schema. Otherwise xgrammar lets pass what does not validate."""
MAX_SHORTEST = 1 << 14
"""Characters of the shortest text of any part of a grammar."""
_CACHE_BYTES = 1 << 28
"""Of parts that grammars share."""
_NOT_IN_STRINGS = ('"', "\\", *map(chr, range(32)))
"""What JSON only spells escaped."""


class Compiler:
    """tokenizer: a transformers PreTrainedTokenizerFast; vocab_size: of the model; stop_ids: tokens that end an answer.

    Special tokens have no text, so no grammar allows them, but for stop_ids at its end.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, stop_ids: Iterable[int]) -> None:
        import xgrammar  # takes seconds, and most workers never need it

        stop_ids = list(stop_ids)
        special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        tokens = [""] * vocab_size
        for token, id in tokenizer.get_vocab().items():
            if id < vocab_size and id not in special:
                tokens[id] = token
        found = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=stop_ids)
        info = xgrammar.TokenizerInfo(
            tokens,  # as the tokenizer spells them, in its own way to spell bytes
            found.vocab_type,
            vocab_size=vocab_size,
            stop_token_ids=stop_ids,
            add_prefix_space=found.add_prefix_space,
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=_CACHE_BYTES)

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        """May take long, and much memory. Raises BadConstraint for what is no such grammar, or allows no text or none
        that ends soon."""
        try:
            compiled = self._compile(constraint)
        except BadConstraint:
            raise
        except Exception as error:  # xgrammar says in many types what is wrong with a text that is not ours
            raise BadConstraint(_reason(error)) from None
        if not _first_mask(compiled).any():
            raise BadConstraint("no text is allowed")
        rules = str(compiled.grammar)
        if _TEMPERED.search(rules):
            raise BadConstraint("temperature: only a request has one, not a rule")
        for rule, length in shortest(rules).items():
            if length > MAX_SHORTEST:
                raise BadConstraint(f"{rule} takes {length:g} characters at least, need {MAX_SHORTEST} at most")
        return compiled

    def _compile(self, constraint: Constraint) -> CompiledGrammar:
        kind, text = constraint.kind, constraint.text
        if kind == "json_object":
            return self._compiler.compile_grammar(_json_grammar({"type": "object"}))
        if kind == "json_schema":
            return self._compiler.compile_grammar(_json_grammar(_loads(text)))
        if kind == "regex":
            return self._compiler.compile_regex(common(text))
        if kind == "grammar":
            return self._compiler.compile_grammar(text)
        if kind == "structural_tag":
            return self._compiler.compile_structural_tag(json.dumps(_exact_inside(_tag(_loads(text)))))
        raise BadConstraint(f"kind {kind!r}, need one of {', '.join(KINDS)}")


def keeps_strings(pattern: str) -> bool:
    """Whether xgrammar's grammar of a pattern, between quotes, spells a JSON string whatever it matches.

    Most patterns become automata of JSON strings. Others, such as those with letters beyond ASCII, become plain rules,
    in which neither a literal nor a class may hold what JSON must escape.
    """
    import xgrammar

    schema = json.dumps({"type": "string", "pattern": pattern})
    rules = str(xgrammar.Grammar.from_json_schema(schema, **_COMPACT)).splitlines()
    own = [rule.partition("::=")[2] for rule in rules if rule.startswith("root")][1:]  # the first puts the quotes
    if any("json_string=true" in rule for rule in own):
        return True
    parts = [part for rule in own for part in PARTS.findall(rule)]
    literals = [ast.literal_eval(part) for part in parts if part.startswith('"')]
    classes = [re.compile(part) for part in parts if part.startswith("[")]
    return not any(bad in text for bad in _NOT_IN_STRINGS for text in literals) and not any(
        some.fullmatch(bad) for bad in _NOT_IN_STRINGS for some in classes
    )


def choice_grammar(choices: Sequence[str]) -> str:
    """A grammar in xgrammar's EBNF: exactly one of these texts."""
    return "root ::= " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


_WIDE, _NARROW = r"[^\"\\\r\n]", r"[^\0-\x1f\"\\\ud800-\udfff]"
"""A character of a string of bounded length: as xgrammar has it, and as JSON does, without control characters. Halves
of surrogate pairs are no text, and would count as three."""
_ESCAPED = re.compile(r"\\(?:x([0-9a-f]{2})|.)", re.DOTALL)
_TEMPERED = re.compile(r'^[\w.-]+\[(?:[^"\]]|"(?:\\.|[^"\\])*")*\btemperature=', re.MULTILINE)
"""A rule that would have its tokens drawn in another way than the request says."""
_PLACE = re.compile(r"^\[[\d:]+\] \S+ (Check failed: .* is false: )?")


def _json_grammar(schema: object) -> str:
    """In EBNF, JSON of this schema and nothing else. Raises BadConstraint."""
    import xgrammar

    grammar = xgrammar.Grammar.from_json_schema(json.dumps(exact(schema, keeps_strings)), **_COMPACT)
    rules = PARTS.sub(lambda part: _NARROW if part[0] == _WIDE else part[0], str(grammar))
    # xgrammar writes \x with two digits, but reads as many as there are.
    return _ESCAPED.sub(lambda one: f"\\u00{one[1]}" if one[1] else one[0], rules)


def _tag(asked: Any) -> Any:
    """A structural tag as xgrammar reads it now. OpenAI-like servers also take `structures`, each a begin, a schema and
    an end, and `triggers`."""
    if not isinstance(asked, dict) or "structures" not in asked:
        return asked
    _check_structures(asked)
    tags = [
        {"begin": item["begin"], "content": {"type": "json_schema", "json_schema": item["schema"]}, "end": item["end"]}
        for item in asked["structures"]
    ]
    found = {"type": "triggered_tags", "triggers": asked["triggers"], "tags": tags}
    return {"type": "structural_tag", "format": found}


def _check_structures(asked: Any) -> None:
    if not isinstance(asked.get("triggers"), list):
        raise BadConstraint("triggers: need a list of texts")
    if not isinstance(asked["structures"], list):
        raise BadConstraint("structures: need a list")
    for i, item in enumerate(asked["structures"]):
        for name in ("begin", "schema", "end"):
            if not isinstance(item, dict) or name not in item:
                raise BadConstraint(f"structures[{i}].{name}: missing")


def _exact_inside(tag: Any) -> Any:
    """A structural tag where each schema has become a grammar, and each expression one that all read alike: as exact as
    they are alone."""
    if isinstance(tag, list):
        return [_exact_inside(item) for item in tag]
    if not isinstance(tag, dict):
        return tag
    if tag.get("type") in ("json_schema", "qwen_xml_parameter"):
        for name, value in tag.items():
            if value and value != _EXACT.get(name, value):
                raise BadConstraint(f"{name}: {value!r} would allow more than the schema says")
        return {"type": "grammar", "grammar": _json_grammar(tag.get("json_schema"))}
    if tag.get("type") == "regex" and isinstance(tag.get("pattern"), str):
        return {**tag, "pattern": common(tag["pattern"])}
    return {name: _exact_inside(item) for name, item in tag.items()}


def _first_mask(compiled: CompiledGrammar) -> Any:
    """int32 [1, ceil(vocab / 32)]: what an output may begin with."""
    import xgrammar

    mask = np.zeros((1, -(-compiled.tokenizer_info.vocab_size // 32)), dtype=np.int32)
    xgrammar.GrammarMatcher(compiled).fill_next_token_bitmask(mask, 0)
    return mask


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadConstraint(f"not JSON: {error}") from None


def _reason(error: Exception) -> str:
    """The first line of what went wrong, without xgrammar's own time and place of it."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return _PLACE.sub("", first)
