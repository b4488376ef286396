"""What a schedule raises when a rule is broken."""


class Violation(AssertionError):
    """A correct coordinator never makes this happen."""
