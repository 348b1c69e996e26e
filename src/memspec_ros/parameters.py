"""Declares the runtime's parameters on a node and turns their values into settings.

`memspec_core.settings.PARAMETERS` is the one source of names, defaults and ranges. What is fixed at
configure stays settable until then, as a managed node's user expects, so it is not read-only in the
sense of ROS: the callback refuses it while the node is configured.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from rcl_interfaces.msg import (
    FloatingPointRange,
    IntegerRange,
    ParameterDescriptor,
    SetParametersResult,
)
from rclpy.node import Node
from rclpy.parameter import Parameter as RosParameter

from memspec_core.errors import MemSpecError, SettingsError
from memspec_core.settings import (
    DRAFT_NAME,
    PARAMETERS,
    DraftSource,
    Parameter,
    Settings,
    Value,
    draft_path_parameter,
)

NAMES = "drafts.names"
UNBOUNDED = 1e300


class ChangeTaker(Protocol):
    """Whoever applies changes of run-time parameters; the runtime does."""

    def change(self, changes: Mapping[str, object]) -> None:
        """Apply the changes; raise `MemSpecError` to refuse them."""
        ...


class NodeParameters:
    """The parameters of one node. `runtime` gives the runtime while the node is configured."""

    def __init__(self, node: Node, runtime: Callable[[], ChangeTaker | None]) -> None:
        self._node = node
        self._runtime = runtime
        self._unusable: dict[str, str] = {}
        for parameter in PARAMETERS:
            self._declare(parameter)
        self._declare_draft_paths(self._current()[NAMES])
        node.add_on_set_parameters_callback(self._on_set)

    def settings(self) -> Settings:
        """Return the parameters as settings; raise `SettingsError` for what cannot be used."""
        for sentence in self._unusable.values():
            raise SettingsError(sentence)
        return Settings.from_parameters(self._given({}))

    def drafts(self) -> tuple[DraftSource, ...]:
        """Return the drafts that are named; none where the names cannot be used."""
        try:
            return Settings.from_parameters(self._given({})).drafts
        except SettingsError:
            return ()

    def value(self, name: str) -> Value:
        """Return the present value of a declared parameter."""
        return _plain(self._node.get_parameter(name).value)

    def _declare(self, parameter: Parameter) -> None:
        """Declare a parameter; a value that cannot be used is kept for configure to report.

        It is declared twice, the first time of any type: with a type, a wrong value in a file
        would end the node before anyone could see why.
        """
        if self._node.has_parameter(parameter.name):
            return
        anything = ParameterDescriptor(dynamic_typing=True)
        self._node.declare_parameter(parameter.name, parameter.default, anything)
        value = parameter.default
        try:
            value = parameter.check(self.value(parameter.name))
        except SettingsError as error:
            self._unusable[parameter.name] = str(error)
            self._node.get_logger().error(f"{error} Configure will fail until it is set.")
        self._node.undeclare_parameter(parameter.name)
        # ROS cannot tell the type of an empty list; one empty name stands for it.
        stored = [""] if value == [] else value
        self._node.declare_parameter(
            parameter.name, stored, describe(parameter), ignore_override=True
        )

    def _declare_draft_paths(self, names: object) -> None:
        for name in names if isinstance(names, list) else []:
            if isinstance(name, str) and DRAFT_NAME.fullmatch(name):
                self._declare(draft_path_parameter(name))

    def _on_set(self, changed: list[RosParameter]) -> SetParametersResult:
        known = {p.name for p in PARAMETERS}
        ours = [p for p in changed if p.name in known or p.name.startswith("drafts.")]
        try:
            _refuse_deletion(ours)
            self._apply({p.name: _plain(p.value) for p in ours})
        except MemSpecError as error:
            return SetParametersResult(successful=False, reason=str(error))
        return SetParametersResult(successful=True)

    def _apply(self, changes: dict[str, Value]) -> None:
        if not changes:
            return
        runtime = self._runtime()
        if runtime is not None:
            _refuse_fixed(changes)
        _refuse_other_type(changes)
        Settings.from_parameters(self._given(changes))
        if runtime is not None:
            runtime.change(changes)
        for name in changes:
            self._unusable.pop(name, None)
        if NAMES in changes:
            self._declare_draft_paths(changes[NAMES])

    def _current(self) -> dict[str, Value]:
        return {p.name: self.value(p.name) for p in PARAMETERS if self._node.has_parameter(p.name)}

    def _given(self, changes: Mapping[str, Value]) -> dict[str, object]:
        """Return all values with the changes, and the paths of the drafts that are named."""
        given: dict[str, object] = {**self._current(), **changes}
        names = given[NAMES]
        paths = {f"drafts.{name}.path" for name in names} if isinstance(names, list) else set()
        for path in paths:
            if path not in given and self._node.has_parameter(path):
                given[path] = self.value(path)
        strays = [n for n in given if n.startswith("drafts.") and n != NAMES and n not in paths]
        for name in strays:
            draft_path_parameter(name.split(".")[1]).check(given.pop(name))
        return given


def describe(parameter: Parameter) -> ParameterDescriptor:
    """Return what `ros2 param describe` and parameter editors show."""
    change = "Fixed at configure." if parameter.read_only else "May change at run time."
    descriptor = ParameterDescriptor(description=f"{parameter.description} {change}")
    # Left to the callback: what rclpy says of a wrong type is a pair of numbers.
    descriptor.dynamic_typing = True
    if parameter.choices:
        descriptor.additional_constraints = "One of: " + ", ".join(parameter.choices)
    if parameter.minimum is None and parameter.maximum is None:
        return descriptor
    low = -UNBOUNDED if parameter.minimum is None else parameter.minimum
    high = UNBOUNDED if parameter.maximum is None else parameter.maximum
    if isinstance(parameter.default, float):
        descriptor.floating_point_range = [
            FloatingPointRange(from_value=float(low), to_value=float(high))
        ]
    else:
        descriptor.integer_range = [IntegerRange(from_value=int(low), to_value=int(high))]
    return descriptor


def _refuse_deletion(changed: list[RosParameter]) -> None:
    for parameter in changed:
        if parameter.type_ == RosParameter.Type.NOT_SET:
            raise SettingsError(f"{parameter.name} cannot be deleted.")


def _refuse_other_type(changes: Mapping[str, Value]) -> None:
    """Keep the type that typed clients read; a file may write 1 for 1.0, a change may not."""
    defaults = {p.name: p.default for p in PARAMETERS}
    for name, value in changes.items():
        wanted = type(defaults.get(name, ""))
        if wanted is float and type(value) is int:
            raise SettingsError(f"{name} is {value}; a value of type float is needed.")


def _refuse_fixed(changes: Mapping[str, Value]) -> None:
    run_time = {p.name for p in PARAMETERS if not p.read_only}
    for name in changes:
        if name not in run_time:
            raise SettingsError(f"{name} is fixed at configure; clean the node up to change it.")


def _plain(value: object) -> Value:
    """Return a parameter's value in Python's own types.

    ROS knows no type for an empty list: in a file it reads it as no value, and [''] stands for it.
    """
    if value is None:
        return []
    if isinstance(value, str | bytes) or not hasattr(value, "__iter__"):
        return value  # type: ignore[return-value]
    items = list(value)
    return [] if items == [""] else items
