"""Subcommands of ``accel-commhooks``: one file each, with ``add_parser`` and ``run``."""
