"""What the drafts did for an answer, in words for a terminal."""

from collections.abc import Iterator

from memspec_core.request import PLAIN, FinishReason
from memspec_msgs.msg import GenerationStats


def one_line(stats: GenerationStats, finish_reason: int) -> str:
    """Return the gist of a generation in one line."""
    return (
        f"[{stats.generated_tokens} tokens at {stats.tokens_per_second:.1f} tokens/s, first after "
        f"{stats.time_to_first_token_seconds:.2f} s; {_drafts(stats)}; "
        f"ended by {reason_text(finish_reason)}]"
    )


def table(stats: GenerationStats, finish_reason: int) -> Iterator[str]:
    """Yield the lines of a readable account of a generation."""
    yield f"prompt                {stats.prompt_tokens} tokens in {stats.prompt_seconds:.2f} s"
    yield f"answer                {stats.generated_tokens} tokens in {stats.iterations} iterations"
    yield f"ended by              {reason_text(finish_reason)}"
    yield f"first token after     {stats.time_to_first_token_seconds:.2f} s"
    yield f"speed                 {stats.tokens_per_second:.1f} tokens/s"
    yield f"drafted               {stats.drafted_tokens} tokens"
    yield f"accepted              {stats.accepted_tokens} tokens{_share(stats)}"
    yield f"mean accepted         {stats.mean_accepted:.2f} tokens an iteration"
    yield f"desired draft         {stats.desired_seconds:.2f} s of decoding"
    yield f"fallback              {stats.fallback_seconds:.2f} s"
    yield f"waiting for loads     {stats.load_wait_seconds:.2f} s"
    yield f"prediction            {stats.prediction_seconds:.2f} s"
    for usage in stats.drafts:
        name = "plain decoding" if usage.draft == PLAIN else f"draft '{usage.draft}'"
        yield (
            f"{name:<21} {usage.iterations} iterations, {usage.accepted_tokens} of "
            f"{usage.drafted_tokens} drafted tokens accepted, {usage.generated_tokens} tokens "
            f"in {usage.seconds:.2f} s"
        )


def reason_text(finish_reason: int) -> str:
    """Return a finish reason in words."""
    try:
        return FinishReason(finish_reason).name.lower().replace("_", " ")
    except ValueError:
        return "an unknown reason"


def _drafts(stats: GenerationStats) -> str:
    if not stats.drafted_tokens:
        return "no draft took part"
    names = ", ".join(usage.draft for usage in stats.drafts if usage.draft != PLAIN)
    return (
        f"draft {names}: {stats.accepted_tokens} of {stats.drafted_tokens} drafted tokens "
        f"accepted, {stats.mean_accepted:.2f} an iteration"
    )


def _share(stats: GenerationStats) -> str:
    if not stats.drafted_tokens:
        return ""
    return f" ({stats.accepted_tokens / stats.drafted_tokens:.0%} of the drafted)"
