"""Prompts said otherwise, by fixed rules: does the routing follow the topic or the wording?

Each rule leaves the topic as it is. Mixed prompts ask for two topics in one request, so that the
best draft changes within an answer.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

_SYSTEM = (
    "You are the assistant of a mobile robot. Be helpful, accurate and polite, and say so when "
    "you do not know something."
)
_GREETING = "Guten Tag! Ich hoffe, es geht Ihnen gut. Hier ist meine Frage:"
_BRIEF = "Answer briefly."


def system_prompt(text: str) -> str:
    """Put general instructions in front, in the same message."""
    return f"{_SYSTEM}\n\n{text}"


def instruction_last(text: str) -> str:
    """Move what comes first to the end.

    That is the first paragraph, or of a single paragraph the first sentence; a single sentence
    stays as it is.
    """
    first, separator, rest = text.strip().partition("\n\n")
    if not separator:
        first, *others = re.split(r"(?<=[.?!:])\s+", first, maxsplit=1)
        rest, separator = "".join(others), " "
    return f"{rest.strip()}{separator}{first}" if rest.strip() else first


def lower_case(text: str) -> str:
    """Write everything small."""
    return text.lower()


def answer_briefly(text: str) -> str:
    """Ask for a short answer at the end."""
    return f"{text}\n\n{_BRIEF}"


def foreign_greeting(text: str) -> str:
    """Greet in another language first."""
    return f"{_GREETING}\n\n{text}"


PARAPHRASES: Mapping[str, Callable[[str], str]] = {
    "system_prompt": system_prompt,
    "instruction_last": instruction_last,
    "lower_case": lower_case,
    "answer_briefly": answer_briefly,
    "foreign_greeting": foreign_greeting,
}
"""By the name of the folder that their prompts go to."""

MIXED = "mixed_topics"
"""The folder of prompts with two topics."""


def two_topics(first: str, second: str) -> str:
    """Ask for two things in one request."""
    return (
        f"I have two requests. The first:\n\n{first}\n\nWhen that is done, the second:\n\n{second}"
    )


def mixed_pairs(domains: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs of domains that are asked for together, each pair once."""
    return list(combinations(domains, 2))
