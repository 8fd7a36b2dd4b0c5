"""Building, checking and trying what users install."""
