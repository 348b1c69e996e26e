"""MemSpec's ranking: the predictor at scheduling points, and what it does without one."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from core.test_prediction import make_head
from core.tiny import EVEN_COSTS, ManualClock, load_target
from memspec_core.iteration import Iteration, IterationSeconds
from memspec_core.prediction.context import prompt_mean, recent_mean
from memspec_core.prediction.head import RankingHead
from memspec_core.prediction.predictor import Predictor
from memspec_core.request import GenerationRequest
from memspec_core.settings import STRATEGY_NAMES, Settings
from memspec_core.speculation.decodings import Decodings
from memspec_core.speculation.planner import Planner
from memspec_core.strategies import Context, MemSpec, PredictionOnly, create_strategy

NAMES = ("math", "other", "code")


def array(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def on_code(place: int = 1) -> Context:
    return Context((1, 2), (3,), place, array(0, 9, 0), array(9, 0, 0))


def memspec(head: RankingHead | None = None, observation: bool = False) -> MemSpec:
    head = head or make_head()
    return MemSpec(NAMES, Predictor(head, observation=observation, length=3))


def test_drafts_are_ranked_as_the_predictor_scores_them() -> None:
    ranking = memspec().rank(on_code())
    assert ranking.order == ("code", "math", "other")  # the one that it does not know comes last
    assert ranking.scores["code"] > 0.99
    assert ranking.outlook is None


def test_at_the_first_point_the_prompt_stands_for_what_is_recent() -> None:
    first = replace(on_code(place=0), recent_state=None)
    assert memspec().rank(first).best == "math"


@pytest.mark.parametrize(
    "context", [Context((1,)), replace(on_code(), recent_state=array(np.nan, 0, 0))]
)
def test_without_states_or_with_broken_ones_all_drafts_count_alike(
    context: Context, caplog: pytest.LogCaptureFixture
) -> None:
    scores = memspec().rank(context).scores
    assert scores == dict.fromkeys(NAMES, pytest.approx(1 / 3))
    assert ("not finite" in caplog.text) == (context.place > 0)


def test_a_fault_of_the_predictor_is_told_each_time_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told: list[str] = []
    predictor = Predictor(make_head(), observation=True, length=3)
    strategy = MemSpec(NAMES, predictor, told.append)
    broken = replace(on_code(), recent_state=array(np.nan, 0, 0))
    for context in (broken, broken, on_code()):
        strategy.rank(context)
    assert [bool(fault) for fault in told] == [True, True, False]
    assert "not finite" in told[0]
    assert len(caplog.records) == 1


def test_without_a_predictor_all_drafts_count_alike() -> None:
    strategy = MemSpec(NAMES, None)
    strategy.observe(iteration("code", 3, 3))
    assert strategy.rank(on_code()).order == NAMES
    assert MemSpec((), None).rank(on_code()).best is None


def iteration(draft: str, proposed: int, accepted: int) -> Iteration:
    return Iteration(0, draft, draft, proposed, accepted, accepted + 1, (), "", accepted + 1)


def test_what_is_seen_corrects_the_ranking() -> None:
    strategy = memspec(observation=True)
    assert strategy.rank(on_code()).best == "code"
    for _ in range(200):
        strategy.observe(iteration("code", 3, 0))
    assert strategy.rank(on_code()).best == "math"
    unmoved = memspec()
    for _ in range(200):
        unmoved.observe(iteration("code", 3, 0))
    assert unmoved.rank(on_code()).best == "code"


def test_the_outlook_is_what_each_draft_adds_if_its_topic_comes() -> None:
    outlook = memspec(observation=True).rank(on_code()).outlook
    assert outlook is not None
    tokens = {share: sum(share**count for count in range(4)) for share in (0.8, 0.2, 0.6)}
    assert outlook.tokens_with("code") == pytest.approx([tokens[0.8], tokens[0.2]], rel=1e-5)
    likely = outlook.probabilities[1]
    gain = likely * (tokens[0.6] - tokens[0.2])
    assert outlook.gain("math", "code") == pytest.approx(gain, rel=1e-4)
    assert outlook.gain("code", "code") == 0.0
    assert outlook.gain("other", "code") == 0.0


def test_the_settings_choose_the_form() -> None:
    head = make_head()
    for name, kind in (("memspec", MemSpec), ("prediction_only", PredictionOnly)):
        for observation in (True, False):
            settings = Settings.from_parameters(
                {"strategy": name, "drafts.names": list(NAMES), "observation": observation}
            )
            strategy = create_strategy(settings, head)
            assert type(strategy) is kind
            assert (strategy.rank(on_code()).outlook is not None) == observation
    assert (MemSpec.prepares, PredictionOnly.prepares) == (None, 1)


@pytest.mark.parametrize("name", STRATEGY_NAMES)
def test_every_strategy_of_the_settings_ranks_all_drafts_or_one(name: str) -> None:
    settings = Settings.from_parameters({"strategy": name, "drafts.names": list(NAMES)})
    strategy = create_strategy(settings)
    ranking = strategy.rank(Context(()))
    assert strategy.name == name
    assert len(ranking.scores) == (1 if name == "general_static" else len(NAMES))
    assert strategy.waits == (name == "mab_sync")


def test_decoding_shows_the_states_that_a_trace_holds(target_folder: Path) -> None:
    target = load_target(target_folder, taps=(0, 2))
    settings = Settings.from_parameters({"drafts.names": [""], "lookup": False})
    prompt = [30, 40, 50, 60, 70]
    request = GenerationRequest(prompt="-", max_new_tokens=12)
    decodings = Decodings(target, Planner(EVEN_COSTS), lambda: settings, ManualClock())
    course = decodings.begin(request, prompt, lambda: None)
    course.read_prompt()
    assert course.recent_state(4) is None  # the prompt's states stand for it, as in training
    for _ in range(6):
        course.iterate(None, "none", 0, IterationSeconds())
    answer = list(course.recent_ids(99))
    prompt_state, recent = course.prompt_state, course.recent_state(4)
    assert (course.generated_tokens, course.remaining_tokens) == (6, 6)
    course.close()
    target.cache.truncate(0)
    target.decoder.forward([*prompt, *answer], target.cache)
    assert target.cache.features is not None
    states = target.cache.features.numpy()[:, -target.decoder.config.hidden_size :]
    traced = states[len(prompt) - 1 : len(prompt) - 1 + len(answer)]
    assert np.allclose(prompt_state, prompt_mean(states[: len(prompt) - 1]), atol=2e-3)
    assert recent is not None
    assert np.allclose(recent, recent_mean(traced, len(answer), 4), atol=2e-3)
