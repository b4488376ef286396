"""Where a value may come from, in which order, and what is said when it is wrong."""

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

from distspec.config import CONFIGS, ENV_PREFIX, Config, check, load, named
from distspec.errors import ConfigError, UnknownKey


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


def test_configurations_ship() -> None:
    assert {"local", "colocated"} <= set(named())


@pytest.mark.parametrize("name", named())
def test_every_shipped_configuration_loads_and_bears_its_own_name(name: str) -> None:
    assert load(name).name == name


def test_local_starts_one_worker_in_each_of_the_four_pools() -> None:
    pools = load("local").pools
    assert [pools.prefill.replicas, pools.decode.replicas, pools.verify.replicas, pools.draft.replicas] == [1, 1, 1, 1]


def test_a_name_a_path_and_a_tree_mean_the_same() -> None:
    path = CONFIGS / "local.yaml"
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
    variable = ENV_PREFIX + path.replace(".", "__").upper()
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


@pytest.mark.parametrize("source", ["no_such_config", "no/such/file.yaml"])
def test_a_missing_source_is_told_what_ships(source: str) -> None:
    with pytest.raises(ConfigError, match=r"no shipped configuration \(.*local.*\)"):
        load(source)


@pytest.mark.parametrize(
    "text", ["engine: {page_size: 32}\nengine: {device: cpu}", "engine: {page_size: 1, page_size: 2}"]
)
def test_a_key_that_is_there_twice_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(f"speculation: {{placement: local}}\n{text}")
    with pytest.raises(ConfigError, match="is there twice"):
        load(file)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="not YAML"):
        load(file)


def test_a_wrong_key_of_a_mapping_is_told_with_its_path() -> None:
    with pytest.raises(ConfigError) as error:
        load("local", ["speculation.num_speculative_tokens={a: 1}"])
    assert error.value.path == "speculation.num_speculative_tokens"


@pytest.mark.parametrize("text", ["- a\n- b\n", "just words", "a: [1, 2", "[]", "false"])
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


@pytest.mark.parametrize("name", named())
def test_a_configuration_survives_being_written_out(name: str) -> None:
    loaded = load(name)
    assert load(msgspec.to_builtins(loaded)) == loaded
    check(loaded)


@pytest.mark.parametrize("name", ["", "a" * 5000, "a\0b", "/proc/self/mem", "/dev/null/local"])
def test_a_file_that_cannot_be_read_is_a_configuration_error(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(name)
    assert caught.value.path == "config"


@pytest.mark.parametrize(
    "text",
    ["[" * 5000, "{a: " * 3000, "topk: 2\ntopk: 3", "{8: 1, 0x8: 2}", "a: b: c", "--- 1\n--- 2", "\x01", "[1", "!!x 1"],
)
def test_what_is_no_yaml_is_an_error_in_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(text)
    for arguments in ((path, ()), ("local", [f"speculation={text}"])):
        with pytest.raises(ConfigError) as caught:
            load(*arguments)
        assert len(str(caught.value).splitlines()) == 1


def test_a_mapping_may_be_merged(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("speculation:\n  <<: {topk: 2, placement: local}\n  topk: 3\n")
    assert load(path).speculation.topk == 3
