"""Work with round numbers, for profiles that no model has."""

from __future__ import annotations

from streambp.planner.laws import Law, PhaseLaws
from streambp.planner.work import Work


def made_work(products, square, name="backward"):
    """A step of one kind of phase, with products for each token and attention forward for each
    pair."""
    laws = Work(*[Law()] * len(Work._fields))._replace(
        products=Law(tokens=products), forward=Law(square=square)
    )
    return (PhaseLaws(name, tuple(laws), 16384),)
