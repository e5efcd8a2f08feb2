"""Errors that a command shows as one line, and the exit status each stands for."""


class UserError(Exception):
    """An error whose message is all that the person at the terminal needs.

    `command_line.Boundary` prints the message and leaves with `exit_status`. `goes_on` is true where the same command,
    given again, goes on with nothing put right.
    """

    exit_status = 1
    goes_on = False


class UsageError(UserError):
    """The command line or the config is wrong; nothing was started."""

    exit_status = 2


class WorkFailedError(UserError):
    """The work itself failed, or a check on its result did not hold."""


class OthersMissingError(UserError):
    """Another process of the run is gone, or did not come; there is nothing to look into in this one."""

    goes_on = True
