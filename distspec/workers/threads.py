"""How threads, torch's among them, behave in a process that computes.

Knows the interpreter and the environment of OpenMP. Imports no torch, since it must come before it.
"""

from __future__ import annotations

import os
import sys


def spin_briefly() -> None:
    """Let OpenMP's threads look out for work for some 10 us between two operations, and sleep then.

    Call it before torch is imported, for GNU's OpenMP reads its environment once. Its own default is to spin for
    seconds: where somebody else wants a core, every operation then waits for a time slice, and a decode step took
    25 times as long. The price is a quarter of the speed of a machine that is all ours (docs/log.md), which
    `OMP_WAIT_POLICY=active` buys back.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def take_turns() -> None:
    """Let threads of this process have the interpreter within 0.2 ms of asking for it, not Python's 5.

    The thread that computes launches kernels for milliseconds without a pause. One that carries KV needs the
    interpreter some twenty times for each piece, each time for microseconds.
    """
    sys.setswitchinterval(2e-4)
