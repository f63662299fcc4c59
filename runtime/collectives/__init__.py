"""Communication between ranks: collectives of two levels, agreement, counted bytes."""
