"""What goes wrong with a kernel: it does not compile, or a launch of it fails; and with what
compiles it.
"""


class MetalCompileError(Exception):
    """Metal's compiler would refuse the source, or is likely to; every line names file, line and
    reason.
    """


class MetalLaunchError(Exception):
    """A launch breaks a limit, or a thread did what it must not; names kernel, file, line and
    thread.
    """


class ToolchainError(Exception):
    """There is no compiler, it could not run, or what it makes cannot be kept: no source is at
    fault.
    """
