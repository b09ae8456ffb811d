"""The one exception that a user is meant to read, and how others are quoted in it."""


class FczooError(Exception):
    """Something the user can put right: one line saying what is wrong, where, and what to do."""

    exit_code = 1  # of the command that it ends


def first_line(error: BaseException) -> str:
    """What somebody else's error says, on one line that is not too long."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]
