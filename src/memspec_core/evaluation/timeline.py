"""One recorded generation along an axis: which draft ran, which was wanted, what was in memory."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TypeVar

from memspec_core.errors import RecordError
from memspec_core.iteration import Iteration
from memspec_core.measurement.decisions import Decision
from memspec_core.measurement.record import Beginning, RecordedGeneration
from memspec_core.request import LOOKUP, PLAIN, FinishReason

TOKENS, SECONDS = "tokens", "seconds"
AXES = (TOKENS, SECONDS)
"""What an answer is laid out along: its tokens, or the time since decoding began."""


@dataclass(frozen=True)
class Span:
    """A part of the axis."""

    start: float
    end: float

    @property
    def width(self) -> float:
        """Its length on the axis."""
        return self.end - self.start


@dataclass(frozen=True)
class Step:
    """One iteration on the axis, with the scheduling point that it follows."""

    span: Span
    iteration: Iteration
    decision: Decision | None

    @property
    def accepted(self) -> int:
        """How many of the tokens that it gave were proposals; the target's own is not one."""
        return min(self.iteration.accepted, self.iteration.committed)


@dataclass(frozen=True)
class Timeline:
    """What a picture of a generation shows; all numbers on the `axis`.

    `rows`: the candidate drafts in their order, and what else ran or was wanted. `resident` and
    `loading` by draft, as seen at the end of each iteration and at each of the scheduling `points`.
    `wanted`: spans with a draft. `fallback`: where another draft ran. `waits`: where decoding
    stopped for a load (no width along tokens).
    """

    beginning: Beginning
    axis: str
    rows: tuple[str, ...]
    steps: tuple[Step, ...]
    resident: dict[str, tuple[Span, ...]]
    loading: dict[str, tuple[Span, ...]]
    wanted: tuple[tuple[str, Span], ...]
    fallback: tuple[Span, ...]
    waits: tuple[Span, ...]
    points: tuple[float, ...]
    finish_reason: FinishReason | None

    @property
    def end(self) -> float:
        """The end of the last iteration."""
        return self.steps[-1].span.end

    @property
    def tokens(self) -> int:
        """Tokens of the answer."""
        return self.steps[-1].iteration.generated_tokens

    @property
    def seconds(self) -> float:
        """The time of decoding, all kinds; the wait for the first draft is left out."""
        first = self.steps[0].iteration.seconds
        parts = (step.iteration.seconds for step in self.steps)
        spent = sum(part.decode + part.prediction + part.load_wait for part in parts)
        return spent - first.load_wait

    @property
    def fallback_share(self) -> float:
        """The share of the time of decoding in which another draft ran than the wanted one."""
        spent = sum(s.iteration.seconds.decode for s in self.steps if s.iteration.fallback)
        return spent / self.seconds if self.seconds > 0.0 else 0.0

    @property
    def wait_share(self) -> float:
        """The share of the time of decoding that it stopped for loads, but for the first draft."""
        waited = sum(step.iteration.seconds.load_wait for step in self.steps[1:])
        return waited / self.seconds if self.seconds > 0.0 else 0.0

    def wanted_runs(self) -> Iterator[tuple[str, Span]]:
        """Yield each wanted draft with the span over which no other was wanted."""
        yield from _joined(self.wanted)

    def runs(self) -> Iterator[tuple[str, Span]]:
        """Yield each draft with the span over which it ran without another in between."""
        yield from _joined([(step.iteration.draft, step.span) for step in self.steps])


def timeline(generation: RecordedGeneration, axis: str = TOKENS) -> Timeline:
    """Lay a generation out; raises `RecordError` if it has no token."""
    steps, marks = _laid_out(generation, axis)
    if not steps or not steps[-1].iteration.generated_tokens:
        raise RecordError("This generation ended before its first token; choose another one.")
    end = steps[-1].span.end
    decided = [(mark.at, mark.decision.wanted) for mark in marks if mark.decision is not None]
    wanted = tuple(_until_next(decided, end))
    drafts = generation.beginning.drafts
    named = {*(step.iteration.draft for step in steps), *(draft for draft, _ in wanted)}
    others = sorted(named - {*drafts, LOOKUP, PLAIN})
    return Timeline(
        beginning=generation.beginning,
        axis=axis,
        rows=(*drafts, *others, *(name for name in (LOOKUP, PLAIN) if name in named)),
        steps=tuple(steps),
        resident=_held([(mark.at, mark.resident) for mark in marks], end),
        loading=_held([(mark.at, mark.loading) for mark in marks], end),
        wanted=wanted,
        fallback=tuple(_merged(step.span for step in steps if step.iteration.fallback)),
        waits=_waits(steps) if axis == SECONDS else (),
        points=tuple(at for at, _ in decided),
        finish_reason=generation.finish_reason,
    )


@dataclass(frozen=True)
class _Mark:
    """A moment at which it is known what was in memory; at a scheduling point with its decision."""

    at: float
    resident: Collection[str]
    loading: Collection[str]
    decision: Decision | None = None


def _laid_out(generation: RecordedGeneration, axis: str) -> tuple[list[Step], list[_Mark]]:
    """Return the iterations in which the target ran, and what was in memory when."""
    steps: list[Step] = []
    marks: list[_Mark] = []
    decision: Decision | None = None
    began: float | None = None
    end = 0.0
    for event in generation.events:
        if isinstance(event, Decision):
            decision = event
            marks.append(_decided(end, event))
            if axis == TOKENS or began is None:
                continue
            end = max(end, event.at_seconds - began)
        elif event.iteration.ran:
            decode = event.iteration.seconds.decode
            began = event.at_seconds - decode if began is None else began
            reached = event.at_seconds - began
            # A stop string takes off again what iterations before had committed.
            start = end if axis == TOKENS else max(end, reached - decode)
            end = max(start, event.iteration.generated_tokens if axis == TOKENS else reached)
            steps.append(Step(Span(start, end), event.iteration, decision))
        marks.append(_Mark(end, event.resident, event.loading))
    return steps, marks


def _decided(at: float, decision: Decision) -> _Mark:
    """Return what was in memory from a scheduling point on, and while decoding waited there."""
    if decision.load_wait_seconds <= 0.0:
        return _Mark(at, decision.resident, decision.loading, decision)
    resident = [name for name in decision.resident if name != decision.active]
    return _Mark(at, resident, [*decision.loading, decision.active], decision)


_Said = TypeVar("_Said")


def _until_next(moments: Sequence[tuple[float, _Said]], end: float) -> Iterator[tuple[_Said, Span]]:
    """Yield what was said of moments, each with the span from it to the next one."""
    ends = [*(at for at, _ in moments[1:]), end]
    for (at, said), until in zip(moments, ends, strict=False):  # no moment, no end either
        yield said, Span(at, until)


def _joined(spans: Iterable[tuple[str, Span]]) -> Iterator[tuple[str, Span]]:
    """Yield spans of the same name that follow each other as one; those without width vanish."""
    for name, group in groupby((s for s in spans if s[1].width > 0.0), lambda pair: pair[0]):
        parts = [span for _, span in group]
        yield name, Span(parts[0].start, parts[-1].end)


def _held(
    moments: Sequence[tuple[float, Collection[str]]], end: float
) -> dict[str, tuple[Span, ...]]:
    """Return where each draft was in a state that holds from one moment to the next."""
    spans: dict[str, list[Span]] = {}
    for names, span in _until_next(moments, end):
        for name in names:
            spans.setdefault(name, []).append(span)
    return {name: tuple(_merged(found)) for name, found in spans.items()}


def _merged(spans: Iterable[Span]) -> Iterator[Span]:
    """Yield spans that have a width, those that touch as one."""
    whole: Span | None = None
    for span in spans:
        if whole is not None and span.start <= whole.end:
            whole = Span(whole.start, max(whole.end, span.end))
            continue
        if whole is not None and whole.width > 0.0:
            yield whole
        whole = span
    if whole is not None and whole.width > 0.0:
        yield whole


def _waits(steps: Sequence[Step]) -> tuple[Span, ...]:
    return tuple(
        Span(before.span.end, step.span.start)
        for before, step in pairwise(steps)
        if step.iteration.seconds.load_wait > 0.0
    )
