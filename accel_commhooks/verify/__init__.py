"""Proving that the hooks work on the devices, the backend and the versions at hand: the checks, their report, the command."""
