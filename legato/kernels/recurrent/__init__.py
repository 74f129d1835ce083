"""Operations that keep a state for each sequence: short convolutions, Mamba's scan, and the gated delta rule."""
