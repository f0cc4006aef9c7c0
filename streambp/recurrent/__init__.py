"""What passes from chunk to chunk beside keys and values: states of recurrences and convolutions, and documents."""
