"""The processes of a job: their groups, small messages, and errors for lost ranks."""
