"""The table of peers: each toolkit in an environment of its own, set up as its documentation says."""
