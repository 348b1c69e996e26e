"""What is documented is what there is."""

import importlib.util
import inspect
from pathlib import Path
from types import FunctionType

import pytest

import memspec_core
from memspec_core import request, settings
from memspec_core.speculation import schema

ROOT = Path(__file__).resolve().parent.parent


def test_the_page_of_parameters_is_up_to_date():
    path = ROOT / "scripts" / "document_parameters.py"
    spec = importlib.util.spec_from_file_location("document_parameters", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)

    assert script.PAGE.read_text(encoding="utf-8") == script.page(), "run make parameters"
    assert f"{settings.MAX_TEXT_BYTES:,} bytes" in script.HEAD


@pytest.mark.parametrize("name", memspec_core.__all__)
def test_public_names_have_docstrings(name):
    public = getattr(memspec_core, name)
    if not callable(public):  # a value: the API reference shows the line below it
        source = Path(settings.__file__).read_text(encoding="utf-8")
        assert f"\n{name}: " in source
        return
    assert inspect.getdoc(public)
    for member, value in vars(public).items():
        if member.startswith("_") or not isinstance(value, FunctionType | property):
            continue
        assert inspect.getdoc(value), f"{name}.{member}"


@pytest.mark.parametrize(
    ("row", "limit"),
    [
        ("| prompt", request.MAX_PROMPT_BYTES),
        ("| messages", request.MAX_MESSAGES),
        ("| role", request.MAX_ROLE_BYTES),
        ("| `json_schema`", request.MAX_SCHEMA_BYTES),
        ("| `json_schema`", schema.MAX_DEPTH),
        ("| stop strings", request.MAX_STOP_STRINGS),
        ("| stop strings", request.MAX_STOP_BYTES),
        ("| draft, in a goal", request.MAX_DRAFT_NAME_BYTES),
        ("| parameters", settings.MAX_TEXT_BYTES),
        ("| `drafts.names`", settings.MAX_DRAFTS),
    ],
)
def test_limits_are_stated_as_they_are(row, limit):
    lines = (ROOT / "SECURITY.md").read_text(encoding="utf-8").splitlines()
    assert any(line.startswith(row) and f"{limit:,}" in line for line in lines)
