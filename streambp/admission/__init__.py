"""Admission: find a model's layers, test each layer, and decide: stream it, run it unchunked, or
raise.
"""
