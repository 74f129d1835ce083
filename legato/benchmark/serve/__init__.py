"""`legato bench serve`: load on a server over HTTP."""
