"""The rules of diagnostic_aggregator's GenericAnalyzer, and of the tree that rqt makes of names.

The aggregator itself is written in C++ and comes only with an installed ROS 2.
"""

from dataclasses import dataclass, field

OK, WARN, ERROR, STALE = range(4)


@dataclass
class Item:
    """The last status of a name and when it came; what is expected and never came is stale."""

    level: int = STALE
    message: str = "Missing"
    seconds: float = float("-inf")


@dataclass
class GenericAnalyzer:
    """One analyzer, from its section of the parameter file; types are those that it insists on."""

    base: str
    section: dict
    items: dict = field(default_factory=dict)

    def __post_init__(self):
        assert self.section["type"] == "diagnostic_aggregator/GenericAnalyzer"
        for key in ("startswith", "contains", "expected"):
            names = self.section.get(key, [])
            assert isinstance(names, list)
            assert all(isinstance(name, str) for name in names)
        assert isinstance(self.section["timeout"], float)
        # What is expected is not matched for that; without one of these it refuses to start.
        assert self.section.get("startswith") or self.section.get("contains")
        self.items = {name: Item() for name in self.section.get("expected", [])}

    @property
    def path(self):
        return f"{self.base}/{self.section['path']}"

    def match(self, name):
        begins = any(name.startswith(start) for start in self.section.get("startswith", []))
        return begins or any(part in name for part in self.section.get("contains", []))

    def hear(self, status, seconds):
        self.items[status.name] = Item(status.level[0], status.message, seconds)

    def report(self, now):
        """Return levels by path: of the analyzer itself, and of each item below it."""
        levels = {}
        for name, item in self.items.items():
            is_stale = now - item.seconds > self.section["timeout"]
            # A slash would make a branch of the tree.
            leaf = name.replace("/", " ")
            levels[f"{self.path}/{leaf}"] = STALE if is_stale else item.level
        worst = max(levels.values(), default=STALE)
        if worst == STALE and set(levels.values()) - {STALE}:
            worst = ERROR
        return {self.path: worst, **levels}


class Aggregator:
    """All analyzers of a parameter file; what none of them matches goes to `others`."""

    def __init__(self, document):
        parameters = document["analyzers"]["ros__parameters"]
        assert isinstance(parameters["pub_rate"], float)
        base = f"/{parameters['path']}"
        sections = [value for value in parameters.values() if isinstance(value, dict)]
        self.analyzers = [GenericAnalyzer(base, section) for section in sections]
        self.others = []

    def hear(self, statuses, seconds):
        for status in statuses:
            matching = [analyzer for analyzer in self.analyzers if analyzer.match(status.name)]
            for analyzer in matching:
                analyzer.hear(status, seconds)
            if not matching:
                self.others.append(status.name)

    def report(self, now):
        levels = {}
        for analyzer in self.analyzers:
            levels.update(analyzer.report(now))
        return levels
