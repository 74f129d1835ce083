"""How our own processes talk: framed messages over socket pairs."""
