"""What keys mean together: names, policies, the longest request."""

from __future__ import annotations

import pytest

from distspec.config import load
from distspec.errors import ConfigError, InvalidValue


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


def test_a_loaded_configuration_is_frozen() -> None:
    with pytest.raises(AttributeError):
        load("local").engine.page_size = 32  # type: ignore[misc]
