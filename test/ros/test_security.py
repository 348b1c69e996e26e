"""What the node gives away: exactly what its SROS 2 policy allows, and no word of a prompt."""

import contextlib
import re
import subprocess
import xml.etree.ElementTree as ET

import pytest
from rclpy.action import get_action_server_names_and_types_by_node
from ros_harness import ROOT, Graph, NodeProcess, new_domain, until, values

POLICY = ROOT / "config" / "memspec_policy.xml"
SECRET = "Zanzibar"
ALLOWED = {
    ("topics", "publish"): "publishes",
    ("topics", "subscribe"): "subscribes",
    ("services", "reply"): "serves",
    ("services", "request"): "calls",
    ("actions", "execute"): "executes",
    ("actions", "call"): "sends goals to",
}


def allowed(policy, enclave):
    """Return what a policy allows the node of an enclave, by kind, as full names."""
    profile = ET.fromstring(policy).find(f".//enclave[@path='{enclave}']/profiles/profile")
    assert profile is not None, f"no enclave {enclave}"
    own = f"{profile.get('ns').rstrip('/')}/{profile.get('node')}"
    names = {}
    for (group, right), kind in ALLOWED.items():
        found = profile.findall(f"{group}[@{right}='ALLOW']/*")
        names[kind] = {re.sub("^~", own, element.text) for element in found}
    return names


def present(ros, name, namespace):
    """Return what a node has over rclpy, by kind. An action's parts count as the action."""

    def ask(what):
        found = getattr(ros, f"get_{what}_names_and_types_by_node")(name, namespace)
        return {entry for entry, _ in found if "/_action/" not in entry}

    actions = get_action_server_names_and_types_by_node(ros, name, namespace)
    return {
        "publishes": ask("publisher"),
        "subscribes": ask("subscriber"),
        "serves": ask("service"),
        "calls": ask("client"),
        "executes": {entry for entry, _ in actions},
        "sends goals to": set(),
    }


def namespaced_policy():
    """Return the policy for a node in a namespace, made as SECURITY.md says."""
    command = re.search(r"^ *(sed .*memspec_policy\.xml)", (ROOT / "SECURITY.md").read_text(), re.M)
    assert command is not None
    done = subprocess.run(
        ["sh", "-c", command[1]], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("namespace", ["", "/robot1"])
def test_the_policy_allows_what_the_node_has_and_nothing_else(tmp_path, namespace):
    policy = namespaced_policy() if namespace else POLICY.read_text()
    domain = new_domain()
    # With the clock of a simulation: without, the node does not listen to /clock.
    command = ("-m", "memspec_ros.node", "--ros-args", "-r", f"__ns:={namespace or '/'}")
    parameters = {"use_sim_time": True, "drafts.names": [""]}
    with (
        NodeProcess(domain, tmp_path, parameters, command) as node,
        Graph(domain, node, f"{namespace}/memspec".lstrip("/")) as graph,
    ):
        graph.bring_up()
        expected = allowed(policy, f"{namespace}/memspec")
        if not hasattr(graph.ros, "_type_description_service"):  # before Jazzy
            expected["serves"].discard(f"{namespace}/memspec/get_type_description")

        def now():
            return present(graph.ros, "memspec", namespace or "/")

        # Not at once: what a node has becomes known bit by bit.
        with contextlib.suppress(AssertionError):
            until(lambda: now() == expected)
        assert now() == expected


def test_the_policy_allows_a_client_what_the_node_offers():
    policy = POLICY.read_text()
    node, client = allowed(policy, "/memspec"), allowed(policy, "/memspec_client")

    assert client["sends goals to"] == node["executes"]
    assert client["calls"] <= node["serves"]
    assert client["subscribes"] - {"/clock", "/parameter_events"} <= node["publishes"]


@pytest.mark.slow
def test_no_word_of_a_prompt_is_logged(tmp_path):
    domain = new_domain()
    decisions = tmp_path / "decisions.jsonl"
    command = ("-m", "memspec_ros.node", "--ros-args", "--log-level", "debug")
    parameters = {"drafts.names": [""], "decisions.path": str(decisions)}
    with (
        NodeProcess(domain, tmp_path, parameters, command) as node,
        Graph(domain, node) as graph,
    ):
        graph.bring_up()
        question = f"Repeat: {SECRET} {SECRET} {SECRET}"
        answered = graph.send(prompt=question, max_new_tokens=12)
        answered.outcome()
        # And the ways in which goals fail: refused, too long, ended by the node.
        assert not graph.send(prompt=question, draft="unheard_of").accepted
        assert not graph.send(prompt=question, stop=[SECRET] * 17).accepted
        graph.send(prompt=question * 2000).outcome()
        cut = graph.send_long(prompt=f"{SECRET} " * 8, draft="none")
        cut.wait_feedback()
        assert graph.deactivate()
        cut.outcome()
        shown = [values(status) for status in graph.next_diagnostics().values()]

    assert "Rejected a goal" in node.output
    assert "DEBUG" in node.output
    assert decisions.read_text()
    for text in (node.output, decisions.read_text(), str(shown), str(graph.statuses)):
        assert SECRET not in text
