"""The ``selfconv`` command."""

from selfconv.cli.command_line import main, parse
from selfconv.cli.commands import COMMANDS, TRAINED_HELP
from selfconv.cli.training import train_command

__all__ = ["COMMANDS", "TRAINED_HELP", "main", "parse", "train_command"]
