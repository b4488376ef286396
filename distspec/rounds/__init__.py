"""Rounds: the engine and a drafter married into what a target worker does with its messages."""

from distspec.rounds.desk import Desk, Reply

__all__ = ["Desk", "Reply"]
