"""The processes of a job: their groups, small messages, and what happens when one is lost."""
