"""The package's version, which ranks compare and reports name."""

__version__ = "0.1.0"
