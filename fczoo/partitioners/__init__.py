"""One file a partitioner: pure functions from labels to who owns which image."""
