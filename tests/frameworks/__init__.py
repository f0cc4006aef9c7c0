"""Real training frameworks, each in an environment of its own; run by hand: `python -m
tests.frameworks.run --help`."""
