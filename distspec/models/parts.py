"""What the parameters of a model are made of. Knows names and shapes of checkpoint tensors, and no tensor."""

from __future__ import annotations

Parts = dict[str, tuple[int, ...]]
"""Checkpoint tensors, by name, whose rows one below the other make one parameter, with their shapes."""
