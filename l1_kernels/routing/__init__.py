"""Which experts a token visits, and with what weights."""
