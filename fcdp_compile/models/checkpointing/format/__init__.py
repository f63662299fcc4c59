"""The files of a checkpoint on disk, their record, and which of their bytes a rank needs."""
