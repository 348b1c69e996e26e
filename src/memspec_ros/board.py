"""Facts of a Jetson board, read from its files: power mode, clocks, temperatures.

On any other machine there is nothing to read and the answers are empty.
"""

from collections.abc import Iterator
from pathlib import Path


def board_facts(root: Path = Path("/")) -> dict[str, str]:
    """Return what the board's files say; empty where `root` is not a Jetson's."""
    model = _read(root / "proc/device-tree/model").rstrip("\0")
    if "jetson" not in model.lower() and not (root / "etc/nv_tegra_release").exists():
        return {}
    facts = {"board": model, "power_mode": _power_mode(root)}
    facts.update(_clocks(root))
    facts.update(_temperatures(root))
    return {name: value for name, value in facts.items() if value}


def _power_mode(root: Path) -> str:
    # nvpmodel keeps the mode in force as "pmode:0002".
    mode = _read(root / "var/lib/nvpmodel/status").removeprefix("pmode:")
    return str(int(mode)) if mode.isdigit() else mode


def _clocks(root: Path) -> Iterator[tuple[str, str]]:
    cpu_khz = _read(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq")
    if cpu_khz.isdigit():
        yield "cpu_clock_mhz", str(int(cpu_khz) // 1000)
    for device in sorted((root / "sys/class/devfreq").glob("*")):
        hertz = _read(device / "cur_freq")
        if hertz.isdigit() and any(name in device.name for name in ("gpu", "ga10b", "gv11b")):
            yield "gpu_clock_mhz", str(int(hertz) // 1_000_000)
            return


def _temperatures(root: Path) -> Iterator[tuple[str, str]]:
    for zone in sorted((root / "sys/class/thermal").glob("thermal_zone*")):
        name = _read(zone / "type").lower().replace("-", "_")
        millidegrees = _read(zone / "temp")
        if name and millidegrees.lstrip("-").isdigit():
            name = name.removesuffix("_thermal")
            yield f"temperature_{name}_c", f"{int(millidegrees) / 1000:.1f}"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        # A sensor of a sleeping block answers with an error; it is as good as absent.
        return ""
