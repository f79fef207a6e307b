"""``python -m tests.elastic --kills 20``, from the repository root."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # as pytest does: the tests import each other by their short names

from elastic.command import main

if __name__ == "__main__":
    sys.exit(main())
