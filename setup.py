"""Build of the ROS package memspec_ros: the Python packages memspec_core and memspec_ros.

Both colcon (``colcon build``) and pip (``pip install --no-deps -e .``) build from this file.
"""

from collections import defaultdict
from pathlib import Path

from setuptools import find_packages, setup

PACKAGE = "memspec_ros"
ROOT = Path(__file__).resolve().parent
EXAMPLES = ("plan_node.py", "speak.py", "chat.py")


def shared_files(*folders: str) -> list[tuple[str, list[str]]]:
    """Return data_files entries that keep each folder as a tree below share/memspec_ros."""
    by_folder: dict[str, list[str]] = defaultdict(list)
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                relative = path.relative_to(ROOT)
                by_folder[f"share/{PACKAGE}/{relative.parent}"].append(str(relative))
    return sorted(by_folder.items())


setup(
    name=PACKAGE,
    version="0.1.0",
    description="Speculative decoding with adaptive draft models, as a ROS 2 lifecycle node",
    maintainer="MemSpec maintainers",
    maintainer_email="maintainers@memspec.example",
    license="Apache-2.0",
    python_requires=">=3.10",
    package_dir={"": "src"},
    # src/ also holds memspec_msgs, a CMake package that is built on its own.
    packages=find_packages(
        "src", include=["memspec_core", "memspec_core.*", "memspec_ros", "memspec_ros.*"]
    ),
    package_data={"": ["py.typed", "*.cpp", "*.h", "*.html", "*.json", "*.yaml"]},
    data_files=[
        ("share/ament_index/resource_index/packages", [f"resource/{PACKAGE}"]),
        (f"share/{PACKAGE}", ["package.xml"]),
        *shared_files("launch", "config", "models", "examples"),
        # Where `ros2 run` and launch files look for programs.
        (f"lib/{PACKAGE}", [f"examples/{name}" for name in EXAMPLES]),
    ],
    zip_safe=False,
    # No install_requires: rosdep and the requirements files provide what is needed, and an
    # entry point must not refuse to start over the torch build that a robot's vendor supplies.
    extras_require={"test": ["pytest"]},
    entry_points={
        "console_scripts": [
            "memspec = memspec_core.cli.main:main",
            "memspec_node = memspec_ros.process:main",
            "generate = memspec_ros.generate:main",
            "watch = memspec_ros.watch:main",
        ],
    },
)
