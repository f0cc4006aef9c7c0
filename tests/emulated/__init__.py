"""An accelerator that every machine with a compiler has: torch's device "emulated". See device.cpp
and backend.py."""
