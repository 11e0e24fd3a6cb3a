"""``python -m selfconv.cli``."""

from selfconv.cli import main

main()
