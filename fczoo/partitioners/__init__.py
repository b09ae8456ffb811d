"""One file per partitioner: pure functions from labels to the images of each client."""
