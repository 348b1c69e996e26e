"""The benchmark on tiny models: what it measures, not how much."""

import importlib.util
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import PreTrainedModel

from core.tiny import CPU, greedy_by_transformers, make_model
from memspec_core.cli.main import main
from memspec_core.errors import PeerError, PromptFileError
from memspec_core.evaluation import bench
from memspec_core.evaluation.bench import plan_bench, run_bench
from memspec_core.evaluation.figures import as_json, quartiles
from memspec_core.evaluation.limit import ReadBytes
from memspec_core.evaluation.machine import cpu_name
from memspec_core.evaluation.peers import PeerAnswer, PeerPlan, open_peers
from memspec_core.evaluation.report import LEGEND, table
from memspec_core.models.checkpoint import open_checkpoint
from memspec_core.request import DraftUsage, GenerationStats
from memspec_core.settings import DraftSource
from memspec_core.training.prompts import PromptSet, read_prompt_sets

TOKENS = 5
BANDWIDTH = 1e9


@pytest.fixture(autouse=True)
def no_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a quarter of a GiB takes longer than the tiny models."""
    monkeypatch.setattr(bench, "read_bandwidth", lambda threads, device: BANDWIDTH)


@pytest.fixture(scope="module")
def parameters(
    target_folder: Path, distilled: Path, draft_folders: dict[str, Path]
) -> dict[str, Any]:
    return {
        "target.path": str(target_folder),
        "drafts.names": ["tiny", "itself"],
        "drafts.tiny.path": str(distilled),
        "drafts.itself.path": str(draft_folders["itself"]),
        "dtype": "fp32",
        "context_tokens": 256,
        "resident_capacity": 1,
        "memory.floor_mib": 0,
        "memory.budget_mib": 1000,
    }


@pytest.fixture
def config(parameters: dict[str, Any], tmp_path: Path) -> Path:
    tree: dict[str, Any] = {}
    for name, value in parameters.items():
        *sections, last = name.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    file = tmp_path / "params.yaml"
    file.write_text(yaml.safe_dump({"memspec": {"ros__parameters": tree}}))
    return file


@pytest.fixture
def prompts(tmp_path: Path) -> list[Path]:
    files = []
    for domain, texts in {"code": ["Sort a list.", "Add 1."], "law": ["What is a lien?"]}.items():
        file = tmp_path / domain / "eval.jsonl"
        file.parent.mkdir()
        file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
        files.append(file)
    return files


def test_the_command_prints_one_object(
    config: Path, prompts: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bench", *map(str, prompts), "--config", str(config), "--json"]
    arguments += ["--max-new-tokens", str(TOKENS), "--repeats", "2", "--draft-lengths", "1,3"]
    arguments += ["--drafts", "none,tiny,itself", "--strategies", "general_static"]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert out.count("\n") == 1
    assert err.count("prompt 1, tokens/s: plain ") == 4
    report = json.loads(out)
    assert report["machine"]["packages"]["torch"] == torch.__version__
    assert report["machine"]["cpu"]
    assert report["prompts"] == {"code/eval": 2, "law/eval": 1}
    assert (report["max_new_tokens"], report["repeats"]) == (TOKENS, 2)
    assert report["read_bandwidth"] == BANDWIDTH
    [series] = report["series"]
    assert series["target"]["kernel"]
    assert series["target"]["threads"] > 0
    names = [c["name"] for c in series["configurations"]]
    drafts = ["tiny γ=1", "tiny γ=3", "itself γ=1", "itself γ=3"]
    assert names == ["plain", *drafts, "general_static γ=1", "general_static γ=3"]
    assert len(series["runs"]) == len(names) * 3 * 2
    for configuration in series["configurations"]:
        assert configuration["all"]["runs"] == 6
        assert configuration["all"]["identical_runs"] == 6  # fp32
        assert configuration["all"]["generated_tokens"] == 6 * TOKENS
        assert {k: v["runs"] for k, v in configuration["prompt_sets"].items()} == {
            "code/eval": 4,
            "law/eval": 2,
        }
    itself = series["configurations"][names.index("itself γ=3")]["all"]
    assert itself["accepted_of_drafted"] == 1.0
    assert itself["tokens_an_iteration"] == TOKENS / 2  # 3 accepted and 1 more, then the last
    assert set(itself["drafts"]) == {"itself", "none"}
    assert itself["drafts"]["itself"]["accepted_tokens"] == 6 * 3
    assert_consistent(report)


def assert_consistent(report: dict[str, Any]) -> None:
    """Every figure follows from the runs that the report holds as well."""
    for series in report["series"]:
        plain = speeds_by_round(series, "plain")
        weights = series["read_bytes"]
        for configuration in series["configurations"]:
            found = configuration["all"]
            speeds = speeds_by_round(series, configuration["name"])
            assert speeds.keys() == plain.keys()
            assert found["tokens_per_second"]["median"] == statistics.median(speeds.values())
            ratios = [speeds[number] / plain[number] for number in plain]
            assert found["speed_over"]["plain"]["median"] == statistics.median(ratios)
            runs = [r for r in series["runs"] if r["configuration"] == configuration["name"]]
            etas = [r["tokens_per_second"] / limit for r in runs if (limit := limit_of(r, weights))]
            if etas:
                assert found["eta"]["median"] == pytest.approx(statistics.median(etas))
            else:
                assert found["eta"] is None


def speeds_by_round(series: dict[str, Any], name: str) -> dict[int, float]:
    return {
        run["round"]: run["tokens_per_second"]
        for run in series["runs"]
        if run["configuration"] == name
    }


def limit_of(run: dict[str, Any], weights: dict[str, Any]) -> float:
    stats = run["stats"]
    if stats is None:
        return 0.0
    drafts = sum(
        u["drafted_tokens"] * weights["drafts"].get(u["draft"], 0) for u in stats["drafts"]
    )
    context = stats["prompt_tokens"] + stats["generated_tokens"] / 2
    read = stats["iterations"] * (weights["target"] + context * weights["kv_per_token"]) + drafts
    return float(BANDWIDTH * stats["generated_tokens"] / read)


def test_the_table(config: Path, prompts: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", *map(str, prompts), "--config", str(config), "--repeats", "1"]
    arguments += ["--max-new-tokens", "3", "--prompts", "1", "--dtypes", "fp32,bf16"]
    assert main([*arguments, "--drafts", "tiny"]) == 0
    out, _ = capsys.readouterr()
    lines = out.splitlines()
    heads = [line for line in lines if "tokens/s  " in line]
    parts = ["all prompts", "code/eval", "law/eval"]
    assert [head.split("  ")[0] for head in heads] == parts * 2
    assert len([line for line in lines if line.startswith("tiny ")]) == 6
    assert "target, fp32, " in out
    assert "target, bf16, " in out
    assert "1.0 GB/s" in out
    assert out.endswith(f"{LEGEND}\n")


def test_the_models_are_weighed(parameters: dict[str, Any], target_model: PreTrainedModel) -> None:
    plan = plan_bench(parameters, (PromptSet("a", ("Hello",)),), max_new_tokens=2, repeats=1)
    [series] = run_bench(plan, lambda line: None)
    weights = sum(parameter.nbytes for parameter in target_model.parameters())
    assert series.read.target == pytest.approx(weights, rel=1e-3)
    heads, layers = 2 * 2, 3  # keys' and values' heads
    assert series.read.kv_per_token / (layers * heads * 16) in (2, 4)  # fp16 or fp32
    assert series.read.drafts["itself"] == pytest.approx(weights, rel=0.01)
    assert 0 < series.read.drafts["tiny"] < weights


def test_an_untied_embedding_is_not_read(
    parameters: dict[str, Any], tmp_path: Path, checkpoints: Any
) -> None:
    model = make_model("llama", seed=3, tie_word_embeddings=False)
    folder = checkpoints.save("untied", model)
    values = parameters | {"target.path": str(folder), "drafts.names": [""]}
    plan = plan_bench(values, (PromptSet("a", ("Hello",)),), max_new_tokens=2, repeats=1)
    [series] = run_bench(plan, lambda line: None)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    unread = model.get_input_embeddings().weight.nbytes
    assert series.read.target == pytest.approx(weights - unread, rel=1e-3)


def test_the_limit() -> None:
    """Ten tokens in five iterations of two proposals, on 100 bytes of target and 10 of draft."""
    read = ReadBytes(target=100, kv_per_token=0.5, drafts={"a": 10})
    usage = DraftUsage("a", iterations=5, drafted_tokens=10), DraftUsage("none")
    stats = GenerationStats(prompt_tokens=15, generated_tokens=10, iterations=5, drafts=usage)
    assert read.an_iteration(stats) == 100 + 2 * 10 + 20 * 0.5
    assert read.limit(stats, 1300.0) == 20.0


def test_quartiles() -> None:
    assert quartiles([]) is None
    assert quartiles([2.0]) == {"lower": 2.0, "median": 2.0, "upper": 2.0}
    assert quartiles([5, 1, 4, 2, 3]) == {"lower": 2.0, "median": 3.0, "upper": 4.0}


def test_the_order_alternates(parameters: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    answer = bench._Bench._answer

    def watched(self: Any, configuration: Any, prompt: Any, tokens: int) -> Any:
        if tokens == 2:
            asked.append(configuration.name)
        return answer(self, configuration, prompt, tokens)

    monkeypatch.setattr(bench._Bench, "_answer", watched)
    sets = (PromptSet("a", ("One", "Two")),)
    plan = plan_bench(parameters, sets, drafts=["tiny"], max_new_tokens=2, repeats=2)
    run_bench(plan, lambda line: None)
    forward = ["plain", "tiny"]
    backward = forward[::-1]
    assert asked == forward + backward + backward + forward


def test_prompts_that_do_not_fit_are_left_out(parameters: dict[str, Any]) -> None:
    sets = (PromptSet("a", ("Hello", "word " * 200)),)
    plan = plan_bench(parameters, sets, drafts=["none"], max_new_tokens=100, repeats=1)
    measured = run_bench(plan, lambda line: None)
    assert measured[0].left_out == 1
    assert {run.prompt for run in measured[0].runs} == {0}
    assert "left out: 1 prompts" in table(as_json(plan, measured))
    with pytest.raises(PromptFileError, match="No prompt fits"):
        run_bench(replace(plan, max_new_tokens=250), lambda line: None)


def test_prompts_are_spread_evenly_and_files_told_apart(tmp_path: Path) -> None:
    files = [tmp_path / name / "x" / "eval.jsonl" for name in ("a", "b")]
    for file in files:
        file.parent.mkdir(parents=True)
        file.write_text("".join(json.dumps({"prompt": str(i)}) + "\n" for i in range(10)))
    a, b = read_prompt_sets([*files, files[0]], 4)
    assert (a.name, b.name) == ("a/x/eval", "b/x/eval")
    assert a.texts == ("0", "2", "5", "7")
    assert read_prompt_sets(files[:1], None) == (PromptSet("eval", tuple(map(str, range(10)))),)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.jsonl"], "nowhere.jsonl"),
        (["--drafts", "poetry"], "poetry"),
        (["--peers", "vllm"], "vllm"),
        (["--peers", "llama_cpp"], "llama"),
        (["--dtypes", "int3"], "int3"),
        (["--strategies", "oracle"], "oracle"),
        (["--draft-lengths", "99"], "draft_length"),
        (["--config", "/nowhere.yaml"], "/nowhere.yaml"),
    ],
)
def test_wrong_input_is_one_line(
    arguments: list[str],
    said: str,
    config: Path,
    prompts: list[Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    config_given = [] if "--config" in arguments else ["--config", str(config)]
    files = [] if arguments == ["nowhere.jsonl"] else [str(prompts[0])]
    assert main(["bench", *files, *arguments, *config_given]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert said in err


def test_a_file_without_prompts_is_wrong_input(
    tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    assert main(["bench", str(empty), "--config", str(config)]) == 2
    assert "holds no prompts" in capsys.readouterr().err


def test_a_missing_peer_says_how_to_install_it(
    embedded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PeerError, match="pip install llama-cpp-python"):
        open_peers(["llama_cpp"], peer_plan(embedded, None))


def test_assisted_generation_needs_a_draft(embedded: Any) -> None:
    with pytest.raises(PeerError, match="assisted needs a draft of kind independent"):
        open_peers(["assisted"], peer_plan(embedded, None))


def peer_plan(checkpoint: Any, draft: DraftSource | None) -> PeerPlan:
    return PeerPlan(checkpoint, draft, 2, str(CPU), threads=1, context_tokens=256)


@pytest.mark.parametrize("draft", ["distilled", "first_layer"])
def test_peers_of_transformers_decode_greedily(
    draft: str, target_folder: Path, distilled: Path, draft_folders: dict[str, Path]
) -> None:
    folder = distilled if draft == "distilled" else draft_folders[draft]
    plan = peer_plan(open_checkpoint(target_folder), DraftSource("tiny", str(folder)))
    peers = open_peers(["assisted", "transformers"], plan)
    assert list(peers) == ["assisted", "transformers"]
    plain = peers["transformers"].answer([5, 6, 7], 12)
    assert plain.first_tokens == 1
    assert 0.0 < plain.first_seconds < plain.seconds
    model = peers["transformers"]._model  # type: ignore[attr-defined]
    assert plain.token_ids == tuple(greedy_by_transformers(model, [5, 6, 7], 12, [2]))
    assisted = peers["assisted"].answer([5, 6, 7], 12)
    assert len(assisted.token_ids) == 12
    assert 1 <= assisted.first_tokens <= 3  # two proposals and one of the target's own
    for peer in peers.values():
        peer.close()


def test_a_distilled_draft_becomes_the_layers_it_was_cut_from(
    target_folder: Path, distilled: Path, target_model: PreTrainedModel
) -> None:
    plan = peer_plan(open_checkpoint(target_folder), DraftSource("tiny", str(distilled)))
    peer = open_peers(["assisted"], plan)["assisted"]
    assistant = peer._assistant  # type: ignore[attr-defined]
    assert assistant.config.num_hidden_layers == 1
    ours, theirs = assistant.model.layers[0], target_model.model.layers[0]
    for name, weight in theirs.state_dict().items():
        found = ours.state_dict()[name].float()
        off = float((found - weight).abs().max() / weight.abs().max())
        assert off < 0.1, name  # rounded to 4 bits and to bf16
    assert assistant.generation_config.num_assistant_tokens == 2


def test_the_speed_of_a_peer_leaves_its_first_tokens_out() -> None:
    assert PeerAnswer(tuple(range(12)), 2, 1.0, 6.0).tokens_per_second == 2.0
    assert PeerAnswer((1,), 1, 1.0, 1.0).tokens_per_second == 0.0
    assert PeerAnswer((), 1, 1.0, 1.5).tokens_per_second == 0.0


def test_peers_run_beside_ours(parameters: dict[str, Any]) -> None:
    sets = (PromptSet("a", ("Hello",)),)
    peers = ["assisted", "transformers"]
    plan = plan_bench(
        parameters, sets, dtypes=["fp32", "bf16"], drafts=["tiny"], peers=peers, max_new_tokens=4
    )
    report = as_json(plan, run_bench(plan, lambda line: None))
    first, second = report["series"]
    names = ["plain", "tiny", *peers]
    assert [c["name"] for c in first["configurations"]] == names
    assert [c["name"] for c in second["configurations"]] == names[:2]
    assert set(first["configurations"][1]["all"]["speed_over"]) == {"plain", *peers}
    assert first["configurations"][2]["draft_length"] == 2
    assert first["configurations"][2]["all"]["tokens_an_iteration"] is None
    assert_consistent(report)
    assert "over assisted" in table(report)


def test_the_processor_has_a_name(tmp_path: Path) -> None:
    assert cpu_name()
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t: Fast 9000\n\nmodel name\t: Fast 9000\n")
    assert cpu_name(file) == "Fast 9000"
    assert cpu_name(tmp_path / "nowhere")
