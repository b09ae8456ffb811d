"""The plug-in is a package of its own: its test runs where it is installed, see ``test_plugin.py``."""

collect_ignore = ["plugin"]
