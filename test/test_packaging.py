"""The packages agree with themselves: versions, dependencies, shared files, comments."""

import ast
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
INTERFACES = sorted((ROOT / "src" / "memspec_msgs").glob("*/*.*"))
# Modules of ROS 2 that memspec_ros and the launch files may import, by the package they come from.
ROS_MODULE = re.compile(
    r"^(rclpy|launch\w*|ament_index_python|rcl_interfaces|builtin_interfaces|composition_interfaces"
    r"|rosidl_\w+|diagnostic_\w+|\w+_msgs|std_srvs|action_tutorials_\w+)$"
)


def dependencies(package_xml: Path) -> set[str]:
    """Return the names that a package.xml depends on to build or to run."""
    tree = ET.parse(package_xml)
    return {
        (element.text or "").strip()
        for element in tree.getroot()
        if element.tag in {"depend", "exec_depend", "build_depend", "test_depend"}
    }


def imported_modules(folder: Path) -> set[str]:
    """Return the first parts of all absolute imports below ``folder``."""
    found = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found.update(alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                found.add(node.module.partition(".")[0])
    return found


def setup_answer(*questions: str) -> list[str]:
    """Ask setup.py, as colcon does, for one line an option."""
    done = subprocess.run(
        [sys.executable, "setup.py", *questions],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def tracked_files() -> list[Path]:
    """Return all files under version control; skips the test where git cannot tell."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip("git cannot read this checkout")
    paths = [ROOT / name.decode() for name in done.stdout.split(b"\0") if name]
    return [path for path in paths if path.is_file()]


@pytest.mark.parametrize("folder", ["src/memspec_ros", "launch", "examples", "test"])
def test_package_xml_names_every_ros_package_that_is_imported(folder):
    needed = {name for name in imported_modules(ROOT / folder) if ROS_MODULE.match(name)}

    assert needed <= dependencies(ROOT / "package.xml")


def test_messages_depend_on_every_package_that_they_use():
    used = set()
    for path in INTERFACES:
        used.update(re.findall(r"^(\w+)/\w+", path.read_text(), flags=re.MULTILINE))

    used.discard("memspec_msgs")
    assert used <= dependencies(ROOT / "src" / "memspec_msgs" / "package.xml")


def test_every_interface_file_is_built():
    cmake = (ROOT / "src" / "memspec_msgs" / "CMakeLists.txt").read_text()
    built = set(re.findall(r'"(\w+/\w+\.\w+)"', cmake))

    assert built == {f"{path.parent.name}/{path.name}" for path in INTERFACES}


def test_versions_agree():
    def version_of(package_xml: Path) -> str:
        return ET.parse(package_xml).findtext("version", default="")

    version = version_of(ROOT / "package.xml")

    changelog = (ROOT / "CHANGELOG.rst").read_text()
    assert version_of(ROOT / "src" / "memspec_msgs" / "package.xml") == version
    assert setup_answer("--version") == [version]
    assert re.search(r"^(\d+\.\d+\.\d+)", changelog, flags=re.MULTILINE)[1] == version


@pytest.mark.parametrize("path", INTERFACES, ids=lambda path: path.name)
def test_every_field_of_an_interface_has_a_comment(path):
    bare = [
        line
        for line in path.read_text().splitlines()
        if line.strip() and not line.startswith(("#", "---")) and not re.search(r"\S\s+# \S", line)
    ]

    assert bare == []


def test_finish_reasons_of_action_and_message_are_the_same():
    def constants(text: str) -> list[str]:
        return re.findall(r"^uint8 +([A-Z_]+=\d+)", text, flags=re.MULTILINE)

    messages = ROOT / "src" / "memspec_msgs"
    action = constants((messages / "action" / "Generate.action").read_text())
    message = constants((messages / "msg" / "FinishReason.msg").read_text())

    assert action == message
    assert len(message) == 7


def test_shared_folders_are_installed_as_trees(monkeypatch):
    arguments = {}
    monkeypatch.setattr("setuptools.setup", lambda **given: arguments.update(given))
    monkeypatch.chdir(ROOT)
    exec(
        compile((ROOT / "setup.py").read_text(), str(ROOT / "setup.py"), "exec"),
        {
            "__file__": str(ROOT / "setup.py"),
            "__name__": "__main__",
        },
    )
    installed = {
        f"{folder}/{Path(name).name}" for folder, names in arguments["data_files"] for name in names
    }

    for folder in ("launch", "config", "models", "examples"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert f"share/memspec_ros/{path.relative_to(ROOT)}" in installed
    assert "share/ament_index/resource_index/packages/memspec_ros" in installed
    assert not [name for name in arguments["packages"] if name.startswith("memspec_msgs")]


def test_no_tracked_file_names_a_machine_or_an_index():
    # Spelled in parts, so that this file does not match itself.
    unwanted = re.compile(
        "|".join(
            [
                "/" + r"(?:root|work|tmp/\w+_jobs)/",
                "/" + r"home/(?!user\b|ubuntu\b)\w+",
                "--(?:extra-)?index-url" + r"[ =]+https?:",
                "(?:download" + r"\.pytorch\.org|files" + r"\.pythonhosted|pypi" + r"\.org/simple)",
            ]
        )
    )
    found = []
    for path in tracked_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {match[0]}" for match in unwanted.finditer(text)]

    assert found == []


def test_no_requirement_replaces_an_installed_torch():
    lists = [*ROOT.glob("requirements*.txt"), ROOT / "constraints.txt"]
    for path in lists:
        assert not re.search(r"^torch\b", path.read_text(), flags=re.MULTILINE), path.name
