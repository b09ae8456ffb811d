"""The one exception that a user is meant to read."""


class FczooError(Exception):
    """Something the user can put right: one line saying what is wrong, where, and what to do."""

    exit_code = 1  # of the command that it ends
