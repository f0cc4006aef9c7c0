"""Every random number of the suite follows from one base seed: the environment variable
STREAMBP_TEST_SEED, 0 if unset.

Tests number their draws; `seed_of` makes a seed of such a number. Subprocesses inherit the
variable.
"""

from __future__ import annotations

import os
import random

import numpy as np
import torch

BASE = int(os.environ.get("STREAMBP_TEST_SEED", "0"))


def seed_of(number: int) -> int:
    """The seed of a test's draw `number`, below 2^32 as numpy wants it for base seeds up to
    400,000."""
    return BASE * 10_007 + number


def seed_torch(number: int = 0) -> None:
    """Seed torch's global generator."""
    torch.manual_seed(seed_of(number))


def seed_others(number: int = 0) -> None:
    """Seed the generators that `random` and `numpy.random` share with the whole program."""
    random.seed(seed_of(number))
    np.random.seed(seed_of(number))


def seeded(number: int = 0) -> torch.Generator:
    """A generator of its own, on the CPU."""
    return torch.Generator().manual_seed(seed_of(number))
