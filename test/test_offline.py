"""Nothing reaches for a network at run time."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# In a network namespace of its own, with nothing but the loopback, which DDS needs.
ALONE = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
REACH_OUT = "import socket; socket.create_connection(('192.0.2.1', 80), 5)"


def alone(*command):
    """Run a Python command where there is no network; skip the test where that cannot be had."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("needs unshare and ip")
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [*ALONE, sys.executable, *command],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if "unshare" in done.stderr:
        pytest.skip(f"network namespaces are not allowed here: {done.stderr.strip()}")
    return done


def test_there_is_no_network_where_these_tests_run():
    assert "Network is unreachable" in alone("-c", REACH_OUT).stderr


@pytest.mark.slow
def test_the_command_needs_no_network():
    options = ["--max-new-tokens", "8", "--json"]
    done = alone("-m", "memspec_core.cli.main", "generate", "Say hello.", *options)

    assert done.returncode == 0, done.stderr
    assert '"generated_tokens": 8' in done.stdout or "END_OF_SEQUENCE" in done.stdout


@pytest.mark.ros
@pytest.mark.slow
def test_the_node_needs_no_network():
    pytest.importorskip("rclpy")
    pytest.importorskip("memspec_msgs.action")
    done = alone("-m", "memspec_ros.demo", "Say hello.", "--max-new-tokens", "8")

    assert done.returncode == 0, done.stdout + done.stderr
    assert "mean accepted" in done.stdout


@pytest.mark.slow
def test_the_core_opens_no_connection(monkeypatch, capsys):
    from memspec_core.cli.main import main

    def forbidden(*_arguments, **_more):
        pytest.fail("something reached for the network")

    monkeypatch.setattr(socket.socket, "connect", forbidden)
    monkeypatch.setattr(socket.socket, "connect_ex", forbidden)
    monkeypatch.setattr(socket, "getaddrinfo", forbidden)
    code = main(["generate", "Say hello.", "--max-new-tokens", "4", "--draft", "none"])

    assert code == 0
    assert capsys.readouterr().out.strip()
