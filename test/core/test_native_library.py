"""Finding, building and loading the native step, without compiling anything."""

import hashlib
import logging
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from memspec_core.cli.doctor import OPTIONAL
from memspec_core.errors import MemSpecError
from memspec_core.models.native import cpu, library

NOT_BUILT = f"The native step is not built; run `{library.BUILD_COMMAND}`."


@pytest.fixture(autouse=True)
def able_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_flags", lambda: {*cpu.CPU_FLAGS, "sse2"})
    monkeypatch.setattr(library, "load", library.load.__wrapped__)
    library._log_once.cache_clear()


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Give each test a cache folder of its own, and the switch as users have it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(library.SWITCH, raising=False)
    return tmp_path / "cache" / "memspec"


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    file = tmp_path / "step.cpp"
    file.write_text("int step();\n")
    monkeypatch.setattr(library, "_SOURCE", file)
    return file


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Return what puts a shell script in the compiler's place; it sees `$out`, its output file."""

    def put(script: str) -> None:
        file = tmp_path / "cxx"
        find = 'while [ $# -gt 0 ]; do [ "$1" = -o ] && out="$2"; shift; done\n'
        file.write_text(f"#!/bin/sh\n{find}{script}\n")
        file.chmod(0o755)
        monkeypatch.setenv("CXX", str(file))

    return put


@pytest.fixture
def loadable(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Let everything load; returns the paths that were."""
    loaded: list[Path] = []

    def take(path: Path) -> object:
        loaded.append(path)
        return sys

    monkeypatch.setattr(library, "_import", take)
    return loaded


def put_into_cache(content: bytes, *, sealed: bool = True) -> Path:
    path = library.library_path()
    path.parent.mkdir(parents=True)
    path.write_bytes(content + (hashlib.sha256(content).digest() if sealed else b""))
    return path


def test_a_cpu_that_lacks_something_is_told_what(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_flags", lambda: {*cpu.CPU_FLAGS} - {"avx512_bf16", "f16c"})
    for action in (library.load, library.build):
        with pytest.raises(library.NativeUnavailableError, match="CPU with avx512_bf16, f16c;"):
            action()
    assert library.library() is None


def test_another_architecture_lacks_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(Path, "read_text", lambda _: "processor : 0\nFeatures : fp asimd\n")
    assert cpu.missing_flags() == list(cpu.CPU_FLAGS)


def test_what_is_not_built_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert library.library() is None
        assert library.library() is None
    assert caplog.record_tuples == [(library.__name__, logging.INFO, NOT_BUILT)]


def test_the_switch(
    monkeypatch: pytest.MonkeyPatch, loadable: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = put_into_cache(b"library")
    monkeypatch.setenv(library.SWITCH, "0")
    with caplog.at_level(logging.INFO):
        assert library.library() is None
    assert loadable == []
    assert not caplog.records
    monkeypatch.setenv(library.SWITCH, "1")
    assert library.library() is sys
    assert loadable == [path]


def test_the_path_is_made_from_all_that_it_is_built_from(
    monkeypatch: pytest.MonkeyPatch, source: Path
) -> None:
    paths = [library.library_path()]
    source.write_text("int other();\n")
    paths.append(library.library_path())
    header = source.with_name("rows.h")
    header.write_text("int rows();\n")
    paths.append(library.library_path())
    header.write_text("int columns();\n")
    paths.append(library.library_path())
    header.rename(source.with_name("columns.h"))
    paths.append(library.library_path())
    monkeypatch.setattr(library, "_FLAGS", ("-O1",))
    paths.append(library.library_path())
    monkeypatch.setattr(library.torch, "__version__", "1.0")
    paths.append(library.library_path())
    assert len(set(paths)) == 7


def test_without_a_home_folder_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert library.library() is None
    with pytest.raises(library.NativeUnavailableError, match="XDG_CACHE_HOME"):
        library.build()


def test_building_once(
    cache: Path, compiler: Callable[[str], None], loadable: list[Path], source: Path
) -> None:
    compiler('echo built > "$out"')
    path = library.build()
    assert path == library.library_path()
    assert [*cache.iterdir()] == [path]
    compiler("exit 1")
    assert library.build() == path  # without the compiler
    assert library.load() is sys
    assert loadable[-1] == path


@pytest.mark.parametrize("left", [0, 3, -1])
def test_a_damaged_library_is_not_loaded_but_built_again(
    left: int,
    compiler: Callable[[str], None],
    loadable: list[Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = put_into_cache(b"library" * 100)
    path.write_bytes(path.read_bytes()[:left])
    assert library.library() is None
    assert loadable == []
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert f"{path} is damaged; run `{library.BUILD_COMMAND}`" in record.message
    compiler('echo built > "$out"')
    library.build()
    assert library.library() is sys


def test_what_the_system_cannot_load_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    path = put_into_cache(b"no ELF file")
    assert library.library() is None
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert f"{path} cannot be loaded (" in record.message
    assert f"delete it and run `{library.BUILD_COMMAND}`" in record.message


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ('echo made > "$out"; exit 3', "exit code 3"),
        ('echo "In a.h:"; echo "a.h:1: error: no Python.h"; exit 1', "a.h:1: error: no Python.h"),
        ('echo made > "$out"', "invalid ELF header|file too short"),
    ],
    ids=["silent", "with a reason", "makes nothing that loads"],
)
def test_a_failing_compiler_leaves_nothing_behind(
    script: str, said: str, cache: Path, compiler: Callable[[str], None]
) -> None:
    compiler(script)
    with pytest.raises(library.NativeUnavailableError, match=said) as failed:
        library.build()
    assert "\n" not in str(failed.value)
    assert [*cache.iterdir()] == []


def test_no_compiler_and_no_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(library.NativeUnavailableError, match="no-such-compiler"):
        library.build()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(library.NativeUnavailableError, match="cannot be built"):
        library.build()
    assert library.library() is None


def test_doctor_says_why_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    check = OPTIONAL["native step"]
    monkeypatch.setattr(cpu, "_flags", set)
    with pytest.raises(MemSpecError, match="avx512_vnni"):
        check()
    monkeypatch.setattr(cpu, "_flags", lambda: set(cpu.CPU_FLAGS))
    with pytest.raises(MemSpecError, match=library.BUILD_COMMAND):
        check()
    monkeypatch.setenv(library.SWITCH, "0")
    with pytest.raises(MemSpecError, match=f"{library.SWITCH}=0"):
        check()
