"""The exception whose message is meant for users, and how it quotes other errors."""

LONGEST = 160  # characters of another error's message that are repeated


class FczooError(Exception):
    """An error that the user can correct. Its message is one line: what is wrong, where, and what to do."""

    exit_code = 1  # of the command line


def first_line(error: BaseException) -> str:
    """The first line of another error's message, at most about 160 characters, whole words; its type where
    it has none.
    """
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return line if len(line) <= LONGEST else f"{line[:LONGEST].rpartition(' ')[0] or line[:LONGEST]} ..."
