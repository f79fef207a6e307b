"""``python -m tests.soak --steps 10000``, from the repository root."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # as pytest does: the tests import each other by their short names
os.environ.setdefault("OMP_NUM_THREADS", "1")

from soak.command import main

if __name__ == "__main__":
    sys.exit(main())
