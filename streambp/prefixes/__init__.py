"""Rows of a batch that begin with the same tokens, computed once.

tree       which tokens rows share, as a tree in one packed row; what its queries may read
spread     outputs of the packed row back to the rows that share them, with gradients that are summed
admission  which calls share: by their arguments, and by a trial of the model
calls      a backbone's call over the packed row, or over its rows
"""
