"""Pass values other than K and V from one chunk of a layer to the next: the states of recurrences
and convolutions, and the boundaries of packed documents."""
