"""From messages to objects of the core and back."""

from builtin_interfaces.msg import Duration, Time
from unique_identifier_msgs.msg import UUID

from memspec_core.measurement.decisions import Decision
from memspec_core.request import (
    ChatMessage,
    DraftUsage,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    GenerationStats,
    SamplingSettings,
)
from memspec_core.snapshot import DraftSnapshot, DraftState, RuntimeSnapshot
from memspec_msgs.action import Generate
from memspec_msgs.msg import ChatMessage as ChatMessageMessage
from memspec_msgs.msg import DraftInfo, RuntimeStatus, SchedulingDecision, TokenChunk
from memspec_msgs.msg import DraftUsage as DraftUsageMessage
from memspec_msgs.msg import GenerationStats as GenerationStatsMessage
from memspec_ros.coalescing import Piece


def request_from_goal(goal: Generate.Goal) -> GenerationRequest:
    """Return the request that a goal asks for; nothing is checked."""
    return GenerationRequest(
        prompt=goal.prompt,
        messages=tuple(ChatMessage(m.role, m.content) for m in goal.messages),
        raw=goal.raw,
        max_new_tokens=goal.max_new_tokens,
        sampling=SamplingSettings(goal.temperature, goal.top_p, goal.top_k, goal.seed),
        stop=tuple(goal.stop),
        draft=goal.draft,
        time_limit_seconds=seconds_from_duration(goal.time_limit),
        priority=goal.priority,
        json_schema=goal.json_schema,
    )


def goal_from_request(request: GenerationRequest) -> Generate.Goal:
    """Return the goal that asks for a request."""
    return Generate.Goal(
        prompt=request.prompt,
        messages=[ChatMessageMessage(role=m.role, content=m.content) for m in request.messages],
        raw=request.raw,
        max_new_tokens=request.max_new_tokens,
        temperature=float(request.sampling.temperature),
        top_p=float(request.sampling.top_p),
        top_k=request.sampling.top_k,
        seed=request.sampling.seed,
        stop=list(request.stop),
        draft=request.draft,
        time_limit=duration_from_seconds(request.time_limit_seconds),
        priority=request.priority,
        json_schema=request.json_schema,
    )


def seconds_from_duration(duration: Duration) -> float:
    """Return a duration in seconds."""
    return float(duration.sec) + float(duration.nanosec) * 1e-9


def duration_from_seconds(seconds: float) -> Duration:
    """Return seconds as a duration."""
    whole = int(seconds // 1)
    return Duration(sec=whole, nanosec=min(999_999_999, int((seconds - whole) * 1e9)))


def feedback_from_piece(piece: Piece, tokens_per_second: float) -> Generate.Feedback:
    """Return what the client of a goal hears of a piece."""
    return Generate.Feedback(
        sequence=piece.sequence,
        text=piece.text,
        generated_tokens=piece.newest.generated_tokens,
        draft=piece.newest.draft,
        fallback=piece.newest.fallback,
        tokens_per_second=float(tokens_per_second),
    )


def chunk_from_piece(goal_id: UUID, piece: Piece, stamp: Time) -> TokenChunk:
    """Return what the topic of tokens hears of a piece."""
    newest = piece.newest
    chunk = TokenChunk(
        goal_id=goal_id,
        sequence=piece.sequence,
        text=piece.text,
        token_ids=piece.token_ids,
        draft=newest.draft,
        fallback=newest.fallback,
        last=newest.finish_reason is not None,
        finish_reason=int(newest.finish_reason or 0),
    )
    chunk.header.stamp = stamp
    return chunk


def last_chunk(goal_id: UUID, sequence: int, reason: FinishReason, stamp: Time) -> TokenChunk:
    """Return the chunk that ends a goal whose last iteration did not say so."""
    chunk = TokenChunk(goal_id=goal_id, sequence=sequence, last=True, finish_reason=int(reason))
    chunk.header.stamp = stamp
    return chunk


def result_from_generation(result: GenerationResult) -> Generate.Result:
    """Return a generation's result as the action's."""
    return Generate.Result(
        text=result.text,
        token_ids=list(result.token_ids),
        finish_reason=int(result.finish_reason),
        error=result.error,
        stats=stats_message(result.stats),
    )


def stats_message(stats: GenerationStats) -> GenerationStatsMessage:
    """Return the counts and times of a generation as a message."""
    return GenerationStatsMessage(
        prompt_tokens=stats.prompt_tokens,
        generated_tokens=stats.generated_tokens,
        iterations=stats.iterations,
        drafted_tokens=stats.drafted_tokens,
        accepted_tokens=stats.accepted_tokens,
        mean_accepted=float(stats.mean_accepted),
        time_to_first_token_seconds=float(stats.time_to_first_token_seconds),
        tokens_per_second=float(stats.tokens_per_second),
        desired_seconds=float(stats.desired_seconds),
        fallback_seconds=float(stats.fallback_seconds),
        load_wait_seconds=float(stats.load_wait_seconds),
        prediction_seconds=float(stats.prediction_seconds),
        prompt_seconds=float(stats.prompt_seconds),
        draft_switches=stats.draft_switches,
        drafts=[_usage_message(usage) for usage in stats.drafts],
    )


def _usage_message(usage: DraftUsage) -> DraftUsageMessage:
    return DraftUsageMessage(
        draft=usage.draft,
        iterations=usage.iterations,
        drafted_tokens=usage.drafted_tokens,
        accepted_tokens=usage.accepted_tokens,
        generated_tokens=usage.generated_tokens,
        seconds=float(usage.seconds),
    )


def draft_message(draft: DraftSnapshot) -> DraftInfo:
    """Return a draft as the service lists it."""
    return DraftInfo(
        name=draft.name,
        path=draft.path,
        kind=draft.kind,
        state=int(draft.state),
        pinned=draft.pinned,
        bytes=draft.bytes,
        score=float(draft.score),
        acceptance=float(draft.acceptance),
        uses=draft.uses,
        error=draft.error,
    )


def decision_message(goal_id: UUID, decision: Decision, stamp: Time) -> SchedulingDecision:
    """Return a scheduling decision of a goal as the topic carries it."""
    message = SchedulingDecision(
        goal_id=goal_id,
        context_hash=decision.context_hash,
        place=decision.place,
        strategy=decision.strategy,
        drafts=list(decision.scores),
        scores=[float(score) for score in decision.scores.values()],
        resident=list(decision.resident),
        loading=list(decision.loading),
        wanted=decision.wanted,
        active=decision.active,
        prediction_seconds=float(decision.prediction_seconds),
        load_wait_seconds=float(decision.load_wait_seconds),
    )
    message.header.stamp = stamp
    return message


def status_message(
    lifecycle_state: str, snapshot: RuntimeSnapshot | None, stamp: Time
) -> RuntimeStatus:
    """Return the node's state; without a runtime, only the lifecycle state."""
    status = RuntimeStatus(lifecycle_state=lifecycle_state)
    status.header.stamp = stamp
    if snapshot is None:
        return status
    status.resident_capacity = snapshot.resident_capacity
    status.scheduling_interval = snapshot.scheduling_interval
    status.strategy = snapshot.strategy
    status.resident = list(snapshot.draft_names_in(DraftState.RESIDENT, DraftState.ACTIVE))
    status.active = snapshot.active
    status.wanted = snapshot.wanted
    status.loading = list(snapshot.draft_names_in(DraftState.LOADING))
    status.failed = list(snapshot.draft_names_in(DraftState.FAILED))
    status.budget_bytes = snapshot.memory.budget_bytes
    status.used_bytes = snapshot.memory.used_bytes
    status.available_bytes = snapshot.memory.available_bytes
    status.queue_length = snapshot.queue_length
    status.queue_capacity = snapshot.queue_capacity
    return status
