"""How long a test waits for another process or thread before it takes it to hang.

Half an hour, because a machine may be 30 times slower than a developer's; a process that ends is
not waited for. Tests of ranks that do hang have seconds of their own.
"""

HANG = 1800
