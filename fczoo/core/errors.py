"""The exception whose message is meant for users, and how it quotes other errors."""


class FczooError(Exception):
    """An error that the user can correct. Its message is one line: what is wrong, where, and what to do."""

    exit_code = 1  # of the command line


def first_line(error: BaseException) -> str:
    """The first line of another error's message, at most 160 characters; its type where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]
