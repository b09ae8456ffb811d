"""The plug-in is its own package: its test runs where it is installed, see ``test_plugin.py``."""

collect_ignore = ["plugin"]
