#!/usr/bin/env python3
"""Build the API reference in build/api from the docstrings, for `make api`."""

from pathlib import Path

import pdoc

import memspec_core
from memspec_core.runtime import Runtime

OUTPUT = Path(__file__).resolve().parent.parent / "build" / "api"

if __name__ == "__main__":
    # The package imports it when it is first asked for, which pdoc does not do.
    memspec_core.Runtime = Runtime
    pdoc.render.configure(docformat="google")
    pdoc.pdoc("memspec_core", "memspec_core.errors", output_directory=OUTPUT)
    print(f"Written: {OUTPUT / 'memspec_core.html'}")
