"""`python -m memspec_core.models.native` builds the native step."""

import sys

from memspec_core.models.native.library import NativeUnavailableError, build

if __name__ == "__main__":
    try:
        print(build())
    except NativeUnavailableError as failure:
        print(failure, file=sys.stderr)
        sys.exit(1)
