"""One module per command; each exposes ``command``. ``castiron.cli`` imports them on use."""
