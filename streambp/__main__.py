"""Run the command line as `python -m streambp`."""

import sys

from streambp.cli import main

sys.exit(main())
