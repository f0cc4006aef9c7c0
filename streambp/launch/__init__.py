"""Stream the models of unchanged training programs.

The entry points are `streambp launch` and `python -m streambp.launch script.py`.
"""
