"""TGI's integration tests as an oracle: its requests to Legato's processes, its snapshots for the answers."""
