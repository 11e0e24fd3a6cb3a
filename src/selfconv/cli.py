"""The ``selfconv`` command."""


def main() -> None:
    raise SystemExit("selfconv: no commands yet")
