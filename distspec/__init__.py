"""Distributed, overlapped speculative decoding for LLM serving on Ray.

from distspec import Fleet

with Fleet("local") as fleet:
    print(fleet.generate("The capital of France is", max_tokens=32)[0].text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distspec.serving.fleet import Fleet

__all__ = ["Fleet"]


def __getattr__(name: str) -> object:
    # Ray and the tokenizers take seconds to import; workers and `distspec check` do without.
    if name == "Fleet":
        from distspec.serving.fleet import Fleet

        return Fleet
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
