"""Structured output: constraints become grammars, and grammars say which token may come next.

Knows xgrammar. Does not know models, slots, requests, or how tokens are drawn.
"""

from distspec.constraints.grammar import Compiler, choice_grammar
from distspec.constraints.grammars import Grammars
from distspec.constraints.guide import Guide, Hint
from distspec.constraints.matcher import Matcher

__all__ = ["Compiler", "Grammars", "Guide", "Hint", "Matcher", "choice_grammar"]
