"""Goals with a JSON schema over a real node."""

import json
import subprocess
import sys

import jsonschema
import pytest
from action_msgs.msg import GoalStatus
from ros_harness import environment, until

from memspec_msgs.action import Generate

SCHEMA = {
    "type": "object",
    "properties": {
        "tool": {"enum": ["fetch", "go_to", "say"]},
        "object": {"type": "string", "maxLength": 16},
    },
    "required": ["tool", "object"],
    "additionalProperties": False,
}
PROMPT = "Fetch the red mug. Answer as JSON with tool (fetch, go_to or say) and object."


def assert_valid(text):
    jsonschema.validate(json.loads(text), SCHEMA)


def test_a_goal_with_a_schema_returns_and_streams_a_valid_document(active):
    goal = active.send(prompt=PROMPT, json_schema=json.dumps(SCHEMA), max_new_tokens=80)
    status, result = goal.outcome()

    assert status == GoalStatus.STATUS_SUCCEEDED
    assert result.finish_reason == Generate.Result.END_OF_SEQUENCE
    assert_valid(result.text)
    chunks = active.chunks
    goal_id = goal.handle.goal_id
    until(lambda: any(chunk.last for chunk in chunks if chunk.goal_id == goal_id))
    assert "".join(chunk.text for chunk in chunks if chunk.goal_id == goal_id) == result.text


REFUSED = {
    "no JSON": ({"json_schema": "{"}, "no JSON"),
    "unsupported": ({"json_schema": '{"type": "array", "uniqueItems": true}'}, "uniqueItems"),
    "stop": ({"json_schema": "{}", "stop": ["x"]}, "not both"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_unusable_schema_is_rejected_with_the_reason_in_the_log(active, case):
    fields, reason = REFUSED[case]
    seen = len(active.node.output)

    assert not active.send(prompt=PROMPT, **fields).accepted
    until(lambda: reason in active.node.output[seen:])


def test_the_generate_command_takes_a_schema_from_a_file(active, tmp_path):
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    command = [sys.executable, "-m", "memspec_ros.generate", PROMPT, "--max-new-tokens", "80"]
    done = subprocess.run(
        [*command, "--json-schema", str(file)],
        capture_output=True,
        text=True,
        env=environment(active.domain),
        check=True,
    )
    assert_valid(done.stdout)

    absent = subprocess.run(
        [*command, "--json-schema", str(tmp_path / "absent.json")],
        capture_output=True,
        text=True,
        env=environment(active.domain),
        check=False,
    )
    assert absent.returncode == 2
    assert "cannot be read" in absent.stderr
