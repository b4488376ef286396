"""Values that cannot work together: refused by the path of the one to change."""

from __future__ import annotations

import pytest

from distspec.config import check_served, load
from distspec.errors import ConfigError, InvalidValue

SHALLOW = ("speculation.num_speculative_tokens=2", "speculation.num_draft_tokens=9")
"""More nodes to judge than so many levels have."""


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        (["speculation.num_speculative_tokens=4", "speculation.num_draft_tokens=4"], "num_draft_tokens"),
        ([*SHALLOW, "speculation.placement=local"], "num_draft_tokens"),
        ([*SHALLOW, "speculation.allowed_policies=[sd]"], "num_draft_tokens"),
        (["speculation.topk=2", "speculation.num_draft_tokens=80"], "num_draft_tokens"),
        (["speculation.num_speculative_tokens={}"], "num_speculative_tokens"),
        (["speculation.num_speculative_tokens={8: 65}"], "num_speculative_tokens"),
        (["engine.max_scratch_nodes=8", "speculation.num_speculative_tokens={8: 9}"], "num_speculative_tokens"),
        (["speculation.branch_nodes=65"], "branch_nodes"),
        (["speculation.lookahead=65"], "lookahead"),
        (["speculation.allowed_policies=[]"], "allowed_policies"),
        (["engine.max_scratch_nodes=16", "speculation.lookahead=17"], "lookahead"),
        (["speculation.num_speculative_tokens=8", "speculation.max_live_nodes=7"], "max_live_nodes"),
        (["speculation.synthetic_acceptance=[0.8, 0.3]"], "synthetic_acceptance"),
        (["speculation.drafter=eagle3"], "draft_model"),
        (["speculation.policy=warp"], "policy"),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit_each_other_are_refused_by_name(overrides: list[str], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load("local", overrides)
    assert caught.value.path == f"speculation.{field}"


DRAWN = {
    "acceptance": "ratio",
    "drafter": "standalone",
    "draft_model": "smollm2-135m",
    "placement": "local",
    "allowed_policies": "[ar, sd, auto]",
}


def _drawn(**other: str) -> list[str]:
    return [f"speculation.{key}={value}" for key, value in {**DRAWN, **other}.items()]


@pytest.mark.parametrize("acceptance", ["ratio", "block"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("drafter", "ngram"),
        ("placement", "pool"),
        ("topk", "2"),
        ("allowed_policies", "[sd, pearl]"),
        ("synthetic_acceptance", "[0.5]"),
    ],
)
def test_what_cannot_weigh_drafts_is_refused_by_name(acceptance: str, field: str, value: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        load("local", _drawn(acceptance=acceptance, **{field: value}))
    assert caught.value.path == f"speculation.{field}"
    assert f"acceptance={acceptance}" in str(caught.value)


@pytest.mark.parametrize("acceptance", ["coupled", "ratio", "block"])
@pytest.mark.parametrize("drafter", ["standalone", "eagle", "eagle3", "mtp", "dflash"])
def test_local_drafters_with_a_model_can_be_weighed(acceptance: str, drafter: str) -> None:
    assert load("local", _drawn(acceptance=acceptance, drafter=drafter)).speculation.acceptance == acceptance


def test_sizes_that_fit_are_taken() -> None:
    tree = ["speculation.topk=2", "speculation.num_speculative_tokens=3", "speculation.num_draft_tokens=11"]
    assert load("local", tree).speculation.num_draft_tokens == 11
    assert load("local", list(SHALLOW)).speculation.num_draft_tokens == 9  # `ssd` drafts deeper ahead
    table = load("local", ["speculation.num_speculative_tokens={8: 4, 64: 1}"]).speculation.num_speculative_tokens
    assert table == {8: 4, 64: 1}


def test_made_up_tokens_are_served_only_where_that_is_asked_for() -> None:
    made_up = "speculation.synthetic_acceptance=[0.8, 0.1]"
    with pytest.raises(InvalidValue, match=r"server\.allow_synthetic=true"):
        check_served(load("local", [made_up]))
    check_served(load("local", [made_up, "server.allow_synthetic=true"]))
    check_served(load("local"))


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_pages_must_hold_the_longest_request_with_its_scratch_nodes(page_size: int) -> None:
    """So that nothing behind ever cuts a request that the front let pass."""
    pages = load("local", [f"engine.page_size={page_size}"]).engine.pages_for(4096)
    assert (pages - 2) * page_size >= 4096 + 64
    asked = [f"engine.page_size={page_size}", "model.max_model_len=4096"]
    assert load("local", [*asked, f"engine.num_pages={pages}"]).max_model_len(8192) == 4096
    with pytest.raises(InvalidValue, match=rf"^engine\.num_pages: got {pages - 1}, need >= {pages} "):
        load("local", [*asked, f"engine.num_pages={pages - 1}"])


def test_draft_workers_without_a_drafter_are_refused() -> None:
    without = ["speculation.policy=ar", "speculation.drafter=none"]
    with pytest.raises(InvalidValue) as caught:
        load("local", without)
    assert caught.value.path == "pools.draft.replicas"
    load("local", [*without, "pools.draft.replicas=0"])


@pytest.mark.parametrize("asks", ["num_cpus=1", "num_gpus=0.5", "resources={rack: 1}"])
@pytest.mark.parametrize("strategy", ["STRICT_SPREAD", "STRICT_PACK"])
def test_a_strict_placement_is_refused_where_a_pool_asks_for_nothing(strategy: str, asks: str) -> None:
    overrides = [f"pools.placement_strategy={strategy}"]
    overrides += [f"pools.{pool}.{asks}" for pool in ("prefill", "decode", "draft")]
    for verify in ("num_cpus=0", "resources={rack: 0}"):
        with pytest.raises(InvalidValue, match=r"pools\.verify, which asks for nothing") as caught:
            load("local", [*overrides, f"pools.verify.{verify}"])
        assert caught.value.path == "pools.placement_strategy"
    load("local", [*overrides, f"pools.verify.{asks}"])
    load("local", [*overrides, "pools.verify.replicas=0"])


def test_more_nodes_than_scratch_are_refused() -> None:
    with pytest.raises(InvalidValue, match="max_scratch_nodes"):
        load("local", ["engine.max_scratch_nodes=8", "speculation.num_speculative_tokens=9"])


@pytest.mark.parametrize("kind", ["nccl", "ipc"])
def test_links_of_gpus_are_refused_without_one(kind: str) -> None:
    with pytest.raises(InvalidValue, match="transfer"):
        load("local", [f"transfer={kind}", "engine.device=cpu"])
    assert load("local", [f"transfer={kind}", "engine.device=cuda"]).transfer == kind


@pytest.mark.parametrize("kind", ["nccl", "ipc"])
def test_links_between_gpus_want_one_in_each_pool_that_has_links(kind: str) -> None:
    asked = [f"transfer={kind}", *(f"pools.{name}.num_gpus=0.5" for name in ("prefill", "decode", "verify"))]
    assert load("local", asked).transfer == kind
    for name in ("prefill", "decode", "verify"):
        with pytest.raises(InvalidValue, match=rf"^transfer: .*pools\.{name}"):
            load("local", [*asked, f"pools.{name}.num_gpus=0"])
    reading = ["speculation.drafter=eagle", "speculation.draft_model=x"]
    with pytest.raises(InvalidValue, match=r"^transfer: .*pools\.draft"):
        load("local", [*asked, *reading])
    load("local", [*asked, *reading, "pools.draft.num_gpus=1"])
