"""One file a release: what public code does, as data."""
