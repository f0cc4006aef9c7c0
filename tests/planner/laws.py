"""Work with round numbers, for profiles that no model has."""

from __future__ import annotations

from streambp.planner.laws import SQUARE, TOKENS, Part
from streambp.planner.work import Work

FEATURES = 9


def law(**coefficients):
    """`tokens` a token and `square` a token squared."""
    places = {"tokens": TOKENS, "square": SQUARE}
    found = [0.0] * FEATURES
    for name, value in coefficients.items():
        found[places[name]] = value
    return tuple(found)


def made_work(products, square, name="backward"):
    """A step of one kind of phase, with products for each token and attention forward for each pair."""
    laws = Work(*[law()] * len(Work._fields))._replace(products=law(tokens=products), forward=law(square=square))
    return (Part(name, tuple(laws), 16384),)
