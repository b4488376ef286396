"""Values that are right each by itself, but cannot work together.

Knows sections and sizes. Does not know where values come from, models or devices.
"""

from __future__ import annotations

from typing import get_args

from distspec.config.sections import LOCAL_POLICIES, MODEL_DRAFTERS, Config, Engine, Pool, Pools, Role, Speculation
from distspec.errors import InvalidValue


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
    if config.transfer in ("nccl", "ipc"):
        _check_gpus(config)
    beat = config.coordinator
    if beat.worker_timeout_s < 2 * beat.heartbeat_s:
        raise InvalidValue(
            "coordinator.worker_timeout_s", beat.worker_timeout_s, f">= 2 x heartbeat_s ({2 * beat.heartbeat_s})"
        )
    _check_pages(config.engine, config.model.max_model_len)


def _check_gpus(config: Config) -> None:
    """Links between GPUs want one at either end. Draft workers have links only for features."""
    for name in get_args(Role):
        links = name != "draft" or config.reads_features
        if links and getattr(config.pools, name).replicas and not config.asks_for_gpu(name):
            need = f"gloo or auto, where pools.{name} computes on the CPU (engine.device, or no num_gpus)"
            raise InvalidValue("transfer", config.transfer, need)


def _check_sizes(spec: Speculation, room: int) -> None:
    """Trees that cannot be grown, or judged, as they are configured."""
    asked = spec.num_speculative_tokens
    if isinstance(asked, dict) and not asked:
        raise InvalidValue("speculation.num_speculative_tokens", asked, "an entry, as {1: 4}; or null")
    most = max(asked.values()) if isinstance(asked, dict) else asked or 0
    where = f"at most engine.max_scratch_nodes ({room})"
    sizes = {"num_speculative_tokens": most, "lookahead": spec.lookahead, "branch_nodes": spec.branch_nodes}
    for name, nodes in sizes.items():
        if nodes > room:
            raise InvalidValue(f"speculation.{name}", nodes, where)
    judged = spec.num_draft_tokens
    if judged is not None:
        if judged - 1 > room:
            raise InvalidValue("speculation.num_draft_tokens", judged, f"at most {room + 1}: the root and {where[8:]}")
        if judged - 1 < most:
            need = f">= {most + 1}: the root and the {most} nodes of a path of num_speculative_tokens"
            raise InvalidValue("speculation.num_draft_tokens", judged, need)
        drafts_ahead = spec.placement == "pool" and not _only_local(spec)
        if most and not drafts_ahead and judged - 1 > _tree_nodes(most, spec.topk):
            need = f"at most {_tree_nodes(most, spec.topk) + 1}, all that {most} levels of topk {spec.topk} have"
            raise InvalidValue("speculation.num_draft_tokens", judged, need)
    live = spec.max_live_nodes
    if live is not None and live < max(most, (judged or 0) - 1):
        need = f">= {max(most, (judged or 0) - 1)}, the nodes of one round"
        raise InvalidValue("speculation.max_live_nodes", live, need)
    if spec.synthetic_acceptance is not None and not 0 < sum(spec.synthetic_acceptance) <= 1:
        need = "probabilities that add up to at most 1"
        raise InvalidValue("speculation.synthetic_acceptance", list(spec.synthetic_acceptance), need)


def _only_local(spec: Speculation) -> bool:
    return set(spec.allowed_policies) <= set(LOCAL_POLICIES)


def _check_drawn(spec: Speculation) -> None:
    """Refuse drafts that are not drawn one below the other, or judged elsewhere than they were drawn."""
    needs = {
        "drafter": (spec.drafter in MODEL_DRAFTERS, f"one of {', '.join(MODEL_DRAFTERS)}"),
        "placement": (spec.placement == "local", "local"),
        "topk": (spec.topk == 1, "1"),
        "allowed_policies": (_only_local(spec), f"only {', '.join(LOCAL_POLICIES)}"),
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
