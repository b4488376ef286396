"""What can be said of the kernels' bench without a GPU."""

from __future__ import annotations

import pytest
import torch

from distspec.bench.kernels import measure
from distspec.errors import ConfigError


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where there is no GPU")
def test_it_names_what_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"engine\.device.*CUDA"):
        measure(["llama-1b"], [1], forwards=False)
