"""``python -m accel_commhooks.cli``: the ``accel-commhooks`` command."""

import sys

from .main import main

if __name__ == "__main__":
    sys.exit(main())
