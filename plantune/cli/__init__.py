"""The command line: each command parses, calls what does the work, and shows the result.

Nothing heavy is imported before a command needs it: `plantune --help` answers at once.
"""

from plantune.cli.root import main

__all__ = ["main"]
