"""``python -m selfconv``, the same as ``selfconv``."""

from selfconv.cli import main

main()
