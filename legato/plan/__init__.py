"""`legato plan`: whether and how a model fits, before anything is loaded."""
