"""What FlashInfer is asked for, and where it is refused; what the package itself computes is tested on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distspec.attention import choose, flashinfer
from distspec.attention.available import missing_for_flashinfer
from distspec.attention.flashinfer import FlashInferBackend
from distspec.errors import InvalidValue
from distspec.kv.pool import KVPool
from tests.unit.attention.test_flash import one_span
from tests.unit.attention.test_sdpa import CPU, compare


class WrittenOut:
    """The package's wrapper of either kind, as it documents them."""

    used: ClassVar[list[str]] = []

    def __init__(self, workspace: torch.Tensor, backend: str) -> None:
        self.backend = backend

    def plan(
        self, rows: torch.Tensor, begins: torch.Tensor, pages: torch.Tensor, ends: torch.Tensor, *sizes: Any,
        causal: bool = False, q_data_type: torch.dtype = torch.float16,
    ) -> None:  # fmt: skip
        assert {x.dtype for x in (rows, begins, pages, ends)} == {torch.int32}
        self.rows, self.begins, self.pages, self.ends = (x.tolist() for x in (rows, begins, pages, ends))
        self.causal = causal or sizes[4:5] == (True,)
        self.used.append(self.backend)

    def run(self, q: torch.Tensor, *others: Any, out: torch.Tensor, return_lse: bool) -> tuple[torch.Tensor, ...]:
        assert return_lse
        if len(others) == 1:
            [(keys, values)] = others
            page = keys.shape[1]
            begins = list(zip(self.begins, self.begins[1:], strict=False))
            counts = [(end - begin - 1) * page + last for (begin, end), last in zip(begins, self.ends, strict=True)]
        else:
            turned, latents, rotary = others
            q, keys, values = (
                torch.cat((q, turned), -1),
                torch.cat((latents, rotary), -1)[:, :, None],
                latents[:, :, None],
            )
            counts = self.ends
        sums = torch.empty(q.shape[1], len(q))
        for span, count in enumerate(counts):
            assert count > 0
            own = slice(self.rows[span], self.rows[span + 1])
            pages = self.pages[self.begins[span] : self.begins[span + 1]]
            k, v = (x[pages].flatten(0, 1)[:count] for x in (keys, values))
            out[own], sums[:, own] = one_span(q[own], k, v, self.causal)
        return out, sums.t() / math.log(2)


class AnEvent:
    """Nothing is copied by itself on a CPU."""

    def synchronize(self) -> None: ...

    def record(self) -> None: ...


def with_written_out(check: Callable[[], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flashinfer, "_kind", lambda latent: WrittenOut)
        patch.setattr(flashinfer, "_WORKSPACE", 0)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=1))
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        patch.setattr(torch.cuda, "Event", AnEvent)
        check()


@pytest.mark.needs("interpreter")
@settings(max_examples=15)
@given(
    st.integers(0, 2**32), st.sampled_from([1, 16]), st.lists(st.sampled_from([1, 2, 6, 20]), min_size=1, max_size=4)
)
def test_rows_see_their_path_and_nothing_else(seed: int, page_size: int, sizes: list[int]) -> None:
    def check() -> None:
        compare(FlashInferBackend, seed, page_size, (6, 2), sizes, CPU, torch.float32, 64)

    with_written_out(check)


@pytest.mark.needs("interpreter")
@settings(max_examples=5)
@given(st.integers(0, 2**32), st.sampled_from([1, 16]), st.lists(st.sampled_from([1, 6, 20]), min_size=1, max_size=3))
def test_heads_share_latents_of_their_path(seed: int, page_size: int, sizes: list[int]) -> None:
    def check() -> None:
        compare(FlashInferBackend, seed, page_size, (6, 1), sizes, CPU, torch.float32, 576, 512)

    with_written_out(check)


def test_only_chunks_of_prompts_are_for_version_3() -> None:
    def check() -> None:
        for rows, version in ((1, "fa2"), (40, "fa2"), (300, "fa3")):
            WrittenOut.used.clear()
            compare(FlashInferBackend, 0, 16, (6, 2), [rows], CPU, torch.float32, 64)
            assert set(WrittenOut.used) == {version}

    with_written_out(check)


def test_splits_of_many_heads_of_a_group_find_room() -> None:
    """What the package asked for in vLLM's issue 25342, for 96 heads over 8, fits 188 multiprocessors."""
    asked, log_sums = 283_115_520, 283_115_520 // 128
    assert asked + log_sums < flashinfer.split_bytes(96, 8, 128, 188) < 1.1 * asked
    assert flashinfer.split_bytes(32, 4, 128, 132) > 128 * 2**20  # on an H200


def test_what_it_lacks_is_said() -> None:
    assert missing_for_flashinfer(CPU, torch.bfloat16) == "FlashInfer needs CUDA, the device is cpu"
    assert "float32" in (missing_for_flashinfer(torch.device("cuda"), torch.float32) or "")
    for latent, instead in ((False, "sdpa"), (True, "mla")):
        with pytest.raises(InvalidValue, match=rf"attention_backend.*need {instead}: FlashInfer needs CUDA"):
            choose("flashinfer", CPU, torch.bfloat16, latent=latent)


@pytest.mark.parametrize(("dim", "latent", "need"), [(96, 0, r"64, 128, 256.*not 96"), (50, 32, r"512, 64.*32, 18")])
def test_sizes_that_it_has_no_kernel_for_are_refused(dim: int, latent: int, need: str) -> None:
    with pytest.raises(InvalidValue, match=rf"attention_backend.*{need}"):
        FlashInferBackend(KVPool(1, 64, 1, dim, latent=latent, dtype=torch.bfloat16, device=CPU), 16, 2)
