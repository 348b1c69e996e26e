"""Everything that a runtime has in memory: target, drafts, ledger, and the loop over them."""

import ctypes
import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from memspec_core.clock import Clock
from memspec_core.controller import Controller
from memspec_core.errors import CheckpointError, MemoryBudgetError, PredictorError
from memspec_core.measurement.decisions import Decision
from memspec_core.models.draft import (
    FEATURE,
    DraftPlan,
    failed_plan,
    is_there,
    plan_draft,
    shared_taps,
)
from memspec_core.models.pieces import Pace
from memspec_core.models.target import Target, TargetPlan, parse_device, plan_target
from memspec_core.prediction.head import (
    HIDDEN_STATES,
    RankingHead,
    load_head,
    predictor_folder,
    weight_bytes,
)
from memspec_core.residency.cache import DraftBytes, DraftCache
from memspec_core.residency.ledger import Account, Ledger, open_ledger
from memspec_core.residency.loader import DraftLoader
from memspec_core.residency.pressure import MemoryPressure, PressureLevel
from memspec_core.settings import DraftSource, Settings
from memspec_core.snapshot import MemorySnapshot, TargetSnapshot
from memspec_core.speculation.calibration import calibrate
from memspec_core.speculation.chain import IndependentDraft
from memspec_core.speculation.decodings import Decodings
from memspec_core.speculation.feature import FeatureDraft, FeatureTreeDraft
from memspec_core.speculation.planner import Planner
from memspec_core.speculation.proposal import Draft
from memspec_core.speculation.read_ahead import read_ahead
from memspec_core.speculation.tree import TreeDraft
from memspec_core.strategies import PREDICTING, Context, create_strategy

_LOG = logging.getLogger(__name__)

DEFAULT_THREADS = torch.get_num_threads()
"""Torch's own choice. Later it may be another thread's number that a new thread begins with."""


@dataclass(frozen=True)
class Engine:
    """Loaded models with the parts that work on them; owned by the worker thread."""

    target: Target
    drafts: dict[str, DraftPlan]
    ledger: Ledger
    loader: DraftLoader
    cache: DraftCache
    pressure: MemoryPressure
    planner: Planner
    controller: Controller
    predictor: RankingHead | None
    predictor_error: str

    def describe_target(self) -> TargetSnapshot:
        """Return what the target is and what computes it."""
        return TargetSnapshot(
            path=str(self.target.checkpoint.path),
            family=self.target.decoder.config.family,
            dtype=self.target.dtype,
            kernel=self.target.decoder.kernel,
            device=str(self.target.decoder.device),
            threads=self.target.backend.threads,
            context_tokens=self.target.context_tokens,
            weight_bytes=self.target.decoder.weight_bytes,
            kv_bytes_per_token=self.target.cache.rows.nbytes / self.target.cache.capacity,
            pass_seconds=self.planner.costs.verify_seconds,
            read_bytes_per_second=self.planner.costs.read_bytes_per_second,
        )

    def describe_memory(self) -> MemorySnapshot:
        """Return the books, and what was given up because the system is short of memory."""
        return self.pressure.describe(self.ledger.snapshot())

    def rest(self) -> None:
        """Between goals: keep nothing for the next one where memory is too short for that."""
        if self.pressure.level >= PressureLevel.STORE and self.target.cache.length:
            self.target.cache.truncate(0)
            self.target.cache.release_unused()

    def close(self) -> None:
        """Let all drafts go and end the loader."""
        self.cache.clear()
        self.loader.close()


def load_engine(
    settings: Callable[[], Settings],
    clock: Clock,
    *,
    between_parts: Callable[[], None],
    on_change: Callable[[], None],
    on_load_finished: Callable[[], None],
    on_decision: Callable[[Decision], None] | None = None,
    drafts_may_fail: bool = False,
) -> Engine:
    """Load the target, the predictor and the first drafts.

    `settings` is asked again while decoding. `drafts_may_fail`: one that is there but cannot be
    loaded counts as failed, and others take its place. Raises `CheckpointError`, `SettingsError`
    or `MemoryBudgetError`, and whatever `between_parts` raises; nothing stays behind then.
    """
    chosen = settings()
    threads = chosen.threads or DEFAULT_THREADS
    torch.set_num_threads(threads)
    ledger = open_ledger(chosen.memory_budget_mib, chosen.memory_floor_mib)
    plan = plan_target(
        chosen.target_path,
        dtype=chosen.dtype,
        device=parse_device(chosen.device),
        context_tokens=chosen.context_tokens,
        threads=threads,
    )
    ledger.reserve(Account.TARGET, "target", plan.weight_bytes + plan.tokenizer_bytes)
    drafts = {d.name: _plan_draft(d, plan, drafts_may_fail) for d in chosen.drafts}
    plan = plan.with_taps(shared_taps(drafts.values()) or _states_for(chosen, plan))
    ledger.reserve(Account.KV, "target", plan.kv_bytes)
    target = plan.load(between_parts)
    if target.backend.own_threads:
        # They wait by spinning for a while, and so do torch's: they would compete.
        torch.set_num_threads(1)
    ledger.correct(Account.TARGET, "target", target.decoder.weight_bytes + plan.tokenizer_bytes)

    head, error = _load_predictor(chosen, target, ledger)

    def load(name: str, pace: Pace) -> Draft:
        draft = _load_draft(drafts[name], target, chosen.draft_shape, pace)
        if cache.demanded == name:  # what is only loaded ahead may never run
            read_ahead(draft, target, pace)
        return draft

    loader = DraftLoader(
        load,
        clock,
        on_finished=on_load_finished,
        device=target.decoder.device,
    )
    cache = DraftCache(
        {
            name: DraftBytes(d.weight_bytes, d.kv_bytes, d.transient_bytes)
            for name, d in drafts.items()
        },
        loader,
        ledger,
        chosen.resident_capacity,
        clock,
        on_change,
    )
    try:
        for draft in drafts.values():
            if draft.error:
                cache.fail(draft.name, draft.error)
        first = _load_first_drafts(cache, chosen, between_parts, drafts_may_fail)
        between_parts()
        planner = Planner(calibrate(target, first, clock))
        loader.limit_rate(planner.costs.read_bytes_per_second)
        book = partial(ledger.reserve, Account.TOKENS, "target")
        decodings = Decodings(target, planner, settings, clock, book)
        controller = Controller(decodings.begin, cache, planner, settings, clock, on_decision)
        pressure = MemoryPressure(
            cache,
            ledger.floor_bytes,
            clock,
            release_store=target.cache.release_unused,
            return_memory=return_memory,
        )
    except BaseException:
        cache.clear()
        loader.close()
        raise
    return Engine(target, drafts, ledger, loader, cache, pressure, planner, controller, head, error)


def return_memory() -> None:
    """Collect what is unreachable and give freed memory back to the system where it can be."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        _LOG.debug("This C library has no malloc_trim")


def _plan_draft(draft: DraftSource, target: TargetPlan, may_fail: bool) -> DraftPlan:
    try:
        return plan_draft(draft.name, draft.path, target)
    except CheckpointError as error:
        if not may_fail or not is_there(draft.name, draft.path):
            raise
        _LOG.error("The draft '%s' is left out: %s", draft.name, error)
        return failed_plan(draft.name, draft.path, target, error)


def _load_draft(plan: DraftPlan, target: Target, shape: str, pace: Pace) -> Draft:
    vocabulary_size, is_tree = target.decoder.config.vocabulary_size, shape == "tree"
    if plan.kind == FEATURE:
        layers, rows = plan.load_feature(target, pace)
        of_features = FeatureTreeDraft if is_tree else FeatureDraft
        return of_features(plan.name, layers, rows, vocabulary_size, target.cache)
    decoder, cache = plan.load(target, pace)
    kind = TreeDraft if is_tree else IndependentDraft
    return kind(plan.name, decoder, cache, vocabulary_size)


def _states_for(settings: Settings, plan: TargetPlan) -> tuple[int, ...]:
    """Return the layers whose states a strategy needs where no draft does: the last, or none."""
    return (plan.checkpoint.config.layers - 1,) if settings.strategy in PREDICTING else ()


def _load_predictor(
    settings: Settings, target: Target, ledger: Ledger
) -> tuple[RankingHead | None, str]:
    """Return the predictor, or why the strategy has to do without it; one draft needs none."""
    if len(settings.drafts) < 2:
        return None, ""
    try:
        folder = predictor_folder(settings.predictor_path)
        ledger.reserve(Account.PREDICTOR, "target", weight_bytes(folder))
        head = load_head(folder, target.checkpoint.sha256())
        if head.plan.encoder != HIDDEN_STATES:
            raise PredictorError(
                f"The predictor in {settings.predictor_path} reads '{head.plan.encoder}', which is "
                f"for comparison only; train one on {HIDDEN_STATES}."
            )
        if target.cache.taps[-1:] != (target.decoder.config.layers - 1,):
            raise PredictorError(
                "The predictor reads the target's last states, which these drafts do not keep; "
                f"their taps are {list(target.cache.taps)}."
            )
    except (PredictorError, MemoryBudgetError) as error:
        ledger.release(Account.PREDICTOR, "target")
        if settings.strategy not in PREDICTING:
            return None, ""
        _LOG.warning("All drafts count alike: %s", error)
        return None, str(error)
    return head, ""


def _load_first_drafts(
    cache: DraftCache, settings: Settings, between_parts: Callable[[], None], may_fail: bool
) -> dict[str, Draft]:
    """Load the K drafts that rank first before anything is known, or those behind them.

    As many as fit beside each other: none is evicted for another.
    """

    def go_on() -> bool:
        between_parts()
        return False

    first: dict[str, Draft] = {}
    for name in create_strategy(settings).rank(Context(())).order:
        if len(first) == settings.resident_capacity:
            break
        if not cache.may_load(name) or (first and not cache.has_room(name)):
            continue
        try:
            first[name] = cache.require(name, give_up=go_on)
        except (CheckpointError, MemoryBudgetError) as error:
            if not may_fail:
                raise
            if isinstance(error, MemoryBudgetError):
                cache.fail(name, str(error))
            _LOG.error("The draft '%s' is left out for now: %s", name, error)
    return first
