"""One file per partitioner: pure functions from labels to who owns which image."""
