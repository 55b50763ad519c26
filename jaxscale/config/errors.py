"""The one error a user can mend."""


class UserError(ValueError):
    """Something the user can mend: the message carries the value, the rule it broke and the remedy.

    The command line prints the message without a traceback and exits with code 2.
    """
