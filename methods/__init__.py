"""Methods, one file per method."""
