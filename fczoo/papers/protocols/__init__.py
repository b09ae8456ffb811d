"""Protocols: each file holds a paper's experiments as data."""
