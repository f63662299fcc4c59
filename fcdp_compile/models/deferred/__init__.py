"""Values for models that were built on the meta device."""
