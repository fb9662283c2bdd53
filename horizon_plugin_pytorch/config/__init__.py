"""Which number format each module gets, and why."""
