"""Whether a JSON schema can be followed, told in bounded time and before a model is asked."""

import json
import textwrap
import threading
from collections import OrderedDict
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from typing import Any

from memspec_core.errors import SchemaError

MAX_DEPTH = 64
"""Objects and arrays within one another."""

MAX_MULTIPLE = 1000
"""Of `multipleOf`, decimal places left out: an automaton has as many states."""

MAX_NUMBER = 2**53
"""Up to here every whole number is exact, also in readers that know floating point alone."""

MAX_COMBINED = 4
"""Patterns that a schema may have which combines schemas: each may multiply the automaton."""

PATIENCE_SECONDS = 0.5
KEPT = 16
MAX_REASON = 200

STYLE = {
    # One way to write each document: no weak model can wander off into blanks, and what lies
    # between two values needs no choice.
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": False,
    "lenient": False,
}
PATTERNS = ("pattern", "format", "multipleOf")
ANNOTATIONS = frozenset(
    ("$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated")
) | frozenset(("description", "examples", "readOnly", "title", "writeOnly"))


def library() -> Any:
    """Return the module llguidance; raises `SchemaError` where it is not installed."""
    try:
        import llguidance
    except ImportError as error:
        raise SchemaError(
            "json_schema needs the Python package llguidance, which cannot be imported "
            f"({error}); install it with: pip install llguidance -c constraints.txt."
        ) from error
    return llguidance


def grammar_of(schema: str) -> str:
    """Return a schema as the library's grammar; raises `SchemaError`."""
    try:
        return str(library().LLMatcher.grammar_from_json_schema(schema, overrides=STYLE))
    except ValueError as error:
        raise SchemaError(f"json_schema cannot be read: {error}.") from error


def limits() -> Any:
    """Return what a grammar and each step of it may cost, in the library's units.

    The lexer's fuel for a step is some 15 ms at most, its states are some 20 MB.
    """
    return library().LLParserLimits(
        max_items_in_row=2000,
        initial_lexer_fuel=200_000,
        step_lexer_fuel=200_000,
        step_max_items=20_000,
        max_lexer_states=10_000,
        max_grammar_size=50_000,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )


def require_usable(matcher: Any) -> None:
    """Raise `SchemaError` if the library has given a grammar up."""
    if matcher.is_error():
        reason = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())
        reason = textwrap.shorten(reason, MAX_REASON, placeholder=" ...")
        raise SchemaError(f"json_schema is not supported, or too complex: {reason}.")


class SchemaChecker:
    """Compiles schemas for no tokenizer in particular, each once; any thread may ask.

    What takes longer than `patience_seconds` is refused, and so is every other schema until the
    library has come back from it.
    """

    def __init__(self, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self._patience_seconds = patience_seconds
        self._lock = threading.Lock()
        self._known: OrderedDict[str, None] = OrderedDict()
        self._compiling: threading.Thread | None = None

    def check(self, schema: str) -> None:
        """Raise `SchemaError` with one sentence unless documents of a schema can be written."""
        with self._lock:
            if schema not in self._known:
                _require_simple(json.loads(schema))
                self._compile(schema)
            self._known[schema] = None
            self._known.move_to_end(schema)
            if len(self._known) > KEPT:
                self._known.popitem(last=False)

    def _compile(self, schema: str) -> None:
        if self._compiling is not None and self._compiling.is_alive():
            raise SchemaError("Another json_schema is still being compiled; try again later.")
        grammar = grammar_of(schema)
        failures: list[SchemaError] = []
        # The library lets other threads run meanwhile, but cannot be stopped.
        self._compiling = threading.Thread(
            target=_try, args=(grammar, failures), name="memspec-schema", daemon=True
        )
        self._compiling.start()
        self._compiling.join(self._patience_seconds)
        if self._compiling.is_alive():
            raise SchemaError(
                f"json_schema takes longer than {self._patience_seconds:g} s to compile; "
                "simplify its patterns, or what it combines."
            )
        if failures:
            raise failures[0]


def _try(grammar: str, failures: list[SchemaError]) -> None:
    guidance = library()
    try:
        tokenizer = guidance.LLTokenizer(guidance.TokenizerWrapper(_Bytes()))
        matcher = guidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
        require_usable(matcher)
        matcher.compute_bitmask()
        require_usable(matcher)
        if matcher.is_stopped() and not matcher.is_accepting():
            raise SchemaError("No document is valid for json_schema.")
    except SchemaError as error:
        failures.append(error)
    except BaseException as error:  # a panic of the library is no Exception
        failures.append(SchemaError(f"json_schema is more than llguidance can take: {error!r}."))


class _Bytes:
    """A tokenizer of bytes, as the library asks for one."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([value]) for value in range(256)), b"<end>")
    special_token_ids = (256,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def _require_simple(schema: dict[str, Any]) -> None:
    """Refuse what makes automata explode, before any is built."""
    nodes = list(_nodes(schema, 1))
    combined = any(isinstance(node, dict) and _combines(node) for node, _ in nodes)
    patterns, steps = 0, 1
    for node, depth in nodes:
        if depth > MAX_DEPTH:
            raise SchemaError(f"json_schema is nested deeper than {MAX_DEPTH} levels.")
        values = node if isinstance(node, list) else node.values()
        if any(isinstance(v, (int, float)) and not abs(v) <= MAX_NUMBER for v in values):
            raise SchemaError("json_schema has a number beyond 2^53, more than can be kept exact.")
        if isinstance(node, list):
            continue
        patterns += sum(keyword in node for keyword in PATTERNS)
        patterns += len(node["patternProperties"]) if _has_patterns(node) else 0
        own = _coefficient(node.get("multipleOf", 1))
        steps = steps * max(1, own) if combined else max(steps, own)
        if steps > MAX_MULTIPLE:
            raise SchemaError(
                f"multipleOf in json_schema is above {MAX_MULTIPLE}, decimal places left out, or "
                "so are several multiplied where schemas are combined; take a smaller one."
            )
    if combined and patterns > MAX_COMBINED:
        raise SchemaError(
            f"json_schema has {patterns} of pattern, format and multipleOf, and combines schemas; "
            f"{MAX_COMBINED} are taken beside allOf, anyOf or $ref with further keywords."
        )


def _has_patterns(node: dict[str, Any]) -> bool:
    return isinstance(node.get("patternProperties"), dict)


def _combines(node: dict[str, Any]) -> bool:
    """Whether a value must be valid for several schemas at once."""
    keywords = node.keys() - ANNOTATIONS
    return "allOf" in node or (len(keywords) > 1 and bool(keywords & {"$ref", "anyOf", "oneOf"}))


def _coefficient(multiple: object) -> int:
    """Return the digits of a multiple as a whole number; of what is no number 0."""
    try:
        return int("".join(map(str, Decimal(str(multiple)).normalize().as_tuple().digits)))
    except (InvalidOperation, ValueError):
        return 0


def _nodes(node: object, depth: int) -> Iterator[tuple[dict[str, Any] | list[Any], int]]:
    """Yield all objects and arrays with how deep they lie, without recursion."""
    waiting = [(node, depth)]
    while waiting:
        node, depth = waiting.pop()
        if isinstance(node, (dict, list)):
            yield node, depth
            inner = node.values() if isinstance(node, dict) else node
            waiting.extend((child, depth + 1) for child in inner)
