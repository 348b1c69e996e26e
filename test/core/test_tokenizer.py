"""Prompts become tokens; tokenizers of drafts are compared with the target's."""

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from memspec_core.errors import RequestError, VocabularyMismatchError
from memspec_core.models.tokenizer import Tokenizer
from memspec_core.request import ChatMessage, GenerationRequest


def words(*tokens: str) -> Tokenizer:
    model = WordLevel({token: index for index, token in enumerate(tokens)}, unk_token=tokens[0])
    backend = PreTrainedTokenizerFast(tokenizer_object=Backend(model))
    return Tokenizer(backend, "words/" + "-".join(tokens))


def test_a_prompt_is_one_user_message(tokenizer: Tokenizer) -> None:
    ids = tokenizer.prompt_ids(GenerationRequest(prompt="Hello").validated(()))
    said = tokenizer.backend.decode(ids)
    assert "<|im_start|>user\nHello<|im_end|>" in said
    assert said.endswith("<|im_start|>assistant\n")


def test_messages_keep_their_roles_and_order(tokenizer: Tokenizer) -> None:
    messages = (ChatMessage("system", "Be brief."), ChatMessage("user", "Hi"))
    ids = tokenizer.prompt_ids(GenerationRequest(messages=messages).validated(()))
    said = tokenizer.backend.decode(ids)
    assert said.index("system\nBe brief.") < said.index("user\nHi")


def test_raw_is_the_text_itself(tokenizer: Tokenizer) -> None:
    request = GenerationRequest(prompt="Hello there", raw=True).validated(())
    assert tokenizer.backend.decode(tokenizer.prompt_ids(request)) == "Hello there"


def test_without_a_template_only_raw_is_taken() -> None:
    plain = words("[unk]", "hello")
    with pytest.raises(RequestError, match="has no chat template"):
        plain.prompt_ids(GenerationRequest(prompt="hello").validated(()))
    request = GenerationRequest(prompt="hello", raw=True).validated(())
    assert plain.prompt_ids(request) == [1]


def test_a_template_that_refuses_is_an_error_of_the_request() -> None:
    plain = words("[unk]", "hello")
    plain.backend.chat_template = "{{ raise_exception('no such role') }}"
    with pytest.raises(RequestError, match="no such role"):
        plain.prompt_ids(GenerationRequest(prompt="hello").validated(()))


def test_equal_maps_are_the_same_tokens(tokenizer: Tokenizer) -> None:
    tokenizer.require_same_tokens(tokenizer)
    assert words("a", "b").sha256() == words("a", "b").sha256() != words("b", "a").sha256()


@pytest.mark.parametrize("pads", [("<pad>",), ("<pad>", "<extra>")])
def test_padding_at_the_end_is_no_difference(pads: tuple[str, ...]) -> None:
    words("a", "b", "c").require_same_tokens(words("a", "b", "c", *pads))
    words("a", "b", "c", *pads).require_same_tokens(words("a", "b", "c"))


@pytest.mark.parametrize("other", [("a", "c", "b"), ("a", "b", "d", "c"), ("x", "b", "c")])
def test_other_tokens_are_refused_by_name(other: tuple[str, ...]) -> None:
    with pytest.raises(VocabularyMismatchError) as refused:
        words("a", "b", "c").require_same_tokens(words(*other))
    assert "words/a-b-c" in str(refused.value)
    assert "words/" + "-".join(other) in str(refused.value)


def test_end_of_sequence_and_decoding(tokenizer: Tokenizer) -> None:
    assert tokenizer.end_of_sequence_ids() == {2}
    assert words("a").end_of_sequence_ids() == frozenset()
    ids = tokenizer.backend.encode("Grüße , 你好")
    assert tokenizer.decode([1, *ids, 2]) == "Grüße , 你好"
