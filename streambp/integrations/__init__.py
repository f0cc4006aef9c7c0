"""Other libraries' ways in; each imports its library only when it is used."""
