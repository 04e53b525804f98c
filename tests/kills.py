"""An exception that stands for a kill."""


class Killed(BaseException):
    """No code of dmltool catches it."""
