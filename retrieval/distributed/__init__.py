"""Several processes on one or more machines: who they are, how they connect and how they end."""
