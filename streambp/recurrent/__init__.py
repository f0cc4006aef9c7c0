"""State passed from chunk to chunk beside K and V: recurrence and convolution states, and
documents.
"""
