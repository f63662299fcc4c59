"""Questions about a job: what it does, how long it takes, what another cluster would do."""
