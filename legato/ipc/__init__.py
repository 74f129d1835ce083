"""Communication between Legato's processes: framed messages over socket pairs."""
