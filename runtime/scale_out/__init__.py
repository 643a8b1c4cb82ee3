"""Several engines behind one address, by Ray Serve: ``castiron serve-engine --replicas N``."""
