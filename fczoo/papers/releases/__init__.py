"""Releases: each file holds the settings of public code as data."""
