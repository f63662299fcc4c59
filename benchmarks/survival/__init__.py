"""What a fault costs a job: ranks, launchers and nodes are killed, cables are pulled, processes stop."""
