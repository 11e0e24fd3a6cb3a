"""The ``selfconv`` command.

A subcommand makes one call of the package from its options. What the user can mend is an error of one line on
stderr, with exit code 2.
"""

from selfconv.cli.command_line import main, parse
from selfconv.cli.commands import COMMANDS, TRAINED_HELP
from selfconv.cli.training import train_command

__all__ = ["COMMANDS", "TRAINED_HELP", "main", "parse", "train_command"]
