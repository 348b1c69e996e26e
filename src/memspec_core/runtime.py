"""The runtime: owns the models and the one thread that works on them, and queues requests."""

import contextlib
import gc
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

from memspec_core.clock import Clock, SystemClock
from memspec_core.engine import Engine, load_engine, return_memory
from memspec_core.errors import (
    MemSpecError,
    NotAcceptingError,
    PromptTooLongError,
    UnknownDraftError,
    is_out_of_memory,
)
from memspec_core.generation import Generation, Listener
from memspec_core.iteration import Iteration
from memspec_core.measurement.counters import RuntimeCounters
from memspec_core.measurement.decisions import Decision, decision_writer
from memspec_core.measurement.record import Beginning, RecordWriter, prompt_of
from memspec_core.request import (
    LOOKUP,
    PLAIN,
    FinishReason,
    GenerationRequest,
    check_draft_name,
)
from memspec_core.request_queue import RequestQueue
from memspec_core.residency.pressure import CHECK_SECONDS
from memspec_core.settings import Settings
from memspec_core.snapshot import (
    DraftSnapshot,
    DraftState,
    LoadCounters,
    MemorySnapshot,
    RuntimeSnapshot,
    TargetSnapshot,
)
from memspec_core.speculation.schema import SchemaChecker
from memspec_core.strategies import StaticStrategy, Strategy, create_strategy
from memspec_core.strategies.utility import DraftCosts

DISPLACED = "A newer request of the same or a higher priority took its place."

_LOG = logging.getLogger(__name__)


class Runtime:
    """Loads models, takes requests through a gate and a bounded queue, and runs them in turn.

    Any thread may call any method. `on_change` is called from the worker or the loader whenever
    the drafts, the queue or the gate have changed, `on_decision` from the worker with each
    scheduling decision; both must return at once. `drafts_may_fail`: drafts that are there but
    cannot be loaded count as failed, in `load` as well as later, and the rest goes on.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        clock: Clock | None = None,
        on_change: Callable[[], None] | None = None,
        on_decision: Callable[[Decision], None] | None = None,
        drafts_may_fail: bool = False,
    ) -> None:
        self._settings = settings
        self._drafts_may_fail = drafts_may_fail
        self._clock = clock or SystemClock()
        self._on_change = on_change or (lambda: None)
        self._on_decision = on_decision
        self._counters = RuntimeCounters(self._clock)
        self._schemas = SchemaChecker()
        self._condition = threading.Condition()
        self._describing = threading.Lock()
        self._queue = RequestQueue[Generation](settings.queue_policy, settings.queue_size)
        self._commands: deque[Callable[[], None]] = deque()
        self._running: Generation | None = None
        self._engine: Engine | None = None
        self._worker: threading.Thread | None = None
        self._worker_error = ""
        self._predictor_fault = ""
        self._record: RecordWriter | None = None
        self._accepting = False
        self._closing = False
        self._active = ""
        self._wanted = ""

    def load(self) -> None:
        """Load target and first drafts in the worker thread and wait for it.

        All objects of the process are left out of garbage collection from then until `close`.
        Raises `MemSpecError`; everything is freed then.
        """
        if self._worker is not None:
            raise NotAcceptingError("The models are loaded already; close the runtime first.")
        loaded: Future[None] = Future()
        self._closing = False
        self._worker_error = ""
        self._worker = threading.Thread(
            target=self._work, args=(loaded,), name="memspec-worker", daemon=True
        )
        self._worker.start()
        try:
            loaded.result()
        except BaseException:
            self.close()
            raise
        # Else the collector looks through all that was imported and loaded in the midst of an
        # answer, which takes as long as a short answer itself.
        gc.collect()
        gc.freeze()

    def interrupt_load(self) -> None:
        """Make a load under way end soon, with `NotAcceptingError`."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()

    def open(self) -> None:
        """Open the gate: requests are taken from here on."""
        with self._condition:
            self._loaded_engine()
            self._accepting = True
        self._on_change()

    def shut(self, reason: str = "The runtime was deactivated.") -> None:
        """Close the gate; running and queued generations end as ABORTED, with their text."""
        with self._condition:
            self._accepting = False
            queued = self._queue.clear()
            if self._running is not None:
                self._running.interrupt(FinishReason.ABORTED, reason)
        for generation in queued:
            self._end(generation, FinishReason.ABORTED, reason)
        with self._condition:
            self._condition.wait_for(lambda: self._running is None)
        self._on_change()

    def close(self) -> None:
        """End everything and free all models; a second call does nothing."""
        self.shut("The runtime was closed.")
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        if self._worker is not None:
            self._worker.join()
            self._worker = None
        gc.unfreeze()
        return_memory()

    def check(self, request: GenerationRequest) -> None:
        """Raise what `submit` would raise now."""
        self._checked(request)
        with self._condition:
            self._require_accepting()
            self._queue.check(request.priority, self._running)

    def submit(
        self,
        request: GenerationRequest,
        listener: Listener | None = None,
        strategy: Strategy | None = None,
    ) -> Generation:
        """Queue a request.

        A `listener` is called with each iteration in the worker's thread, between two iterations:
        what it does delays decoding, but costs less than waking another thread on busy cores.
        A `strategy`, new for this request, replaces the one that the settings name. Raises
        `RequestError`, `QueueFullError` or `NotAcceptingError`, one sentence each.
        """
        checked = self._checked(request)
        generation = Generation(checked, self._clock.now(), self._stop, listener, strategy)
        with self._condition:
            self._require_accepting()
            running = self._running
            displaced = self._queue.add(generation, running)
            if running is not None and self._queue.preempts(generation, running):
                running.interrupt(FinishReason.ABORTED, DISPLACED)
            self._counters.count_accepted()
            self._condition.notify_all()
        for other in displaced:
            self._end(other, FinishReason.ABORTED, DISPLACED)
        self._on_change()
        return generation

    def count_rejected(self) -> None:
        """Count a request that was refused."""
        self._counters.count_rejected()

    def change(self, changes: Mapping[str, object]) -> None:
        """Change parameters that may change at run time; the next interval sees them.

        Raises `SettingsError`, and changes nothing then.
        """
        self._settings = self._settings.with_changes(changes)
        engine = self._engine
        if engine is not None:
            engine.cache.set_capacity(self._settings.resident_capacity)
        self._on_change()

    def pin(self, draft: str, pinned: bool) -> None:
        """Keep a draft resident, or let it go.

        Raises `UnknownDraftError`, `MemoryBudgetError`, `NotAcceptingError`, or `RequestError` for
        a name that is too long to be shown.
        """
        check_draft_name(draft)
        if draft not in self._settings.draft_names:
            known = ", ".join(self._settings.draft_names) or "none"
            raise UnknownDraftError(f"Unknown draft {draft!r}; there are: {known}.")
        self._command(lambda engine: engine.cache.pin(draft, pinned))

    def unload_drafts(self) -> None:
        """Let all drafts go, as after configure with none resident; raises `NotAcceptingError`."""
        self._command(lambda engine: engine.cache.clear())

    def draft_costs(self) -> DraftCosts:
        """Return what drafts cost, as measured so far; raises `NotAcceptingError`."""
        return self._loaded_engine().planner

    def strategy(self, name: str) -> Strategy:
        """Return a new strategy of a name, with the predictor that is loaded."""
        settings = replace(self._settings, strategy=name)
        return create_strategy(settings, self._loaded_engine().predictor, self._note_predictor)

    @property
    def running(self) -> Generation | None:
        """The generation that the worker is at."""
        return self._running

    def snapshot(self) -> RuntimeSnapshot:
        """Return the state as of now; never waits for decoding or loading."""
        with self._describing:
            return self._snapshot()

    def _snapshot(self) -> RuntimeSnapshot:
        settings, engine, worker = self._settings, self._engine, self._worker
        with self._condition:
            queue_length, running = len(self._queue), self._running is not None
        return RuntimeSnapshot(
            resident_capacity=settings.resident_capacity,
            scheduling_interval=settings.scheduling_interval,
            strategy=settings.strategy,
            queue_capacity=settings.queue_size,
            loaded=engine is not None,
            accepting=self._accepting,
            worker_alive=worker is not None and worker.is_alive(),
            worker_error=self._worker_error,
            running=running,
            queue_length=queue_length,
            active=self._active,
            wanted=self._wanted,
            drafts=self._draft_snapshots(engine),
            predicted=engine.predictor.plan.drafts if engine and engine.predictor else (),
            predictor_error=(engine.predictor_error or self._predictor_fault) if engine else "",
            proposal=engine.planner.plan.describe() if engine else "",
            target=engine.describe_target() if engine else TargetSnapshot(),
            memory=engine.describe_memory() if engine else MemorySnapshot(),
            loads=engine.cache.counters() if engine else LoadCounters(),
            generations=self._counters.snapshot(),
        )

    def _note_predictor(self, fault: str) -> None:
        """Keep why the predictor failed at the last ranking, nothing where it did not."""
        if fault != self._predictor_fault:
            self._predictor_fault = fault
            self._on_change()

    def _draft_snapshots(self, engine: Engine | None) -> tuple[DraftSnapshot, ...]:
        if engine is None:
            stored = DraftState.STORED
            return tuple(DraftSnapshot(d.name, d.path, "", stored) for d in self._settings.drafts)
        cache = engine.cache
        return tuple(
            DraftSnapshot(
                name=name,
                path=str(plan.path),
                kind=plan.kind,
                state=cache.state(name),
                pinned=cache.pinned(name),
                bytes=plan.weight_bytes + plan.kv_bytes,
                score=cache.score(name),
                acceptance=self._counters.acceptance(name),
                uses=self._counters.uses(name),
                error=cache.error(name),
                acceptance_by_position=self._counters.acceptance_by_position(name),
            )
            for name, plan in engine.drafts.items()
        )

    def _command(self, action: Callable[[Engine], None]) -> None:
        """Have the worker do something between two iterations, and wait for it."""
        done: Future[None] = Future()

        def command() -> None:
            try:
                action(self._loaded_engine())
                done.set_result(None)
            except Exception as error:
                done.set_exception(error)

        with self._condition:
            self._loaded_engine()
            self._commands.append(command)
            self._condition.notify_all()
        done.result()

    def _loaded_engine(self) -> Engine:
        if self._engine is None:
            raise NotAcceptingError("No model is loaded; configure first.")
        return self._engine

    def _checked(self, request: GenerationRequest) -> GenerationRequest:
        """Return a request with its messages filled in; raises `RequestError`."""
        checked = request.validated(self._settings.draft_names)
        if request.json_schema:
            self._schemas.check(request.json_schema)
        return checked

    def _require_accepting(self) -> None:
        if not self._accepting:
            raise NotAcceptingError("The runtime takes no requests: it is not active.")

    def _stop(self, generation: Generation, reason: FinishReason) -> None:
        with self._condition:
            waited = self._queue.remove(generation)
            if not waited:
                generation.interrupt(reason)
        if waited:
            self._end(generation, reason)

    def _end(self, generation: Generation, reason: FinishReason, error: str = "") -> None:
        self._counters.count_result(generation.finish(reason, error))
        self._on_change()

    def _work(self, loaded: "Future[None]") -> None:
        """Be the worker thread: load, serve, free."""
        try:
            self._record = self._record_writer()
            self._engine = load_engine(
                lambda: self._settings,
                self._clock,
                between_parts=self._stop_if_closing,
                on_change=self._on_change,
                on_load_finished=self._collect_loads,
                on_decision=self._decision_listener(),
                drafts_may_fail=self._drafts_may_fail,
            )
        except BaseException as error:
            loaded.set_exception(error)
            return
        loaded.set_result(None)
        try:
            self._serve()
        except Exception as error:
            _LOG.exception("The worker thread died")
            why = "out of memory" if is_out_of_memory(error) else repr(error)
            self._worker_error = f"The worker thread died: {why}."
        finally:
            self._free()

    def _decision_listener(self) -> Callable[[Decision], None] | None:
        """Return what is told decisions: whoever asked for them, and the files of the settings."""
        listeners = [self._on_decision] if self._on_decision else []
        if self._settings.decisions_path:
            listeners.append(decision_writer(Path(self._settings.decisions_path).expanduser()))
        if self._record is not None:
            listeners.append(self._record.decision)

        def tell(decision: Decision) -> None:
            for listener in listeners:
                listener(decision)

        return tell if listeners else None

    def _record_writer(self) -> RecordWriter | None:
        path = self._settings.record_path
        return RecordWriter(Path(path).expanduser()) if path else None

    def _stop_if_closing(self) -> None:
        if self._closing:
            raise NotAcceptingError("The load was interrupted.")

    def _collect_loads(self) -> None:
        """Have the worker take over finished loads, also when it is idle."""
        with self._condition:
            if self._engine is not None:
                self._commands.append(self._engine.cache.collect)
                self._condition.notify_all()

    def _serve(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(
                    lambda: self._closing or self._commands or self._queue, timeout=CHECK_SECONDS
                )
                if self._closing:
                    return
                self._running = self._queue.take()
            self._run_commands()
            if self._running is not None:
                self._run(self._running)
            self._loaded_engine().rest()

    def _run(self, generation: Generation) -> None:
        """Run one generation to its end; whatever goes wrong ends it alone."""
        reason, error = FinishReason.ABORTED, ""
        try:
            reason = self._decode(generation)
        except MemSpecError as failure:
            error = str(failure)
        except Exception as failure:
            _LOG.exception("A generation failed")
            error = f"The generation failed: {failure!r}."
        self._active = self._wanted = ""
        with self._condition:
            self._running = None
            self._condition.notify_all()
        self._end(generation, reason, error)

    def _decode(self, generation: Generation) -> FinishReason:
        assert self._engine is not None
        prompt_ids = self._engine.target.tokenizer.prompt_ids(generation.request)
        if len(prompt_ids) > self._settings.max_prompt_tokens:
            raise PromptTooLongError(
                f"The prompt has {len(prompt_ids)} tokens; max_prompt_tokens is "
                f"{self._settings.max_prompt_tokens}."
            )
        generation.begin(len(prompt_ids))
        strategy = generation.strategy or self._strategy(generation.request)
        if self._record is not None:
            asked = prompt_of(generation.request)
            self._record.begin(Beginning.of(asked, prompt_ids, strategy.name, self._settings))
        iterations = self._engine.controller.generate(
            generation.request,
            prompt_ids,
            strategy,
            lambda: generation.interruption(self._clock.now()),
        )
        reason = FinishReason.ABORTED
        with contextlib.closing(iterations):  # also where a listener raises
            for iteration in iterations:
                now = self._clock.now()
                self._counters.count_iteration(iteration)
                generation.record(iteration, now)
                self._show(iteration)
                self._run_commands()
                if self._record is not None:
                    cache = self._engine.cache
                    self._record.iteration(iteration, now, cache.residents, cache.loading)
                reason = iteration.finish_reason or reason
        return reason

    def _strategy(self, request: GenerationRequest) -> Strategy:
        if request.draft:
            return StaticStrategy(request.draft)
        return self.strategy(self._settings.strategy)

    def _show(self, iteration: Iteration) -> None:
        shown = (iteration.draft, iteration.wanted)
        by_choice = iteration.draft in (PLAIN, LOOKUP) and not iteration.fallback
        if shown == (self._active, self._wanted) or (by_choice and self._active):
            return  # what the planner prefers from one iteration to the next is no change of draft
        self._active, self._wanted = shown
        self._on_change()

    def _run_commands(self) -> None:
        if self._engine is not None:
            self._engine.pressure.check()
        while self._commands:
            self._commands.popleft()()

    def _free(self) -> None:
        """Give up the models and whatever still waits for them."""
        # Nobody who describes the models may keep them beyond this.
        with self._describing, self._condition:
            engine, self._engine = self._engine, None
            self._predictor_fault = ""
            self._accepting = False
            # One that still runs here was left behind by a thread that ends in the midst of it.
            waiting = [*filter(None, (self._running,)), *self._queue.clear()]
            self._running = None
            self._condition.notify_all()
        for generation in waiting:
            self._end(generation, FinishReason.ABORTED, self._worker_error or "The worker ended.")
        if engine is not None:
            engine.close()
        self._run_commands_after_close()

    def _run_commands_after_close(self) -> None:
        while self._commands:
            command = self._commands.popleft()
            try:
                command()
            except Exception:
                _LOG.debug("A command came after the runtime was closed")
