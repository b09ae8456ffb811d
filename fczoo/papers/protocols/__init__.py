"""One file a protocol: a paper's experiments as data."""
