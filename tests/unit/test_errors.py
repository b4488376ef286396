"""The error tree: what crosses a boundary keeps its type, its field and its size."""

from __future__ import annotations

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distspec import errors


def _kinds(kind: type[errors.DistspecError]) -> list[type[errors.DistspecError]]:
    return [kind] + [grandchild for child in kind.__subclasses__() for grandchild in _kinds(child)]


def test_every_error_of_the_module_hangs_in_the_tree_that_its_docstring_draws() -> None:
    defined = {
        name
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, Exception) and kind.__module__ == errors.__name__
    }
    drawn = {
        line.replace("|", " ").replace("-", " ").replace("`", " ").split()[0]
        for line in (errors.__doc__ or "").splitlines()
        if line.startswith("    ")
    }
    assert {kind.__name__ for kind in _kinds(errors.DistspecError) if kind.__module__ == errors.__name__} == defined
    assert drawn == defined


@pytest.mark.parametrize("code", sorted(errors.REQUEST_ERRORS))
def test_a_request_error_survives_the_channel(code: str) -> None:
    kind = errors.REQUEST_ERRORS[code]
    back = errors.request_error(code, "what happened", "max_tokens")
    assert type(back) is kind
    assert (back.code, back.status, str(back), back.field) == (code, kind.status, "what happened", "max_tokens")
    assert 400 <= back.status < 600


def test_an_unknown_code_is_still_a_request_error() -> None:
    back = errors.request_error("from_a_newer_coordinator", "no", None)
    assert type(back) is errors.RequestError
    assert back.status == 400


@pytest.mark.parametrize("code", ["overloaded", "unavailable"])
def test_only_what_may_succeed_later_says_when(code: str) -> None:
    assert errors.request_error(code, "busy").retry_after_s
    assert errors.request_error("invalid_value", "never").retry_after_s is None


@given(st.text(max_size=5000))
def test_a_huge_value_does_not_make_a_huge_message(value: str) -> None:
    error = errors.InvalidField("prompt", got=value, need="something short")
    assert len(str(error)) < 160
    assert str(error).startswith("prompt: ")
    assert str(error).endswith("need something short")


def test_messages_name_what_would_work() -> None:
    assert "served: a, b" in str(errors.ModelNotServed("c", ["a", "b"]))
    assert "looked in: here; there" in str(errors.ModelNotFound("m", ["here", "there"]))
    assert "did you mean pools.verify.replicas?" in str(
        errors.UnknownKey("pools.verify.replica", ["pools.verify.replicas"])
    )
    refused = str(errors.HandshakeRefused("verify-0", {"dtype": ("float32", "bfloat16")}))
    assert refused == "verify-0 refused: dtype: fleet has float32, verify-0 has bfloat16"
    assert "engine.num_pages" in str(errors.OutOfPages(need=4, free=1))
    assert "engine.max_num_seqs" in str(errors.OutOfSlots(8))
