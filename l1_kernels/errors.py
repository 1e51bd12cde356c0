"""The one exception that means "the user can mend this": one line on standard error, exit status 2."""


class UserError(Exception):
    """What the user can mend. Its text is one line that names the cause and the flag or file to change."""
