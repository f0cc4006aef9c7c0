"""What the package is stands in pyproject.toml."""

from setuptools import setup

setup()
