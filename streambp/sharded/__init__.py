"""A layer whose sequence is split over ranks (Ulysses)."""
