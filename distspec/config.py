"""Fleet configuration: frozen Structs from YAML, environment and overrides, checked before anything starts.

Knows keys, types and ranges. Does not know Ray, models or devices. A configuration is named (a file in
`distspec/configs/`) or a path; environment variables `DISTSPEC__POOLS__VERIFY__REPLICAS=2` come next, then
overrides `pools.verify.replicas=2`. Unknown keys are refused with the nearest valid name.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import yaml
from msgspec import Meta, Struct, field

from distspec.errors import ConfigError, InvalidValue, UnknownKey

CONFIGS = Path(__file__).parent / "configs"
ENV_PREFIX = "DISTSPEC__"

Positive = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
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
    """One target worker. num_pages None sizes the pool from memory; num_threads 0 divides the host's cores. overlap: on
    a GPU, leased rounds are launched before the ones before them are read; false is for comparison.
    logprobs_mode, as in vLLM: of what the model says, or of what is drawn from. Logprobs of a prompt are always raw.
    """

    page_size: Positive = 16
    num_pages: Positive | None = None
    max_num_seqs: Positive = 16
    max_num_batched_tokens: Positive = 512
    max_scratch_nodes: Positive = 64
    attention_backend: Literal["auto", "sdpa", "triton", "flash"] = "auto"
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

    max_n: Positive = 3
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
    max_shared_tokens: Annotated[int, Meta(ge=4)] = 65536


class Speculation(Struct, frozen=True, forbid_unknown_fields=True):
    """placement: the drafter runs in the draft pool, or inside the decode worker (`local`). draft_model: for the
    drafters that have a model, as model.name. fallback: the drafter that `ssd` and `bvsp` ask after a miss.

    num_speculative_tokens: drafted levels of a round (SGLang's num_steps), or a table of them by the number of
    running requests, `{8: 4, 64: 1}`; None follows the measured cost of wider steps. topk: guesses per node that
    are judged; num_draft_tokens: most nodes judged in a round, the root counted (None: the chain, or max_live_nodes).
    tree: `dynamic` compares nodes by the drafter's confidence, `static` by how often guesses of a rank are right.
    lookahead: drafter steps of one growth while a verification is on its way, and nodes per submission of `dsi`.
    branch_topk, branch_width: guesses per node, and nodes expanded per drafter step, where `ssd` and `bvsp` branch;
    branch_nodes: drafted nodes that make `bvsp` send a further verifier off. max_live_nodes: of the tree of a request
    (None: engine.max_scratch_nodes). acceptance: which drafts are kept; `coupled` gives the tokens of plain decoding,
    `ratio` and `block` keep more of a local drafter's chain and give their distribution (docs/sampling.md).
    synthetic_acceptance: for benchmarks, draws and guesses come from a hash, such that the drafter's first, second...
    guess is right with these probabilities.
    """

    policy: PolicyName = "sd"
    allowed_policies: tuple[PolicyName, ...] = get_args(PolicyName)
    drafter: Literal["none", "ngram", "suffix", "standalone", "eagle", "eagle3", "mtp", "dflash"] = "ngram"
    draft_model: str | None = None
    placement: Literal["pool", "local"] = "pool"
    fallback: Literal["none", "ngram", "suffix"] = "none"
    num_speculative_tokens: Steps | dict[Positive, Steps] | None = None
    topk: Annotated[int, Meta(ge=1, le=16)] = 1
    num_draft_tokens: Annotated[int, Meta(ge=2)] | None = None
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
    """One pool of Ray actors. resources: custom Ray resources each actor asks for. num_gpus below 1: workers share a
    GPU, and each takes this part of engine.gpu_memory_utilization of it."""

    replicas: Natural = 0
    num_cpus: Annotated[float, Meta(ge=0)] = 0.0
    num_gpus: Annotated[float, Meta(ge=0)] = 0.0
    resources: dict[str, float] = field(default_factory=dict)

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
    """allow_synthetic: serve over HTTP although speculation.synthetic_acceptance makes every token up."""

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=1, le=65535)] = 8000
    default_max_tokens: Positive = 256
    max_n: Positive = 16
    allow_synthetic: bool = False


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

    def max_model_len(self, max_position: int) -> int:
        """The longest request in tokens: as configured, or what the model takes and the configured pages hold."""
        if self.model.max_model_len is not None:
            return self.model.max_model_len
        pages = self.engine.num_pages
        return max_position if pages is None else min(max_position, self.engine.tokens_in(pages))


def load(source: str | Path | Mapping[str, Any] = "local", overrides: Iterable[str] = ()) -> Config:
    """A checked configuration.

    source: the name of a shipped configuration, a path, or the tree itself. overrides: `a.b.c=value`,
    value in YAML. Raises ConfigError (UnknownKey, InvalidValue) with the path of the key.
    """
    tree = dict(source) if isinstance(source, Mapping) else _read(source)
    for key, value in os.environ.items():
        if key.startswith(ENV_PREFIX):
            _set(tree, key[len(ENV_PREFIX) :].lower().split("__"), value)
    for override in overrides:
        key, sep, value = override.partition("=")
        if not sep:
            raise ConfigError(override, "an override reads key.path=value")
        _set(tree, key.strip().split("."), value)
    _refuse_unknown(Config, tree, "")
    try:
        config = msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        raise ConfigError(path.strip("`.").replace("[...]", "") or "(top)", message) from None
    check(config)
    return config


def check_served(config: Config) -> None:
    """Refuse what must not be served over HTTP. Raises InvalidValue."""
    made_up = config.speculation.synthetic_acceptance
    if made_up is not None and not config.server.allow_synthetic:
        need = "null: it makes every token up; or server.allow_synthetic=true"
        raise InvalidValue("speculation.synthetic_acceptance", list(made_up), need)


def check(config: Config) -> None:
    """Refuse combinations that cannot run. Raises InvalidValue."""
    spec, pools = config.speculation, config.pools
    if pools.decode.replicas < 1:
        raise InvalidValue("pools.decode.replicas", pools.decode.replicas, "at least 1")
    if spec.policy not in spec.allowed_policies:
        raise InvalidValue("speculation.policy", spec.policy, f"one of allowed_policies {list(spec.allowed_policies)}")
    if spec.drafter in MODEL_DRAFTERS and not spec.draft_model:
        raise InvalidValue("speculation.draft_model", None, f"a model for the drafter `{spec.drafter}`")
    if spec.drafter == "none" and spec.policy != "ar":
        raise InvalidValue("speculation.drafter", "none", f"a drafter for policy {spec.policy} (ngram needs no model)")
    if spec.placement == "pool" and spec.drafter != "none" and spec.policy != "ar" and pools.draft.replicas < 1:
        raise InvalidValue("pools.draft.replicas", 0, "at least 1, or speculation.placement=local")
    if spec.drafter == "none" and pools.draft.replicas:
        raise InvalidValue("pools.draft.replicas", pools.draft.replicas, "0 without a drafter")
    _check_placement(pools)
    if spec.ngram.min_n > spec.ngram.max_n:
        raise InvalidValue("speculation.ngram.min_n", spec.ngram.min_n, f"at most max_n ({spec.ngram.max_n})")
    _check_sizes(spec, config.engine.max_scratch_nodes)
    if spec.acceptance != "coupled":
        _check_drawn(spec)
    if config.transfer in ("nccl", "ipc") and config.engine.device == "cpu":
        raise InvalidValue("transfer", config.transfer, "gloo or auto, where engine.device is cpu")
    beat = config.coordinator
    if beat.worker_timeout_s < 2 * beat.heartbeat_s:
        raise InvalidValue(
            "coordinator.worker_timeout_s", beat.worker_timeout_s, f">= 2 x heartbeat_s ({2 * beat.heartbeat_s})"
        )
    _check_pages(config.engine, config.model.max_model_len)


def _check_sizes(spec: Speculation, room: int) -> None:
    """Trees that cannot be grown, or judged, as they are configured."""
    asked = spec.num_speculative_tokens
    if isinstance(asked, dict) and not asked:
        raise InvalidValue("speculation.num_speculative_tokens", asked, "an entry, as {1: 4}; or null")
    most = max(asked.values()) if isinstance(asked, dict) else asked or 0
    where = f"at most engine.max_scratch_nodes ({room})"
    for name, nodes in (("num_speculative_tokens", most), ("branch_nodes", spec.branch_nodes)):
        if nodes > room:
            raise InvalidValue(f"speculation.{name}", nodes, where)
    judged = spec.num_draft_tokens
    if judged is not None:
        if judged - 1 > room:
            raise InvalidValue("speculation.num_draft_tokens", judged, f"at most {room + 1}: the root and {where[8:]}")
        if judged - 1 < most:
            need = f">= {most + 1}: the root and the {most} nodes of a path of num_speculative_tokens"
            raise InvalidValue("speculation.num_draft_tokens", judged, need)
        if most and judged - 1 > _tree_nodes(most, spec.topk):
            need = f"at most {_tree_nodes(most, spec.topk) + 1}, all that {most} levels of topk {spec.topk} have"
            raise InvalidValue("speculation.num_draft_tokens", judged, need)
    live = spec.max_live_nodes
    if live is not None and live < max(most, (judged or 0) - 1):
        need = f">= {max(most, (judged or 0) - 1)}, the nodes of one round"
        raise InvalidValue("speculation.max_live_nodes", live, need)
    if spec.synthetic_acceptance is not None and not 0 < sum(spec.synthetic_acceptance) <= 1:
        need = "probabilities that add up to at most 1"
        raise InvalidValue("speculation.synthetic_acceptance", list(spec.synthetic_acceptance), need)


def _check_drawn(spec: Speculation) -> None:
    """Refuse drafts that are not drawn one below the other, or judged elsewhere than they were drawn."""
    needs = {
        "drafter": (spec.drafter in MODEL_DRAFTERS, f"one of {', '.join(MODEL_DRAFTERS)}"),
        "placement": (spec.placement == "local", "local"),
        "topk": (spec.topk == 1, "1"),
        "allowed_policies": (set(spec.allowed_policies) <= set(LOCAL_POLICIES), f"only {', '.join(LOCAL_POLICIES)}"),
        "synthetic_acceptance": (spec.synthetic_acceptance is None, "null"),
    }
    why = f"with acceptance={spec.acceptance}, which weighs chains by what a local drafter drew them from"
    for name, (holds, need) in needs.items():
        if not holds:
            raise InvalidValue(f"speculation.{name}", getattr(spec, name), f"{need} {why}")


def _tree_nodes(steps: int, topk: int) -> int:
    """Nodes that a drafter makes in so many steps: topk below the root, then topk below each of the topk best."""
    return topk + (steps - 1) * topk * topk


def _check_pages(engine: Engine, max_model_len: int | None) -> None:
    need = engine.pages_for(max_model_len or 1)
    if engine.num_pages is not None and engine.num_pages < need:
        longest = "any request" if max_model_len is None else "one request of max_model_len"
        raise InvalidValue("engine.num_pages", engine.num_pages, f">= {need} to hold {longest} and its scratch nodes")


def _check_placement(pools: Pools) -> None:
    if not pools.placement_strategy.startswith("STRICT_"):
        return
    for name in get_args(Role):
        pool: Pool = getattr(pools, name)
        if pool.replicas and not (pool.num_cpus or pool.num_gpus or any(pool.resources.values())):
            need = f"num_cpus, num_gpus or resources in pools.{name}, which asks for nothing; or SPREAD or PACK"
            raise InvalidValue("pools.placement_strategy", pools.placement_strategy, need)


def named() -> list[str]:
    """Names of the configurations that ship with the package."""
    return sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def _read(source: str | Path) -> dict[str, Any]:
    path = Path(source)
    shipped = CONFIGS / f"{source}.yaml"
    if not path.is_file():
        if not shipped.is_file():
            raise ConfigError("config", f"{source!s} is no file and no shipped configuration ({', '.join(named())})")
        path = shipped
    try:
        tree = yaml.safe_load(path.read_text()) or {}
    except yaml.YAMLError as error:
        raise ConfigError("config", f"{path}: not YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError("config", f"{path}: the top level must be a mapping")
    return tree


def _set(tree: dict[str, Any], path: list[str], text: str) -> None:
    for i, key in enumerate(path[:-1]):
        child = tree.setdefault(key, {})
        if not isinstance(child, dict):
            raise ConfigError(".".join(path[: i + 1]), "is a value, not a section")
        tree[key] = dict(child)
        tree = tree[key]
    try:
        tree[path[-1]] = yaml.safe_load(text)
    except yaml.YAMLError:
        raise InvalidValue(".".join(path), text, "a YAML value") from None


def _refuse_unknown(kind: type, tree: Any, path: str) -> None:
    hints = get_type_hints(kind, include_extras=False)
    if not isinstance(tree, Mapping):
        raise InvalidValue(path or "(top)", tree, "a mapping")
    for key, value in tree.items():
        here = f"{path}.{key}" if path else str(key)
        if key not in hints:
            raise UnknownKey(here, _nearest(str(key), path))
        child = _struct_in(hints[key])
        if child is not None:
            _refuse_unknown(child, value, here)


def _struct_in(hint: Any) -> type[Struct] | None:
    for candidate in (hint, *get_args(hint)):
        if isinstance(candidate, type) and get_origin(candidate) is None and issubclass(candidate, Struct):
            return candidate
    return None


def _nearest(key: str, path: str) -> list[str]:
    """Valid key paths that look like `key`: first beside it, then anywhere."""
    paths = _paths(Config, "")
    beside = {p.rpartition(".")[2]: p for p in paths if p.rpartition(".")[0] == path}
    anywhere = {p.rpartition(".")[2]: p for p in paths}
    for names in (beside, anywhere):
        close = difflib.get_close_matches(key, names, n=2, cutoff=0.6)
        if close:
            return [names[name] for name in close]
    return []


def _paths(kind: type, path: str) -> list[str]:
    out = []
    for name, hint in get_type_hints(kind).items():
        here = f"{path}.{name}" if path else name
        out.append(here)
        child = _struct_in(hint)
        if child is not None:
            out += _paths(child, here)
    return out
