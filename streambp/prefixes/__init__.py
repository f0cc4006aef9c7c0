"""Compute the rows of a batch without their padding, and prefixes that rows share only once.

tree           packs the tokens of a batch into one row, as a tree of shared prefixes
row_outputs    copies outputs of the packed row to the batch's rows, and sums their gradients
admission      decides which calls share prefixes: by arguments, and by a trial of the model
arguments      converts a call's arguments to those of the packed row
deferred_rows  computes hidden states of padding afterwards, if the program reads them
calls          runs a backbone's call over the packed row or over the batch's rows
"""
