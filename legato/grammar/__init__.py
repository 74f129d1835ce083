"""What a text must look like: grammars, compiled to masks over the vocabulary. No torch here; the router imports it."""
