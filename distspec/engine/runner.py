"""A model over its KV pool: how a forward runs, launched kernel by kernel or replayed from a graph.

Knows the model, the pool, attention's plans, and the rows of a batch. Does not know slots, what is booked of them, or
how what follows a row is drawn.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

import torch
from torch import Tensor

from distspec import config
from distspec.attention import AttentionBackend, DevicePlans, StaticPlans, choose
from distspec.copies import integers
from distspec.engine.batch import Batch
from distspec.engine.capture import Capture, capturing
from distspec.engine.graphs import Graphs, Sizes
from distspec.kv.pool import KVPool
from distspec.models.base import Model, Paged, Taps

log = logging.getLogger(__name__)


class Runner:
    """taps: where in the model features are read, see models.Taps. graphs: of its forward, on CUDA, if it has any;
    capture: what these, and others that hold its forward, are captured with. max_model_len: tokens that the rows of
    one slot look at, at most."""

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        options: config.Engine,
        *,
        taps: tuple[int, ...],
        max_model_len: int,
        device: torch.device,
    ) -> None:
        """Raises InvalidValue if the attention backend that is asked for cannot run here."""
        shape = model.config
        backend, reason = choose(options.attention_backend, device, model.dtype, latent=shape.latent is not None)
        log.info("attention %s on %s", reason, device)
        self.taps = taps
        self._model = model
        self._pool = pool
        self._device = device
        self._attention: AttentionBackend = backend(pool, options.page_size, shape.num_heads)
        self.capture: Capture | None
        self.graphs: Graphs | None
        self.capture, self.graphs = self._graphs(options, max_model_len)

    @torch.inference_mode()
    def prepare(self, only_largest: bool = False) -> None:
        """Capture the graphs now; else each waits for its first step. only_largest: those that take the most memory,
        which the others reuse."""
        if self.graphs is not None:
            self.graphs.prepare(only_largest)

    def run(self, batch: Batch) -> Callable[[Seq[int]], Tensor]:
        """The model runs. Gives logits of rows, ascending: float32 [rows, vocab], which the next run overwrites."""
        logits = self.graphs.run(batch) if self.graphs is not None and batch.wanted else None
        if logits is not None:
            return partial(self._rows, logits)
        plan = self._attention.plan(batch.spans)
        tokens = self._integers(batch.tokens)
        batch.settle(tokens, self._integers(batch.borrowed()))
        hidden = self.hidden(tokens, self._integers(batch.positions), plan)
        return lambda rows: self._model.logits(self._rows(hidden, rows))

    # -- forwards that others plan -----------------------------------------------------------------

    @property
    def plans(self) -> DevicePlans | None:
        """How rounds plan whose lengths only the device knows; None if the attention backend cannot."""
        return self._attention if isinstance(self._attention, DevicePlans) else None

    def hidden(self, tokens: Tensor, positions: Tensor, plan: Any) -> Tensor:
        """What the logits after each row are made of (Model.logits): [rows, hidden_size]; writes KV and features.

        tokens, positions: int64 [rows]. plan: of `plans`. Books are whoever's who planned; waits for nothing.
        """
        attend = Paged(self._pool.layers, plan.write, partial(self._attention.read, plan))
        taps = Taps(self.taps) if self.taps else None
        hidden = self._model.forward(tokens, positions, attend, taps)
        if taps is not None:
            self._pool.features.index_copy_(0, plan.write, taps.features())
        return hidden

    # -- helpers -----------------------------------------------------------------------------------

    @torch.inference_mode()
    def _graphs(self, options: config.Engine, max_model_len: int) -> tuple[Capture, Graphs] | tuple[None, None]:
        """Of the forward, where they are wanted and the attention backend's plans can stay in place."""
        capture = capturing(self._device) if options.cuda_graphs else None
        if capture is None:
            return None, None
        if not isinstance(self._attention, StaticPlans):
            log.info("no CUDA graphs: attention backend %s plans anew each step", options.attention_backend)
            return None, None
        sizes = Sizes(
            rows=options.max_num_seqs * (1 + options.max_scratch_nodes),
            scratch=options.max_scratch_nodes,
            pages=options.max_num_seqs * options.pages_for(max_model_len),
            vocab=self._model.config.vocab_size,
        )
        return capture, Graphs(self._logits, self._attention, sizes, capture, self._device)

    def _logits(self, tokens: Tensor, positions: Tensor, plan: Any) -> Tensor:
        return self._model.logits(self.hidden(tokens, positions, plan))

    def _rows(self, values: Tensor, rows: Seq[int]) -> Tensor:
        return values if len(rows) == len(values) else values.index_select(0, self._integers(rows))

    def _integers(self, values: Seq[int]) -> Tensor:
        return integers(values, self._device)
