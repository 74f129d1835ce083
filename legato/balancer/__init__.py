"""`legato route`: one endpoint for several servers."""
