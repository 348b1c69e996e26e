"""The demonstration, as `make demo` runs it."""

import subprocess
import sys

import pytest
from ros_harness import default_drafts, environment, new_domain


@pytest.mark.slow
def test_the_demonstration_shows_an_answer_and_what_the_draft_did(tmp_path):
    params = tmp_path / "params.yaml"
    params.write_text(f"/**:\n  ros__parameters:\n    drafts.names: {default_drafts()}\n")
    options = ["--max-new-tokens", "8", "--params-file", str(params)]
    options += ["--ros-args", "--log-level", "debug"]
    done = subprocess.run(
        [sys.executable, "-m", "memspec_ros.demo", "Say hello.", *options],
        env=environment(new_domain()),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "Models loaded" in done.stdout
    assert "mean accepted" in done.stdout
    assert "exit code 0" in done.stdout
    assert "[DEBUG]" in done.stderr
