"""Configuration: where a value may come from, in which order, and what is said when it is wrong."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from distspec import config as config_module
from distspec.config import Config, check, check_served, load, named
from distspec.errors import ConfigError, InvalidValue, UnknownKey


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in [key for key in os.environ if key.startswith(config_module.ENV_PREFIX)]:
        monkeypatch.delenv(key)


def _leaves(kind: type, path: str = "") -> list[str]:
    out = []
    for item in msgspec.structs.fields(kind):
        here = f"{path}.{item.name}" if path else item.name
        struct = isinstance(item.type, type) and issubclass(item.type, msgspec.Struct)
        out += _leaves(item.type, here) if struct else [here]
    return out


LEAVES = _leaves(Config)


def _value(config: Config, path: str) -> Any:
    node: Any = config
    for key in path.split("."):
        node = getattr(node, key)
    return node


# -- sources and their order ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        (["speculation.num_speculative_tokens=4", "speculation.num_draft_tokens=4"], "num_draft_tokens"),
        (["speculation.num_speculative_tokens=2", "speculation.num_draft_tokens=9"], "num_draft_tokens"),
        (["speculation.topk=2", "speculation.num_draft_tokens=80"], "num_draft_tokens"),
        (["speculation.num_speculative_tokens={}"], "num_speculative_tokens"),
        (["speculation.num_speculative_tokens={8: 65}"], "num_speculative_tokens"),
        (["engine.max_scratch_nodes=8", "speculation.num_speculative_tokens={8: 9}"], "num_speculative_tokens"),
        (["speculation.branch_nodes=65"], "branch_nodes"),
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
    table = load("local", ["speculation.num_speculative_tokens={8: 4, 64: 1}"]).speculation.num_speculative_tokens
    assert table == {8: 4, 64: 1}


def test_made_up_tokens_are_served_only_where_that_is_asked_for() -> None:
    made_up = "speculation.synthetic_acceptance=[0.8, 0.1]"
    with pytest.raises(InvalidValue, match=r"server\.allow_synthetic=true"):
        check_served(load("local", [made_up]))
    check_served(load("local", [made_up, "server.allow_synthetic=true"]))
    check_served(load("local"))


def test_configurations_ship() -> None:
    assert {"local", "colocated"} <= set(named())


@pytest.mark.parametrize("name", named())
def test_every_shipped_configuration_loads_and_bears_its_own_name(name: str) -> None:
    assert load(name).name == name


def test_local_starts_one_worker_in_each_of_the_four_pools() -> None:
    pools = load("local").pools
    assert [pools.prefill.replicas, pools.decode.replicas, pools.verify.replicas, pools.draft.replicas] == [1, 1, 1, 1]


def test_a_name_a_path_and_a_tree_mean_the_same() -> None:
    path = config_module.CONFIGS / "local.yaml"
    assert load("local") == load(path) == load(str(path)) == load(yaml.safe_load(path.read_text()))


def test_an_override_beats_the_environment_and_that_beats_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    file = load("local").pools.verify.replicas
    monkeypatch.setenv("DISTSPEC__POOLS__VERIFY__REPLICAS", str(file + 1))
    assert load("local").pools.verify.replicas == file + 1
    assert load("local", [f"pools.verify.replicas={file + 2}"]).pools.verify.replicas == file + 2


@given(st.sampled_from(LEAVES), st.data())
def test_environment_and_overrides_reach_every_key_alike(path: str, data: st.DataObject) -> None:
    other = "colocated" if data.draw(st.booleans()) else "local"
    text = yaml.safe_dump(msgspec.to_builtins(_value(load(other), path)), default_flow_style=True).removesuffix("...\n")
    variable = config_module.ENV_PREFIX + path.replace(".", "__").upper()
    with mock.patch.dict(os.environ, {variable: text}):
        by_environment = _outcome("local", [])
    assert by_environment == _outcome("local", [f"{path}={text}"])
    if isinstance(by_environment, Config):
        assert _value(by_environment, path) == _value(load(other), path)


def _outcome(source: str, overrides: list[str]) -> Config | str:
    try:
        return load(source, overrides)
    except ConfigError as error:
        return str(error)


def test_a_later_override_wins_and_loading_changes_no_argument() -> None:
    tree: dict[str, Any] = {"pools": {"decode": {"replicas": 1}}, "speculation": {"placement": "local"}}
    before = msgspec.json.encode(tree)
    loaded = load(tree, ["pools.decode.replicas=2", "pools.decode.replicas=3"])
    assert loaded.pools.decode.replicas == 3
    assert msgspec.json.encode(tree) == before


def test_an_empty_file_is_the_default_with_a_local_drafter(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("")
    assert load(path, ["speculation.placement=local"]).model.name == "smollm2-135m"


# -- what is refused, and how ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "path", "nearest"),
    [
        ("pools.verify.replica=2", "pools.verify.replica", "pools.verify.replicas"),
        ("pools.verfy.replicas=2", "pools.verfy", "pools.verify"),
        ("engine.pagesize=2", "engine.pagesize", "engine.page_size"),
        ("page_size=16", "page_size", "engine.page_size"),
        (
            "speculation.num_speculative_token=2",
            "speculation.num_speculative_token",
            "speculation.num_speculative_tokens",
        ),
        ("speculation.ngram.maxn=2", "speculation.ngram.maxn", "speculation.ngram.max_n"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_valid_name(override: str, path: str, nearest: str) -> None:
    with pytest.raises(UnknownKey) as caught:
        load("local", [override])
    assert caught.value.path == path
    assert nearest in str(caught.value)


@pytest.mark.parametrize("path", [path for path in LEAVES if len(path.rpartition(".")[2]) >= 4])
def test_a_slip_of_any_one_letter_is_told_the_key_that_was_meant(path: str) -> None:
    parent, _, key = path.rpartition(".")
    for slip in range(len(key)):
        wrong = key[:slip] + "0" + key[slip + 1 :]
        with pytest.raises(UnknownKey, match="did you mean") as caught:
            load({}, [f"{parent}.{wrong}=1" if parent else f"{wrong}=1"])
        assert path in str(caught.value)


@given(st.text(min_size=1, max_size=20).filter(lambda key: "." not in key and "=" not in key))
def test_no_key_outside_the_schema_is_ever_taken(key: str) -> None:
    key = key.strip()
    if key in {leaf.split(".")[0] for leaf in LEAVES}:
        return
    with pytest.raises(UnknownKey):
        load({key: 1})


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("engine.page_size=0", "engine.page_size"),
        ("engine.page_size=sixteen", "engine.page_size"),
        ("engine.gpu_memory_utilization=1.5", "engine.gpu_memory_utilization"),
        ("pools.verify.replicas=-1", "pools.verify.replicas"),
        ("pools.decode.replicas=0", "pools.decode.replicas"),
        ("pools.verify.resources=[1]", "pools.verify.resources"),
        ("server.port=70000", "server.port"),
        ("model.dtype=int3", "model.dtype"),
        ("coordinator.heartbeat_s=0", "coordinator.heartbeat_s"),
        ("coordinator.worker_timeout_s=1", "coordinator.worker_timeout_s"),
        ("speculation.policy=psd", "speculation.policy"),
        ("speculation.allowed_policies=[ar]", "speculation.policy"),
        ("speculation.drafter=standalone", "speculation.draft_model"),
        ("speculation.drafter=none", "speculation.drafter"),
        ("speculation.ngram.min_n=4", "speculation.ngram.min_n"),
        ("speculation.num_speculative_tokens=65", "speculation.num_speculative_tokens"),
        ("pools.draft.replicas=0", "pools.draft.replicas"),
        ("engine.num_pages=2", "engine.num_pages"),
        ("engine=fast", "engine"),
    ],
)
def test_a_value_that_cannot_work_is_refused_with_the_path_of_its_key(override: str, path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load("local", [override])
    assert caught.value.path == path
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_pages_must_hold_the_longest_request_with_its_scratch_nodes(page_size: int) -> None:
    """So that nothing behind ever cuts a request that the front let pass."""
    pages = load("local", [f"engine.page_size={page_size}"]).engine.pages_for(4096)
    assert (pages - 2) * page_size >= 4096 + 64
    asked = [f"engine.page_size={page_size}", "model.max_model_len=4096"]
    assert load("local", [*asked, f"engine.num_pages={pages}"]).max_model_len(8192) == 4096
    with pytest.raises(InvalidValue, match=rf"^engine\.num_pages: got {pages - 1}, need >= {pages} "):
        load("local", [*asked, f"engine.num_pages={pages - 1}"])


def test_without_max_model_len_pages_and_model_decide_the_longest_request() -> None:
    free = ["model.max_model_len=null"]
    assert load("local", free).max_model_len(8192) == 8192
    assert load("local", [*free, "engine.num_pages=1000"]).max_model_len(8192) == 8192
    assert load("local", [*free, "engine.num_pages=100"]).max_model_len(8192) == 98 * 16 - 64
    assert load("local", [*free, "engine.num_pages=7"]).max_model_len(8192) == 16
    with pytest.raises(InvalidValue, match=r"need >= 7 to hold any request"):
        load("local", [*free, "engine.num_pages=6"])


@pytest.mark.parametrize("name", ["", "a b", "a:b", "a/b", "é", "a\n", "x*"])
def test_a_name_that_actors_cannot_bear_is_refused(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({"name": name, "speculation": {"placement": "local"}})
    assert caught.value.path == "name"


def test_a_name_of_letters_digits_and_marks_is_taken() -> None:
    assert load("local", ["name=Fleet-2_b.1"]).name == "Fleet-2_b.1"


def test_a_model_has_one_served_name_and_a_fleet_one_list_of_policies() -> None:
    assert load("local").served_name == "smollm2-135m"
    assert load("local", ["model.served_name=tiny"]).served_name == "tiny"
    assert load("local", ["speculation.allowed_policies=[ar, sd]"]).policies == ("ar", "sd")
    none = ["speculation.drafter=none", "speculation.policy=ar", "pools.draft.replicas=0"]
    assert load("local", none).policies == ("ar",)


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


@pytest.mark.parametrize("source", ["no_such_config", "no/such/file.yaml"])
def test_a_missing_source_is_told_what_ships(source: str) -> None:
    with pytest.raises(ConfigError, match=r"no shipped configuration \(.*local.*\)"):
        load(source)


@pytest.mark.parametrize("text", ["- a\n- b\n", "just words", "a: [1, 2"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        load(path)


@pytest.mark.parametrize("override", ["engine.page_size", "", "engine.page_size=[1"])
def test_a_malformed_override_is_a_config_error(override: str) -> None:
    with pytest.raises(ConfigError):
        load("local", [override])


def test_an_override_cannot_look_into_a_value() -> None:
    with pytest.raises(ConfigError) as caught:
        load("local", ["model.name.part=1"])
    assert caught.value.path == "model.name"


# -- the value itself -----------------------------------------------------------------------------


def test_a_loaded_configuration_is_frozen() -> None:
    with pytest.raises(AttributeError):
        load("local").engine.page_size = 32  # type: ignore[misc]


@pytest.mark.parametrize("name", named())
def test_a_configuration_survives_being_written_out(name: str) -> None:
    loaded = load(name)
    assert load(msgspec.to_builtins(loaded)) == loaded
    check(loaded)


@pytest.mark.parametrize("kind", ["nccl", "ipc"])
def test_links_of_gpus_are_refused_without_one(kind: str) -> None:
    with pytest.raises(InvalidValue, match="transfer"):
        load("local", [f"transfer={kind}", "engine.device=cpu"])
    assert load("local", [f"transfer={kind}"]).transfer == kind
