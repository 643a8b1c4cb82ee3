"""Plugin tactics tried on this machine, one op at a time, against their references (castiron plugin test)."""
