"""What the tests of methods share: the width of the test backbone."""

DIM = 32
