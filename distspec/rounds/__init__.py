"""Rounds: the engine and a drafter married into what a target worker does with its messages."""

from distspec.rounds.desk import Desk, Reply
from distspec.rounds.drafting import DraftDesk

__all__ = ["Desk", "DraftDesk", "Reply"]
