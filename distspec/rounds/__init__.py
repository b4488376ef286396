"""Rounds: the engine and a drafter married into what a target worker does with its messages."""

from distspec.rounds.desk import Desk
from distspec.rounds.drafting import DraftDesk
from distspec.rounds.held import Reply

__all__ = ["Desk", "DraftDesk", "Reply"]
