"""Several servers and a router as processes of one command."""
