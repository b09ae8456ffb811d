"""One file a baseline."""
