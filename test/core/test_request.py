"""What a request may hold: each bad field is refused with one sentence."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memspec_core.errors import RequestError
from memspec_core.request import (
    MAX_DRAFT_NAME_BYTES,
    MAX_MESSAGES,
    MAX_PROMPT_BYTES,
    MAX_ROLE_BYTES,
    MAX_STOP_BYTES,
    MAX_STOP_STRINGS,
    ChatMessage,
    FinishReason,
    GenerationRequest,
    SamplingSettings,
)

DRAFTS = ("general", "code")
GOOD = GenerationRequest(prompt="Hello")
USER = ChatMessage("user", "Hello")


def refused(request: GenerationRequest, *parts: str) -> None:
    with pytest.raises(RequestError) as error:
        request.validated(DRAFTS)
    said = str(error.value)
    assert "\n" not in said
    assert said.endswith(".")
    assert all(part in said for part in parts), said


def test_a_prompt_becomes_one_user_message() -> None:
    assert GOOD.validated(DRAFTS).messages == (USER,)
    assert replace(GOOD, raw=True).validated(DRAFTS).messages == ()
    given_messages = (ChatMessage("system", "Be brief."), USER)
    assert GenerationRequest(messages=given_messages).validated(()).messages == given_messages


def test_validating_twice_is_harmless_for_messages() -> None:
    request = GenerationRequest(messages=(USER,))
    assert request.validated(DRAFTS).validated(DRAFTS) == request


@pytest.mark.parametrize("prompt", ["", " ", "\n\t ", "\u3000"])
@pytest.mark.parametrize("raw", [False, True])
def test_empty_prompts(prompt: str, raw: bool) -> None:
    refused(GenerationRequest(prompt=prompt, raw=raw), "empty")


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (GenerationRequest(prompt="a", messages=(USER,)), "not both"),
        (GenerationRequest(messages=(USER,), raw=True), "raw"),
        (GenerationRequest(messages=(ChatMessage("", "a"),)), "role"),
        (GenerationRequest(messages=(ChatMessage("user", " "),)), "empty"),
        (GenerationRequest(prompt="a" * (MAX_PROMPT_BYTES + 1)), "longer"),
        (GenerationRequest(prompt="é" * (MAX_PROMPT_BYTES // 2 + 1)), "longer"),
        (GenerationRequest(messages=(USER, ChatMessage("user", "a" * MAX_PROMPT_BYTES))), "longer"),
        (GenerationRequest(prompt="broken \udcff text"), "UTF-8"),
        (GenerationRequest(messages=(ChatMessage("user", "\ud800"),)), "UTF-8"),
        (GenerationRequest(messages=(ChatMessage("\udcff", "a"),)), "UTF-8"),
        (replace(GOOD, stop=("\udcff",)), "UTF-8"),
        (replace(GOOD, stop=("",)), "stop string"),
        (replace(GOOD, stop=("a" * 1025,)), "stop string"),
        (replace(GOOD, stop=("a",) * 17), "stop strings"),
        (replace(GOOD, draft="poetry"), "'poetry'"),
        (replace(GOOD, draft="General"), "general, code, lookup, none"),
        (replace(GOOD, draft="a\nERROR b"), r"a\nERROR b"),
        (replace(GOOD, draft="\udcff"), "UTF-8"),
        (replace(GOOD, draft="a" * (MAX_DRAFT_NAME_BYTES + 1)), "draft's name"),
        (GenerationRequest(messages=(USER,) * (MAX_MESSAGES + 1)), "messages"),
        (GenerationRequest(messages=(ChatMessage("r" * (MAX_ROLE_BYTES + 1), "a"),)), "role"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_texts_that_are_refused(request_: GenerationRequest, said: str) -> None:
    refused(request_, said)


@pytest.mark.parametrize(
    "request_",
    [
        GenerationRequest(prompt="a" * MAX_PROMPT_BYTES),
        GenerationRequest(messages=(USER,) * MAX_MESSAGES),
        GenerationRequest(messages=(ChatMessage("r" * MAX_ROLE_BYTES, "a"),)),
        replace(GOOD, stop=("a" * MAX_STOP_BYTES,) * MAX_STOP_STRINGS),
    ],
    ids=lambda _: "",
)
def test_limits_are_inclusive(request_: GenerationRequest) -> None:
    request_.validated(DRAFTS)


@pytest.mark.parametrize("draft", ["", "none", "general", "code"])
def test_drafts_that_may_be_named(draft: str) -> None:
    assert replace(GOOD, draft=draft).validated(DRAFTS).draft == draft


NUMBERS: list[tuple[str, list[float], list[float]]] = [
    ("max_new_tokens", [0, 1, 1_000_000], [-1, 1_000_001, 2**40, 10**400]),
    ("temperature", [0.0, 1e-45, 1.0, 100.0], [-0.1, 100.1, 1e30, math.nan, math.inf, -math.inf]),
    ("top_p", [0.0, 0.5, 1.0], [-0.1, 1.1, math.nan, math.inf]),
    ("top_k", [0, 1, 10_000_000], [-1, 10_000_001, 10**400]),
    ("seed", [0, 2**64 - 1], [-1, 2**64, 10**400]),
    ("time_limit_seconds", [0.0, 0.001, 1e9], [-1.0, 1e10, math.nan, math.inf]),
    ("priority", [-128, 0, 127], [-129, 128, 10**400]),
]


def with_number(name: str, value: Any) -> GenerationRequest:
    if name in ("temperature", "top_p", "top_k", "seed"):
        return replace(GOOD, sampling=SamplingSettings(**{name: value}))
    return replace(GOOD, **{name: value})


@pytest.mark.parametrize(("name", "good", "bad"), NUMBERS, ids=[name for name, *_ in NUMBERS])
def test_numbers(name: str, good: list[float], bad: list[float]) -> None:
    for value in good:
        with_number(name, value).validated(DRAFTS)
    for value in bad:
        refused(with_number(name, value), name.removesuffix("_seconds"), "between")


@given(
    request=st.builds(
        GenerationRequest,
        prompt=st.text(st.characters(), max_size=5),
        messages=st.lists(
            st.builds(ChatMessage, st.text(st.characters(), max_size=3), st.text(st.characters())),
            max_size=2,
        ).map(tuple),
        raw=st.booleans(),
        max_new_tokens=st.integers(),
        sampling=st.builds(
            SamplingSettings, st.floats(), st.floats(), st.integers(), st.integers()
        ),
        stop=st.lists(st.text(st.characters()), max_size=3).map(tuple),
        draft=st.sampled_from(["", "none", "general", "x"]),
        time_limit_seconds=st.floats(),
        priority=st.integers(),
    )
)
def test_anything_is_taken_or_refused_with_its_error(request: GenerationRequest) -> None:
    try:
        checked = request.validated(DRAFTS)
    except RequestError as error:
        str(error).encode()
    else:
        assert checked.raw or checked.messages


def test_greedy_is_temperature_zero() -> None:
    assert SamplingSettings().greedy
    assert not SamplingSettings(temperature=0.01).greedy


def test_finish_reasons_are_those_of_the_message() -> None:
    assert [reason.value for reason in FinishReason] == [1, 2, 3, 4, 5, 6]
