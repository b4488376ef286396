"""Rounds that follow each other on the device, and the host that launches them ahead. Knows engines, no request."""

from distspec.engine.rolling.chains import Chains
from distspec.engine.rolling.flight import Begun, Flight
from distspec.engine.rolling.rolling import MakeChains, Rolling
from distspec.engine.rolling.state import Kind, State

__all__ = ["Begun", "Chains", "Flight", "Kind", "MakeChains", "Rolling", "State"]
