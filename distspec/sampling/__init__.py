"""Coupled sampling: the token at a position is a function of logits, parameters and seed."""

from distspec.sampling.draw import GREEDY_BELOW, SamplingRows, best, draw, process
from distspec.sampling.editor import Asked, Editor, Masker, edited
from distspec.sampling.edits import Edit
from distspec.sampling.noise import gumbel

__all__ = [
    "GREEDY_BELOW",
    "Asked",
    "Edit",
    "Editor",
    "Masker",
    "SamplingRows",
    "best",
    "draw",
    "edited",
    "gumbel",
    "process",
]
