"""Builds command lines from a base of bases.yaml and several sets of flags. Contains no tests."""

from tests.functional_tests.case import Flags, command_line, read_bases


def merged_argv(base: str, *flags: Flags) -> list[str]:
    """Returns the command line of a base with these flags. Later flags replace earlier ones."""
    merged: Flags = dict(read_bases()[base])
    for more in flags:
        merged |= more
    return command_line(merged)
