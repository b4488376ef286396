"""The target engine: one model over slots of paged KV. Knows no drafter, no round, no request."""

from distspec.engine.batch import Guesses, Outcome, Segment, stand_in
from distspec.engine.engine import Engine, Guessing
from distspec.engine.rolling import Begun, Flight, MakeChains, Rolling

__all__ = [
    "Begun",
    "Engine",
    "Flight",
    "Guesses",
    "Guessing",
    "MakeChains",
    "Outcome",
    "Rolling",
    "Segment",
    "stand_in",
]
