"""Streaming in training programs that know nothing of it: `streambp launch`, or `python -m streambp.launch script.py`."""
