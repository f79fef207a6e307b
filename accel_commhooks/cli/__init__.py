"""The ``accel-commhooks`` command: main.py, and one file for each subcommand with ``add_parser`` and ``run``."""
