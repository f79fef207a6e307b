"""Measuring hooks against each other, and what is made of the results: tables, advice, pictures."""
