"""``python -m accel_commhooks CONFIG train.py [arguments]``: see ways_in/launch.py."""

import sys

from .ways_in.launch import run_script

if __name__ == "__main__":
    run_script(sys.argv[1:])
