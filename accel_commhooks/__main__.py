"""``python -m accel_commhooks CONFIG train.py [arguments]``: see launch.py."""

import sys

from .launch import run_script

if __name__ == "__main__":
    run_script(sys.argv[1:])
