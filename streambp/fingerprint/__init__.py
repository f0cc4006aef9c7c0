"""What a layer is made of: whether findings about it still hold, and whether backward finds what forward did."""
