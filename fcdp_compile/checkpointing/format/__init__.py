"""What lies on disk: the files of a checkpoint, their record, and which bytes of them a rank needs."""
