"""Records of simulated generations, in the form of real ones."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from memspec_core.clock import Clock
from memspec_core.iteration import Iteration
from memspec_core.measurement.decisions import Decision
from memspec_core.measurement.record import Beginning, RecordWriter
from memspec_core.measurement.trace import TracedPrompt
from memspec_core.models.text import TextStream
from memspec_core.residency.cache import DraftCache
from memspec_core.settings import Settings

Decode = Callable[[list[int]], str]


class SimulationRecord:
    """Appends simulated generations to a record, with their text where `decode` makes it of tokens.

    Raises `SettingsError` if the file cannot be opened.
    """

    def __init__(self, path: Path, decode: Decode | None = None) -> None:
        self._writer = RecordWriter(path)
        self._decode = decode or (lambda _: "")

    def begin(
        self, prompt: TracedPrompt, strategy: str, settings: Settings, profile: str
    ) -> Callable[[Decision], None]:
        """Begin a generation; return what is to be told its decisions."""
        ids: list[int] = prompt.prompt_ids.tolist()
        self._writer.begin(Beginning.of(prompt.domain, ids, strategy, settings, profile))
        return self._writer.decision

    def follow(
        self,
        iterations: Iterable[Iteration],
        prompt: TracedPrompt,
        clock: Clock,
        cache: DraftCache,
    ) -> Iterator[Iteration]:
        """Yield iterations as they come, each when it is recorded."""
        stream = TextStream(self._decode)
        ids: list[int] = prompt.token_ids.tolist()
        for iteration in iterations:
            cache.collect()  # as the runtime's worker does between iterations
            for token in ids[stream.token_count : iteration.generated_tokens]:
                stream.push(token)
            piece = stream.take() if iteration.finish_reason is None else stream.finish()
            told = replace(iteration, token_ids=piece.token_ids, text=piece.text)
            self._writer.iteration(told, clock.now(), cache.residents, cache.loading)
            yield iteration
