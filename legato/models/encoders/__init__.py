"""Models that make a vector of a text: encoders and decoders without a head, poolings, classification heads."""
