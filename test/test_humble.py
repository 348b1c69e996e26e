"""What the node and the launch files use of ROS 2 is there in Humble, which is on no registry.

`humble_api.json` states facts of Humble: the names of the modules that are used, and for each
callable its parameters (`*` and `**` take more, `=` may only be given by name). A class lists its
members, of which those that are no methods have null. `scripts/list_humble_api.py` makes it.
"""

import ast
import inspect
import json
import os
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
SOURCES = sorted([*HERE.parent.glob("src/memspec_ros/*.py"), *HERE.parent.glob("launch/*.py")])
HUMBLE = json.loads((HERE / "humble_api.json").read_text(encoding="utf-8"))
PACKAGES = ("rclpy", "launch", "launch_ros")


def trees():
    return [(path.name, ast.parse(path.read_text(encoding="utf-8"))) for path in SOURCES]


def of_ros(module):
    return module is not None and module.partition(".")[0] in PACKAGES


def imports(tree):
    """Give the module and the name of each import from ROS 2, and what it is called here."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and of_ros(node.module):
            for alias in node.names:
                yield node.module, alias.name, alias.asname or alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if of_ros(alias.name):
                    yield alias.name, "", alias.asname or alias.name


def defined(tree):
    """Return the names of the functions and attributes that a source makes itself."""
    functions = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    return functions | {
        n.attr
        for n in ast.walk(tree)
        if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
    }


def used(tree):
    """Return all names behind a dot."""
    return {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}


def signatures(name):
    """Return the parameters of each method of a name, in any class of Humble."""
    return [m[name] for m in HUMBLE["callables"].values() if m.get(name) is not None]


def fits(call, parameters):
    """Tell whether a call's arguments have their places in a list of parameters."""
    by_place = [p for p in parameters if not p.endswith("=") and p not in ("*", "**")]
    known = {p.rstrip("=") for p in parameters}
    given = [k.arg for k in call.keywords if k.arg is not None]
    enough = "*" in parameters or len(call.args) <= len(by_place)
    return enough and ("**" in parameters or known.issuperset(given))


def misfits(name, tree):
    """Give a sentence for each call that Humble would refuse."""
    own = defined(tree)
    here = {}
    modules = set()
    for module, imported, called in imports(tree):
        if imported:
            target = HUMBLE["modules"].get(module, {}).get(imported)
            here[called] = HUMBLE["callables"].get(target or "")
        else:
            modules.add(called)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        if isinstance(function, ast.Name) and here.get(function.id):
            facts = here[function.id]
            candidates = [facts.get("") or facts.get("__init__") or ["*", "**"]]
        elif isinstance(function, ast.Attribute) and function.attr not in own:
            receiver = function.value
            if isinstance(receiver, ast.Name) and receiver.id in modules:
                target = HUMBLE["modules"][receiver.id].get(function.attr, "nothing")
                facts = HUMBLE["callables"].get(target)
                candidates = [facts.get("") or facts.get("__init__")] if facts else []
                if target == "nothing":
                    yield f"{name}:{node.lineno}: {receiver.id}.{function.attr} is not in Humble"
            else:
                candidates = signatures(function.attr)
        else:
            continue
        if candidates and not any(fits(node, parameters) for parameters in candidates):
            yield f"{name}:{node.lineno}: Humble takes {candidates}: {ast.unparse(node)}"


def test_what_is_imported_is_there():
    missing = [
        f"{path}: {module}.{name}"
        for path, tree in trees()
        for module, name, _ in imports(tree)
        if module not in HUMBLE["modules"] or (name and name not in HUMBLE["modules"][module])
    ]
    assert missing == []


def test_what_is_called_takes_these_arguments():
    assert [said for path, tree in trees() for said in misfits(path, tree)] == []


def test_no_attribute_is_newer_than_humble():
    """Of all names behind a dot, those that the installed ROS 2 has and Humble has not."""
    pytest.importorskip("rclpy")
    newer = installed_members() - humble_members()
    own = {name for _, tree in trees() for name in defined(tree)}

    assert {name for _, tree in trees() for name in used(tree) & newer} <= own


def test_private_attributes_are_our_own_or_those_of_humble():
    for path, tree in trees():
        private = {name for name in used(tree) - defined(tree) if name.startswith("_")}
        ours_to_use = humble_members() | set(dir(os))
        assert {n for n in private if not n.startswith("__")} <= ours_to_use, path


def humble_members():
    return {member for facts in HUMBLE["callables"].values() for member in facts}


def installed_members():
    """Return the members of the classes that the facts tell of, as they are installed here."""
    found = set()
    for qualified in HUMBLE["callables"]:
        module, _, name = qualified.rpartition(".")
        if module.startswith("rclpy"):
            __import__(module)
            value = getattr(inspect.sys.modules[module], name, None)
            found |= set(dir(value)) if inspect.isclass(value) else set()
    return {member for member in found if not member.startswith("__")}


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import rclpy\nrclpy.init(domain=3)", "domain"),
        ("import rclpy\nrclpy.spin_forever()", "not in Humble"),
        ("from rclpy.node import Node\nNode('a', enable_logger_service=True)", "enable_logger"),
        ("def f(node):\n    node.create_service(A, 'a', f, qos=3)", "qos=3"),
    ],
)
def test_newer_calls_are_found(source, said):
    assert said in " ".join(misfits("a.py", ast.parse(source)))
