"""Why the contract cannot be run. Each message is one line for a user; commands say it and end."""


class ContractError(Exception):
    """A device that cannot be opened, a compiler that fails: nothing is said of any kernel."""

    exit_code = 1


class Refused(ContractError):
    """A kernel or a device that is asked for, and is not there."""

    exit_code = 2
