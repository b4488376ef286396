"""Where Triton's interpreter computes otherwise than what its compiler makes, it is made to do the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from triton.runtime.interpreter import InterpreterBuilder


@pytest.fixture(autouse=True, scope="package")
def _compiled_minima() -> Iterator[None]:
    """Of a number and what is none, a compiled minimum or maximum is the number; the interpreter's is none."""

    def least(self: Any, one: Any, other: Any) -> Any:
        return self.binary_op(one, other, np.fmin)

    def largest(self: Any, one: Any, other: Any) -> Any:
        return self.binary_op(one, other, np.fmax)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_minnumf", least)
        patch.setattr(InterpreterBuilder, "create_maxnumf", largest)
        yield
