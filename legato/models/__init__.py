"""One file per architecture; each constructor shows the layout of its checkpoint."""
