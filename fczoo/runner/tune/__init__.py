"""Search of hyper-parameters with equal effort for every method."""
