"""The one exception type for input a user can put right."""


class LongspanError(ValueError):
    """Bad input, with the numbers and the way out in its message.

    Raised before any collective runs and from facts that are the same on every rank, so that either all ranks
    raise it or none does. The command line prints it as one line, without a traceback.
    """
