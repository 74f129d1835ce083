"""One loader per weight format; each returns an object with apply(x)."""
