"""Hooks: one file each, which registers itself."""
