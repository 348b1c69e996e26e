"""Names and numbers as the report and the pictures write them."""

from collections.abc import Sequence

from memspec_core.evaluation.comparison import PINNED
from memspec_core.evaluation.reproduction.claims import Claim
from memspec_core.evaluation.reproduction.estimates import Estimate
from memspec_core.evaluation.reproduction.figures import SHARE, Value

SETTINGS = {
    "real": "this machine, real runs",
    "ours": "our traces, simulated board",
    "paper_like": "generated traces, simulated board",
}

_NAMES = {
    "general_static": "General-Static",
    "oracle_static": "Oracle-Static",
    "oracle_dynamic": "Oracle-Dynamic",
    "mab_sync": "MAB-Sync",
    "mab_async": "MAB-Async",
    "prediction_only": "Prediction-Only",
    "memspec": "MemSpec",
    "desired": "desired draft",
    "fallback": "fallback",
    "load_wait": "load wait",
    "prediction": "prediction",
    "prompt_seconds": "prompt",
    "first_wait": "first load",
    "decoding": "decoding",
    "prompt": "prompt only",
    "recent": "recent only",
    "both": "prompt and recent",
}


def name(key: str) -> str:
    """Return the name of a strategy, a ratio of two, or a part."""
    if key.startswith(PINNED):
        return f"{key.removeprefix(PINNED)} alone"
    return " over ".join(_NAMES.get(part, part) for part in key.split(" / "))


def short_domains(domains: Sequence[str]) -> dict[str, str]:
    """Return domains without the last part that all of them share, such as /eval."""
    endings = {domain.rpartition("/")[2] for domain in domains}
    shared = len(endings) == 1 and all("/" in domain for domain in domains)
    return {domain: domain.rpartition("/")[0] if shared else domain for domain in domains}


def number(value: float, unit: str) -> str:
    """Return a mean."""
    if unit != SHARE:
        return f"{value:.3f}"
    return f"{100 * value:.2f} %" if 0.0 < value < 0.001 else f"{100 * value:.1f} %"


def with_interval(estimate: Estimate, unit: str) -> str:
    """Return a mean with its interval; what is certain has none."""
    mean = number(estimate.mean, unit)
    if estimate.low == estimate.high:
        return mean
    low, high = (number(end, unit).removesuffix(" %") for end in (estimate.low, estimate.high))
    return f"{mean} ({low} to {high})"


def claimed(claim: Claim | None, unit: str) -> str:
    """Return what the paper says."""
    if claim is None:
        return ""
    if claim.low == claim.high:
        return number(claim.high, unit)
    if claim.low < 0:
        return f"at most {number(claim.high, unit)}"
    return f"{number(claim.low, unit)} to {number(claim.high, unit)}"


def told(value: Value) -> str:
    """Return a value with its interval, the null control, and how it lies to the claim."""
    text = with_interval(value.estimate, value.unit)
    if value.control is not None:
        text += f"; chance {number(value.control.mean, value.unit)}"
    if value.claim is not None:
        text += f", {value.claim.verdict(value.estimate.low, value.estimate.high)}"
    return text


def change(ratio: float, digits: int = 0) -> str:
    """Return a ratio as a change in percent."""
    return f"{100 * (ratio - 1):+.{digits}f} %".replace("-", "−")


def percent(share: float) -> str:
    """Return a share, the small ones with a digit more."""
    return f"{100 * share:.1f} %" if abs(share) < 0.1 else f"{100 * share:.0f} %"
