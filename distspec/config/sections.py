"""The keys of a fleet's configuration: frozen Structs with their types, ranges and defaults, a Struct a section.

Knows what a key means, and what follows from a few of them. Does not know where values come from (loading.py), or which
of them fit together (checks.py).
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from msgspec import Meta, Struct, field

_MOST = 2**31 - 1
"""Of a size: indices on a device have 32 bits. Of seconds: 68 years, which clocks can wait for."""

Positive = Annotated[int, Meta(ge=1, le=_MOST)]
Natural = Annotated[int, Meta(ge=0, le=_MOST)]
Seconds = Annotated[float, Meta(gt=0, le=_MOST)]
Amount = Annotated[float, Meta(ge=0, le=_MOST)]
PolicyName = Literal["ar", "sd", "pearl", "dsi", "ssd", "bvsp", "auto"]
Share = Annotated[float, Meta(ge=0, le=1)]
Steps = Annotated[int, Meta(ge=1, le=64)]
Role = Literal["prefill", "decode", "verify", "draft"]


class Model(Struct, frozen=True, forbid_unknown_fields=True):
    """The target. name: `smollm2-135m`, a local folder, a hub id, or for benchmarks `random:SHAPE`.

    max_model_len None: the model's own.
    """

    name: str = "smollm2-135m"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    max_model_len: Positive | None = None
    served_name: str | None = None


class Engine(Struct, frozen=True, forbid_unknown_fields=True):
    """One target worker. num_pages None sizes the pool from memory; num_threads 0 divides the host's cores, and is 1
    beside a GPU. device: `auto` is a GPU in the pools that ask for one (num_gpus) if torch finds it, else the CPU.
    overlap: on a GPU, leased rounds are launched before the ones before them are read; false is for comparison.
    logprobs_mode, as in vLLM: of what the model says, or of what is drawn from. Logprobs of a prompt are always raw.
    """

    page_size: Positive = 16
    num_pages: Positive | None = None
    max_num_seqs: Positive = 16
    max_num_batched_tokens: Positive = 512
    max_scratch_nodes: Positive = 64
    attention_backend: Literal["auto", "sdpa", "triton", "flash", "flashinfer", "mla"] = "auto"
    cuda_graphs: bool = True
    overlap: bool = True
    prefix_cache: bool = True
    device: Literal["auto", "cpu", "cuda"] = "auto"
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.9
    num_threads: Natural = 0
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs"

    def pages_for(self, tokens: int) -> int:
        """Pages that hold one request of so many tokens, its scratch nodes, and two partly filled pages."""
        return -(-(tokens + self.max_scratch_nodes) // self.page_size) + 2

    def tokens_in(self, pages: int) -> int:
        """The longest request that so many pages hold, in tokens: the inverse of `pages_for`, 0 if there is none."""
        return max(0, (pages - 2) * self.page_size - self.max_scratch_nodes)


FEATURE_DRAFTERS = ("eagle", "eagle3", "mtp", "dflash")
"""Drafters that read the target's features."""

MODEL_DRAFTERS = ("standalone", *FEATURE_DRAFTERS)
"""Drafters that have a model, named by speculation.draft_model."""

LOCAL_POLICIES = ("ar", "sd", "auto")
"""Policies whose rounds a decode worker can run on its own, `auto` by keeping to the others."""


class Ngram(Struct, frozen=True, forbid_unknown_fields=True):
    """Prompt lookup: the latest match of the longest suffix, from max_n tokens down to min_n."""

    max_n: Annotated[int, Meta(ge=1, le=64)] = 3
    min_n: Positive = 1


class Suffix(Struct, frozen=True, forbid_unknown_fields=True):
    """A suffix automaton of each request's text. max_match: longest match in tokens. min_prob: drafting ends where
    the drafter's own confidence in the whole path falls below it. share_outputs: also look into what the drafter saw
    of outputs of requests that ended, the last max_shared_tokens of them; guesses then tell, to whoever may measure
    how fast they come, what other users were answered.
    """

    max_match: Positive = 64
    min_prob: Annotated[float, Meta(gt=0, le=1)] = 0.1
    share_outputs: bool = False
    max_shared_tokens: Annotated[int, Meta(ge=4, le=_MOST)] = 65536


class Speculation(Struct, frozen=True, forbid_unknown_fields=True):
    """placement: the drafter runs in the draft pool, or inside the decode worker (`local`). draft_model: for the
    drafters that have a model, as model.name. fallback: the drafter that `ssd` and `bvsp` ask after a miss.

    num_speculative_tokens: drafted levels of a round (SGLang's num_steps), or a table of them by the number of
    running requests, `{8: 4, 64: 1}`; None follows the measured cost of wider steps. topk: guesses per node that
    are judged; num_draft_tokens: most nodes judged in a round, the root counted (None: of a chain as many as are worth
    their rows, where more is drafted ahead than num_speculative_tokens; of a tree max_live_nodes, and with the root no
    more than engine.max_scratch_nodes).
    tree: `dynamic` compares nodes by the drafter's confidence, `static` by how often guesses of a rank are right.
    lookahead: drafter steps of one growth while a verification is on its way, and nodes per submission of `dsi`.
    branch_topk, branch_width: guesses per node, and nodes expanded per drafter step, where `ssd` and `bvsp` branch;
    branch_nodes: drafted nodes that make `bvsp` send a further verifier off. max_live_nodes: of the tree of a request
    (None: engine.max_scratch_nodes), for which draft workers have room. acceptance: which drafts are kept; `coupled`
    gives the tokens of plain decoding, `ratio` and `block` keep more of a local drafter's chain and give their
    distribution (docs/sampling.md).
    synthetic_acceptance: for benchmarks, draws and guesses come from a hash, such that the drafter's first, second...
    guess is right with these probabilities.
    """

    policy: PolicyName = "sd"
    allowed_policies: Annotated[tuple[PolicyName, ...], Meta(min_length=1)] = get_args(PolicyName)
    drafter: Literal["none", "ngram", "suffix", "standalone", "eagle", "eagle3", "mtp", "dflash"] = "ngram"
    draft_model: str | None = None
    placement: Literal["pool", "local"] = "pool"
    fallback: Literal["none", "ngram", "suffix"] = "none"
    num_speculative_tokens: Steps | dict[Positive, Steps] | None = None
    topk: Annotated[int, Meta(ge=1, le=16)] = 1
    num_draft_tokens: Annotated[int, Meta(ge=2, le=_MOST)] | None = None
    tree: Literal["static", "dynamic"] = "static"
    lookahead: Positive = 2
    branch_topk: Annotated[int, Meta(ge=1, le=16)] = 3
    branch_width: Positive = 8
    branch_nodes: Positive = 16
    max_live_nodes: Positive | None = None
    acceptance: Literal["coupled", "ratio", "block"] = "coupled"
    synthetic_acceptance: tuple[Share, ...] | None = None
    ngram: Ngram = Ngram()
    suffix: Suffix = Suffix()


class Pool(Struct, frozen=True, forbid_unknown_fields=True):
    """One pool of Ray actors. resources: custom Ray resources each actor asks for. num_gpus: at most the one GPU that a
    worker computes on; below 1, workers share a GPU, and each takes this part of engine.gpu_memory_utilization of it.
    """

    replicas: Natural = 0
    num_cpus: Amount = 0.0
    num_gpus: Share = 0.0
    resources: dict[str, Amount] = field(default_factory=dict)

    @property
    def gpu_part(self) -> float:
        """Of one GPU, that a worker has to itself."""
        return self.num_gpus if 0 < self.num_gpus < 1 else 1.0


class Pools(Struct, frozen=True, forbid_unknown_fields=True):
    """No prefill worker: decode workers prefill. No draft worker: see speculation.placement.

    placement_strategy: how the workers of a pool lie on the hosts. It takes hold of what they ask for (num_cpus,
    num_gpus, resources): of a pool that asks for nothing, SPREAD is a wish, PACK means nothing, and STRICT_PACK and
    STRICT_SPREAD are refused.
    """

    prefill: Pool = Pool()
    decode: Pool = Pool(replicas=1)
    verify: Pool = Pool()
    draft: Pool = Pool()
    placement_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"


class Coordinator(Struct, frozen=True, forbid_unknown_fields=True):
    """journal: a file for `distspec replay` (off by default: it holds token ids), at most journal_mb."""

    max_queued_requests: Natural = 256
    heartbeat_s: Seconds = 1.0
    worker_timeout_s: Seconds = 10.0
    task_timeout_s: Seconds = 120.0
    lease_s: Seconds = 30.0
    start_timeout_s: Seconds = 300.0
    restart_workers: bool = True
    journal: str | None = None
    journal_mb: Positive = 256


class Server(Struct, frozen=True, forbid_unknown_fields=True):
    """allow_synthetic: serve over HTTP although speculation.synthetic_acceptance makes every token up.

    tool_call_parser: how the model spells calls of tools that it makes of its own accord, as vLLM names it; None leaves
    them in the text.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=1, le=65535)] = 8000
    default_max_tokens: Positive = 256
    max_n: Positive = 16
    allow_synthetic: bool = False
    tool_call_parser: Literal["hermes", "llama3_json"] | None = None


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    """A whole fleet. name: Ray actors are named after it, so two fleets of one cluster need two names."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]+\Z")] = "distspec"
    model: Model = Model()
    engine: Engine = Engine()
    speculation: Speculation = Speculation()
    pools: Pools = Pools()
    coordinator: Coordinator = Coordinator()
    server: Server = Server()
    transfer: Literal["auto", "gloo", "nccl", "ipc"] = "auto"

    @property
    def served_name(self) -> str:
        """The name that clients know the model by."""
        return self.model.served_name or self.model.name

    @property
    def policies(self) -> tuple[PolicyName, ...]:
        """The policies that a request may choose."""
        return self.speculation.allowed_policies if self.speculation.drafter != "none" else ("ar",)

    @property
    def reads_features(self) -> bool:
        """The drafter reads features: those of the worker that it is in, or such as targets send it."""
        return self.speculation.drafter in FEATURE_DRAFTERS

    def asks_for_gpu(self, pool: str) -> bool:
        """Whether workers of the pool `prefill`, `decode`, `verify` or `draft` are to compute on a GPU."""
        asked: Pool = getattr(self.pools, pool)
        return self.engine.device == "cuda" or (self.engine.device == "auto" and asked.num_gpus > 0)

    def max_model_len(self, max_position: int) -> int:
        """The longest request in tokens: as configured, or what the model takes and the configured pages hold."""
        if self.model.max_model_len is not None:
            return self.model.max_model_len
        pages = self.engine.num_pages
        return max_position if pages is None else min(max_position, self.engine.tokens_in(pages))
