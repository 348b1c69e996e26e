#!/usr/bin/env python3
"""Write test/humble_api.json: what Humble has of all that the node and the launch files import.

    git clone -b humble https://github.com/ros2/rclpy        # and ros2/launch, ros2/launch_ros
    python3 scripts/list_humble_api.py --sources rclpy launch launch_ros

Only needed when something else of ROS 2 is imported; nothing of Humble is run or copied but names.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FACTS = ROOT / "test" / "humble_api.json"
USERS = [*ROOT.glob("src/memspec_ros/*.py"), *ROOT.glob("launch/*.py")]
PACKAGES = ("rclpy", "launch", "launch_ros")
# What the node is handed without an import.
HANDED = (
    "rclpy.action.client.ClientGoalHandle",
    "rclpy.client.Client",
    "rclpy.clock.Clock",
    "rclpy.context.Context",
    "rclpy.lifecycle.publisher.LifecyclePublisher",
    "rclpy.publisher.Publisher",
    "rclpy.service.Service",
    "rclpy.subscription.Subscription",
    "rclpy.task.Future",
    "rclpy.task.Task",
    "rclpy.time.Time",
    "rclpy.timer.Timer",
)
Parameters = list[str]
Members = dict[str, "Parameters | None"]


class Sources:
    """The modules below some folders, read but never run."""

    def __init__(self, folders: list[Path]) -> None:
        self._folders = folders

    def path(self, module: str) -> Path | None:
        """Return the file of a module."""
        parts = module.split(".")
        for folder in self._folders:
            for base in (folder / parts[0], folder):
                place = base.joinpath(*parts)
                for file in (place / "__init__.py", place.with_suffix(".py")):
                    if file.is_file():
                        return file
        return None

    @functools.cache  # noqa: B019
    def statements(self, module: str) -> list[ast.stmt]:
        """Return a module's statements, those under `if` and `try` included."""
        path = self.path(module)
        return [] if path is None else list(_flat(ast.parse(path.read_text()).body))

    def names(self, module: str) -> dict[str, str]:
        """Return the names of a module and the full name of what each stands for."""
        found = {}
        for node in self.statements(module):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found[node.name] = f"{module}.{node.name}"
            elif isinstance(node, ast.ImportFrom):
                source = self._absolute(module, node)
                found |= {a.asname or a.name: f"{source}.{a.name}" for a in node.names}
            elif isinstance(node, ast.Import):
                found |= {a.asname or a.name.partition(".")[0]: a.name for a in node.names}
            else:
                found |= {name: f"{module}.{name}" for name in _assigned(node)}
        return found

    def find(self, qualified: str) -> tuple[str, ast.FunctionDef | ast.ClassDef] | None:
        """Return the definition of a full name, through imports, and its module."""
        module, _, name = qualified.rpartition(".")
        for node in self.statements(module) if module else ():
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
                return module, node
        target = self.names(module).get(name, qualified) if module else qualified
        return None if target == qualified else self.find(target)

    def members(self, module: str, definition: ast.ClassDef) -> Members:
        """Return a class's members, inherited ones included."""
        members: Members = {}
        for base in reversed(definition.bases):
            head, dot, last = ast.unparse(base).partition("[")[0].rpartition(".")
            known = self.names(module)
            found = self.find(f"{known.get(head, head)}.{last}" if dot else known.get(last, last))
            if found is not None and isinstance(found[1], ast.ClassDef):
                members |= self.members(found[0], found[1])
        inherited = members.get("__init__") or []
        for node in _flat(definition.body):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                decorators = [ast.unparse(d) for d in node.decorator_list]
                plain = not any("property" in d or ".setter" in d for d in decorators)
                members[node.name] = _parameters(node, "staticmethod" not in decorators, plain)
                members |= {n: members.get(n) for n in _set_on_self(node) if n not in members}
            elif isinstance(node, ast.ClassDef):
                members.setdefault(node.name, None)
            else:
                members |= {n: None for n in _assigned(node) if n not in members}
        constructor = members.get("__init__")
        passed_on = [p.rstrip("=") for p in inherited if p not in ("*", "**")]
        if constructor is not None and constructor is not inherited and passed_on:
            _pass_on(constructor, passed_on, "**" in inherited)
        return members

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        path = self.path(module)
        package = module.split(".")
        if path is not None and path.name != "__init__.py":
            package.pop()
        package = package[: len(package) - node.level + 1]
        return ".".join([*package, *([node.module] if node.module else [])])


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _flat([*node.body, *node.orelse])


def _assigned(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else []
    targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _set_on_self(method: ast.AST) -> set[str]:
    return {
        node.attr
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) == "self"
    }


def _pass_on(constructor: Parameters, inherited: list[str], more: bool) -> None:
    """Put what a constructor hands on by `**` in its place."""
    if "**" in constructor:
        constructor.remove("**")
        named = {p.rstrip("=") for p in constructor}
        constructor += [f"{p}=" for p in inherited if p not in named] + ["**"] * more


def _parameters(
    node: ast.FunctionDef | ast.AsyncFunctionDef, bound: bool = False, plain: bool = True
) -> Parameters | None:
    if not plain:
        return None
    taken = node.args
    names = [argument.arg for argument in (*taken.posonlyargs, *taken.args)][int(bound) :]
    names += ["*"] if taken.vararg else []
    names += [f"{argument.arg}=" for argument in taken.kwonlyargs]
    return names + (["**"] if taken.kwarg else [])


def facts(sources: Sources) -> dict[str, dict[str, dict[str, object]]]:
    """Return the names of the modules that are imported here, and what their callables take."""
    modules, wanted, attributes = _used()
    callables: dict[str, dict[str, object]] = {}
    for qualified in (*wanted, *HANDED):
        found = sources.find(qualified)
        if found is None:
            continue
        module, node = found
        members: Members = {"": _parameters(node)} if isinstance(node, ast.FunctionDef) else {}
        if isinstance(node, ast.ClassDef):
            members = sources.members(module, node)
        callables[f"{module}.{node.name}"] = {
            name: members[name]
            for name in sorted(members)
            if name in ("", "__init__") or not name.startswith("_") or name in attributes
        }
    names: dict[str, dict[str, object]] = {}
    for module in modules:
        names[module] = {}
        for name, target in sorted(sources.names(module).items()):
            if name.startswith("_") or target.partition(".")[0] not in PACKAGES:
                continue
            found = sources.find(target)
            full = "" if found is None else f"{found[0]}.{found[1].name}"
            names[module][name] = full if full in callables else ""
    return {"callables": callables, "modules": names}


def _used() -> tuple[set[str], set[str], set[str]]:
    """Return the modules and the full names that are imported, and all names behind a dot."""
    modules, wanted, attributes = {"rclpy"}, set(), set()
    for path in USERS:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                attributes.add(node.attr)
                wanted.add(f"{ast.unparse(node.value)}.{node.attr}")
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules |= {node.module} if node.module.partition(".")[0] in PACKAGES else set()
                wanted |= {f"{node.module}.{alias.name}" for alias in node.names}
    return modules, {name for name in wanted if name.partition(".")[0] in PACKAGES}, attributes


def main() -> None:
    """Read the sources and write the facts, one module or callable a line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--sources", nargs="+", type=Path, required=True, help="checkouts of Humble"
    )
    stated = facts(Sources(parser.parse_args().sources))
    parts = []
    for part, entries in stated.items():
        lines = ",\n".join(f"{json.dumps(k)}: {json.dumps(entries[k])}" for k in sorted(entries))
        parts.append(f"{json.dumps(part)}: {{\n{lines}\n}}")
    FACTS.write_text("{" + ",\n".join(parts) + "}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
