"""What keys mean together: names, policies, the longest request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import msgspec
import pytest

from distspec.config import Config, load
from distspec.errors import ConfigError, InvalidValue


def test_without_max_model_len_pages_and_model_decide_the_longest_request() -> None:
    free = ["model.max_model_len=null"]
    assert load("local", free).max_model_len(8192) == 8192
    assert load("local", [*free, "engine.num_pages=1000"]).max_model_len(8192) == 8192
    assert load("local", [*free, "engine.num_pages=100"]).max_model_len(8192) == 98 * 16 - 64
    assert load("local", [*free, "engine.num_pages=7"]).max_model_len(8192) == 16
    with pytest.raises(InvalidValue, match=r"need >= 7 to hold any request"):
        load("local", [*free, "engine.num_pages=6"])


@pytest.mark.parametrize("pool", ["prefill", "decode", "verify", "draft"])
@pytest.mark.parametrize(
    ("device", "num_gpus", "asks"),
    [("auto", 0, False), ("auto", 0.25, True), ("auto", 1, True), ("cpu", 1, False), ("cuda", 0, True)],
)
def test_auto_asks_for_a_gpu_in_the_pools_that_do(pool: str, device: str, num_gpus: float, asks: bool) -> None:
    config = load("local", [f"engine.device={device}", f"pools.{pool}.num_gpus={num_gpus}"])
    assert config.asks_for_gpu(pool) == asks


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


@pytest.mark.parametrize(
    ("path", "value", "choices"),
    [
        ("speculation.policy", "warp", "ar, sd, pearl, dsi, ssd, bvsp, auto"),
        ("speculation.allowed_policies[1]", "warp", "ar, sd, pearl, dsi, ssd, bvsp, auto"),
        ("speculation.drafter", "psychic", "none, ngram, suffix, standalone, eagle, eagle3, mtp, dflash"),
        ("server.tool_call_parser", "json", "hermes, llama3_json"),
    ],
)
def test_an_unknown_choice_is_refused_with_those_there_are(path: str, value: str, choices: str) -> None:
    key, item, _ = path.partition("[")
    with pytest.raises(ConfigError, match=f"'{value}', need one of {choices}$") as caught:
        load("local", [f"{key}={f'[sd, {value}]' if item else value}"])
    assert caught.value.path == path


def numbers(kind: type, path: str = "") -> Iterator[str]:
    """Keys of numbers, in tables too."""
    for item in msgspec.structs.fields(kind):
        here = f"{path}{item.name}"
        parts = [item.type]
        for part in parts:
            parts += get_args(part)
        if isinstance(item.type, type) and issubclass(item.type, msgspec.Struct):
            yield from numbers(item.type, f"{here}.")
        elif int in parts or float in parts:
            yield here


@pytest.mark.parametrize("value", [".inf", "-.inf", ".nan", "1e30", str(10**30), "-1", "true", "'1'"])
@pytest.mark.parametrize("key", numbers(Config))
def test_a_number_that_nothing_could_be_sized_by_is_refused(key: str, value: str) -> None:
    text = {"resources": f"{{rack: {value}}}", "synthetic_acceptance": f"[{value}]"}.get(key.rpartition(".")[2], value)
    with pytest.raises(ConfigError) as caught:
        load("local", [f"{key}={text}"])
    assert caught.value.path.startswith(key)


@pytest.mark.parametrize("table", ["{0: 4}", "{-1: 4}", "{8: 0}", "{8: 65}", "{8: true}", f"{{{10**30}: 4}}", "{a: 4}"])
def test_a_table_of_nonsense_is_refused(table: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load("local", [f"speculation.num_speculative_tokens={table}"])
    assert caught.value.path == "speculation.num_speculative_tokens"


def test_a_loaded_configuration_is_frozen() -> None:
    with pytest.raises(AttributeError):
        load("local").engine.page_size = 32  # type: ignore[misc]
